"""The exchange, message by message, and under schedules that lose, double, delay and reorder them."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.transport.protocol import (
    NO_HANDLE,
    SILENCE_S,
    ExchangeProtocol,
    Handle,
    Kind,
    Message,
    State,
)

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


@pytest.fixture
def ends():
    return Ends()


def begun(ends: Ends) -> Ends:
    """Learner 0 has proposed to learner 1."""
    assert ends.ends[0].propose(1, 0.5, ends.now)
    return ends


def test_an_exchange_from_propose_to_done(ends):
    begun(ends)
    for kind in (Kind.PROPOSE, Kind.ACCEPT, Kind.COMMIT, Kind.DONE):
        ends.deliver(kind)
    ends.assert_both_or_neither(exchanges=1)
    ends.assert_idle()
    assert (ends.ends[0].counts.committed, ends.ends[1].counts.applied) == (1, 1)


def test_the_initiator_applies_on_accept_and_the_acceptor_on_commit(ends):
    begun(ends).deliver(Kind.PROPOSE)
    assert [len(s.added) for s in ends.snapshots.values()] == [0, 0]
    ends.deliver(Kind.ACCEPT)
    assert [len(s.added) for s in ends.snapshots.values()] == [1, 0]
    ends.deliver(Kind.COMMIT)
    assert [len(s.added) for s in ends.snapshots.values()] == [1, 1]


def test_a_lost_proposal_is_given_up_at_the_deadline(ends):
    begun(ends).take(Kind.PROPOSE)
    ends.pass_s(DEADLINE_S - 0.01)
    assert ends.ends[0].open
    ends.pass_s(0.01)
    assert ends.ends[0].counts.late == 1
    assert ends.ends[0].silent(1, ends.now) and not ends.ends[0].silent(1, ends.now + SILENCE_S)
    ends.deliver(Kind.ABORT)
    ends.assert_idle()
    ends.assert_both_or_neither(exchanges=0)


def test_a_peer_that_is_heard_is_silent_no_more(ends):
    begun(ends).take(Kind.PROPOSE)
    ends.pass_s(DEADLINE_S)
    ends.wire.clear()
    assert ends.ends[0].silent(1, ends.now)
    ends.give(0, Message(Kind.PUBLISHED, 1, 4))
    assert not ends.ends[0].silent(1, ends.now)


def test_a_late_accept_is_answered_by_abort(ends):
    begun(ends).deliver(Kind.PROPOSE)
    receiver, accept = ends.take(Kind.ACCEPT)
    ends.now += DEADLINE_S
    ends.ends[0].tick(ends.now)
    ends.take(Kind.ABORT)  # lost
    ends.give(receiver, accept)
    ends.deliver(Kind.ABORT)
    ends.assert_idle()
    assert ends.ends[1].counts.aborted == 1
    ends.assert_both_or_neither(exchanges=0)


def test_a_lost_accept_is_sent_again_on_request_of_time(ends):
    """The acceptor in doubt asks; the initiator has given up, so the answer is no, and neither end has added."""
    begun(ends).deliver(Kind.PROPOSE)
    ends.take(Kind.ACCEPT)
    ends.now += DEADLINE_S
    ends.ends[1].tick(ends.now)
    assert ends.ends[1].counts.asked == 1
    ends.deliver(Kind.ACCEPT)
    ends.settle()
    ends.assert_both_or_neither(exchanges=1)
    ends.assert_idle()


def test_a_doubled_accept_commits_once(ends):
    begun(ends).deliver(Kind.PROPOSE)
    receiver, accept = ends.take(Kind.ACCEPT)
    for _ in range(3):
        ends.give(receiver, accept)
    assert [message.kind for _, message in ends.wire] == [Kind.COMMIT] * 3
    ends.settle()
    ends.give(receiver, accept)  # long after the end
    ends.deliver(Kind.COMMIT)
    ends.deliver(Kind.DONE)
    assert ends.ends[0].counts.committed == ends.ends[1].counts.applied == 1
    ends.assert_both_or_neither(exchanges=1)
    ends.assert_idle()


def test_a_lost_commit_is_sent_again(ends):
    begun(ends).deliver(Kind.PROPOSE)
    ends.deliver(Kind.ACCEPT)
    ends.take(Kind.COMMIT)
    ends.now += DEADLINE_S
    ends.ends[0].tick(ends.now)
    ends.deliver(Kind.COMMIT)
    ends.deliver(Kind.DONE)
    ends.assert_both_or_neither(exchanges=1)
    ends.assert_idle()


def test_an_acceptor_in_doubt_asks_and_applies_once(ends):
    begun(ends).deliver(Kind.PROPOSE)
    ends.deliver(Kind.ACCEPT)
    receiver, commit = ends.take(Kind.COMMIT)
    ends.now += DEADLINE_S
    ends.ends[1].tick(ends.now)
    assert ends.ends[1].counts.asked == 1
    ends.deliver(Kind.ACCEPT)
    ends.deliver(Kind.COMMIT)
    ends.give(receiver, commit)  # the one that was lost was only late
    assert [message.kind for _, message in ends.wire] == [Kind.DONE, Kind.DONE]
    ends.settle()
    assert ends.ends[1].counts.applied == ends.ends[1].counts.duplicate == 1
    ends.assert_both_or_neither(exchanges=1)
    ends.assert_idle()


def test_a_lost_done_is_said_again(ends):
    begun(ends).deliver(Kind.PROPOSE)
    ends.deliver(Kind.ACCEPT)
    ends.deliver(Kind.COMMIT)
    ends.take(Kind.DONE)
    assert ends.ends[0].open[1].state is State.COMMITTED and not ends.ends[1].open
    ends.pass_s(DEADLINE_S)
    ends.deliver(Kind.COMMIT)
    ends.deliver(Kind.DONE)
    ends.assert_both_or_neither(exchanges=1)
    ends.assert_idle()


def test_a_doubled_proposal_is_accepted_again_but_held_once(ends):
    begun(ends)
    receiver, proposal = ends.take(Kind.PROPOSE)
    ends.give(receiver, proposal)
    ends.give(receiver, proposal)
    assert len(ends.snapshots[1].held) == 1
    ends.settle()
    ends.give(receiver, proposal)  # after the end
    assert ends.ends[1].counts.duplicate >= 1
    ends.assert_both_or_neither(exchanges=1)
    ends.assert_idle()


def test_of_two_crossing_proposals_the_lower_numbers_wins(ends):
    begun(ends)
    assert ends.ends[1].propose(0, 0.5, ends.now)
    (_, of_0), (_, of_1) = ends.wire
    ends.wire.clear()
    ends.give(0, of_1)
    ends.deliver(Kind.REFUSE)
    ends.give(1, of_0)
    ends.settle()
    assert ends.ends[0].counts.committed == ends.ends[1].counts.applied == ends.ends[1].counts.refused == 1
    ends.assert_both_or_neither(exchanges=1)
    ends.assert_idle()


def test_crossing_proposals_seen_by_the_higher_number_first(ends):
    begun(ends)
    assert ends.ends[1].propose(0, 0.5, ends.now)
    (_, of_0), (_, of_1) = ends.wire
    ends.wire.clear()
    ends.give(1, of_0)
    assert [message.kind for _, message in ends.wire] == [Kind.ABORT, Kind.ACCEPT]
    ends.settle()
    ends.give(0, of_1)  # the proposal that was withdrawn, at last
    ends.settle()
    assert ends.ends[0].counts.committed == 1
    ends.assert_both_or_neither()
    ends.assert_idle()


def test_a_doubled_old_proposal_does_not_disturb_a_newer_one_of_ones_own(ends):
    begun(ends)
    old = ends.wire[0]
    ends.settle()
    assert ends.ends[1].propose(0, 0.5, ends.now)
    new = ends.wire.pop()
    ends.give(*old)
    ends.give(*new)
    ends.settle()
    assert ends.ends[1].counts.committed == 1
    ends.assert_both_or_neither(exchanges=2)
    ends.assert_idle()


def test_a_learner_takes_part_in_one_exchange_it_started_and_one_it_accepted():
    ends = Ends(4)
    assert ends.ends[0].propose(1, 1 / 3, 0.0)
    assert not ends.ends[0].propose(2, 1 / 3, 0.0)
    assert ends.ends[0].counts.busy == 1
    for peer in (2, 3):
        assert ends.ends[peer].propose(0, 1 / 3, 0.0)
    ends.settle()
    assert ends.ends[2].counts.committed + ends.ends[3].counts.committed == 1
    assert ends.ends[2].counts.refused + ends.ends[3].counts.refused == 1
    ends.assert_both_or_neither(exchanges=2)
    ends.assert_idle()


def test_an_exchange_in_doubt_leaves_room_for_another():
    """Learner 1 falls silent between two messages; 0 goes on with 2, and ends with 1 once it is back."""
    ends = Ends(3)
    begun(ends).deliver(Kind.PROPOSE)
    ends.deliver(Kind.ACCEPT)
    ends.take(Kind.COMMIT)
    ends.dead.add(1)
    ends.pass_s(DEADLINE_S)
    assert ends.ends[0].propose(2, 1 / 3, ends.now)
    while ends.wire:
        ends.give(*ends.wire.pop(0))
    assert ends.ends[0].counts.committed == 2 and set(ends.ends[0].open) == {1}
    ends.dead.clear()
    ends.settle()
    ends.assert_both_or_neither(exchanges=2)
    ends.assert_idle()


@pytest.mark.parametrize("coefficient", [0.0, -0.1, 0.51, 1.0, float("nan"), float("inf")])
def test_a_coefficient_outside_its_bounds_is_refused(ends, coefficient):
    begun(ends)
    receiver, proposal = ends.take(Kind.PROPOSE)
    ends.give(receiver, proposal._replace(coefficient=coefficient))
    ends.deliver(Kind.REFUSE)
    assert ends.ends[0].counts.refused == 1
    ends.assert_both_or_neither(exchanges=0)
    ends.assert_idle()


@pytest.mark.parametrize("handle", [NO_HANDLE, Handle(0, 7), Handle(200, 1), Handle(1, 1)])
def test_a_stale_handle_is_refused_by_the_acceptor(ends, handle):
    begun(ends)
    receiver, proposal = ends.take(Kind.PROPOSE)
    ends.give(receiver, proposal._replace(handle=handle))
    ends.deliver(Kind.REFUSE)
    ends.assert_both_or_neither(exchanges=0)
    ends.assert_idle()


def test_a_stale_handle_in_an_accept_ends_the_exchange_at_both_ends(ends):
    begun(ends).deliver(Kind.PROPOSE)
    receiver, accept = ends.take(Kind.ACCEPT)
    ends.give(receiver, accept._replace(handle=Handle(2, 99)))
    ends.settle()
    assert ends.ends[0].counts.committed == 0 and ends.ends[1].counts.aborted == 1
    ends.assert_both_or_neither(exchanges=0)
    ends.assert_idle()


def test_weights_that_are_not_finite_are_neither_sent_nor_given(ends):
    ends.snapshots[0].finite = False
    assert not ends.ends[0].propose(1, 0.5, 0.0)
    assert ends.ends[0].counts.nonfinite == 1
    assert ends.ends[1].propose(0, 0.5, 0.0)
    ends.deliver(Kind.PROPOSE)
    ends.deliver(Kind.REFUSE)
    ends.assert_both_or_neither(exchanges=0)
    ends.assert_idle()


@pytest.mark.parametrize(("delivered", "torn"), [(0, 0), (1, 0), (2, 1), (3, 1), (4, 0)])
def test_an_exchange_with_a_lost_peer_is_torn_only_once_committed(ends, delivered, torn):
    begun(ends)
    for kind in (Kind.PROPOSE, Kind.ACCEPT, Kind.COMMIT, Kind.DONE)[:delivered]:
        ends.deliver(kind)
    ends.ends[0].lost(1)
    assert ends.ends[0].counts.torn == torn
    assert not ends.ends[0].open and not ends.snapshots[0].held


@pytest.mark.parametrize("delivered", [1, 2, 3])
def test_the_loss_of_the_initiator_tears_nothing_at_the_acceptor(ends, delivered):
    begun(ends)
    for kind in (Kind.PROPOSE, Kind.ACCEPT, Kind.COMMIT)[:delivered]:
        ends.deliver(kind)
    ends.ends[1].lost(0)
    assert ends.ends[1].counts.torn == 0
    assert not ends.ends[1].open and not ends.snapshots[1].held


@pytest.mark.parametrize("kind", list(Kind))
def test_a_message_about_nothing_known_changes_nothing(ends, kind):
    ends.give(0, Message(kind, 1, 12345, Handle(1, 5), 0.5))
    assert not ends.snapshots[0].added
    ends.settle()
    ends.assert_idle()


@pytest.mark.parametrize("learners", [2, 3, 4])
@given(seed=st.integers(0, 2**32), dropped=st.floats(0.0, 0.5), doubled=st.floats(0.0, 0.5))
@settings(derandomize=True, max_examples=80, deadline=None)
def test_both_ends_or_neither_under_random_schedules(learners, seed, dropped, doubled):
    """Proposals at any time, messages lost, doubled, late and out of order, deadlines that pass: then calm."""
    draw, ends = random.Random(seed), Ends(learners)
    proposed = 0
    for _ in range(200):
        match draw.choice(("propose", "deliver", "deliver", "deliver", "time")):
            case "propose":
                sender, receiver = draw.sample(range(learners), 2)
                proposed += ends.ends[sender].propose(receiver, draw.choice((1 / 3, 0.5)), ends.now)
            case "deliver" if ends.wire:
                place = draw.randrange(len(ends.wire))
                receiver, message = ends.wire[place]
                if draw.random() >= doubled:
                    ends.wire.pop(place)
                if draw.random() >= dropped:
                    ends.give(receiver, message)
            case _:
                ends.now += draw.choice((0.01, 0.1, DEADLINE_S))
                end = draw.choice(ends.ends)
                end.tick(ends.now)
        for end in ends.ends:
            fresh = [exchange.state for exchange in end.open.values() if exchange.fresh]
            assert fresh.count(State.HELD) <= 1
            assert len(fresh) - fresh.count(State.HELD) <= 1
    draw.shuffle(ends.wire)
    ends.settle()
    ends.assert_both_or_neither()
    ends.assert_idle()
    committed = sum(end.counts.committed for end in ends.ends)
    assert (
        committed
        == sum(end.counts.applied for end in ends.ends)
        == sum(len(snapshots.added) for snapshots in ends.snapshots.values()) // 2
    )
    assert committed + sum(end.counts.refused + end.counts.late for end in ends.ends) <= proposed
    assert proposed == sum(end.counts.proposed for end in ends.ends)
    # Calm weather: whoever proposes now gets an exchange.
    assert ends.ends[0].propose(1, 0.5, ends.now)
    ends.settle()
    assert sum(end.counts.committed for end in ends.ends) == committed + 1


@given(seed=st.integers(0, 2**32))
@settings(derandomize=True, max_examples=60, deadline=None)
def test_a_frozen_end_ends_its_exchanges_when_it_is_back(seed):
    """While it is frozen, messages to it pile up (or get lost); the others keep exchanging."""
    draw, ends = random.Random(seed), Ends(3)
    frozen_until = draw.randrange(20, 60)
    pile, done_by_others = [], 0
    for turn in range(120):
        frozen = 10 <= turn < frozen_until
        sender, receiver = draw.sample(range(3), 2)
        if not (frozen and sender == 2):
            ends.ends[sender].propose(receiver, 1 / 3, ends.now)
        for _ in range(draw.randrange(8)):
            if ends.wire:
                receiver, message = ends.wire.pop(0)
                if frozen and receiver == 2:
                    pile += [(receiver, message)][: draw.randrange(2)]
                else:
                    ends.give(receiver, message)
        if not frozen:
            ends.wire, pile = pile + ends.wire, []
        else:
            done_by_others = ends.ends[0].counts.applied + ends.ends[1].counts.applied
        ends.now += 0.05
        for end in ends.ends[: 2 if frozen else 3]:
            end.tick(ends.now)
    ends.settle()
    assert done_by_others > 0
    ends.assert_both_or_neither()
    ends.assert_idle()


@given(seed=st.integers(0, 2**32))
@settings(derandomize=True, max_examples=60, deadline=None)
def test_an_end_that_dies_leaves_nothing_open_and_at_most_one_torn_exchange_with_each(seed):
    draw, ends = random.Random(seed), Ends(3)
    for _ in range(draw.randrange(5, 80)):
        sender, receiver = draw.sample(range(3), 2)
        ends.ends[sender].propose(receiver, 1 / 3, ends.now)
        if ends.wire and draw.random() < 0.8:
            ends.give(*ends.wire.pop(draw.randrange(len(ends.wire))))
        if draw.random() < 0.2:
            ends.pass_s(0.1)
    ends.dead.add(2)
    ends.wire = [(receiver, message) for receiver, message in ends.wire if message.sender != 2]
    for survivor in ends.ends[:2]:
        survivor.lost(2)
        assert survivor.counts.torn <= 1
    ends.settle()
    assert not ends.ends[0].open and not ends.ends[1].open
    between = [
        addition
        for learner in (0, 1)
        for addition in ends.snapshots[learner].added
        if all(number != 2 for number, _ in addition[0])
    ]
    assert all(between.count(addition) == 2 for addition in between)
