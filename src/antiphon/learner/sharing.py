"""Work that goes from host to host: a learner whose host runs short asks others for tickets; without I/O or a clock.

A note tells another learner all that this one has to say to it, and the newest one counts, so notes may be lost,
doubled or late:

    as a thief     how many tickets of the receiver's it wants to have in hand, below which bound; which ones it has
                   ended, which it gives back: each is told until the receiver lists it no more
    as a victim    the receiver's: drawn for it and not known as ended; they stay in this learner's row of the board
    for its host   what it has to do (`pool.HostState`), from which others go on should it die

A ticket is accounted for by the host that drew it alone: should the thief die, the victim has it; should the victim
die, its host or whoever takes over from that; a thief drops what it has not begun of a dead victim's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from antiphon.learner.pool import ENDLESS, HostState, Pool
from antiphon.transport.block import OUTSTANDING, Col, Gauge

CHANNEL = 2
"""Of the notes on the network."""
PERIOD_S, SOON_S = 0.1, 0.01
"""How often a note goes to each peer at least, and at most."""
HORIZON_S = 0.4
"""So long before its host runs short a learner asks others, and so much work it asks for."""
MOST_AHEAD = 16
HEARD_S = 1.0
"""A learner that was not heard for that long is not asked."""
HEADER = 8


class Note(NamedTuple):
    """What one learner tells another."""

    stamp: int
    """Grows from note to note, and is the time for all learners of a host: of two states the newer one counts."""
    want: int
    bound: int
    ended: list[int]
    back: list[int]
    granted: list[int]
    state: HostState


def pack(note: Note) -> bytes:
    """Return the bytes of a note: whole numbers of 64 bits, little-endian."""
    series = [number for pair in note.state.series.items() for number in pair]
    lists = [note.ended, note.back, note.granted, series, note.state.tickets]
    header = [note.stamp, note.want, note.bound, *map(len, lists)]
    return np.array(sum(lists, header), "<i8").tobytes()


def unpack(data: bytes) -> Note | None:
    """Return the note that ``data`` holds, or None where it holds none."""
    if len(data) % 8 or len(data) < 8 * HEADER:
        return None
    numbers: list[int] = np.frombuffer(data, "<i8").tolist()
    lengths, rest = numbers[3:HEADER], numbers[HEADER:]
    if min(numbers) < 0 or max(numbers) > ENDLESS or sum(lengths) != len(rest) or lengths[3] % 2:
        return None
    ends = np.cumsum(lengths).tolist()
    ended, back, granted, series, tickets = (
        rest[end - length : end] for end, length in zip(ends, lengths, strict=True)
    )
    state = HostState(dict(zip(series[::2], series[1::2], strict=True)), tickets)
    stamp, want, bound = numbers[:3]
    return Note(stamp, want, bound, ended, back, granted, state)


class _Peer:
    """What stands between this learner and one on another host."""

    def __init__(self) -> None:
        self.stamp = -1
        self.heard_s = self.sent_s = -math.inf
        self.urgent = False
        # This learner as the peer's victim, and as its thief.
        self.granted: set[int] = set()
        self.reserve: set[int] = set()
        self.taken: set[int] = set()
        self.told: dict[int, bool] = {}
        """Ended (true) or given back, and still listed by the peer."""


class Sharing:
    """One learner's part in sharing work with other hosts.

    Args:
        pool: the work of this host.
        send: takes (peer, note); may lose it.
    """

    def __init__(self, pool: Pool, send: Callable[[int, bytes], None]) -> None:
        self.pool, self.send = pool, send
        self.host = {number: host for host, numbers in pool.learners.items() for number in numbers}
        self.peers = {number: _Peer() for number, host in self.host.items() if host != pool.host}
        self.states: dict[int, HostState] = {}
        """The newest of each other host."""
        self.bound = 0
        """Tickets below it are worked on now."""
        self.left = False
        self._stamps: dict[int, int] = {}

    # --- the thread that takes tickets

    def take(self, bound: int) -> tuple[int, int] | None:
        """Return a ticket below ``bound`` that another host has granted, and by which learner."""
        with self.pool.lock:
            low = [(ticket, number) for number, peer in self.peers.items() for ticket in peer.reserve if ticket < bound]
            if not low:
                return None
            ticket, number = min(low)
            self.peers[number].reserve.remove(ticket)
            self.peers[number].taken.add(ticket)
            return ticket, number

    def end(self, ticket: int, number: int) -> None:
        """Let the learner that granted a ticket know that it is ended."""
        with self.pool.lock:
            peer = self.peers[number]
            if ticket in peer.taken:
                peer.taken.remove(ticket)
                peer.told[ticket] = peer.urgent = True

    def leave(self) -> None:
        """Give back what is not begun, and take no more."""
        with self.pool.lock:
            self.left = True
            for peer in self.peers.values():
                self._give_back(peer)

    def take_back(self, patient: Callable[[int], bool]) -> None:
        """Take back what was granted to learners for which there is no more patience."""
        with self.pool.lock:
            for number, peer in self.peers.items():
                if peer.granted and not patient(number):
                    self._reclaim(peer)

    def grants(self, bound: int) -> bool:
        """Say whether tickets below ``bound`` were granted to others that they have not ended yet."""
        with self.pool.lock:
            return any(ticket < bound for peer in self.peers.values() for ticket in peer.granted)

    def pending(self, host: int, bound: int) -> bool:
        """Say whether another host, unless it was taken over, may have tickets below ``bound`` to end."""
        with self.pool.lock:
            if host in self._adopted():
                return False
            state = self.states.get(host)
            return state is None or bool(self._remaining(state, bound)) or any(t < bound for t in state.tickets)

    def adopt(self, host: int) -> None:
        """Take over the rest of another host, from what was last heard of it."""
        with self.pool.lock:
            if host not in self._adopted():
                self.pool.adopt(host, self.states.get(host, HostState({host: 0}, [])))

    def adopt_dead(self) -> None:
        """Take over the rest of hosts all of whose learners are dead, if this host is the first of those that live."""
        dead = [host for host in self.pool.learners if self._is_dead(host)]
        if dead and self.pool.host == min(set(self.pool.learners).difference(dead), default=self.pool.host):
            for host in dead:
                self.adopt(host)

    # --- the exchange thread

    def receive(self, number: int, data: bytes) -> None:
        """Take in a note."""
        note = unpack(data)
        with self.pool.lock:
            peer = self.peers.get(number)
            host = self.host.get(number, -1)
            if peer is None or note is None or note.stamp <= peer.stamp or not self._sound(host, note.state):
                return
            peer.stamp, peer.heard_s = note.stamp, self.pool.clock()
            if note.stamp > self._stamps.get(host, -1):
                self._stamps[host], self.states[host] = note.stamp, note.state
                if self.pool.host in note.state.series:
                    self.pool.give_away()
            self._as_victim(peer, note)
            self._as_thief(peer, note)

    def tick(self, now: float) -> None:
        """Send what is due."""
        with self.pool.lock:
            state = None
            for number, peer in self.peers.items():
                if self.pool.block.dead(number):
                    self._drop(peer)
                elif now - peer.sent_s >= (SOON_S if peer.urgent else PERIOD_S):
                    state = state or self._look_here()
                    self._send(number, peer, state, now)

    def _look_here(self) -> HostState:
        state = self.pool.state()
        board_LC = self.pool.block.board_LC
        board_LC[self.pool.learner, Col.FLOOR] = self.pool.floor(state)
        for host in self._adopted():
            if self._is_dead(host):  # whoever has its rest tells of it from now on
                board_LC[self.pool.learners[host], Col.FLOOR] = ENDLESS
        return state

    def _send(self, number: int, peer: _Peer, state: HostState, now: float) -> None:
        want = self._want(number, now)
        ended = [ticket for ticket, done in peer.told.items() if done]
        back = [ticket for ticket, done in peer.told.items() if not done]
        note = Note(int(now * 1e9), want, self.bound, ended, back, sorted(peer.granted), state)
        peer.sent_s, peer.urgent = now, False
        self.send(number, pack(note))

    def _want(self, number: int, now: float) -> int:
        """Return how many tickets of a peer's this learner wants to have in hand, the one that it works on included."""
        pool, peer = self.pool, self.peers[number]
        here = [other for other in pool.here if other == pool.learner or not pool.block.dead(other)]
        short = pool.remaining(self.bound) <= sum(map(self._ahead, here))
        if self.left or not short or number != self._victim(now):
            return 0
        others = sum(len(other.reserve) for other in self.peers.values() if other is not peer)
        return max(0, self._ahead(pool.learner) - others) + len(peer.taken)

    def _ahead(self, learner: int) -> int:
        """Return how many tickets keep a learner of this host busy until others can have answered."""
        step_s = float(self.pool.block.gauges_LC[learner, Gauge.STEP_S])
        return min(MOST_AHEAD, math.ceil(HORIZON_S / step_s)) if step_s else 1

    def _victim(self, now: float) -> int | None:
        """Return whom to ask: on the host with the most left to draw, one that was heard lately."""
        best: tuple[int, int, list[int]] | None = None
        for host, state in self.states.items():
            heard = [
                number
                for number in self.pool.learners[host]
                if now - self.peers[number].heard_s < HEARD_S and not self.pool.block.dead(number)
            ]
            remaining = self._remaining(state, self.bound)
            if heard and remaining and (best is None or remaining > best[0]):
                best = remaining, host, heard
        # Learners of one host ask different ones of another.
        return best[2][self.pool.here.index(self.pool.learner) % len(best[2])] if best else None

    def _as_victim(self, peer: _Peer, note: Note) -> None:
        for ticket in peer.granted.intersection(note.ended):
            self.pool.end(ticket)
        for ticket in peer.granted.intersection(note.back).difference(note.ended):
            self.pool.take_back(ticket, again=False)
        peer.granted.difference_update(note.ended, note.back)
        # The thief's part of what is left, as fast as it is and the learners here are.
        part = note.want / (note.want + sum(map(self._ahead, self.pool.here)))
        for _ in range(min(note.want - len(peer.granted), math.ceil(part * self.pool.remaining(note.bound)))):
            drawn = self.pool.draw(note.bound) if self.pool.row.free > OUTSTANDING // 2 else None
            if drawn is None:
                break
            peer.granted.add(drawn)
        peer.urgent |= bool(note.want or note.ended or note.back)

    def _as_thief(self, peer: _Peer, note: Note) -> None:
        listed = set(note.granted)
        peer.told = {ticket: done for ticket, done in peer.told.items() if ticket in listed}
        peer.reserve |= listed.difference(peer.taken, peer.told)
        if self.left:
            self._give_back(peer)

    def _give_back(self, peer: _Peer) -> None:
        peer.urgent |= bool(peer.reserve)
        peer.told.update(dict.fromkeys(peer.reserve, False))
        peer.reserve.clear()

    def _drop(self, peer: _Peer) -> None:
        """Forget a peer that is dead: whoever takes over from it has all that it granted."""
        self._reclaim(peer)
        peer.reserve.clear()
        peer.told.clear()

    def _reclaim(self, peer: _Peer) -> None:
        for ticket in peer.granted:
            self.pool.take_back(ticket)
        peer.granted.clear()

    def _is_dead(self, host: int) -> bool:
        return all(map(self.pool.block.dead, self.pool.learners[host]))

    def _adopted(self) -> set[int]:
        """The other hosts whose rest some host has taken over."""
        told = {of for host, state in self.states.items() for of in state.series if of != host}
        return (told | self.pool.adopted) - {self.pool.host}

    def _remaining(self, state: HostState, bound: int) -> int:
        """Return how many tickets below ``bound`` a host can still draw."""
        return sum(max(0, self.pool.series[host].below(bound) - number) for host, number in state.series.items())

    def _sound(self, host: int, state: HostState) -> bool:
        return host in state.series and set(state.series) <= set(self.pool.series)
