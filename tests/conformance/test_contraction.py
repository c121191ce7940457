"""A conserved sum is not yet consensus: the learners come together under latencies that are out to prevent it."""

from __future__ import annotations

import random

import pytest
import torch
from virtual import LEARNERS, assert_drained, first_weights, simulation, sums

from antiphon.simulation.engine import distances
from antiphon.strategies import STRATEGIES

NAMES = sorted(STRATEGIES)
ASYNCHRONOUS = [name for name in NAMES if not STRATEGIES[name].waits]


def constant(sender, receiver, now):
    """Two steps for each message, eight for an exchange."""
    return 2.0


def alternating(sender, receiver, now):
    return 2.4 if int(now) % 2 else 0.01


def one_slow_edge(sender, receiver, now):
    return 2.4 if {sender, receiver} == {0, 1} else 0.01


def one_way_slow(sender, receiver, now):
    return 2.4 if sender < receiver else 0.01


def heavy_tail(seed):
    """Pareto with exponent 1.2: half are under a fifth of a step, one in fifty is over the deadline."""
    draw = random.Random(seed)
    return lambda sender, receiver, now: 0.1 * draw.random() ** (-1 / 1.2)


LAWS = {
    "constant": lambda: constant,
    "alternating": lambda: alternating,
    "slow edge": lambda: one_slow_edge,
    "one way slow": lambda: one_way_slow,
    "heavy tail": lambda: heavy_tail(2),
}


def history(run):
    """Return the consensus distance after each round's time, and at the end with nothing under way."""
    seen = [distances(run.initial_LN)]
    run.run(lambda k, W_LN: seen.append(distances(W_LN)))
    run.clock.run(until=lambda: False)
    return [*seen, distances(run.weights())]


def assert_contracts(run, shrinks_to, bulge=1.0):
    seen = history(run)
    assert_drained(run)
    assert seen[-1] < shrinks_to * seen[0]
    # At no time is it much larger than a while before: nothing that oscillates and only happens to end small.
    for earlier, later in zip(seen, seen[20:], strict=False):
        assert later < bulge * earlier + 1e-6
    torch.testing.assert_close(sums(run.weights()), sums(first_weights(run.learners)), atol=2e-5, rtol=0)


@pytest.mark.parametrize("learners", LEARNERS[1:])
@pytest.mark.parametrize("law", sorted(LAWS))
@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_learners_come_together(name, law, learners):
    rounds = 12 * learners + 12
    assert_contracts(simulation(name, learners, rounds=rounds, latency=LAWS[law](), deadline_s=5.0), 0.1)


@pytest.mark.parametrize("learners", LEARNERS[1:])
@pytest.mark.parametrize("name", [name for name in NAMES if STRATEGIES[name].waits and name != "allreduce"])
def test_learners_that_wait_come_together(name, learners):
    run = simulation(name, learners, rounds=3 * learners, latency=heavy_tail(2), step_s=lambda n, k: 1.0 + n % 2)
    seen = [distances(run.initial_LN), distances(run.run())]
    assert_drained(run)
    assert seen[1] < 0.05 * seen[0]


@pytest.mark.parametrize("learners", LEARNERS[1:])
@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_learners_come_together_with_one_that_is_slow(name, learners):
    steps = lambda learner, round: 20.0 if learner == 0 else 1.0  # noqa: E731
    run = simulation(name, learners, rounds=12 * learners, step_s=steps, latency=constant, deadline_s=5.0)
    seen = history(run)
    assert_drained(run)
    assert seen[-1] < 0.1 * seen[0]


@pytest.mark.parametrize("learners", [2, 3, 4, 8])
@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_learners_come_together_though_messages_are_lost(name, learners):
    draw = random.Random(4)
    latency = lambda sender, receiver, now: None if draw.random() < 0.2 else 0.05  # noqa: E731
    assert_contracts(simulation(name, learners, rounds=10 * learners, latency=latency), 0.05)


@pytest.mark.parametrize("learners", LEARNERS)
def test_allreduce_keeps_its_learners_equal_to_the_bit(learners):
    """It averages gradients, so learners that start equal stay so, whatever the latencies."""
    gradients = torch.randn(30, learners, 11, generator=torch.Generator().manual_seed(1))
    run = simulation("allreduce", learners, rounds=30, latency=heavy_tail(3), lr=0.1,
                     gradient=lambda learner, round, w_N: gradients[round, learner] + w_N)  # fmt: skip
    run.buffers.weights_LN.copy_(run.initial_LN[:1].expand(learners, -1))
    final_LN = run.run()
    assert bool((final_LN == final_LN[:1]).all())
    assert bool((final_LN[0] != run.initial_LN[0]).all())
    assert_drained(run)
