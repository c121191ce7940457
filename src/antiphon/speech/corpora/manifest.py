"""Recordings listed in a manifest: JSON lines with `audio`, `text`, `speaker` and, if wanted, `id`, `split`,
`start_s`, `end_s`. Paths are relative to the manifest's folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from antiphon.errors import DataError
from antiphon.records import Json, read_jsonl
from antiphon.speech.corpora.base import Corpus, Recording, Say, Skip
from antiphon.speech.manifest import SPLITS


def read(source: Path | None, say: Say) -> Corpus:
    """Read the manifest ``source``.

    Raises:
        DataError: it is missing, a line of it is no utterance, or two have one id; file and line are named.
    """
    if source is None:
        raise DataError("no manifest named: pass --source FILE (JSON lines with audio, text, speaker)")
    if source.is_dir():
        raise DataError(f"{source} is a folder: name the manifest file in it")
    corpus = Corpus("manifest")
    read_rows(source, corpus)
    corpus.split()
    return corpus


def read_rows(path: Path, corpus: Corpus, *, audio_keys: Sequence[str] = ("audio", "path")) -> list[Json]:
    """Add the utterances of a manifest to ``corpus`` and return their lines, in the same order.

    Raises:
        DataError: as `read`.
    """
    rows: list[Json] = []
    lines: dict[str, int] = {}
    for number, row in read_jsonl(path):
        where = f"{path}:{number}"
        audio_key = next((key for key in audio_keys if key in row), audio_keys[0])
        audio = _text(row, audio_key, where)
        text, speaker = _text(row, "text", where, empty=True), _text(row, "speaker", where)
        start_s, end_s = _seconds(row, "start_s", where), _seconds(row, "end_s", where)
        name = _text(row, "id", where) if "id" in row else _name_of(audio, start_s, end_s)
        if name in lines:
            raise DataError(f"{where}: id '{name}' already stands on line {lines[name]}: give each its own")
        lines[name] = number
        split = _text(row, "split", where) if row.get("split") is not None else ""
        if split and split not in SPLITS:
            raise DataError(f"{where}: split is '{split}', expected one of {', '.join(SPLITS)}")
        words = corpus.words_of(name, text, where)
        if words is None:
            continue
        if reason := bad_times(start_s, end_s):
            corpus.skipped.append(Skip(name, f"{where}: {reason}"))
            continue
        file = path.parent / audio
        corpus.recordings.append(Recording(name, file, speaker, words, split, where, start_s, end_s))
        rows.append(row)
    if not lines:
        raise DataError(f"{path}: no utterances in it")
    return rows


def bad_times(start_s: float | None, end_s: float | None) -> str | None:
    """Say what is wrong with the times of a part, or return None.

    >>> bad_times(2.0, 1.5)
    'end_s 1.5 is not after start_s 2.0'
    """
    if start_s is not None and not 0.0 <= start_s < float("inf"):
        return f"start_s is {start_s}, expected 0 or more"
    if end_s is not None and not (start_s or 0.0) < end_s < float("inf"):
        return f"end_s {end_s} is not after start_s {start_s or 0.0}"
    return None


def _name_of(audio: str, start_s: float | None, end_s: float | None) -> str:
    name = Path(audio).with_suffix("").as_posix().strip("/").replace("/", "-")
    if start_s is None and end_s is None:
        return name
    return f"{name}-{start_s or 0.0:.3f}-" + ("end" if end_s is None else f"{end_s:.3f}")


def _text(row: Json, key: str, where: str, *, empty: bool = False) -> str:
    value: Any = row.get(key)
    if not isinstance(value, str) or not (value.strip() or empty):
        found = "nothing" if key not in row else repr(value)
        raise DataError(f'{where}: "{key}" must be a text{"" if empty else " that is not empty"}, found {found}')
    return value


def _seconds(row: Json, key: str, where: str) -> float | None:
    value: Any = row.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise DataError(f'{where}: "{key}" must be a number of seconds, found {value!r}')
    return float(value)
