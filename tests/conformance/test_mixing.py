"""Every strategy: mixing never moves the sum of the weights, ends what it started, and is as stale as it says."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual import (
    LEARNERS,
    PARAMETERS,
    assert_drained,
    drawn_latency,
    drawn_steps,
    first_weights,
    simulation,
    sums,
)

from antiphon.strategies import STRATEGIES, strategy_class
from antiphon.strategies.base import Exchange

NAMES = sorted(STRATEGIES)
ASYNCHRONOUS = [name for name in NAMES if not STRATEGIES[name].waits]
ROUNDING = 2e-5
"""Of sums of some tens of numbers of size one, in float32, over some tens of rounds."""


def assert_sum_kept(run):
    before = sums(run.initial_LN)
    torch.testing.assert_close(sums(run.run()), before, atol=ROUNDING, rtol=0)
    assert_drained(run)


@pytest.mark.parametrize("learners", LEARNERS)
@pytest.mark.parametrize("name", NAMES)
def test_sum_is_conserved_under_scripted_latencies(name, learners):
    """Short ones, ones of several steps, and ones at the very deadline of the protocol (0.25 s, both ways)."""
    script = [0.001, 0.6, 0.125, 0.02, 0.125, 3.0, 0.0]
    calls = iter(range(10**9))
    latency = lambda sender, receiver, now: script[next(calls) % len(script)]  # noqa: E731
    assert_sum_kept(simulation(name, learners, rounds=25, latency=latency))


@pytest.mark.parametrize("name", NAMES)
@given(learners=st.sampled_from(LEARNERS), seed=st.integers(0, 2**16), longest_s=st.sampled_from([0.01, 0.2, 1.0]))
@settings(derandomize=True, max_examples=8, deadline=None)
def test_sum_is_conserved_under_random_latencies_and_step_times(name, learners, seed, longest_s):
    steps = drawn_steps(seed, ratio=10.0)
    assert_sum_kept(
        simulation(name, learners, rounds=20, latency=drawn_latency(seed, longest_s), step_s=steps, seed=seed)
    )


@pytest.mark.parametrize("name", ASYNCHRONOUS)
@given(
    learners=st.sampled_from(LEARNERS),
    seed=st.integers(0, 2**16),
    lost=st.floats(0.1, 0.3),
    longest_s=st.sampled_from([0.01, 0.1, 0.4]),
)
@settings(derandomize=True, max_examples=15, deadline=None)
def test_sum_is_conserved_though_messages_are_lost(name, learners, seed, lost, longest_s):
    """A round of a strategy that waits is published in memory, not sent: it has no messages to lose."""
    latency, steps = drawn_latency(seed, longest_s, lost), drawn_steps(seed, ratio=10.0)
    assert_sum_kept(simulation(name, learners, rounds=20, latency=latency, step_s=steps, seed=seed))


@pytest.mark.parametrize("learners", LEARNERS)
@pytest.mark.parametrize("name", NAMES)
def test_gradients_alone_move_the_sum(name, learners):
    """By -lr times the sum of all gradients, wherever mixing has come in between."""
    gradients = torch.randn(12, learners, PARAMETERS, generator=torch.Generator().manual_seed(1))
    run = simulation(
        name,
        learners,
        rounds=12,
        gradient=lambda learner, round, w_N: gradients[round, learner],
        lr=0.1,
        latency=drawn_latency(5, 0.3),
        step_s=drawn_steps(5, ratio=3.0),
    )
    expected = sums(run.initial_LN) - 0.1 * gradients.double().sum((0, 1))
    torch.testing.assert_close(sums(run.run()), expected, atol=ROUNDING, rtol=0)


@pytest.mark.parametrize("learners", LEARNERS)
@pytest.mark.parametrize("name", NAMES)
def test_matrices_are_doubly_stochastic(name, learners):
    for round in range(10):
        T_LL = torch.from_numpy(strategy_class(name)(0, learners, seed=7).matrix(round))
        assert (T_LL >= -1e-15).all()
        torch.testing.assert_close(T_LL.sum(0), torch.ones(learners).double())
        torch.testing.assert_close(T_LL.sum(1), torch.ones(learners).double())


STALENESS = {
    "allreduce": lambda learners: 0,
    "sync-ring": lambda learners: min(learners - 1, 1),
    "delay-by-one": lambda learners: min(learners - 1, 1),
    # One exchange that it started and one that it accepted; two learners have one edge.
    "fixed-ring": lambda learners: min(learners - 1, 2),
    "random-ring": lambda learners: min(learners - 1, 2),
}


@pytest.mark.parametrize("learners", LEARNERS)
@pytest.mark.parametrize("name", NAMES)
def test_staleness_under_equal_step_times(name, learners):
    if name not in STALENESS:
        pytest.skip(f"{name} does not say how stale its gradients are")
    run = simulation(name, learners, rounds=10)
    run.run()
    expected = STALENESS[name](learners)
    for virtual in run.virtual:
        # An exchange is started after a step, so the first gradient of the asynchronous ones is fresh.
        first = expected if virtual.strategy.waits else 0
        assert virtual.staleness == [first] + [expected] * 9


@pytest.mark.parametrize("learners", LEARNERS)
@pytest.mark.parametrize("name", NAMES)
def test_waiting_strategies_are_in_step_and_the_others_wait_for_nobody(name, learners):
    """With one learner ten times slower: the virtual time at which the first and the last end their work."""
    ends = {}

    def gradient(learner, round, w_N):
        ends[learner] = run.clock.now
        return torch.zeros_like(w_N)

    run = simulation(name, learners, rounds=10, gradient=gradient, step_s=lambda n, k: 10.0 if n == 0 else 1.0)
    run.run()
    assert ends[0] == pytest.approx(100.0, abs=1.0)
    for learner in range(1, learners):
        if not STRATEGIES[name].waits:
            assert ends[learner] == pytest.approx(10.0)
        elif learner in (1, learners - 1):  # on a ring, those farther off may be ahead by a round for each edge
            assert 80.0 < ends[learner] < 100.0


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_a_ring_closes_over_a_missing_learner(name):
    for learners in LEARNERS[1:]:
        present = [learner for learner in range(learners) if learner != learners // 2]
        peers = set()
        for learner in present:
            for action in strategy_class(name)(learner, learners, seed=1).stepped(4, present):
                assert isinstance(action, Exchange)
                assert 0 < action.coefficient <= 0.5
                peers.add(action.peer)
        assert peers == (set(present) if len(present) > 1 else set())


@pytest.mark.parametrize("learners", [3, 4, 8])
@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_the_others_go_on_and_conserve_their_sum_without_one_that_is_gone(name, learners):
    """It goes between two exchanges, so that what it took part in is whole."""
    run = simulation(name, learners, rounds=40)
    gone = run.virtual[1]

    def leave():
        gone.compute = lambda: None
        for virtual in run.virtual:
            if virtual is not gone:
                virtual.transport.lose(1)

    run.clock.at(10.5, leave)
    final_LN = run.run()
    torch.testing.assert_close(sums(final_LN), sums(first_weights(learners)), atol=ROUNDING, rtol=0)
    others = [virtual for virtual in run.virtual if virtual is not gone]
    assert [virtual.round for virtual in others] == [40] * (learners - 1)
    assert all(not virtual.transport.protocol.open for virtual in others)
    rows = [learner for learner in range(learners) if learner != 1]
    assert float(final_LN[rows].std(0).max()) < 1e-3
