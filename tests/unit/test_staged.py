"""Weights on a device: staged through the CPU, with a lane whose work is done as late as its marks allow.

A GPU does what it is asked for later. The lane here does the same, and as late as it may, so a mark that is not waited
for is a copy of the wrong moment. What the computing thread asks for is done at once, as in a stream that runs dry.
"""

from __future__ import annotations

import threading

import pytest
import torch

from antiphon.learner.lanes import NoLane, Now, _pages
from antiphon.learner.staged import REFRESH_S, StagedWeights
from antiphon.transport.buffers import GENERATION, Buffers

N = 6


class LateMark:
    def __init__(self, lane, count):
        self.lane, self.count = lane, count

    def hold(self):
        self.lane.catch_up(self.count)

    synchronize = hold


class LateLane:
    """Does its work when a mark of it is waited for, and not before."""

    def __init__(self):
        self.asked, self.done = [], 0

    def here(self):
        return Now()

    def run(self, work, after):
        self.asked.append((work, after))
        return LateMark(self, len(self.asked))

    def catch_up(self, count):
        while self.done < count:
            work, after = self.asked[self.done]
            self.done += 1
            after.hold()
            work()


@pytest.fixture(params=[NoLane, LateLane])
def pair(request):
    buffers = Buffers.in_process(2, N)
    weights = [StagedWeights(buffers, n, torch.device("cpu"), request.param()) for n in range(2)]
    weights[0].w_N.copy_(torch.arange(N))
    weights[1].w_N.fill_(1.0)
    return weights


def exchange(first, second, c=0.25):
    own, theirs = first.take(), second.take()
    first.apply(second.learner, theirs, own, c)
    second.apply(first.learner, own, theirs, c)
    first.release(own)
    second.release(theirs)


def step(weights, change):
    weights.begin_step()
    weights.w_N.add_(change)
    weights.end_step()


def test_an_exchange_is_folded_on_the_device_and_the_sum_is_conserved(pair):
    first, second = pair
    exchange(first, second)
    expected_N = torch.arange(N) + 0.25 * (1.0 - torch.arange(N))
    assert torch.equal(first.w_N, torch.arange(N).float())
    torch.testing.assert_close(first.snapshot(), expected_N)
    step(first, 10.0)
    torch.testing.assert_close(first.w_N, expected_N + 10.0)
    assert (first.additions, first.folded) == (1, 1)
    step(second, 0.0)
    torch.testing.assert_close(first.w_N + second.w_N, torch.arange(N) + 11.0)


def test_two_differences_add_up_before_and_after_a_fold(pair):
    first, second = pair
    total_N = first.w_N + second.w_N
    exchange(first, second)
    exchange(first, second)
    step(first, 0.0)
    exchange(first, second)
    step(first, 0.0)
    step(second, 0.0)
    torch.testing.assert_close(first.w_N + second.w_N, total_N)
    torch.testing.assert_close(first.w_N - second.w_N, (torch.arange(N) - 1.0) / 8)


def test_a_copy_under_way_keeps_the_weights_of_before_the_step(pair):
    """The exchange thread has asked for a copy and is not yet back; the computing thread goes on to its step."""
    first, _ = pair
    assert first._ask_for_copy(0)
    first.begin_step()
    first.w_N.add_(100.0)
    handle = first._finish_copy(0)
    first.end_step()
    torch.testing.assert_close(first.buffers.slots_LSN[0, handle.slot], torch.arange(N).float())


def test_no_copy_is_asked_for_while_a_step_is(pair):
    first, _ = pair
    first.begin_step()
    assert first.write(0, tries=2) is None
    first.end_step()
    assert first.write(0) is not None


def test_a_fold_takes_no_difference_that_comes_after_it(pair):
    """D goes to the device again before the fold before has been carried out there: in order all the same."""
    first, _ = pair
    first.add_differences([(torch.ones(N), 1.0)], torch.zeros(N))
    step(first, 0.0)
    first.add_differences([(torch.full((N,), 5.0), 1.0)], torch.zeros(N))
    torch.testing.assert_close(first.w_N, torch.arange(N) + 1.0)
    first.settle()
    torch.testing.assert_close(first.w_N, torch.arange(N) + 6.0)


def test_a_fold_does_not_wait_for_the_exchange_thread(pair):
    first, _ = pair
    first.add_differences([(torch.ones(N), 1.0)], torch.zeros(N))
    with first._lock:
        step(first, 0.0)
        assert first.folded == 0
    step(first, 0.0)
    assert first.folded == 1


def test_weights_that_are_not_finite_are_not_sent(pair):
    first, _ = pair
    first.w_N[2] = float("nan")
    assert first.take() is None and not first.finite
    first.replace(torch.ones(N))
    assert first.finite and first.take() is not None
    out_N = torch.empty(N)
    assert first.buffers.read(0, out_N) and torch.equal(out_N, torch.ones(N))


def test_others_see_the_row_of_the_last_refresh(pair, monkeypatch):
    first, second = pair
    now_s = [1000.0]
    monkeypatch.setattr("antiphon.learner.staged.time.monotonic", lambda: now_s[0])
    out_N = torch.empty(N)
    step(first, 1.0)
    now_s[0] += REFRESH_S / 2
    first._refresh_at_s = now_s[0] + 0.1
    before_N = first.buffers.weights_LN[0].clone()
    step(first, 1.0)
    assert first.buffers.read(0, out_N) and torch.equal(out_N, before_N)
    now_s[0] += 0.1
    exchange(first, second)
    step(first, 1.0)
    assert first.buffers.read(0, out_N) and torch.equal(out_N, first.w_N)
    assert first.buffers.clock_L3[0, GENERATION] % 2 == 0
    step(first, 1.0)
    first.settle()
    assert first.buffers.read(0, out_N) and torch.equal(out_N, first.w_N)


def test_two_threads_conserve_the_sum():
    """Both learners step while they exchange, each exchange racing with one step of each."""
    buffers = Buffers.in_process(2, N)
    weights = [StagedWeights(buffers, n, torch.device("cpu")) for n in range(2)]
    weights[0].w_N.copy_(torch.arange(N))
    rounds, turns = 300, [threading.Semaphore(0) for _ in weights]

    def compute(own):
        for _ in range(rounds):
            assert turns[own.learner].acquire(timeout=30.0)
            step(own, 0.0)

    threads = [threading.Thread(target=compute, args=(own,)) for own in weights]
    for thread in threads:
        thread.start()
    for _ in range(rounds):
        for turn in turns:
            turn.release()
        exchange(*weights)
    for thread in threads:
        thread.join()
    for each in weights:
        each.settle()
    torch.testing.assert_close(weights[0].w_N + weights[1].w_N, torch.arange(N).float(), atol=1e-5, rtol=0)
    torch.testing.assert_close(weights[0].w_N, weights[1].w_N, atol=1e-4, rtol=0)


def test_pages_that_touch_are_pinned_as_one():
    whole = torch.zeros(1 << 16)
    near, far = [whole[:100], whole[200:300]], whole[1 << 15 : (1 << 15) + 10]
    page = 4096
    (begin, end), (other, last) = _pages([*near, far])
    assert begin % page == 0 and begin <= near[0].data_ptr() and near[1].data_ptr() + 400 <= end
    assert other <= far.data_ptr() and far.data_ptr() + 40 <= last and other > end
