"""Pronunciations: the CMU dictionary, a user's own entries, spelled letters, and rules learned from the dictionary.

The dictionary is the one that the pocketsphinx wheel carries (BSD licence): 39 phones without stress.
"""

from __future__ import annotations

from pathlib import Path

from antiphon.errors import DataError
from antiphon.records import write_text

Pronunciation = tuple[str, ...]
Lexicon = dict[str, list[Pronunciation]]


def write_lexicon(path: Path, lexicon: Lexicon) -> None:
    """Write a word, a tab and its phones on each line, sorted."""
    lines = sorted(f"{word}\t{' '.join(phones)}\n" for word, entries in lexicon.items() for phones in entries)
    write_text(path, "".join(lines))


def read_lexicon(path: Path) -> Lexicon:
    """Read lines of a word and its phones.

    Raises:
        DataError: the file is missing, or a line has no phones; file and line are named.
    """
    lexicon: Lexicon = {}
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text ({error.reason})") from None
    for number, line in enumerate(text.splitlines(), 1):
        fields = line.split()
        if not fields:
            continue
        if len(fields) < 2:
            raise DataError(f"{path}:{number}: expected a word and its phones, found {line!r}")
        entries = lexicon.setdefault(fields[0], [])
        if (phones := tuple(fields[1:])) not in entries:
            entries.append(phones)
    return lexicon
