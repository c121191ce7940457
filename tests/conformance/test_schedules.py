"""The exchange under schedules that lose, double, delay and reorder messages, freeze ends and kill them."""

from __future__ import annotations

import random

import pytest
from ends import DEADLINE_S, Ends
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.transport.protocol import State


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


@pytest.mark.parametrize("learners", [2, 3, 4])
@given(seed=st.integers(0, 2**32), lost=st.floats(0.0, 0.3), doubled=st.floats(0.0, 0.3))
@settings(derandomize=True, max_examples=60, deadline=None)
def test_an_end_that_dies_and_returns_any_number_of_times(learners, seed, lost, doubled):
    """Among those that live, an exchange is added at both ends or at neither; with the dead, torn ones are counted."""
    draw, ends = random.Random(seed), Ends(learners)
    unaware: set[tuple[int, int]] = set()
    victim, deaths = learners - 1, 0

    def proposes():
        sender, receiver = draw.sample(range(learners), 2)
        if sender not in ends.dead and (sender, receiver) not in unaware:
            ends.ends[sender].propose(receiver, 1 / 3, ends.now)

    def delivers():
        if not ends.wire:
            return
        place = draw.randrange(len(ends.wire))
        receiver, message = ends.wire[place]
        # The slots of a dead process are as it left them; a new one's messages come after the word of its return.
        if draw.random() >= doubled:
            ends.wire.pop(place)
        if draw.random() >= lost:
            ends.give(receiver, message)

    def ages():
        ends.now += draw.choice((0.01, 0.1, DEADLINE_S))
        end = draw.choice(ends.ends)
        if end.learner not in ends.dead:
            end.tick(ends.now)

    for _ in range(250):
        draw.choice((proposes, delivers, delivers, delivers, ages))()
        for end in ends.ends:
            assert (end.next_due() is None) == (not end.open), "whatever is open has a deadline"
        if victim not in ends.dead and draw.random() < 0.02:
            ends.kill(victim)
            deaths += 1
            unaware = {(other, victim) for other in range(learners) if other != victim}
        elif unaware and draw.random() < 0.3:
            other, _ = pair = draw.choice(sorted(unaware))
            ends.notice(other, victim)
            unaware.discard(pair)
        elif victim in ends.dead and not unaware and draw.random() < 0.2:
            ends.come_back(victim)
    for other, _ in sorted(unaware):
        ends.notice(other, victim)
    if victim in ends.dead:
        ends.come_back(victim)
    ends.settle()
    ends.assert_idle()
    survivors = [learner for learner in range(learners) if learner != victim]
    added = [addition for learner in range(learners) for addition in ends.snapshots[learner].added]
    alone = [addition for addition in added if added.count(addition) == 1]
    assert all(added.count(addition) <= 2 for addition in added)
    # Whatever was added at one end alone was added with the one that died: by it, or counted as torn.
    assert all(any(number == victim for number, _ in pair) for pair, _ in alone)
    by_survivors = sum(addition in ends.snapshots[learner].added for addition in alone for learner in survivors)
    torn = sum(ends.ends[learner].counts.torn for learner in survivors)
    assert by_survivors <= torn <= deaths * len(survivors)
    for first, second in [(learner, victim) for learner in survivors] + [(victim, learner) for learner in survivors]:
        before = ends.ends[first].counts.committed
        assert ends.ends[first].propose(second, 1 / 3, ends.now)
        ends.settle()
        assert ends.ends[first].counts.committed == before + 1, "whoever has returned exchanges as before"
