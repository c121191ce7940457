"""One block of shared memory a host: what the run's learners show each other and whoever watches them.

The block is an unnamed file (memfd): nothing of it outlives its processes. A private folder holds the links by which
learners find it and each other's sockets. Each row of the board is written by its own learner. A run on several hosts
has a block on each, with rows for all: those of learners on other hosts are mirrors, which cost no memory until they
are written (`mirror.Mirror`).
"""

from __future__ import annotations

import contextlib
import enum
import mmap
import os
import shutil
import stat
import tempfile
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from antiphon.errors import ArgumentError, DeadlineError, LearnerError
from antiphon.transport.buffers import Buffers, slots_of
from antiphon.transport.draws import Draws

MAGIC = 0x416E7469
OUTSTANDING = 64
"""Tickets that one learner may have taken and not yet ended."""
STOP_LAG_S = 0.5
"""How long a request to stop may take to reach all learners."""


class Head(enum.IntEnum):
    """Words that belong to the run as a whole."""

    MAGIC = 0
    LEARNERS = 1
    PARAMETERS = 2
    READY = 3
    STOP = 4
    """0, or one more than the round at which learners are to stop."""
    HOST = 5
    """The number of this host."""
    ASKED = 6
    """How many times the weights of learners on other hosts were asked for (`mirror.collect`)."""


class Col(enum.IntEnum):
    """Words of a learner's row of the board."""

    PID = 0
    STATE = 1
    STEPS = 2
    SAMPLES = 3
    PUBLISHED = 4
    """One more than the last round published."""
    WAITS = 5
    """1 where its strategy cannot do without the others."""
    MIXED = 6
    """Its steps at its last exchange."""
    REPEATED = 7
    """Samples taken again from a learner that died."""
    BEREFT = 8
    """One more than the learner for want of which it ends; 0 otherwise."""
    LEFT = 9
    """1 once all that it writes at its end is written."""
    DRAWN = 10
    """Tickets that it has drawn and shown, ever."""
    FLOOR = 11
    """The first ticket that its host has not ended, as it last found."""
    INCARNATION = 12
    """How many processes were this learner before this one."""


class Link(enum.IntEnum):
    """Words about a learner that hold on this host alone."""

    HOST = 0
    """The host that it runs on."""
    NOTED = 1
    """The number of the note that its row is a copy of; only where it runs on another host."""
    PULLED = 2
    """The last request (Head.ASKED) for which its weights were fetched, or its negative where they could not be."""
    SERVES = 3
    """1 while this learner's exchange thread fetches for the others of its host."""


class Gauge(enum.IntEnum):
    """Numbers of a learner's row that are not whole."""

    LOSS = 0
    WEIGHT = 1
    STEP_S = 2
    """Seconds of the last step."""


class Status(enum.IntEnum):
    """Where a learner stands."""

    ABSENT = 0
    JOINED = 1
    DRAINED = 2
    """Starts nothing any more, and has nothing of its own in flight."""
    DONE = 3
    FAILED = 4
    AWAY = 5
    """Has left before the end, or comes in late: what it holds is done by others."""


class Block:
    """The mapped block: `create` makes it, `attach` finds it, `allocate` adds room for the weights.

    Args:
        folder: the private folder of the run.
        fd: the open block.
    """

    def __init__(self, folder: Path, fd: int, learners: int) -> None:
        self.folder, self.learners, self._fd = folder, learners, fd
        weakref.finalize(self, os.close, fd)
        self._slots = slots_of(learners)
        words = len(Head) + learners * (len(Col) + len(Link) + len(Gauge) + OUTSTANDING + 3 + self._slots)
        self._control_bytes = -(-words * 8 // mmap.PAGESIZE) * mmap.PAGESIZE
        if os.fstat(fd).st_size < self._control_bytes:
            os.ftruncate(fd, self._control_bytes)
        self._map = mmap.mmap(fd, self._control_bytes)
        self._taken = 0
        self.head = self._words(len(Head))
        self.board_LC = self._words(learners, len(Col))
        self.links_LC = self._words(learners, len(Link))
        self.gauges_LC = self._words(learners, len(Gauge)).view(np.float64)
        self.outstanding_LK = self._words(learners, OUTSTANDING)
        """Tickets taken and not yet ended, plus one; 0 where none."""
        self._clock_L3 = self._words(learners, 3)
        self._versions_LS = self._words(learners, self._slots)
        self.buffers: Buffers | None = None

    @classmethod
    def create(cls, learners: int, folder: Path | None = None) -> Block:
        """Make the block of a new run, and its folder where none is given."""
        if learners < 1:
            raise ArgumentError(f"learners must be at least 1, not {learners}")
        if folder is None:
            sweep(Path(tempfile.gettempdir()))
            folder = Path(tempfile.mkdtemp(prefix="antiphon-"))
        fd = os.memfd_create("antiphon-block")
        block = cls(folder, fd, learners)
        block.head[Head.LEARNERS], block.head[Head.MAGIC] = learners, MAGIC
        # The counter's file stays open as long as the block: learners reach it through this descriptor.
        tickets = os.memfd_create("antiphon-tickets")
        weakref.finalize(block, os.close, tickets)
        (folder / "tickets").symlink_to(f"/proc/{os.getpid()}/fd/{tickets}")
        (folder / "block").symlink_to(f"/proc/{os.getpid()}/fd/{fd}")
        return block

    @classmethod
    def attach(cls, folder: Path, learners: int, deadline_s: float = 60.0) -> Block:
        """Open the block of a run that another process made, waiting for it if need be.

        Raises:
            DeadlineError: it does not appear in time.
            ArgumentError: the folder belongs to another user, or the run has another number of learners.
        """
        wait_for((folder / "block").exists, deadline_s, f"the run's shared memory in {folder}")
        if (owner := folder.stat()).st_uid != os.getuid() or stat.S_IMODE(owner.st_mode) & 0o077:
            raise ArgumentError(f"{folder} is open to other users: a run's folder must be one's own, mode 0700")
        block = cls(folder, os.open(folder / "block", os.O_RDWR), learners)
        if block.head[Head.MAGIC] != MAGIC or block.head[Head.LEARNERS] != learners:
            raise ArgumentError(
                f"the run in {folder} has {block.head[Head.LEARNERS]} learners, this process was told {learners}"
            )
        return block

    def allocate(self, parameters: int) -> Buffers:
        """Map room for N parameters a learner: the weights, what is pending, and the slots."""
        rows = self.learners * (2 + self._slots)
        size = self._control_bytes + rows * parameters * 4
        if os.fstat(self._fd).st_size < size:
            os.ftruncate(self._fd, size)
        whole = mmap.mmap(self._fd, size)
        data = torch.frombuffer(whole, dtype=torch.float32, offset=self._control_bytes, count=rows * parameters)
        one = self.learners * parameters
        self.buffers = Buffers(
            data[:one].view(self.learners, parameters),
            data[one : 2 * one].view(self.learners, parameters),
            data[2 * one :].view(self.learners, self._slots, parameters),
            self._versions_LS,
            self._clock_L3,
        )
        return self.buffers

    def is_local(self, learner: int) -> bool:
        """Say whether a learner runs on this host."""
        return bool(self.links_LC[learner, Link.HOST] == self.head[Head.HOST])

    @property
    def local(self) -> list[int]:
        """The learners on this host."""
        return np.flatnonzero(self.links_LC[:, Link.HOST] == self.head[Head.HOST]).tolist()

    @property
    def remote(self) -> list[int]:
        """The learners on other hosts."""
        return np.flatnonzero(self.links_LC[:, Link.HOST] != self.head[Head.HOST]).tolist()

    def request_stop(self) -> None:
        """Ask all learners to stop after the round in hand; those that wait for each other after the same one."""
        if self.head[Head.STOP]:
            return
        rounds = int(self.board_LC[:, Col.STEPS].max())
        # As many more as they may make before all of them have read it.
        step_s = float(self.gauges_LC[:, Gauge.STEP_S].max())
        margin = 3 + int(STOP_LAG_S / step_s if step_s else 0)
        self.head[Head.STOP] = rounds + margin

    def draws(self) -> Draws:
        """Return the counter of this host's tickets."""
        return Draws(self.folder / "tickets")

    def failed(self, learner: int) -> bool:
        """Say whether a learner is known to have failed, its process running or not."""
        return bool(self.board_LC[learner, Col.STATE] == Status.FAILED)

    def dead(self, learner: int) -> bool:
        """Say whether a learner that had joined has failed, left, or ended without being done.

        One on another host has failed once a connection to it was lost and refused; its silence is no failure.
        """
        pid, state = int(self.board_LC[learner, Col.PID]), int(self.board_LC[learner, Col.STATE])
        if state in (Status.JOINED, Status.DRAINED) and self.is_local(learner):
            return not process_runs(pid)
        return state in (Status.FAILED, Status.AWAY)

    def claim_again(self, ticket: int, dead: int) -> bool:
        """Claim a ticket that a dead learner left: true for one caller only."""
        try:
            os.close(os.open(self._claim(ticket, dead), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            return False
        return True

    def claimed(self, ticket: int, dead: int) -> bool:
        """Say whether somebody has claimed that ticket."""
        return self._claim(ticket, dead).exists()

    def unfinished(self) -> list[int]:
        """Return the tickets that were taken and not yet ended; those of the dead until they are given out again."""
        return sorted(
            int(held) - 1
            for learner, held_K in enumerate(self.outstanding_LK)
            for held in held_K[held_K > 0]
            if not self.claimed(int(held) - 1, learner)
        )

    def _claim(self, ticket: int, dead: int) -> Path:
        return self.folder / f"again-{ticket}-{dead}-{self.board_LC[dead, Col.INCARNATION]}"

    def remove(self) -> None:
        """Remove the folder; processes that have the block mapped keep it."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _words(self, *shape: int) -> NDArray[np.int64]:
        count = int(np.prod(shape))
        words = np.frombuffer(self._map, np.int64, count, self._taken * 8).reshape(shape)
        self._taken += count
        return words


def sweep(parent: Path) -> None:
    """Remove the folders of runs whose launcher was killed: their memory is gone, and with it all learners."""
    for folder in parent.glob("antiphon-*"):
        link = folder / "block"
        if link.is_symlink() and link.lstat().st_uid == os.getuid() and not link.exists():
            shutil.rmtree(folder, ignore_errors=True)


def process_runs(pid: int) -> bool:
    """Say whether a process is there and not a zombie."""
    return _process_state(pid) not in "ZX"


def stopped(pid: int) -> bool:
    """Say whether a process is there and stopped (SIGSTOP)."""
    return _process_state(pid) in "Tt"


def _process_state(pid: int) -> str:
    """Return the letter that the kernel gives a process's state, X where there is none."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    return "X"


def wait_for(
    ready: Callable[[], bool], deadline_s: float, what: str, alive: Callable[[], str | None] = lambda: None
) -> None:
    """Wait until ``ready()``; ``alive()`` returns why waiting has become vain, or None.

    Raises:
        DeadlineError: it took longer than ``deadline_s``.
        LearnerError: waiting is vain.
    """
    end = time.monotonic() + deadline_s
    while not ready():
        if (reason := alive()) is not None:
            if ready():  # it came to pass just before
                return
            raise LearnerError(reason)
        if time.monotonic() > end:
            raise DeadlineError(f"waited {deadline_s:g} s for {what}")
        time.sleep(0.002)
