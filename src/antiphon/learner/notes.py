"""What a learner tells while it runs: lines of JSON that it appends to a file, and that whoever watches reads."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from antiphon.records import Json, to_json

FOLDER = "ANTIPHON_NOTES"
"""The environment variable that names the folder; by default they lie in the run's private one."""


class Notes:
    """Appends notes to one learner's file, each by one write, so that readers see whole lines.

    Args:
        folder: where the file is, as ``learner-N.jsonl``; None to tell nobody.
        learner: N.
    """

    def __init__(self, folder: Path | None, learner: int) -> None:
        self._file = None if folder is None else path_of(folder, learner).open("a+b", buffering=0)
        # An earlier process of the learner may have been killed as it wrote, and have left half a line.
        if self._file and (end := self._file.tell()) and os.pread(self._file.fileno(), 1, end - 1) != b"\n":
            self._file.write(b"\n")

    def write(self, event: str, **fields: Any) -> None:
        """Append one note."""
        if self._file:
            self._file.write((to_json({"event": event, **fields}) + "\n").encode())

    def close(self) -> None:
        """Close the file; closing twice is harmless."""
        if self._file:
            self._file.close()
            self._file = None


class NotesReader:
    """Reads what all learners of a run have noted since it was last asked.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> reader = NotesReader(folder, learners=2)
    >>> Notes(folder, 1).write("metrics", steps=3)
    >>> reader.fresh(), reader.fresh()
    ([{'event': 'metrics', 'steps': 3}], [])
    """

    def __init__(self, folder: Path, learners: int) -> None:
        self._paths = [path_of(folder, learner) for learner in range(learners)]
        self._read_bytes = [0] * learners

    def fresh(self) -> list[Json]:
        """Return the new notes, those of each learner in order."""
        return [note for learner in range(len(self._paths)) for note in self._fresh_of(learner)]

    def _fresh_of(self, learner: int) -> list[Json]:
        path, begin = self._paths[learner], self._read_bytes[learner]
        if not path.exists() or path.stat().st_size <= begin:
            return []
        with path.open("rb") as file:
            file.seek(begin)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read_bytes[learner] += len(whole)
        return [note for line in whole.splitlines() if (note := _note(line))]


def folder_of(private: Path) -> Path:
    """Return the folder that the environment names, or else the run's private one."""
    return Path(os.environ.get(FOLDER) or private)


def path_of(folder: Path, learner: int) -> Path:
    """Return a learner's file."""
    return folder / f"learner-{learner}.jsonl"


def _note(line: bytes) -> Json | None:
    try:
        note = json.loads(line)
    except ValueError:
        return None
    return note if isinstance(note, dict) else None
