"""The work: every sample once an epoch, every ticket once, and those of the dead once more."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.errors import ArgumentError
from antiphon.learner import progress as module
from antiphon.learner.progress import EpochOrder, Patience, Rounds, Tickets, waiting_for
from antiphon.training.checkpoint import tickets_done
from antiphon.transport.block import OUTSTANDING, Block, Col, Gauge, Status

NOBODY = 2**22 + 1
"""More than the largest process number there can be."""


@pytest.fixture
def make_block(tmp_path):
    """Make blocks of learners that this very process stands for, so that all of them are alive."""
    made = []

    def make(learners):
        folder = tmp_path / f"run-{len(made)}"
        folder.mkdir(mode=0o700)
        block = Block.create(learners, folder)
        block.board_LC[:, Col.PID], block.board_LC[:, Col.STATE] = os.getpid(), Status.JOINED
        made.append(block)
        return block

    return make


def die(block, learner):
    block.board_LC[learner, Col.PID] = NOBODY


def held(block, learner):
    return sorted(int(held) - 1 for held in block.outstanding_LK[learner] if held)


# --- the order


@given(
    samples=st.integers(1, 300), local_batch=st.integers(1, 50), learners=st.integers(1, 8), seed=st.integers(0, 2**31)
)
@settings(derandomize=True, max_examples=150, deadline=None)
def test_every_sample_exactly_once_an_epoch(samples, local_batch, learners, seed):
    if samples < learners:
        samples = learners
    order = EpochOrder(samples, local_batch, learners, seed)
    assert order.batches % learners == 0
    for epoch in (0, 3):
        batches = [order.batch(epoch * order.batches + place) for place in range(order.batches)]
        assert sorted(sample for batch in batches for sample in batch) == list(range(samples))
        sizes = {len(batch) for batch in batches}
        assert max(sizes) - min(sizes) <= 1 and max(sizes) <= local_batch
    # No more batches than needed: with a round less, some batch would be larger than the share.
    assert (order.batches - learners) * local_batch < samples


def test_the_order_is_the_same_for_all_and_another_each_epoch_and_seed():
    orders = [EpochOrder(100, 5, 4, seed=9) for _ in range(2)]
    assert [orders[0].batch(t) for t in range(60)] == [orders[1].batch(t) for t in range(60)]
    epochs = [[sample for t in range(20) for sample in orders[0].batch(20 * epoch + t)] for epoch in range(5)]
    assert len({tuple(epoch) for epoch in epochs}) == 5
    other = EpochOrder(100, 5, 4, seed=10)
    assert [other.batch(t) for t in range(20)] != [orders[0].batch(t) for t in range(20)]


def test_bounds_of_the_order():
    with pytest.raises(ArgumentError, match="at least 1 sample, not 0"):
        EpochOrder(10, 0, 2)
    with pytest.raises(ArgumentError, match="3 samples cannot feed 4 learners"):
        EpochOrder(3, 1, 4)
    assert EpochOrder(4, 1, 4).batches == 4


# --- synchronous rounds


def test_rounds_go_round(make_block):
    block = make_block(3)
    works = [Rounds(block, learner, first=6) for learner in range(3)]
    assert [[work.take(14) for _ in range(4)] for work in works] == [
        [6, 9, 12, None],
        [7, 10, 13, None],
        [8, 11, None, None],
    ]
    assert works[0].rest(14) is None
    assert works[2].take() == 14


# --- tickets


def test_tickets_of_several_processes_are_unique_and_complete(make_block):
    """Four processes take numbers as fast as they can, through the file that the block's folder names."""
    block = make_block(4)
    pipes = []
    for learner in range(4):
        reading, writing = os.pipe()
        if os.fork() == 0:
            draws = block.draws()
            os.write(writing, b"".join(draws.draw(learner, k).to_bytes(4) for k in range(400)))
            os._exit(0)
        os.close(writing)
        pipes.append(os.fdopen(reading, "rb"))
    streams = [pipe.read() for pipe in pipes]
    for pipe in pipes:
        pipe.close()
        os.wait()
    numbers = [[int.from_bytes(s[k : k + 4]) for k in range(0, len(s), 4)] for s in streams]
    assert sorted(number for row in numbers for number in row) == list(range(1600))
    assert all(row == sorted(row) for row in numbers)
    assert block.draws().latest() == {learner: (row[-1], 399) for learner, row in enumerate(numbers)}


def test_tickets_of_several_threads_are_unique_and_complete(make_block):
    block, total = make_block(4), 500
    barrier = threading.Barrier(4)

    def work(learner):
        tickets, mine = Tickets(block, learner), []
        barrier.wait(10)
        while (ticket := tickets.take(total)) is not None:
            mine.append(ticket)
            tickets.end_oldest()
        assert tickets.rest(total) is None
        return mine

    with ThreadPoolExecutor(4) as pool:
        taken = list(pool.map(work, range(4)))
    assert sorted(ticket for mine in taken for ticket in mine) == list(range(total))


def test_a_ticket_beyond_the_epoch_is_kept_for_the_next(make_block):
    block = make_block(1)
    work = Tickets(block, 0, first=10)
    assert [work.take(12) for _ in range(4)] == [10, 11, None, None]
    assert [work.take(14) for _ in range(3)] == [12, 13, None]


def test_tickets_are_on_the_board_until_they_are_ended(make_block):
    block = make_block(1)
    work = Tickets(block, 0)
    work.take(), work.take()
    assert held(block, 0) == [0, 1]
    work.end_oldest()
    assert held(block, 0) == [1]
    work.end_oldest()
    work.end_oldest()
    assert held(block, 0) == []


def test_more_tickets_ahead_than_the_board_holds_are_refused(make_block):
    work = Tickets(make_block(1), 0)
    for _ in range(OUTSTANDING):
        work.take()
    with pytest.raises(ArgumentError, match=f"more than {OUTSTANDING} batches taken and not ended"):
        work.take()


# --- the dead


@pytest.mark.parametrize("bound", [2, 9])
def test_a_ticket_drawn_and_not_yet_shown_is_not_lost(make_block, bound):
    """It dies between the draw and the showing of it: the counter remembers who has drawn it."""
    block = make_block(2)
    works = [Tickets(block, learner) for learner in range(2)]
    assert works[1].take(bound) == 0
    works[1].end_oldest()
    block.draws().draw(learner=1, index=1)
    assert tickets_done(block, 0, waits=False) == 1
    assert works[0].pool.state().tickets == [1]
    die(block, 1)
    assert works[0].rest(bound) == 1
    assert works[0].again == {1}
    works[0].end_oldest()
    assert works[0].take(bound) == (None if bound == 2 else 2)
    assert tickets_done(block, 0, waits=False) == 2


def test_tickets_of_the_dead_are_given_out_exactly_once(make_block):
    block = make_block(3)
    works = [Tickets(block, learner) for learner in range(3)]
    assert [works[2].take(), works[2].take(), works[0].take(), works[1].take()] == [0, 1, 2, 3]
    die(block, 2)
    again = [works[0].rest(4), works[1].rest(4)]
    assert sorted(again) == [0, 1]
    assert [works[n].again for n in (0, 1)] == [{again[0]}, {again[1]}]
    for work in works[:2]:
        work.end_oldest()
        work.end_oldest()
    assert works[0].rest(4) is None and works[1].rest(4) is None


def test_tickets_of_the_dead_come_before_new_ones(make_block, monkeypatch):
    block = make_block(2)
    works = [Tickets(block, learner) for learner in range(2)]
    assert works[1].take(10) == 0
    die(block, 1)
    works[0].pool._look_at_s = 0.0
    assert works[0].take(10) == 0
    assert works[0].take(10) == 1


def test_one_that_dies_with_anothers_ticket_leaves_it_once_more(make_block):
    block = make_block(3)
    works = [Tickets(block, learner) for learner in range(3)]
    assert works[2].take(1) == 0
    die(block, 2)
    assert works[1].rest(1) == 0
    die(block, 1)
    assert works[0].rest(1) == 0
    works[0].end_oldest()
    assert works[0].rest(1) is None


def test_a_ticket_kept_for_the_next_epoch_is_left_to_others_in_that_epoch(make_block):
    """It died between two epochs: its ticket must not be lost, nor be taken in the epoch before."""
    block = make_block(2)
    works = [Tickets(block, learner) for learner in range(2)]
    assert [works[1].take(1), works[1].take(1)] == [0, None]
    works[1].end_oldest()
    works[1].pool.spare.add(works[1].pool._draw(works[1].pool.sources[0]))
    die(block, 1)
    assert works[0].rest(1) is None
    assert works[0].rest(2) == 1


def test_rest_does_not_wait_for_tickets_beyond_the_end(make_block):
    block = make_block(2)
    works = [Tickets(block, learner) for learner in range(2)]
    assert [works[1].take(1), works[1].take(1)] == [0, None]
    works[1].end_oldest()
    works[1].pool.spare.add(works[1].pool.row.show(1))
    assert works[0].rest(1) is None


def test_rest_does_not_wait_for_one_that_has_left(make_block):
    block = make_block(2)
    works = [Tickets(block, learner) for learner in range(2)]
    works[1].take(1)
    for state in (Status.DRAINED, Status.DONE):
        block.board_LC[1, Col.STATE] = state
        assert works[0].rest(1) is None


def during_sleep(monkeypatch, event):
    """Let ``event`` happen when `rest` first sleeps: it has then seen all that it will see without it."""
    events = iter([event])
    monkeypatch.setattr(module.time, "sleep", lambda seconds: next(events)())


def test_rest_waits_for_a_living_one_that_then_ends(make_block, monkeypatch):
    block = make_block(2)
    works = [Tickets(block, learner) for learner in range(2)]
    works[1].take(1)
    during_sleep(monkeypatch, works[1].end_oldest)
    assert works[0].rest(1) is None


def test_rest_waits_for_a_living_one_that_then_dies(make_block, monkeypatch):
    block = make_block(2)
    works = [Tickets(block, learner) for learner in range(2)]
    works[1].take(1)
    during_sleep(monkeypatch, lambda: die(block, 1))
    assert works[0].rest(1) == 0


@pytest.mark.parametrize("look", range(6))
def test_one_that_dies_at_any_moment_of_rest_leaves_its_ticket(make_block, monkeypatch, look):
    """It dies right before the n-th time that anybody asks whether it is dead."""
    block = make_block(2)
    works = [Tickets(block, learner) for learner in range(2)]
    works[1].take(1)
    dead, looks = block.dead, []

    def dies_before_this_look(learner):
        if len(looks) == look:
            die(block, 1)
        looks.append(learner)
        return dead(learner)

    monkeypatch.setattr(block, "dead", dies_before_this_look)
    monkeypatch.setattr(module.time, "sleep", lambda seconds: None)
    assert works[0].rest(1) == 0


def test_learners_that_took_batches_ahead_do_not_wait_for_each_other(make_block, monkeypatch):
    """A loader with workers asks for more before its learner has ended what it holds."""
    block = make_block(2)
    works = [Tickets(block, learner) for learner in range(2)]
    works[0].take(2), works[1].take(2)
    monkeypatch.setattr(module.time, "sleep", lambda seconds: pytest.fail("waits for one that waits for it"))
    assert works[0].rest(2) is None
    assert works[1].rest(2) is None


def test_rest_loses_patience_with_one_that_stands_still(make_block, monkeypatch):
    block = make_block(2)
    works = [Tickets(block, learner) for learner in range(2)]
    works[1].take(1)
    now = [0.0]
    works[0]._patience = Patience(block, base_s=15.0, clock=lambda: now[0])
    monkeypatch.setattr(module.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + 1.0))
    assert works[0].rest(1) is None
    assert 15.0 < now[0] < 18.0


def test_patience_is_as_long_as_twenty_steps_and_renewed_by_each(make_block):
    block, now = make_block(2), [0.0]
    patience = Patience(block, base_s=10.0, clock=lambda: now[0])
    block.gauges_LC[1, Gauge.STEP_S] = 2.0
    assert not patience.exhausted(1)
    now[0] = 49.0
    assert not patience.exhausted(1)
    block.board_LC[1, Col.STEPS] += 1
    assert not patience.exhausted(1)
    now[0] = 98.0
    assert not patience.exhausted(1)
    now[0] = 100.0
    assert patience.exhausted(1)


def test_waiting_for_those_that_still_work(make_block):
    block = make_block(5)
    block.board_LC[1, Col.STATE], block.board_LC[2, Col.STATE] = Status.DRAINED, Status.FAILED
    die(block, 3)
    assert waiting_for(block, 0, Patience(block)) == [4]


# --- where a resumed run begins


def test_a_resumed_run_begins_with_the_first_unfinished_ticket(make_block):
    block = make_block(3)
    works = [Tickets(block, learner) for learner in range(3)]
    assert [works[n].take(9) for n in (0, 1, 2, 0)] == [0, 1, 2, 3]
    works[0].end_oldest()
    assert tickets_done(block, 0, waits=False) == 1
    works[1].end_oldest()
    die(block, 2)
    assert tickets_done(block, 0, waits=False) == 2
    works[1].pool._look_at_s = 0.0
    assert works[1].take(9) == 2
    assert tickets_done(block, 0, waits=False) == 2
    works[1].end_oldest()
    works[0].end_oldest()
    block.board_LC[:, Col.STEPS] = [2, 2, 0]
    assert tickets_done(block, 0, waits=False) == 4


def test_learners_that_wait_for_each_other_agree_on_how_far_the_work_has_come() -> None:
    block = Block.create(3)
    try:
        rounds = [Rounds(block, learner) for learner in range(3)]
        for expected in (0, 3, 6):
            tickets = [work.take() for work in rounds]
            assert sorted(tickets) == [expected, expected + 1, expected + 2]
            assert {work.position(ticket) for work, ticket in zip(rounds, tickets, strict=True)} == {expected}
        assert Tickets(block, 0).position(7) == 7
    finally:
        block.remove()
