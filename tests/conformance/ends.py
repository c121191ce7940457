"""Ends of the exchange with snapshots that hold no weights, and the messages between them."""

from __future__ import annotations

from dataclasses import dataclass, field

from antiphon.transport.protocol import ExchangeProtocol, Handle, Kind, Message

DEADLINE_S = 0.25


@dataclass
class FakeSnapshots:
    """Slots that hold no weights, and a list of what was added."""

    learner: int
    all: dict[int, FakeSnapshots]
    slots: int = 3
    finite: bool = True
    versions: int = 0
    held: dict[int, int] = field(default_factory=dict)
    """Slot -> version, of the pinned ones."""
    added: list[tuple[frozenset[tuple[int, Handle]], float]] = field(default_factory=list)

    def take(self):
        free = [slot for slot in range(self.slots) if slot not in self.held]
        if not free or not self.finite:
            return None
        self.versions += 1
        self.held[free[0]] = self.versions
        return Handle(free[0], self.versions)

    def release(self, handle):
        assert self.held.pop(handle.slot) == handle.version, "a slot was freed that was no longer this exchange's"

    def usable(self, peer, handle):
        return self.all[peer].held.get(handle.slot) == handle.version

    def apply(self, peer, theirs, own, coefficient):
        assert self.held[own.slot] == own.version, "one's own snapshot must be pinned as it is used"
        assert self.all[peer].held.get(theirs.slot) == theirs.version, "the peer's snapshot must be pinned too"
        self.added.append((frozenset([(self.learner, own), (peer, theirs)]), coefficient))


class Ends:
    """Two or more ends and the messages between them, which the test delivers as it likes."""

    def __init__(self, learners: int = 2) -> None:
        self.now = 0.0
        self.wire: list[tuple[int, Message]] = []
        self.dead: set[int] = set()
        self.snapshots: dict[int, FakeSnapshots] = {}
        for learner in range(learners):
            self.snapshots[learner] = FakeSnapshots(learner, self.snapshots)
        self.ends = [
            ExchangeProtocol(learner, self.snapshots[learner], lambda peer, m: self.wire.append((peer, m)), DEADLINE_S)
            for learner in range(learners)
        ]

    def take(self, kind: Kind) -> tuple[int, Message]:
        """Take the only message under way, which must be of this kind, off the wire."""
        assert [message.kind for _, message in self.wire] == [kind]
        return self.wire.pop()

    def deliver(self, kind: Kind) -> None:
        self.give(*self.take(kind))

    def give(self, receiver: int, message: Message) -> None:
        if receiver not in self.dead:
            self.ends[receiver].receive(message, self.now)

    def kill(self, learner: int) -> None:
        """Let its process end; the others have yet to notice, and what it has sent is still under way."""
        self.dead.add(learner)
        self.wire = [(receiver, message) for receiver, message in self.wire if receiver != learner]

    def notice(self, learner: int, dead: int) -> None:
        """Let ``learner`` notice that a process has ended; what has come from it by then is not heard any more."""
        self.wire = [(receiver, m) for receiver, m in self.wire if (receiver, m.sender) != (learner, dead)]
        self.ends[learner].lost(dead)

    def come_back(self, learner: int) -> None:
        """Let a new process be the learner, once all others have noticed the end of the old one."""
        old, self.snapshots[learner].held = self.ends[learner], {}
        self.ends[learner] = ExchangeProtocol(
            learner, self.snapshots[learner], old.send, DEADLINE_S, incarnation=old.incarnation + 1
        )
        self.dead.discard(learner)
        for end in self.ends:
            if end.learner not in {learner, *self.dead}:
                end.returned(learner)

    def pass_s(self, seconds: float) -> None:
        self.now += seconds
        for end in self.ends:
            if end.learner not in self.dead:
                end.tick(self.now)

    def settle(self) -> None:
        """Deliver everything, and let deadlines pass, until nothing is open."""
        for _ in range(100):
            while self.wire:
                self.give(*self.wire.pop(0))
            if not any(end.open for end in self.ends if end.learner not in self.dead):
                return
            self.pass_s(DEADLINE_S)
        raise AssertionError(f"still open: {[end.open for end in self.ends]}")

    def assert_both_or_neither(self, exchanges: int | None = None) -> None:
        """Each exchange was added at both ends, from the same pair of snapshots with the same c, once."""
        added = [addition for snapshots in self.snapshots.values() for addition in snapshots.added]
        for addition in added:
            assert added.count(addition) == 2
        assert exchanges is None or len(added) == 2 * exchanges

    def assert_idle(self) -> None:
        for end in self.ends:
            assert not end.open
            assert end.next_due() is None
            assert not self.snapshots[end.learner].held
