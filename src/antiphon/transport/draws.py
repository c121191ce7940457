"""A counter that all processes of a host draw from without a lock, and that remembers who drew what."""

from __future__ import annotations

import os
import struct
from pathlib import Path

ENTRY = struct.Struct("<II")
"""learner, and how many draws it had made before."""


class Draws:
    """A file of entries, each appended by one write: its place in the file is the number drawn.

    No process, frozen or dead, can block it. As each entry names its learner, a number that was drawn by one that died
    before it could show it anywhere is found: `latest` tells it.

    Args:
        path: the file; made if it is not there.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     draws = Draws(Path(folder) / "draws")
    ...     draws.draw(learner=3, index=0), draws.draw(learner=1, index=0), len(draws), draws.latest()
    (0, 1, 2, {3: (0, 0), 1: (1, 0)})
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("a+b", buffering=0)
        self._latest: dict[int, tuple[int, int]] = {}
        self._read = 0

    def draw(self, learner: int, index: int) -> int:
        """Return the next number, as the learner's draw ``index``."""
        self._file.write(ENTRY.pack(learner, index))
        return self._file.tell() // ENTRY.size - 1

    def __len__(self) -> int:
        """Return how many numbers were drawn: the next one."""
        return os.fstat(self._file.fileno()).st_size // ENTRY.size

    def latest(self) -> dict[int, tuple[int, int]]:
        """Return each learner's last number and the index of that draw."""
        missing = (len(self) - self._read) * ENTRY.size
        data = os.pread(self._file.fileno(), missing, self._read * ENTRY.size)
        for learner, index in ENTRY.iter_unpack(data):
            self._latest[learner] = self._read, index
            self._read += 1
        return self._latest
