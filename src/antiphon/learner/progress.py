"""The work: one global order of batches, taken one ticket at a time by whoever is free.

Ticket t is batch t mod n of epoch t div n, n batches an epoch. A fast learner simply takes more of them; every sample
is taken once an epoch. The batches that a learner held when it died are given out again. Global progress, which
schedules follow, is the ticket over n.
"""

from __future__ import annotations

import functools
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from antiphon.errors import ArgumentError
from antiphon.transport.block import OUTSTANDING, Block, Col, Gauge, Status


@dataclass(frozen=True)
class EpochOrder:
    """The shuffled order of each epoch, cut into batches: a function of (seed, epoch) alone.

    n = L ceil(N / (b L)) batches an epoch, a whole number of rounds of L learners; their sizes differ by one at most
    and none is larger than b, the share batch/L of one learner.

    Args:
        samples: N, how many the data set has.
        local_batch: b, at most this many samples a batch.
        learners: L.
        seed: of the shuffling.

    Raises:
        ArgumentError: fewer samples than learners, or a batch below one.

    >>> order = EpochOrder(samples=10, local_batch=3, learners=2)
    >>> order.batches, sorted(len(order.batch(t)) for t in range(4))
    (4, [2, 2, 3, 3])
    """

    samples: int
    local_batch: int
    learners: int
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the bounds."""
        if self.local_batch < 1:
            raise ArgumentError(f"a learner's share of the batch must be at least 1 sample, not {self.local_batch}")
        if self.samples < self.learners:
            raise ArgumentError(f"{self.samples} samples cannot feed {self.learners} learners: use fewer learners")

    @property
    def batches(self) -> int:
        """n, the batches of one epoch."""
        return self.learners * -(-self.samples // (self.local_batch * self.learners))

    def batch(self, ticket: int) -> list[int]:
        """Return the samples of one ticket."""
        epoch, place = divmod(ticket, self.batches)
        begin, end = (self.samples * k // self.batches for k in (place, place + 1))
        return [int(sample) for sample in _shuffled(self.samples, self.seed, epoch)[begin:end]]


@functools.lru_cache(maxsize=4)
def _shuffled(samples: int, seed: int, epoch: int) -> NDArray[np.int64]:
    return np.random.default_rng([seed, epoch]).permutation(samples)


class Work(ABC):
    """Where a learner's tickets come from; those it holds are shown on the board until they are ended."""

    def __init__(self, block: Block, learner: int) -> None:
        self.block, self.learner = block, learner
        self.again: set[int] = set()
        """Tickets that were taken over from learners that died."""
        self._held: deque[int] = deque()

    @abstractmethod
    def take(self, total: int | None = None) -> int | None:
        """Return the next ticket below ``total``, or None where there is none left for this learner."""

    def rest(self, total: int) -> int | None:
        """Return a ticket below ``total`` that a learner which died left, or None once none can come back any more."""
        return None

    def position(self, ticket: int) -> int:
        """Return where a ticket lies in the work, for whatever follows global progress."""
        return ticket

    def end_oldest(self) -> None:
        """Mark the ticket that was taken first as ended: its step has been added."""
        if self._held:
            outstanding_K = self.block.outstanding_LK[self.learner]
            outstanding_K[outstanding_K == self._held.popleft() + 1] = 0

    def _show(self, ticket: int) -> int:
        """Show a ticket on the board, from where others take it should this learner die."""
        outstanding_K = self.block.outstanding_LK[self.learner]
        free = np.flatnonzero(outstanding_K == 0)
        if not len(free):
            raise ArgumentError(f"more than {OUTSTANDING} batches taken ahead: let the loader prefetch fewer")
        outstanding_K[free[0]] = ticket + 1
        return ticket

    def _hold(self, ticket: int) -> int:
        self._held.append(ticket)
        return ticket


class Rounds(Work):
    """Synchronous work: in round k learner l has ticket k L + l."""

    def __init__(self, block: Block, learner: int, first: int = 0) -> None:
        super().__init__(block, learner)
        self._next = first + learner

    def take(self, total: int | None = None) -> int | None:
        """Return the next ticket of this learner."""
        if total is not None and self._next >= total:
            return None
        ticket, self._next = self._next, self._next + self.block.learners
        return self._hold(self._show(ticket))

    def position(self, ticket: int) -> int:
        """Return the first ticket of the round: the same for all learners."""
        return ticket - self.learner


class Tickets(Work):
    """Asynchronous work: the next number of a counter that all learners share, or what a dead learner left."""

    def __init__(self, block: Block, learner: int, first: int = 0) -> None:
        super().__init__(block, learner)
        self._number, self._first = block.ticket_counter(), first
        self._ahead: int | None = None
        """A ticket that lies beyond what was asked for: on the board, and kept for the next time."""
        self._patience = Patience(block)
        self._look_at_s = 0.0

    def take(self, total: int | None = None) -> int | None:
        """Return what a dead learner left, or else the next ticket."""
        if time.monotonic() > self._look_at_s:
            self._look_at_s = time.monotonic() + 0.2
            if (left := self._left_by_dead(total)) is not None:
                return self._hold(left)
        if self._ahead is None:
            self._ahead = self._show(self._first + self._number())
        if total is not None and self._ahead >= total:
            return None
        ticket, self._ahead = self._ahead, None
        return self._hold(ticket)

    def rest(self, total: int) -> int | None:
        """Return a ticket that a dead learner left, waiting while a living one still holds any; None when all ended.

        A loader that takes batches ahead asks before this learner has ended its own. Learners that waited for each
        other's would wait in vain, so it is then told None; the last batches of one that dies late are lost.
        """
        while True:
            # In this order: one that dies in between is still counted as holding, and met at the next turn.
            holding = any(self._holds(learner, total) for learner in range(self.block.learners))
            if (left := self._left_by_dead(total)) is not None:
                return self._hold(left)
            if not holding or self._held:
                return None
            time.sleep(0.005)

    def _holds(self, learner: int, total: int) -> bool:
        """Say whether a living learner may still end, or leave, a ticket below ``total``."""
        return (
            learner != self.learner
            and bool(len(self._below(learner, total)))
            and self.block.board_LC[learner, Col.STATE] == Status.JOINED
            and not self.block.dead(learner)
            and not self._patience.exhausted(learner)
        )

    def _below(self, learner: int, total: int | None) -> NDArray[np.int64]:
        tickets_K: NDArray[np.int64] = self.block.outstanding_LK[learner] - 1
        tickets_K = tickets_K[tickets_K >= 0]
        return tickets_K if total is None else tickets_K[tickets_K < total]

    def _left_by_dead(self, total: int | None) -> int | None:
        for learner in range(self.block.learners):
            tickets_K = self._below(learner, total)
            if learner == self.learner or not len(tickets_K) or not self.block.dead(learner):
                continue
            for ticket in tickets_K.tolist():
                if self.block.claim_again(ticket, learner):
                    self.again.add(ticket)
                    return self._show(ticket)
        return None


class Patience:
    """How long to wait for a learner at the end: ``base_s`` and twenty of its steps without any progress of its."""

    def __init__(self, block: Block, base_s: float = 15.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.block, self.base_s, self._clock = block, base_s, clock
        self._seen: dict[int, tuple[tuple[int, int], float]] = {}

    def exhausted(self, learner: int) -> bool:
        """Say whether the learner's steps and state have not moved for that long."""
        now = self._clock()
        mark = int(self.block.board_LC[learner, Col.STEPS]), int(self.block.board_LC[learner, Col.STATE])
        seen, since = self._seen.get(learner, (None, now))
        if seen != mark:
            self._seen[learner] = (mark, now)
            return False
        return now - since > self.base_s + 20 * float(self.block.gauges_LC[learner, Gauge.STEP_S])


def waiting_for(block: Block, learner: int, patience: Patience) -> list[int]:
    """Return the others that are neither drained, dead nor past patience."""
    return [
        other
        for other in range(block.learners)
        if other != learner
        and block.board_LC[other, Col.STATE] == Status.JOINED
        and not block.dead(other)
        and not patience.exhausted(other)
    ]
