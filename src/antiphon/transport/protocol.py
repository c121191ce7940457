"""The exchange of two snapshots as a state machine: messages and ticks in, messages and additions out; no I/O.

    initiator:  PROPOSED --ACCEPT--> apply, COMMITTED --DONE--> over
                PROPOSED --REFUSE--> over          PROPOSED --deadline--> send ABORT, over
                COMMITTED --deadline--> send COMMIT again
    acceptor:   --PROPOSE--> HELD --COMMIT--> apply, send DONE, over          HELD --ABORT--> over
                HELD --deadline--> send ACCEPT again                          HELD --withdraw--> send REFUSE, over

Any message may be lost, doubled or late. The initiator alone decides, and it remembers its last commit with each peer.
An acceptor in doubt keeps the pair of snapshots, asks again and goes on: what an exchange adds is a difference of two
fixed snapshots, so it may be added at any later time. The sum of the weights is therefore conserved by every exchange
that both ends end; the one that cannot be (an end dies between the two commits) is counted as torn.

Every state with every event: docs/protocol.md, whose table is tested against this file.

Rules that keep delayed mixing contracting: one unresolved exchange a pair of peers (of two crossing proposals the lower
number's wins), and of those within their deadline, one started and one accepted by a learner at a time.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple
from typing import Protocol as Interface


class Kind(enum.IntEnum):
    """What a message says."""

    PROPOSE = 1
    ACCEPT = 2
    REFUSE = 3
    COMMIT = 4
    ABORT = 5
    DONE = 6
    PUBLISHED = 7
    """A snapshot for a synchronous round is ready: not the exchange's, but it travels with it."""


class Handle(NamedTuple):
    """Names one snapshot of one learner: a slot and the version that was written into it."""

    slot: int
    version: int


NO_HANDLE = Handle(0, 0)


class Message(NamedTuple):
    """One message; ``handle`` belongs to the sender, ``coefficient`` is the c of the exchange."""

    kind: Kind
    sender: int
    sequence: int
    handle: Handle = NO_HANDLE
    coefficient: float = 0.0


class Snapshots(Interface):
    """What the protocol asks of a learner's weights."""

    finite: bool = True
    """Whether the weights were finite when they were last copied."""

    def take(self) -> Handle | None:
        """Copy the weights into a free slot and pin it; None where none is free or the weights are not finite."""

    def release(self, handle: Handle) -> None:
        """Free a slot of one's own."""

    def usable(self, peer: int, handle: Handle) -> bool:
        """Say whether the peer's slot still holds that version."""

    def apply(self, peer: int, theirs: Handle, own: Handle, coefficient: float) -> None:
        """Add c (s_peer - s_own) to the weights."""


@dataclass
class Counts:
    """What became of a learner's exchanges; fields are those of the ``learner`` event in docs/formats.md."""

    proposed: int = 0
    committed: int = 0
    applied: int = 0
    refused: int = 0
    busy: int = 0
    late: int = 0
    torn: int = 0
    nonfinite: int = 0
    full: int = 0
    asked: int = 0
    aborted: int = 0
    duplicate: int = 0


class State(enum.Enum):
    """Where one exchange stands, seen from this end."""

    PROPOSED = "proposed"
    COMMITTED = "committed"
    HELD = "held"


@dataclass
class _Open:
    state: State
    sequence: int
    own: Handle
    coefficient: float
    due: float
    theirs: Handle = NO_HANDLE
    fresh: bool = True
    """Within its first deadline, and so counted against the one that may be started or accepted."""


@dataclass
class _Peer:
    """What is remembered of one peer between exchanges."""

    proposed: int = 0
    committed: int = 0
    seen: int = 0
    applied: int = 0
    forsaken: int = 0
    """What was held for it when it was taken for dead."""
    silent_until: float = 0.0


INCARNATION_BITS = 40
SILENCE_S = 1.0
"""How long a peer that let a proposal run into its deadline is left out of the ring, unless it is heard before."""


@dataclass
class ExchangeProtocol:
    """One learner's end of all its exchanges.

    Args:
        learner: its number.
        snapshots: its weights.
        send: takes (peer, message); may lose it.
        deadline_s: how long an answer is waited for before it is asked for again or given up.
        incarnation: how many processes were this learner before this one: its exchanges are numbered above all theirs.
    """

    learner: int
    snapshots: Snapshots
    send: Callable[[int, Message], None]
    deadline_s: float = 0.25
    incarnation: int = 0
    counts: Counts = field(default_factory=Counts)
    open: dict[int, _Open] = field(default_factory=dict)
    peers: dict[int, _Peer] = field(default_factory=dict)

    def propose(self, peer: int, coefficient: float, now: float) -> bool:
        """Start an exchange with ``peer`` if the rules allow one now; say whether it was started."""
        if peer in self.open or self._fresh(State.PROPOSED, State.COMMITTED):
            self.counts.busy += 1
            return False
        own = self.snapshots.take()
        if own is None:
            self.counts.nonfinite += not self.snapshots.finite
            self.counts.full += self.snapshots.finite
            return False
        known = self._peer(peer)
        known.proposed += 1
        self.counts.proposed += 1
        self.open[peer] = _Open(State.PROPOSED, known.proposed, own, coefficient, now + self.deadline_s)
        self._say(peer, Kind.PROPOSE, known.proposed, own, coefficient)
        return True

    def receive(self, message: Message, now: float) -> None:
        """Take in one message."""
        peer = message.sender
        self._peer(peer).silent_until = 0.0
        exchange = self.open.get(peer)
        current = exchange if exchange and exchange.sequence == message.sequence else None
        match message.kind:
            case Kind.PROPOSE:
                self._proposed(message, exchange, now)
            case Kind.ACCEPT:
                self._accepted(message, current, now)
            case Kind.COMMIT:
                self._committed(message, current)
            case Kind.ABORT if current and current.state is State.HELD:
                self.counts.aborted += 1
                self._end(peer)
            case Kind.REFUSE if current and current.state is State.PROPOSED:
                self.counts.refused += 1
                self._end(peer)
            case Kind.REFUSE if current and current.state is State.COMMITTED:
                self.counts.torn += 1
                self._end(peer)
            case Kind.DONE if current and current.state is State.COMMITTED:
                self._end(peer)
            case _:
                pass

    def tick(self, now: float) -> None:
        """Act on what has passed its deadline."""
        for peer, exchange in list(self.open.items()):
            if now < exchange.due:
                continue
            exchange.due, exchange.fresh = now + self.deadline_s, False
            match exchange.state:
                case State.PROPOSED:
                    self.counts.late += 1
                    self._peer(peer).silent_until = now + SILENCE_S
                    self._say(peer, Kind.ABORT, exchange.sequence)
                    self._end(peer)
                case State.COMMITTED:
                    self._say(peer, Kind.COMMIT, exchange.sequence)
                case State.HELD:
                    self.counts.asked += 1
                    self._say(peer, Kind.ACCEPT, exchange.sequence, exchange.own)

    def next_due(self) -> float | None:
        """Return when `tick` has something to do, or None."""
        return min((exchange.due for exchange in self.open.values()), default=None)

    def silent(self, peer: int, now: float) -> bool:
        """Say whether the peer let a deadline pass lately and has not been heard since."""
        return self._peer(peer).silent_until > now

    def lost(self, peer: int) -> None:
        """Take note that ``peer`` is gone for good: an exchange that only this end has applied is torn.

        Should it live after all, it hears of what was held for it when it says COMMIT, and counts that as torn.
        """
        exchange = self.open.get(peer)
        if exchange:
            self.counts.torn += exchange.state is State.COMMITTED
            if exchange.state is State.HELD:
                self._peer(peer).forsaken = exchange.sequence
            self._end(peer)

    def returned(self, peer: int) -> None:
        """Take note that a new process is ``peer``: what is open was with the old one.

        The numbers of both ends go on from where they were, so that what the old process said late stays refused.
        """
        self.lost(peer)
        known = self._peer(peer)
        known.committed, known.silent_until = 0, 0.0

    def withdraw(self, peer: int) -> None:
        """Give up a held exchange whose pair of snapshots never became whole here, so that ACCEPT was never sent."""
        exchange = self.open.get(peer)
        if exchange and exchange.state is State.HELD:
            self.counts.aborted += 1
            self._say(peer, Kind.REFUSE, exchange.sequence)
            self._end(peer)

    def extend(self, peer: int, now: float) -> None:
        """Move the deadline of what is open with ``peer``: parts of a snapshot arrive, so it is there and at work."""
        if peer in self.open:
            self.open[peer].due = now + self.deadline_s

    def _proposed(self, message: Message, exchange: _Open | None, now: float) -> None:
        peer, sequence = message.sender, message.sequence
        known = self._peer(peer)
        if sequence <= known.seen and not (exchange and exchange.state is State.HELD):
            self.counts.duplicate += 1
            return
        # What is refused stays refused: a double of it that comes later is not looked at.
        known.seen = max(known.seen, sequence)
        if exchange and not self._give_way(peer, sequence, exchange):
            return
        sound = 0.0 < message.coefficient <= 0.5 and self.snapshots.usable(peer, message.handle)
        own = None if self._fresh(State.HELD) or not sound else self.snapshots.take()
        if own is None:
            self._say(peer, Kind.REFUSE, sequence)
            return
        self.open[peer] = _Open(State.HELD, sequence, own, message.coefficient, now + self.deadline_s, message.handle)
        self._say(peer, Kind.ACCEPT, sequence, own)

    def _give_way(self, peer: int, sequence: int, exchange: _Open) -> bool:
        """Resolve a proposal that meets an open exchange with the same peer; say whether it is to be looked at."""
        match exchange.state:
            case State.HELD if sequence == exchange.sequence:
                self._say(peer, Kind.ACCEPT, sequence, exchange.own)
                return False
            case State.HELD if sequence < exchange.sequence:
                return False
            case State.HELD:  # the peer has gone on, so the one held here was aborted
                self.counts.aborted += 1
            case State.COMMITTED:
                self._say(peer, Kind.COMMIT, exchange.sequence)
                self._say(peer, Kind.REFUSE, sequence)
                return False
            case State.PROPOSED if self.learner < peer:
                self._say(peer, Kind.REFUSE, sequence)
                return False
            case State.PROPOSED:
                self._say(peer, Kind.ABORT, exchange.sequence)
                self.counts.aborted += 1
        self._end(peer)
        return True

    def _accepted(self, message: Message, exchange: _Open | None, now: float) -> None:
        peer, sequence = message.sender, message.sequence
        if exchange and exchange.state is State.PROPOSED:
            if not self.snapshots.usable(peer, message.handle):
                self.counts.aborted += 1
                self._say(peer, Kind.ABORT, sequence)
                self._end(peer)
                return
            # Both snapshots stay pinned: this one until DONE, theirs until COMMIT.
            self.snapshots.apply(peer, message.handle, exchange.own, exchange.coefficient)
            exchange.state, exchange.due = State.COMMITTED, now + self.deadline_s
            self._peer(peer).committed = sequence
            self.counts.committed += 1
        committed = self._peer(peer).committed == sequence
        self._say(peer, Kind.COMMIT if committed else Kind.ABORT, sequence)

    def _committed(self, message: Message, exchange: _Open | None) -> None:
        peer, sequence = message.sender, message.sequence
        if exchange and exchange.state is State.HELD:
            self.snapshots.apply(peer, exchange.theirs, exchange.own, exchange.coefficient)
            self._peer(peer).applied = sequence
            self.counts.applied += 1
            self._end(peer)
        elif self._peer(peer).applied == sequence:
            self.counts.duplicate += 1
        elif self._peer(peer).forsaken == sequence:
            self._say(peer, Kind.REFUSE, sequence)
            return
        else:
            return
        self._say(peer, Kind.DONE, sequence)

    def _fresh(self, *states: State) -> bool:
        return any(exchange.fresh and exchange.state in states for exchange in self.open.values())

    def _peer(self, peer: int) -> _Peer:
        return self.peers.setdefault(peer, _Peer(proposed=self.incarnation << INCARNATION_BITS))

    def _end(self, peer: int) -> None:
        self.snapshots.release(self.open.pop(peer).own)

    def _say(self, peer: int, kind: Kind, sequence: int, handle: Handle = NO_HANDLE, coefficient: float = 0.0) -> None:
        self.send(peer, Message(kind, self.learner, sequence, handle, coefficient))
