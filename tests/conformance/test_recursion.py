"""Every strategy, through the real protocol and weights, equals the matrix recursion that defines it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from antiphon.simulation.engine import Simulation
from antiphon.strategies import STRATEGIES, strategy_class

ROUNDS, PARAMETERS, ALPHA = 50, 37, 0.1


def recursion(strategy, W, gradient, rounds):
    """W_{k+1} = W_k T_k - alpha G(W_k), learners in columns; allreduce has (W_k - alpha G(W_k)) T_u."""
    T_before = np.eye(W.shape[1])
    for k in range(rounds):
        G, T = gradient(W), strategy.matrix(k)
        if strategy.name == "allreduce":
            W = (W - ALPHA * G) @ T
        elif strategy.waits:
            W = W @ T - ALPHA * G
        else:  # the exchange that a step starts runs beside the next gradient
            W, T_before = W @ T_before - ALPHA * G, T
        yield W if strategy.waits else W @ T


def problem(learners):
    """One quadratic a learner, with minima apart: g_l(w) = a_l (w - b_l), elementwise."""
    draw = np.random.default_rng(learners)
    a = draw.uniform(0.1, 1.0, (PARAMETERS, learners))
    b = draw.normal(size=(PARAMETERS, learners))
    return a.astype(np.float32), b.astype(np.float32), draw.normal(size=(PARAMETERS, learners)).astype(np.float32)


@pytest.mark.parametrize("learners", [1, 2, 3, 4, 5, 7, 8])
@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_strategy_equals_its_matrix_recursion(name, learners):
    a, b, first = problem(learners)
    if name == "allreduce":  # it averages gradients, so its learners are equal from the start
        first[:] = first[:, :1]
    expected = recursion(
        strategy_class(name)(0, learners, seed=3),
        first.astype(np.float64),
        lambda W: a.astype(np.float64) * (W - b.astype(np.float64)),
        ROUNDS,
    )
    errors = []

    def gradient(learner, round, w_N):
        return torch.from_numpy(a[:, learner]) * (w_N - torch.from_numpy(b[:, learner]))

    simulation = Simulation(
        name,
        torch.from_numpy(first.T.copy()),
        gradient,
        rounds=ROUNDS,
        lr=ALPHA,
        latency=lambda sender, receiver, now: 1e-3,
        seed=3,
    )
    simulation.run(lambda k, W_LN: errors.append(np.abs(W_LN.numpy().T - next(expected)).max()))
    assert len(errors) == ROUNDS
    assert max(errors) < 1e-6
    assert [virtual.round for virtual in simulation.virtual] == [ROUNDS] * learners
