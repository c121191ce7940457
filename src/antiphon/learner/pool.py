"""One host's share of the work, as its learners see it: they draw tickets, show what they hold, do what the dead left.

Of every L tickets a host owns those at the numbers of its learners, so that each ticket tells how far the work of all
has come. A host takes over the rest of another that is dead: what it held, and its share from there on.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from antiphon.errors import ArgumentError
from antiphon.transport.block import OUTSTANDING, Block, Col, Link
from antiphon.transport.draws import Draws

ENDLESS = 1 << 62
"""Above every ticket."""
FAR = 1 << 40
"""Where a series goes on that others draw from."""
LOOK_S = 0.2
"""How often a learner looks for what the dead have left."""


@dataclass(frozen=True)
class Series:
    """The tickets that a host owns: ticket(k) = first + L (k div l) + places[k mod l], of l learners out of L.

    >>> series = Series(first=10, learners=4, places=(1, 2))
    >>> [series.ticket(k) for k in range(4)], series.below(16)
    ([11, 12, 15, 16], 3)
    """

    first: int
    learners: int
    places: tuple[int, ...]

    def ticket(self, number: int) -> int:
        """Return the ticket of one number."""
        turn, place = divmod(number, len(self.places))
        return self.first + self.learners * turn + self.places[place]

    def below(self, bound: int) -> int:
        """Return how many numbers have a ticket below ``bound``."""
        turns, rest = divmod(max(0, bound - self.first), self.learners)
        return turns * len(self.places) + sum(place < rest for place in self.places)


@dataclass
class Source:
    """What is drawn from: some tickets that a dead host left, then a host's series from number ``begin`` on."""

    host: int
    draws: Draws
    series: Series
    begin: int = 0
    left: Sequence[int] = ()

    def ticket(self, number: int) -> int:
        """Return the ticket of the number drawn."""
        beyond = number - len(self.left)
        return self.left[number] if beyond < 0 else self.series.ticket(self.begin + beyond)

    def remaining(self, bound: int) -> int:
        """Return how many tickets below ``bound`` were not drawn yet."""
        drawn = len(self.draws)
        left = sum(ticket < bound for ticket in self.left[drawn:])
        return left + max(0, self.series.below(bound) - self.begin - max(0, drawn - len(self.left)))

    def undrawn(self) -> tuple[int, Sequence[int]]:
        """Return the next number of the series, and what is left besides."""
        drawn = len(self.draws)
        return self.begin + max(0, drawn - len(self.left)), self.left[drawn:]


class HostState(NamedTuple):
    """All that a host has to do: the next number of each series that it draws from, by host, and tickets besides."""

    series: dict[int, int]
    tickets: list[int]


class Row:
    """A learner's row of the board: the tickets that it has drawn and that were not yet ended."""

    def __init__(self, block: Block, learner: int) -> None:
        self.tickets_K: NDArray[np.int64] = block.outstanding_LK[learner]

    def show(self, ticket: int) -> int:
        """Show a ticket, from where others take it should this learner die."""
        self.check_room()
        self.tickets_K[np.flatnonzero(self.tickets_K == 0)[0]] = ticket + 1
        return ticket

    def end(self, ticket: int) -> None:
        """Show it no more."""
        self.tickets_K[self.tickets_K == ticket + 1] = 0

    def check_room(self) -> None:
        """Raise ArgumentError where no more can be shown."""
        if not self.free:
            raise ArgumentError(
                f"more than {OUTSTANDING} batches taken and not ended: let the loader prefetch fewer, or say"
                " step(batches=...) where several make one step"
            )

    @property
    def free(self) -> int:
        """How many more can be shown."""
        return int((self.tickets_K == 0).sum())


class Pool:
    """The work of one host, for one of its learners, or for a process that only looks.

    Args:
        block: the host's shared memory.
        learner: this learner's number.
        first: the first ticket of the run's session.
        clock: seconds that only grow.
    """

    def __init__(self, block: Block, learner: int, first: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        hosts_L = block.links_LC[:, Link.HOST].tolist()
        self.block, self.learner, self.host, self.clock = block, learner, hosts_L[learner], clock
        self.learners: dict[int, list[int]] = {}
        for number, host in enumerate(hosts_L):
            self.learners.setdefault(host, []).append(number)
        self.series = {
            host: Series(first, block.learners, tuple(numbers)) for host, numbers in sorted(self.learners.items())
        }
        self.here = self.learners[self.host]
        self.row = Row(block, learner)
        self.lock = threading.RLock()
        """Held by whichever thread of this process touches the row."""
        self.spare: set[int] = set()
        """Tickets in the row that nobody works on: drawn beyond what was asked for, or come back."""
        self.again: set[int] = set()
        """Tickets that somebody else had taken before, and that may have been ended."""
        self.sources = [Source(self.host, block.draws(), self.series[self.host])]
        self._look_at_s = 0.0
        self.read_adopted()

    # --- drawing

    def draw(self, bound: int) -> int | None:
        """Return a ticket below ``bound`` that nobody works on, now shown in the row; None where there is none."""
        with self.lock:
            if low := [ticket for ticket in self.spare if ticket < bound]:
                self.spare.remove(min(low))
                return min(low)
            for source in self.sources:
                while source.remaining(bound):
                    ticket = self._draw(source)
                    if ticket < bound:
                        return ticket
                    self.spare.add(ticket)
        return None

    def _draw(self, source: Source) -> int:
        self.row.check_room()
        row_C = self.block.board_LC[self.learner]
        index = int(row_C[Col.DRAWN])
        number = source.draws.draw(self.learner, index)
        ticket = self.row.show(source.ticket(number))
        row_C[Col.DRAWN] = index + 1
        if number < len(source.left):
            self.again.add(ticket)
        return ticket

    def reclaim(self) -> None:
        """Take back what an earlier process of this learner held, unless others have it by now."""
        with self.lock:
            unshown = self._unshown(self.learner)
            for ticket in unshown:
                self.row.show(ticket)
            self.block.board_LC[self.learner, Col.DRAWN] += len(unshown)
            for ticket in self.held(self.learner):
                if self.block.claim_again(ticket, self.learner):
                    self.take_back(ticket)
                else:
                    self.row.end(ticket)

    def end(self, ticket: int) -> None:
        """Show a ticket no more: its step has been added."""
        with self.lock:
            self.row.end(ticket)

    def take_back(self, ticket: int, again: bool = True) -> None:
        """Put a ticket of the row among those that nobody works on; ``again`` where it may have been ended."""
        with self.lock:
            self.spare.add(ticket)
            if again:
                self.again.add(ticket)

    def remaining(self, bound: int) -> int:
        """Return how many tickets below ``bound`` can be drawn here."""
        with self.lock:
            spare = sum(ticket < bound for ticket in self.spare)
            return spare + sum(source.remaining(bound) for source in self.sources)

    # --- what others hold

    def look(self, bound: int, now: bool = False) -> bool:
        """Take over a ticket below ``bound`` that the dead left, a few times a second or ``now``; say if it was time.

        One at a time, for the others of this host have as much time for them.
        """
        if not now and self.clock() < self._look_at_s:
            return False
        self._look_at_s = self.clock() + LOOK_S
        self.read_adopted()
        for other in self.here:
            if other != self.learner and self.block.dead(other):
                left = [*self.held(other), *self._unshown(other)]
                if any(self._claim(ticket, other) for ticket in left if ticket < bound):
                    break
        return True

    def held(self, learner: int, bound: int = ENDLESS) -> list[int]:
        """Return the tickets below ``bound`` in a learner's row."""
        tickets_K = self.block.outstanding_LK[learner] - 1
        return [int(ticket) for ticket in tickets_K[(tickets_K >= 0) & (tickets_K < bound)]]

    def _claim(self, ticket: int, dead: int) -> bool:
        with self.lock:
            if self.row.free < OUTSTANDING // 2 or self.block.claimed(ticket, dead):
                return False
            # Shown first: should this learner die in between, two have it, and not none.
            self.row.show(ticket)
            if self.block.claim_again(ticket, dead):
                self.take_back(ticket)
                return True
            self.row.end(ticket)
            return False

    def _unshown(self, learner: int) -> list[int]:
        """Return the ticket that a learner has drawn and not yet shown, if there is one."""
        with self.lock:
            latest = [(source, source.draws.latest().get(learner)) for source in self.sources]
        shown = int(self.block.board_LC[learner, Col.DRAWN])
        return [source.ticket(draw[0]) for source, draw in latest if draw and draw[1] >= shown]

    def state(self) -> HostState:
        """Return all that this host has to do; what is drawn or ended meanwhile may be told as not yet."""
        undrawn = {source.host: source.undrawn() for source in self.sources}
        tickets = {ticket for _, left in undrawn.values() for ticket in left}
        # Twice, for what is claimed meanwhile goes from one row to another. In this order: what is drawn meanwhile is
        # still to be drawn, or not yet shown, or shown.
        for learner in 2 * self.here:
            held = [*self._unshown(learner), *self.held(learner)]
            tickets.update(ticket for ticket in held if not self.block.claimed(ticket, learner))
        return HostState({host: number for host, (number, _) in undrawn.items()}, sorted(tickets))

    def floor(self, state: HostState | None = None) -> int:
        """Return the first ticket that the host has not ended."""
        series, tickets = state or self.state()
        return min([*(self.series[host].ticket(number) for host, number in series.items()), *tickets[:1]])

    # --- the rest of another host

    def give_away(self) -> None:
        """Draw no more from the series of this host: another one, which took it for dead, does."""
        with self.lock:
            self.sources[0].begin = FAR

    @property
    def adopted(self) -> set[int]:
        """The hosts whose rest is done here."""
        return {source.host for source in self.sources[1:]}

    def adopt(self, host: int, state: HostState) -> None:
        """Take over the rest of a dead host, as one of its learners told it last; for all learners of this host."""
        path = self.block.folder / f"adopted-{host}.json"
        rows = [
            {"host": of, "begin": begin, "left": state.tickets if of == host else []}
            for of, begin in state.series.items()
        ]
        beside = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
        beside.write_text(json.dumps(rows))
        # Of several learners that do this at once the first one's word counts.
        with contextlib.suppress(FileExistsError):
            os.link(beside, path)
        beside.unlink()
        self.read_adopted()

    def read_adopted(self) -> None:
        """See what learners of this host have adopted."""
        with self.lock:
            known = {source.host for source in self.sources}
            for path in sorted(self.block.folder.glob("adopted-*.json")):
                for row in json.loads(path.read_text()):
                    if row["host"] in known:
                        continue
                    known.add(row["host"])
                    draws = Draws(self.block.folder / f"tickets-{row['host']}")
                    self.sources.append(Source(row["host"], draws, self.series[row["host"]], row["begin"], row["left"]))
