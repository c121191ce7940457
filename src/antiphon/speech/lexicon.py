"""Pronunciations: the CMU dictionary and a user's own entries.

The dictionary is the one that the pocketsphinx wheel carries (BSD licence): 39 phones without stress.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from antiphon.errors import DataError
from antiphon.records import write_text
from antiphon.speech.text import spoken_words

Pronunciation = tuple[str, ...]
Lexicon = dict[str, list[Pronunciation]]

# Names that the aligner and the graph use for themselves.
RESERVED_PHONES = ("SIL", "<eps>")
_VARIANT = re.compile(r"\(\d+\)$")


def write_lexicon(path: Path, lexicon: Lexicon) -> None:
    """Write a word, a tab and its phones on each line, sorted."""
    lines = sorted(f"{word}\t{' '.join(phones)}\n" for word, entries in lexicon.items() for phones in entries)
    write_text(path, "".join(lines))


def read_lexicon(path: Path) -> Lexicon:
    """Read lines of a word and its phones; ``word(2)`` is another pronunciation of ``word``.

    Raises:
        DataError: the file is missing, or a line has no phones; file and line are named.
    """
    lexicon: Lexicon = {}
    for number, line in _lines(path):
        fields = line.split()
        if len(fields) < 2:
            raise DataError(f"{path}:{number}: expected a word and its phones, found '{line.strip()}'")
        _add(lexicon, _VARIANT.sub("", fields[0]), tuple(fields[1:]))
    return lexicon


def read_user_lexicon(path: Path) -> Lexicon:
    """Read a user's entries, checked and brought to the dictionary's form.

    Words become lower case; a phone of the dictionary may carry a stress digit or be in lower case (``ah0``).

    Raises:
        DataError: the file is missing or empty, a word is not one word of a normalised text, or a phone's name is
            reserved; file and line are named.
    """
    known = dictionary_phones()
    lexicon: Lexicon = {}
    for number, line in _lines(path):
        fields = line.split()
        if len(fields) < 2:
            raise DataError(f"{path}:{number}: expected a word and its phones, found '{line.strip()}'")
        word = _VARIANT.sub("", fields[0]).lower()
        if not _is_word(word):
            raise DataError(
                f"{path}:{number}: '{fields[0]}' never stands in a normalised text (one word, no digits, hyphens"
                " or marks): give the entry of each of its words"
            )
        phones = tuple(_known_phone(phone, known) for phone in fields[1:])
        if bad := [phone for phone in phones if phone in RESERVED_PHONES or phone.startswith("#")]:
            raise DataError(f"{path}:{number}: '{bad[0]}' is not a phone's name to use: it is reserved")
        _add(lexicon, word, phones)
    if not lexicon:
        raise DataError(f"{path}: no entries; expected lines of a word and its phones")
    return lexicon


def dictionary_path() -> Path:
    """Return where the CMU dictionary lies; the package that carries it is found, not imported.

    Raises:
        DataError: pocketsphinx is not installed, or comes without its dictionary.
    """
    spec = importlib.util.find_spec("pocketsphinx")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / "model" / "en-us" / "cmudict-en-us.dict"
        if path.is_file():
            return path
    raise DataError("the CMU dictionary is missing: pip install 'antiphon[speech]' brings it with pocketsphinx")


@functools.cache
def dictionary() -> Lexicon:
    """Return the CMU dictionary: about 125,000 words in lower case. Treat it as read-only."""
    return read_lexicon(dictionary_path())


@functools.cache
def dictionary_phones() -> frozenset[str]:
    """Return the 39 phones of the dictionary."""
    return frozenset(phone for entries in dictionary().values() for phones in entries for phone in phones)


def pronounce(
    words: Iterable[str], *, user: Lexicon | None = None, guess: Callable[[str], Pronunciation] | None = None
) -> tuple[Lexicon, list[str], list[str]]:
    """Look up each word: the user's entry instead of the dictionary's, else a guess.

    Args:
        words: normalised words, repeats allowed.
        user: entries that replace the dictionary's for their words.
        guess: letter-to-sound rules for words found nowhere; empty where it knows no answer.

    Returns:
        the lexicon of these words, the words without pronunciation, and the words that were guessed.

    >>> pronounce(["yes", "xqz"], user={"no": [("N", "OW")]})
    ({'yes': [('Y', 'EH', 'S')]}, ['xqz'], [])
    """
    found: Lexicon = {}
    missing: list[str] = []
    guessed: list[str] = []
    for word in sorted(set(words)):
        entries = (user or {}).get(word) or dictionary().get(word)
        if entries:
            found[word] = list(entries)
        elif guess is not None and (phones := guess(word)):
            found[word] = [phones]
            guessed.append(word)
        else:
            missing.append(word)
    return found, missing, guessed


def _lines(path: Path) -> list[tuple[int, str]]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text ({error.reason})") from None
    return [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]


def _add(lexicon: Lexicon, word: str, phones: Pronunciation) -> None:
    entries = lexicon.setdefault(word, [])
    if phones not in entries:
        entries.append(phones)


def _is_word(word: str) -> bool:
    try:
        return spoken_words(word) == (word,)
    except DataError:
        return False


def _known_phone(phone: str, known: frozenset[str]) -> str:
    plain = phone.upper().rstrip("012")
    return plain if plain in known else phone
