"""Virtual learners for the conformance tests: what they share of set-up and of checks."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor

from antiphon.simulation.engine import Simulation
from antiphon.transport.memory import Latency

LEARNERS = [1, 2, 3, 4, 5, 7, 8]
PARAMETERS = 11


def first_weights(learners: int, seed: int = 0) -> Tensor:
    return torch.randn(learners, PARAMETERS, generator=torch.Generator().manual_seed(seed))


def no_gradient(learner: int, round: int, w_N: Tensor) -> Tensor:
    return torch.zeros_like(w_N)


def simulation(
    name: str,
    learners: int,
    *,
    rounds: int,
    latency: Latency = lambda sender, receiver, now: 1e-3,
    step_s: Callable[[int, int], float] = lambda learner, round: 1.0,
    deadline_s: float | None = None,
    **more: object,
) -> Simulation:
    """Return learners of one strategy, with no gradient unless told otherwise."""
    settings = {"gradient": no_gradient, "seed": 3, **more}
    made = Simulation(name, first_weights(learners), rounds=rounds, latency=latency, step_s=step_s, **settings)
    if deadline_s is not None:
        for virtual in made.virtual:
            virtual.transport.protocol.deadline_s = deadline_s
    return made


def drawn_latency(seed: int, longest_s: float, lost: float = 0.0) -> Latency:
    """Return latencies drawn evenly from 0 to ``longest_s``, of which the fraction ``lost`` never arrives."""
    draw = random.Random(seed)
    return lambda sender, receiver, now: None if draw.random() < lost else draw.uniform(0.0, longest_s)


def drawn_steps(seed: int, ratio: float) -> Callable[[int, int], float]:
    """Return step times between 1/ratio and 1, drawn for each step, on top of a pace for each learner."""

    def step_s(learner: int, round: int) -> float:
        pace, jitter = random.Random(f"{seed}/{learner}"), random.Random(f"{seed}/{learner}/{round}")
        return ratio ** -(0.7 * pace.random() + 0.3 * jitter.random())

    return step_s


def assert_drained(run: Simulation) -> None:
    """Nothing is open, pinned or under way, and every learner has made all its steps."""
    assert [virtual.round for virtual in run.virtual] == [run.rounds] * run.learners
    for virtual in run.virtual:
        assert not virtual.transport.protocol.open
        assert not any(virtual.weights._pins)
        assert not virtual.transport._published
    counts = [virtual.transport.counts for virtual in run.virtual]
    assert sum(count.committed for count in counts) == sum(count.applied for count in counts)
    assert sum(count.torn for count in counts) == 0


def sums(weights_LN: Tensor) -> Tensor:
    return weights_LN.double().sum(0)
