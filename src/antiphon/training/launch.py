"""Starts the learners of a run on this host, watches over them, and sees to it that none is left behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

from torch import Tensor

from antiphon.errors import LearnerError
from antiphon.learner.membership import jump_of
from antiphon.learner.notes import FOLDER, NotesReader, folder_of
from antiphon.learner.progress import Patience
from antiphon.records import Json
from antiphon.transport.block import Block, Col, Head, Status, process_runs, stopped
from antiphon.transport.buffers import Buffers
from antiphon.transport.mirror import collect
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
    updates_lost: int = 0
    """Steps of its that no other learner has heard of: those since its last exchange."""
    jump: float = 0.0
    """RMS over parameters by which the mean of those present moved as it went."""
    restarted: bool = False

    def __str__(self) -> str:
        return f"learner {self.learner} {self.text}; {'it is started again' if self.restarted else 'the others go on'}"


@dataclass
class Watched:
    """What the watch sees when it looks."""

    block: Block
    faults: list[Fault] = field(default_factory=list)
    news: list[Json] = field(default_factory=list)
    """What learners have noted, in the order in which it was read; ``event`` says what."""
    missing: list[int] = field(default_factory=list)
    """Learners on other hosts whose weights the last consensus is without."""

    @property
    def present(self) -> list[int]:
        """Learners that have joined and not died, or died only after their part was done."""
        states_L = self.block.board_LC[:, Col.STATE]
        return [n for n in range(self.block.learners) if states_L[n] not in (Status.ABSENT, Status.FAILED, Status.AWAY)]

    @property
    def begun(self) -> bool:
        """Whether all learners have joined."""
        return bool((self.block.board_LC[:, Col.STATE] >= Status.JOINED).all())

    def consensus(self) -> tuple[Tensor, float]:
        """Return the mean of the weights of those present [N], and their RMS distance from it."""
        self.missing = collect(self.block)
        return self.map_weights().consensus([n for n in self.present if n not in self.missing])

    def map_weights(self) -> Buffers:
        """Return the memory of the weights; all learners have joined."""
        return self.block.buffers or self.block.allocate(int(self.block.head[Head.PARAMETERS]))


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
        restarts: how many times a learner of an asynchronous run is started again when it was killed.
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
        restarts: int = 0,
        grace_s: float = 20.0,
    ) -> None:
        self.command, self.learners, self.logs, self.grace_s = list(command), learners, logs, grace_s
        self.ranks, self.restarts, self._starts_ranks = ranks, restarts, place is None
        self._first = place or Place(0, learners)
        self.block = self._first.open()
        self.watched = Watched(self.block)
        self._patience = Patience(self.block)
        notes = folder_of(self.block.folder if logs is None else logs)
        self._notes = NotesReader(notes, learners)
        self._environment = {**os.environ, **(environment or {}), FOLDER: str(notes)}
        self._numbers = range(learners) if numbers is None else numbers
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        """Each learner's, or its rank 0's: a learner fails with any of its ranks."""
        self._incarnations = [0] * learners
        self._noted: set[int] = set()
        """Learners whose end was noted."""
        self._followers: list[subprocess.Popen[bytes]] = []
        self._frozen: set[int] = set()
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
            self._look(look)
            time.sleep(every_s)
        self._look(look)
        if not self.watched.present:
            first = self.watched.faults[0]
            raise LearnerError(f"all learners ended before their time; learner {first.learner} {first.text}")
        return self.watched

    def _look(self, look: Callable[[Watched], None]) -> None:
        self.watched.news += self._notes.fresh()
        look(self.watched)

    def _end_frozen(self) -> None:
        """Wait no longer for what has long not moved, once all others have ended.

        A learner that is stopped (SIGSTOP) is killed; one on another host, of which nobody here hears any more, is
        taken for dead.
        """
        block, running = self.block, [number for number in range(self.learners) if self._runs(number)]
        near = [number for number in running if block.is_local(number)]
        if len(running) == self.learners or not all(stopped(int(block.board_LC[n, Col.PID])) for n in near):
            return
        for number in running:
            if not self._patience.exhausted(number):
                continue
            if number not in near:
                block.board_LC[number, Col.STATE] = Status.FAILED
            elif number in self._processes:
                self._frozen.add(number)
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
        output: IO[bytes] | None = None
        if self.logs is not None:
            self.logs.mkdir(parents=True, exist_ok=True)
            output = self._log(number, rank).open("ab" if self._incarnations[number] else "wb")
            self._files.append(output)
        parent = os.getpid()
        return subprocess.Popen(
            self.command,
            env={**self._environment, **self._place(number, rank).environment()},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            # Ctrl-C reaches the launcher alone, which lets the learners end; should it be killed, they go with it.
            start_new_session=True,
            preexec_fn=lambda: _die_with(parent),
        )

    def _place(self, number: int, rank: int = 0) -> Place:
        return replace(
            self._first,
            learner=number,
            folder=self.block.folder,
            creates=False,
            rank=rank,
            ranks=self.ranks,
            incarnation=self._incarnations[number],
        )

    def _log(self, number: int, rank: int = 0) -> Path:
        assert self.logs is not None
        return self.logs / (f"learner-{number}.log" if rank == 0 else f"learner-{number}-rank-{rank}.log")

    def _runs(self, number: int) -> bool:
        if number in self._processes:
            return self._processes[number].poll() is None
        # Another process of a torchrun job: it is known once it has joined.
        row_C, near = self.block.board_LC[number], self.block.is_local(number)
        if row_C[Col.STATE] == Status.DONE:
            return not row_C[Col.LEFT] and (not near or process_runs(int(row_C[Col.PID])))
        return not self.block.dead(number)

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
        return not any(self._runs(number) for number in range(self.learners))

    def _ended_now(self) -> list[int]:
        return [number for number in range(self.learners) if not self._runs(number)]

    def _ended(self, number: int) -> None:
        """Take note of how a learner ended; raise where the run cannot go on without it."""
        block, state = self.block, int(self.block.board_LC[number, Col.STATE])
        process = self._processes.get(number)
        code = process.poll() if process else None
        if number in self._noted or (state in (Status.DONE, Status.AWAY) and not code):
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
            if number in self._frozen:
                text = "was stopped (SIGSTOP) and did not go on, so that it was killed"
        if self.logs is not None and self._log(number).exists():
            lines = self._log(number).read_text(errors="replace").strip().splitlines()
            if kind == "failed" and lines:
                text += f": {lines[-1]} (all of it in {self._log(number)})"
        held = int((block.outstanding_LK[number] > 0).sum())
        fault = Fault(number, kind, text, held)
        self._noted.add(number)
        self.watched.faults.append(fault)
        if state == Status.DONE:
            return
        row_C = block.board_LC[number]
        row_C[Col.STATE] = Status.FAILED
        if row_C[Col.WAITS] or state == Status.ABSENT:
            raise LearnerError(f"learner {number} {text}")
        fault.updates_lost = int(row_C[Col.STEPS] - row_C[Col.MIXED])
        if self.watched.begun:
            self.watched.map_weights()
            fault.jump = jump_of(block, number)
        if kind == "died" and self._may_return(number):
            fault.restarted = True
            self._incarnations[number] += 1
            self._noted.remove(number)
            self._processes[number] = self._start(number)

    def _may_return(self, number: int) -> bool:
        """Say whether a learner that was killed is to be started again: others still work, and it has tries left."""
        block, states_L = self.block, self.block.board_LC[:, Col.STATE]
        return (
            number in self._processes
            and self.ranks == 1
            and self._incarnations[number] < self.restarts
            and self.watched.begun
            and not block.head[Head.STOP]
            and any(states_L[n] == Status.JOINED and not block.dead(n) for n in range(self.learners))
        )


def membership_text(note: Json) -> str:
    """Return what is told of a ``membership`` event."""
    source = "" if note["source"] is None else f" with the weights of learner {note['source']}"
    text = {"reseeded": "had weights that were not finite, and began again"}.get(note["change"], note["change"])
    return f"learner {note['learner']} {text}{source}"


def _die_with(parent: int) -> None:
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
