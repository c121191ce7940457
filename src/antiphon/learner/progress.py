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
from antiphon.learner.pool import ENDLESS, Pool, Row
from antiphon.learner.sharing import CHANNEL, Sharing
from antiphon.transport.block import Block, Col, Gauge, Status
from antiphon.transport.exchange import ExchangeTransport
from antiphon.transport.mirror import Notes


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

    @abstractmethod
    def take(self, total: int | None = None) -> int | None:
        """Return the next ticket below ``total``, or None where there is none left for this learner."""

    def rest(self, total: int) -> int | None:
        """Return a ticket below ``total`` that others left, or None once none can come back any more."""
        return None

    def position(self, ticket: int) -> int:
        """Return where a ticket lies in the work, for whatever follows global progress."""
        return ticket

    @abstractmethod
    def end_oldest(self) -> None:
        """Mark the ticket that was taken first as ended: its step has been added."""

    def over(self, stopping: bool) -> None:  # noqa: B027 - most have nobody to tell
        """Tell whoever follows that an epoch has ended, the last one where the run is ``stopping``."""


class Rounds(Work):
    """Synchronous work: in round k learner l has ticket k L + l."""

    def __init__(self, block: Block, learner: int, first: int = 0) -> None:
        super().__init__(block, learner)
        self._next = first + learner
        self._row, self._held = Row(block, learner), deque[int]()

    def take(self, total: int | None = None) -> int | None:
        """Return the next ticket of this learner."""
        if total is not None and self._next >= total:
            return None
        ticket, self._next = self._next, self._next + self.block.learners
        self._held.append(self._row.show(ticket))
        return ticket

    def position(self, ticket: int) -> int:
        """Return the first ticket of the round: the same for all learners."""
        return ticket - self.learner

    def end_oldest(self) -> None:
        """Show the ticket that was taken first no more."""
        if self._held:
            self._row.end(self._held.popleft())


class Tickets(Work):
    """Asynchronous work: what a host has to do goes to whoever of its learners is free, and to others that run short.

    Args:
        block: the host's shared memory.
        learner: this learner's number.
        first: the first ticket of the run's session.
        clock: seconds that only grow.
    """

    def __init__(self, block: Block, learner: int, first: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(block, learner)
        self.pool = Pool(block, learner, first, clock)
        self.again = self.pool.again
        self.sharing: Sharing | None = None
        self._patience = Patience(block, clock=clock)
        self._held: deque[tuple[int, int | None]] = deque()
        """What was taken and not yet ended, and which learner on another host granted it."""

    def share(self, send: Callable[[int, bytes], None]) -> Sharing:
        """Begin to share work with other hosts; ``send`` takes (peer, note) and may lose it."""
        self.sharing = Sharing(self.pool, send)
        return self.sharing

    def share_over(self, transport: ExchangeTransport, notes: Notes) -> None:
        """Begin to share work with other hosts, by notes of the carrier that reaches them."""
        sharing = self.share(lambda peer, data: notes.note(peer, CHANNEL, data))
        notes.on_note[CHANNEL] = sharing.receive
        transport.on_tick.append(sharing.tick)

    def take(self, total: int | None = None) -> int | None:
        """Return the next ticket: one that another host has granted, that a dead learner left, or a new one."""
        bound = ENDLESS if total is None else total
        if self.pool.look(bound) and self.sharing:
            self.sharing.adopt_dead()
        return self._next(bound)

    def rest(self, total: int) -> int | None:
        """Return a ticket that others left, waiting while one of them holds any; None once all have ended.

        A loader that takes batches ahead asks before this learner has ended its own. Learners that waited for each
        other's would wait in vain, so it is then told None; the last batches of one that dies late are lost.
        """
        while True:
            ticket, over = self.seek(total)
            if ticket is not None or over:
                return ticket
            time.sleep(0.005)

    def seek(self, total: int) -> tuple[int | None, bool]:
        """Return a ticket that others left, where there is one now, and whether none can come back any more."""
        # In this order: one that dies in between is still counted as holding, and met at the next turn.
        holding = self.holding(total)
        self.pool.look(total, now=True)
        if self.sharing:
            self.sharing.adopt_dead()
        ticket = self._next(total)
        over = ticket is None and (not holding or bool(self._held))
        if over and self.sharing:
            self.sharing.leave()
        return ticket, over

    def end_oldest(self) -> None:
        """Let nobody else have the ticket that was taken first."""
        if not self._held:
            return
        ticket, granter = self._held.popleft()
        if granter is None:
            self.pool.end(ticket)
        elif self.sharing:
            self.sharing.end(ticket, granter)

    def holding(self, total: int) -> bool:
        """Say whether anybody else may still end, or leave, a ticket below ``total``."""
        here = any(self._holds(learner, total) for learner in self.pool.here)
        return here or bool(self.sharing and self._hosts_hold(self.sharing, total))

    def _next(self, bound: int) -> int | None:
        granted = None
        if self.sharing:
            self.sharing.bound = bound
            granted = self.sharing.take(bound)
        ticket, granter = granted or (self.pool.draw(bound), None)
        if ticket is not None:
            self._held.append((ticket, granter))
        return ticket

    def _holds(self, learner: int, total: int) -> bool:
        """Say whether a living learner of this host may still end, or leave, a ticket below ``total``."""
        if learner == self.learner:
            return bool(self.sharing and self.sharing.grants(total))
        return (
            bool(self.pool.held(learner, total))
            and self.block.board_LC[learner, Col.STATE] == Status.JOINED
            and not self.block.dead(learner)
            and not self._patience.exhausted(learner)
        )

    def _hosts_hold(self, sharing: Sharing, total: int) -> bool:
        """Say whether another host may; the rest of one that has not moved for too long is taken over."""
        sharing.take_back(self._hopeful)
        hopeful = {h for h, numbers in self.pool.learners.items() if any(map(self._hopeful, numbers))}
        pending = [host for host in self.pool.learners if host != self.pool.host and sharing.pending(host, total)]
        for host in pending:
            if host not in hopeful and self.pool.host == min(hopeful | {self.pool.host}):
                sharing.adopt(host)
        return bool(pending)

    def _hopeful(self, learner: int) -> bool:
        in_time = not self._patience.exhausted(learner)
        present = self.block.board_LC[learner, Col.STATE] in (Status.JOINED, Status.DRAINED)
        return learner == self.learner or (in_time and present and not self.block.dead(learner))


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
