"""A learner's weights: what is pending, how it is folded, and that nobody takes a torn copy for a whole one."""

from __future__ import annotations

import threading

import pytest
import torch

from antiphon.learner import weights as module
from antiphon.learner.weights import Weights
from antiphon.transport.buffers import GENERATION, PENDING, PENDING_GENERATION, SLOTS, Buffers

N = 5


@pytest.fixture
def pair():
    buffers = Buffers.in_process(2, N)
    buffers.weights_LN[0], buffers.weights_LN[1] = torch.arange(N).float(), torch.ones(N)
    return Weights(buffers, 0), Weights(buffers, 1)


def exchange(first, second, c=0.25):
    own, theirs = first.take(), second.take()
    first.apply(second.learner, theirs, own, c)
    second.apply(first.learner, own, theirs, c)
    first.release(own)
    second.release(theirs)


def read(weights):
    out_N = torch.empty(N)
    assert weights.buffers.read(weights.learner, out_N)
    return out_N


def test_an_exchange_waits_in_the_pending_row_until_it_is_folded(pair):
    first, second = pair
    exchange(first, second)
    expected_N = torch.tensor([0.25, 1.0, 1.75, 2.5, 3.25])
    torch.testing.assert_close(first.w_N, torch.arange(N).float())
    torch.testing.assert_close(first.snapshot(), expected_N)
    torch.testing.assert_close(read(first), expected_N)
    first.settle()
    torch.testing.assert_close(first.w_N, expected_N)
    assert not first.buffers.clock_L3[0, PENDING]
    torch.testing.assert_close(read(first), expected_N)
    torch.testing.assert_close(first.snapshot() + second.snapshot(), torch.arange(N) + torch.ones(N))


def test_a_second_exchange_starts_from_what_is_pending(pair):
    first, second = pair
    exchange(first, second)
    exchange(first, second)
    difference_N = torch.arange(N) - torch.ones(N)
    torch.testing.assert_close(first.snapshot() - second.snapshot(), difference_N / 4)


def test_additions_and_folds_are_counted(pair):
    first, second = pair
    assert (first.additions, first.folded) == (0, 0)
    exchange(first, second)
    exchange(first, second)
    assert (first.additions, first.folded) == (2, 0)
    first.begin_step()
    first.end_step()
    assert (first.additions, first.folded) == (2, 2)


def test_a_fold_does_not_wait_for_the_exchange_thread(pair):
    first, second = pair
    exchange(first, second)
    with first._lock:
        first.begin_step()
        first.end_step()
        assert (first.additions, first.folded) == (1, 0)
        torch.testing.assert_close(first.w_N, torch.arange(N).float())
    first.begin_step()
    first.end_step()
    assert first.folded == 1


def test_a_step_is_two_generations_and_a_snapshot_during_it_is_refused(pair):
    first, _ = pair
    generation = int(first.buffers.clock_L3[0, GENERATION])
    first.begin_step()
    assert first.write(0, tries=2) is None
    assert not first.buffers.read(0, torch.empty(N), tries=2)
    first.end_step()
    assert first.buffers.clock_L3[0, GENERATION] == generation + 2
    assert first.write(0) is not None
    assert first.buffers.read(0, torch.empty(N))


def test_a_copy_that_a_step_has_torn_is_made_again(pair, monkeypatch):
    first, _ = pair
    copy_into, copies = first._copy_into, []

    def copy_as_a_step_comes_in(slot):
        finite = copy_into(slot)
        if not copies:
            first.begin_step()
            first.w_N.add_(100.0)
            first.buffers.clock_L3[0, GENERATION] += 1
        copies.append(slot)
        return finite

    monkeypatch.setattr(first, "_copy_into", copy_as_a_step_comes_in)
    handle = first.take()
    assert copies == [0, 0]
    torch.testing.assert_close(first.buffers.slots_LSN[0, handle.slot], torch.arange(N) + 100.0)


def test_a_copy_that_is_torn_every_time_gives_no_snapshot(pair, monkeypatch):
    first, _ = pair
    copy_into = first._copy_into

    def copy_as_a_step_comes_in(slot):
        first.buffers.clock_L3[0, GENERATION] += 2
        return copy_into(slot)

    monkeypatch.setattr(first, "_copy_into", copy_as_a_step_comes_in)
    monkeypatch.setattr(module.time, "sleep", lambda seconds: None)
    assert first.take() is None
    assert not any(first._pins)
    assert first.buffers.versions_LS[0].max() <= 0, "no version may name a slot that holds a torn copy"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", ["weights", "pending"])
def test_weights_that_are_not_finite_give_no_snapshot(pair, value, where):
    first, second = pair
    exchange(first, second)
    (first.w_N if where == "weights" else first.buffers.pending_LN[0])[3] = value
    assert first.take() is None
    assert first.write(1) is None
    assert not any(first._pins)


def test_two_infinities_do_not_hide_each_other(pair):
    first, _ = pair
    first.w_N[0], first.w_N[1] = float("inf"), float("-inf")
    assert first.take() is None


def test_slots_are_pinned_until_released_and_versions_never_repeat(pair):
    first, second = pair
    handles = [first.take() for _ in range(SLOTS)]
    assert sorted(handle.slot for handle in handles) == list(range(SLOTS))
    assert first.take() is None
    assert all(second.usable(0, handle) for handle in handles)
    first.release(handles[1])
    fresh = first.take()
    assert fresh.slot == handles[1].slot and fresh.version > max(handle.version for handle in handles)
    assert not second.usable(0, handles[1]) and second.usable(0, fresh)


def test_the_last_slot_is_not_touched_until_it_is_needed(pair):
    first, _ = pair
    for _ in range(5):
        started, accepted = first.take(), first.take()
        assert {started.slot, accepted.slot} == {0, 1}
        first.release(started)
        first.release(accepted)


@pytest.mark.parametrize("handle", [(0, 0), (0, -1), (3, 1), (255, 1), (0, 2**62)])
def test_handles_that_name_nothing_are_not_usable(pair, handle):
    first, second = pair
    first.take()
    assert not second.usable(0, module.Handle(*handle))


def test_a_slot_being_written_is_not_usable(pair, monkeypatch):
    first, second = pair
    handle = first.take()
    first.release(handle)
    seen = []
    monkeypatch.setattr(module.math, "isfinite", lambda value: seen.append(second.usable(0, handle)) or True)
    first.take()
    assert seen == [False]


def test_blocks_smaller_than_the_weights_give_the_same(monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 3)
    buffers = Buffers.in_process(2, 10)
    buffers.weights_LN[0] = torch.arange(10)
    first, second = Weights(buffers, 0), Weights(buffers, 1)
    own, theirs = first.take(), second.take()
    torch.testing.assert_close(buffers.slots_LSN[0, own.slot], torch.arange(10).float())
    first.apply(1, theirs, own, 0.5)
    torch.testing.assert_close(first.snapshot(), torch.arange(10) / 2)


def test_what_was_folded_is_overwritten_not_added_to(pair):
    first, second = pair
    first._pending_N.fill_(float("nan"))
    exchange(first, second)
    torch.testing.assert_close(first.snapshot(), torch.tensor([0.25, 1.0, 1.75, 2.5, 3.25]))


def test_both_ends_add_the_same_difference_to_the_bit(monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 16)
    buffers = Buffers.in_process(2, 1000)
    buffers.weights_LN.copy_(torch.randn(2, 1000, generator=torch.Generator().manual_seed(0)))
    ends = Weights(buffers, 0), Weights(buffers, 1)
    exchange(*ends, c=1 / 3)
    assert torch.equal(buffers.pending_LN[0], -buffers.pending_LN[1]) and buffers.pending_LN[0].any()
    exchange(*ends, c=1 / 3)
    assert torch.equal(buffers.pending_LN[0], -buffers.pending_LN[1])


@pytest.mark.parametrize("coefficient", [1 / 3, 1 / 2, 0.1, 1e-9])
def test_a_scaled_difference_is_rounded_as_its_two_parts_are(coefficient):
    first_N, second_N = torch.randn(2, 10_001, generator=torch.Generator().manual_seed(0))
    out_N = torch.full_like(first_N, float("nan"))
    module.scaled_difference(first_N, second_N, coefficient, out_N)
    assert torch.equal(out_N, torch.mul(torch.sub(first_N, second_N), coefficient))


def test_a_mix_with_nobody_adds_nothing(pair):
    first, _ = pair
    first._pending_N.fill_(float("nan"))
    first.add_differences([], first.w_N.clone())
    torch.testing.assert_close(first.snapshot(), torch.arange(N).float())


def test_a_mix_of_several(pair):
    first, second = pair
    others = [(second.w_N, 1 / 3), (torch.zeros(N), 1 / 3)]
    first.add_differences(others, first.w_N.clone())
    torch.testing.assert_close(first.snapshot(), (torch.arange(N) + torch.ones(N)) / 3)


def test_consensus_is_the_mean_of_those_present_and_their_distance():
    buffers = Buffers.in_process(3, 2)
    buffers.weights_LN.copy_(torch.tensor([[1.0, 5.0], [3.0, 5.0], [100.0, 100.0]]))
    mean_N, distance = buffers.consensus([0, 1])
    torch.testing.assert_close(mean_N, torch.tensor([2.0, 5.0]))
    assert distance == pytest.approx((2 / 4) ** 0.5)
    mean_N, distance = buffers.consensus([2])
    torch.testing.assert_close(mean_N, torch.tensor([100.0, 100.0]))
    assert distance == 0.0


def test_consensus_block_by_block_is_what_the_whole_arrays_give(monkeypatch):
    monkeypatch.setattr("antiphon.transport.buffers.BLOCK", 7)
    buffers = Buffers.in_process(5, 40)
    buffers.weights_LN.normal_(10.0, 0.01, generator=torch.Generator().manual_seed(0))
    rows_LN = buffers.weights_LN[[0, 2, 3, 4]].double()
    mean_N, distance = buffers.consensus([0, 2, 3, 4])
    torch.testing.assert_close(mean_N.double(), rows_LN.mean(0), rtol=1e-6, atol=0)
    assert distance == pytest.approx(float((rows_LN - rows_LN.mean(0)).square().mean().sqrt()), rel=1e-4)


def test_consensus_counts_what_is_pending(pair):
    first, second = pair
    exchange(first, second)
    mean_N, _ = first.buffers.consensus([0, 1])
    torch.testing.assert_close(mean_N, (torch.arange(N) + torch.ones(N)) / 2)


def test_snapshots_beside_running_steps_are_whole():
    """Steps keep all elements equal, so a torn copy would show two values."""
    buffers = Buffers.in_process(2, 200_000)
    own = Weights(buffers, 0)
    stop, steps = threading.Event(), 0

    def snapshots():
        while not stop.is_set():
            handle = own.take()
            if handle is not None:
                slot_N = buffers.slots_LSN[0, handle.slot]
                wrong.append(float(slot_N.max() - slot_N.min()))
                own.release(handle)

    wrong: list[float] = []
    thread = threading.Thread(target=snapshots)
    thread.start()
    while steps < 3000 and len(wrong) < 100:
        own.begin_step()
        own.w_N.add_(1.0)
        own.end_step()
        steps += 1
    stop.set()
    thread.join()
    assert wrong and max(wrong) == 0.0


def test_replaced_weights_are_whole_whatever_they_were(pair):
    """As after a process that was killed amid a change, with a difference that nobody folded."""
    weights, _ = pair
    weights.w_N.fill_(float("nan"))
    assert weights.take() is None and not weights.finite
    weights.buffers.clock_L3[0, [GENERATION, PENDING, PENDING_GENERATION]] = 7, 1, 3
    weights.replace(torch.full_like(weights.w_N, 2.5))
    assert weights.finite and weights.take() is not None
    assert bool((read(weights) == 2.5).all())


def test_a_learner_that_returns_names_no_snapshot_as_the_process_before_it_did():
    buffers = Buffers.in_process(1, 4)
    before = Weights(buffers, 0)
    handles = [before.take() for _ in range(3)]
    buffers.versions_LS[0, 0] = -1  # killed as it was writing
    returned = Weights(buffers, 0)
    assert min(returned.take().version for _ in range(3)) > max(handle.version for handle in handles)
