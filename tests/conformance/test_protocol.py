"""The exchange, message by message."""

from __future__ import annotations

import pytest
from ends import DEADLINE_S, Ends

from antiphon.transport.protocol import NO_HANDLE, SILENCE_S, Handle, Kind, Message, State


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
