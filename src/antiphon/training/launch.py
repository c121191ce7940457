"""Starts the learners of a run on this host, watches over them, and sees to it that none is left behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from torch import Tensor

from antiphon.errors import LearnerError
from antiphon.learner.progress import Patience
from antiphon.transport.block import Block, Col, Head, Status, stopped
from antiphon.transport.place import Place

PR_SET_PDEATHSIG = 1
LAST_WORDS_S = 5.0
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass
class Fault:
    """A learner that ended before its time."""

    learner: int
    kind: str
    """``died`` (killed by a signal) or ``failed`` (ended with an error)."""
    text: str
    tickets_returned: int


@dataclass
class Watched:
    """What the watch sees when it looks."""

    block: Block
    faults: list[Fault] = field(default_factory=list)

    @property
    def present(self) -> list[int]:
        """Learners that have joined and not died, or died only after their part was done."""
        states_L = self.block.board_LC[:, Col.STATE]
        return [n for n in range(self.block.learners) if states_L[n] not in (Status.ABSENT, Status.FAILED)]

    @property
    def begun(self) -> bool:
        """Whether all learners have joined."""
        return bool((self.block.board_LC[:, Col.STATE] >= Status.JOINED).all())

    def consensus(self) -> tuple[Tensor, float]:
        """Return the mean of the weights of those present [N], and their RMS distance from it."""
        buffers = self.block.buffers or self.block.allocate(int(self.block.head[Head.PARAMETERS]))
        return buffers.consensus(self.present)


class Launch:
    """Runs ``command`` once for each learner; use as a context manager, which ends whatever still runs.

    Args:
        command: what each learner runs; it finds its place in its environment.
        learners: how many, L.
        environment: variables added to this process's own.
        logs: a folder for one ``learner-N.log`` each, or None to let them write to this terminal.
        numbers: which of the learners to start here; all by default.
        place: where a torchrun job meets; a private folder by default.
        ranks: processes of each learner (a super-learner), K.
        grace_s: how long learners get to end by themselves before they are killed.
    """

    def __init__(
        self,
        command: Sequence[str],
        learners: int,
        *,
        environment: Mapping[str, str] | None = None,
        logs: Path | None = None,
        numbers: Sequence[int] | None = None,
        place: Place | None = None,
        ranks: int = 1,
        grace_s: float = 20.0,
    ) -> None:
        self.command, self.learners, self.logs, self.grace_s = list(command), learners, logs, grace_s
        self.ranks, self._starts_ranks = ranks, place is None
        self.block = (place or Place(0, learners)).open()
        self.watched = Watched(self.block)
        self._patience = Patience(self.block)
        self._environment = {**os.environ, **(environment or {})}
        self._numbers = range(learners) if numbers is None else numbers
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        """Each learner's, or its rank 0's: a learner fails with any of its ranks."""
        self._followers: list[subprocess.Popen[bytes]] = []
        self._files: list[IO[bytes]] = []

    def __enter__(self) -> Launch:
        """Start the learners."""
        try:
            for number in self._numbers:
                self._processes[number] = self._start(number)
                if self._starts_ranks:
                    self._followers += [self._start(number, rank) for rank in range(1, self.ranks)]
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """End what still runs, and remove what the run leaves in the system."""
        processes = [*self._processes.values(), *self._followers]
        for process in processes:
            if process.poll() is None:
                process.terminate()
        end = time.monotonic() + self.grace_s / 4
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.05, end - time.monotonic()))
            if process.poll() is None:
                process.kill()
                process.wait()
        for file in self._files:
            file.close()
        self.block.remove()

    def watch(self, look: Callable[[Watched], None], every_s: float = 0.1) -> Watched:
        """Call ``look`` again and again until all learners have ended.

        An asynchronous run goes on without a learner that died; a strategy whose rounds need everybody ends with it.

        Raises:
            LearnerError: all learners failed, or one without which the strategy cannot go on, or one that made no
                Learner.
        """
        while not self._note_ended():
            self._end_frozen()
            look(self.watched)
            time.sleep(every_s)
        look(self.watched)
        if not self.watched.present:
            first = self.watched.faults[0]
            raise LearnerError(f"all learners ended before their time; learner {first.learner} {first.text}")
        return self.watched

    def _end_frozen(self) -> None:
        """Kill learners that are stopped (SIGSTOP) and have long not moved, once all others have ended."""
        running = [number for number in range(self.learners) if self._runs(number)]
        if len(running) == self.learners or not all(stopped(int(self.block.board_LC[n, Col.PID])) for n in running):
            return
        for number in running:
            if self._patience.exhausted(number) and number in self._processes:
                self._processes[number].kill()

    def stop(self) -> None:
        """Ask the learners to stop after the round in hand; those that wait for each other after the same one."""
        self.block.request_stop()

    def wait(self, timeout_s: float) -> bool:
        """Wait until all have ended; say whether they did."""
        end = time.monotonic() + timeout_s
        while any(self._runs(number) for number in range(self.learners)):
            if time.monotonic() > end:
                return False
            time.sleep(0.05)
        return True

    @property
    def pids(self) -> list[int]:
        """The learners' process numbers, those started here."""
        return [process.pid for process in self._processes.values()]

    def _start(self, number: int, rank: int = 0) -> subprocess.Popen[bytes]:
        place = Place(number, self.learners, self.block.folder, creates=False, rank=rank, ranks=self.ranks)
        output: IO[bytes] | None = None
        if self.logs is not None:
            self.logs.mkdir(parents=True, exist_ok=True)
            output = self._log(number, rank).open("wb")
            self._files.append(output)
        parent = os.getpid()
        return subprocess.Popen(
            self.command,
            env={**self._environment, **place.environment()},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            # Ctrl-C reaches the launcher alone, which lets the learners end; should it be killed, they go with it.
            start_new_session=True,
            preexec_fn=lambda: _die_with(parent),
        )

    def _log(self, number: int, rank: int = 0) -> Path:
        assert self.logs is not None
        return self.logs / (f"learner-{number}.log" if rank == 0 else f"learner-{number}-rank-{rank}.log")

    def _runs(self, number: int) -> bool:
        if number in self._processes:
            return self._processes[number].poll() is None
        # Another process of a torchrun job: it is known once it has joined.
        state = self.block.board_LC[number, Col.STATE]
        return state not in (Status.DONE, Status.FAILED) and not self.block.dead(number)

    def _note_ended(self) -> bool:
        """Take note of those that have ended, and say whether all have."""
        bereft_L = self.block.board_LC[:, Col.BEREFT]
        ended = self._ended_now()
        if ended and bereft_L.any():
            # Whoever they miss has failed first, but may still be at its last words: they are to be heard.
            for missed in set(bereft_L[bereft_L > 0] - 1).intersection(self._processes):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._processes[missed].wait(LAST_WORDS_S)
            ended = self._ended_now()
        for number in sorted(ended, key=lambda number: bool(bereft_L[number])):
            self._ended(number)
        return len(ended) == self.learners

    def _ended_now(self) -> list[int]:
        return [number for number in range(self.learners) if not self._runs(number)]

    def _ended(self, number: int) -> None:
        """Take note of how a learner ended; raise where the run cannot go on without it."""
        block, state = self.block, int(self.block.board_LC[number, Col.STATE])
        process = self._processes.get(number)
        code = process.poll() if process else None
        if any(fault.learner == number for fault in self.watched.faults) or (state == Status.DONE and not code):
            return
        if code == 0 and state == Status.ABSENT:
            raise LearnerError(f"learner {number} ended without having made its antiphon.Learner")
        if code == 0 and state in (Status.JOINED, Status.DRAINED):
            # A script may end without telling; its weights stay as they were.
            block.board_LC[number, Col.STATE] = Status.DONE
            block.outstanding_LK[number] = 0
            return
        kind, text = "failed", f"ended with status {code}"
        if code is None:
            kind, text = "died", "vanished"
        elif code < 0:
            kind, text = "died", f"was killed by {signal.Signals(-code).name}"
        if self.logs is not None and self._log(number).exists():
            lines = self._log(number).read_text(errors="replace").strip().splitlines()
            if kind == "failed" and lines:
                text += f": {lines[-1]} (all of it in {self._log(number)})"
        held = int((block.outstanding_LK[number] > 0).sum())
        self.watched.faults.append(Fault(number, kind, text, held))
        if state == Status.DONE:
            return
        block.board_LC[number, Col.STATE] = Status.FAILED
        if block.board_LC[number, Col.WAITS] or state == Status.ABSENT:
            raise LearnerError(f"learner {number} {text}")


def _die_with(parent: int) -> None:
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
