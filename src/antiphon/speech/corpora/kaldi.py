"""A Kaldi data folder: wav.scp (plain paths), text, utt2spk and, if there, segments.

Either the folder itself, or its subfolders train, dev and test.
"""

from __future__ import annotations

from pathlib import Path

from antiphon.errors import DataError
from antiphon.speech.corpora.base import Corpus, Recording, Say, Skip
from antiphon.speech.corpora.manifest import bad_times
from antiphon.speech.manifest import SPLITS

Entries = dict[str, tuple[str, str]]


def read(source: Path | None, say: Say) -> Corpus:
    """Read the Kaldi folder ``source``.

    Raises:
        DataError: a file is missing, a line of it is wrong, a path is a piped command, or an id stands twice; file
            and line are named.
    """
    if source is None:
        raise DataError("no folder named: pass --source DIR with wav.scp, text and utt2spk")
    folders = [(name, source / name) for name in SPLITS if (source / name / "wav.scp").is_file()]
    if not folders and not (source / "wav.scp").is_file():
        raise DataError(f"{source} has no wav.scp, nor has a subfolder {', '.join(SPLITS)}: name a Kaldi data folder")
    corpus = Corpus("kaldi")
    seen: dict[str, str] = {}
    for split, folder in folders or [("", source)]:
        _read_folder(corpus, folder, split)
    for recording in corpus.recordings:
        if recording.id in seen:
            raise DataError(f"{recording.where}: '{recording.id}' already stands at {seen[recording.id]}")
        seen[recording.id] = recording.where
    corpus.split()
    return corpus


def _read_folder(corpus: Corpus, folder: Path, split: str) -> None:
    audio = {name: _audio_path(folder, value, where) for name, (value, where) in _entries(folder, "wav.scp").items()}
    texts, speakers = _entries(folder, "text"), _entries(folder, "utt2spk")
    segments = _entries(folder, "segments") if (folder / "segments").is_file() else {}
    for name, (text, where) in texts.items():
        start_s = end_s = None
        recording = name
        if segments:
            if name not in segments:
                corpus.skipped.append(Skip(name, f"{where}: not in segments"))
                continue
            recording, start_s, end_s = _segment(*segments[name])
        if recording not in audio:
            corpus.skipped.append(Skip(name, f"{where}: wav.scp has no recording '{recording}'"))
        elif name not in speakers:
            corpus.skipped.append(Skip(name, f"{where}: utt2spk has no speaker for it"))
        elif reason := bad_times(start_s, end_s):
            corpus.skipped.append(Skip(name, f"{segments[name][1]}: {reason}"))
        elif words := corpus.words_of(name, text, where):
            speaker = speakers[name][0]
            corpus.recordings.append(Recording(name, audio[recording], speaker, words, split, where, start_s, end_s))
    for name, (_, where) in (segments or _entries(folder, "wav.scp")).items():
        if name not in texts:
            corpus.skipped.append(Skip(name, f"{where}: text has no line for it"))


def _entries(folder: Path, name: str) -> Entries:
    """Return ``{first field: (the rest of the line, "file:line")}``."""
    path = folder / name
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text ({error.reason})") from None
    entries: Entries = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        key, *rest = line.split(maxsplit=1)
        where = f"{path}:{number}"
        if not rest and name != "text":
            raise DataError(f"{where}: only one field, expected a name and its value")
        if key in entries:
            raise DataError(f"{where}: '{key}' already stands at {entries[key][1]}")
        entries[key] = (rest[0].strip() if rest else "", where)
    return entries


def _audio_path(folder: Path, value: str, where: str) -> Path:
    if value.endswith("|"):
        raise DataError(f"{where}: a piped command is not run: write its output to a file and name that file")
    beside = folder / value
    # Kaldi reads paths from the working folder; a folder that was moved as a whole has them beside wav.scp.
    return beside if beside.exists() else Path.cwd() / value


def _segment(value: str, where: str) -> tuple[str, float, float | None]:
    try:
        recording, start, end = value.split()
        # Kaldi writes -1 for an end at the end of the recording.
        return recording, float(start), None if float(end) == -1.0 else float(end)
    except ValueError:
        raise DataError(f"{where}: expected utterance, recording, start and end in seconds, found '{value}'") from None
