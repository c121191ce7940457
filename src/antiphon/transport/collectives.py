"""Synchronous rounds of learners on several hosts, by the collectives of torch.distributed (gloo, over TCP).

What a round sends is done one piece after the other by a thread of its own, so that averaging weights hides behind the
gradient. The group is Antiphon's own: a script may have a default process group beside it. gloo's mean is made once and
handed to all, so it is equal to the bit for all of them.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from antiphon.errors import DeadlineError, LearnerError
from antiphon.transport.base import Coefficients, Rounds
from antiphon.transport.block import Block, Col
from antiphon.transport.shared import SharedWeights

LOOK_S = 0.05
TAGS = 1 << 16
NEWS_S = 2.0
"""How long it may take to learn who it was that broke a round off."""


def gloo_group(store: Any, run: str, learner: int, learners: int, address: str, timeout_s: float) -> Any:
    """Return a group of all learners, whose connections go by the interface of ``address``; all must call it.

    Args:
        store: a store of torch.distributed, by which they find each other.
        run: the run's name: under it the store holds nothing of an earlier start.
        learner: this learner's number.
        learners: how many there are.
        address: this learner's.
        timeout_s: how long a round may take.

    Raises:
        LearnerError: the others cannot be reached.
    """
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    # Longer than any round is waited for: gloo's own timeout tells nothing of who is late.
    options._timeout = timedelta(seconds=2 * timeout_s)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    try:
        own = dist.PrefixStore(f"rounds-{run}", store)  # type: ignore[attr-defined]
        return dist.ProcessGroupGloo(own, learner, learners, options)
    except RuntimeError as error:
        raise LearnerError(f"learner {learner} cannot reach the others for its collectives: {error}") from error


class GroupRounds(Rounds):
    """Rounds over a process group.

    Args:
        block: this host's shared memory, whose board says who is gone.
        learner: this learner's number.
        weights: its weights.
        group: a process group of all learners.
        timeout_s: how long a round is waited for.
    """

    def __init__(self, block: Block, learner: int, weights: SharedWeights, group: Any, timeout_s: float) -> None:
        self.block, self.learner, self.weights, self.timeout_s = block, learner, weights, timeout_s
        self._group = group
        self._peers = [peer for peer in range(block.learners) if peer != learner]
        self._work: queue.SimpleQueue[tuple[Callable[[], None], Future[None]]] = queue.SimpleQueue()
        self._pending: Future[None] = Future()
        self._sum_N = torch.empty(0)
        self._received: dict[int, Tensor] = {}
        # A daemon, for a round that will never end must not keep the process from ending.
        threading.Thread(target=self._run, name="rounds", daemon=True).start()

    def start_mix(self, round: int, coefficients: Coefficients) -> None:
        """Let the thread snapshot the weights, send them, and add the differences once the others' are there."""
        self._start(round, lambda: self._mix(round, coefficients))

    def finish_mix(self, round: int) -> None:
        """Wait until the differences of the round have been added."""
        self._finish(round)

    def start_average(self, round: int, vector_N: Tensor) -> None:
        """Let the thread add up all learners' vectors."""
        if self._sum_N.shape != vector_N.shape:
            self._sum_N = torch.empty(vector_N.shape)
        self._sum_N.copy_(vector_N)
        self._start(round, self._add_up)

    def finish_average(self, round: int, mean_N: Tensor) -> None:
        """Wait for all, and write the mean."""
        self._finish(round)
        mean_N.copy_(self._sum_N.div_(self.block.learners))

    # --- the computing thread

    def _start(self, round: int, work: Callable[[], None]) -> None:
        self.block.board_LC[self.learner, Col.PUBLISHED] = round + 1
        self._pending = Future()
        self._work.put((work, self._pending))

    def _finish(self, round: int) -> None:
        """Wait for the round in hand, in short pieces: Ctrl-C and the news of a death are to be heard."""
        end = time.monotonic() + self.timeout_s
        while not self._pending.done():
            self._look()
            if time.monotonic() > end:
                missing = np.flatnonzero(self.block.board_LC[:, Col.PUBLISHED] <= round).tolist()
                raise DeadlineError(
                    f"learner {self.learner} waited {self.timeout_s:g} s in round {round} for learners {missing}:"
                    " raise timeout_s, or use an asynchronous strategy, which waits for nobody"
                )
            wait([self._pending], LOOK_S)
        error = self._pending.exception()
        if isinstance(error, LearnerError):
            raise error
        if error is not None:
            # gloo says that a connection broke; who is gone comes by another way, a little later.
            until = time.monotonic() + NEWS_S
            while time.monotonic() < until:
                self._look()
                time.sleep(LOOK_S)
            raise LearnerError(f"learner {self.learner}: round {round} broke off: {error}") from error

    def _look(self) -> None:
        bereft_L = self.block.board_LC[:, Col.BEREFT]
        # One that has ended for want of another may be heard of before that other one.
        if lost := sorted({int(bereft_L[n]) - 1 if bereft_L[n] else n for n in self._peers if self.block.dead(n)}):
            bereft_L[self.learner] = lost[0] + 1
            raise LearnerError(f"learners {lost} are gone, and this strategy needs them in every round")

    # --- the rounds' thread

    def _run(self) -> None:
        torch.set_num_threads(1)
        while True:
            work, pending = self._work.get()
            try:
                work()
            except BaseException as error:
                pending.set_exception(error)
            else:
                pending.set_result(None)

    def _add_up(self) -> None:
        self._group.allreduce([self._sum_N]).wait()
        learners = self.block.learners
        self.bytes_read += 8 * self._sum_N.numel() * (learners - 1) // learners

    def _mix(self, round: int, coefficients: Coefficients) -> None:
        """Add sum_j c_j (s_j - s_own); where all c are equal, that is c L (mean - s_own)."""
        if self.weights.write(0) is None:
            raise LearnerError(f"learner {self.learner}: the weights are not finite in round {round}")
        own_N, learners = self.weights.buffers.slots_LSN[self.learner, 0], self.block.learners
        if len(coefficients) == learners - 1 and len({coefficient for _, coefficient in coefficients}) == 1:
            self._sum_N = self._sum_N if self._sum_N.shape == own_N.shape else torch.empty_like(own_N)
            self._sum_N.copy_(own_N)
            self._add_up()
            others = [(self._sum_N.div_(learners), learners * coefficients[0][1])]
        else:
            others = self._neighbours(round, coefficients, own_N)
        self.weights.add_differences(others, own_N)

    def _neighbours(self, round: int, coefficients: Coefficients, own_N: Tensor) -> list[tuple[Tensor, float]]:
        others = [(self._received.setdefault(peer, torch.empty_like(own_N)), c) for peer, c in coefficients]
        tag = round % TAGS
        coming = [self._group.recv([self._received[peer]], peer, tag) for peer, _ in coefficients]
        for transfer in coming + [self._group.send([own_N], peer, tag) for peer, _ in coefficients]:
            transfer.wait()
        self.bytes_read += 4 * own_N.numel() * len(others)
        return others
