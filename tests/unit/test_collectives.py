"""Rounds over gloo, each learner in a thread: the same sums as over shared memory, and deadlines that hold."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from antiphon.errors import DeadlineError, LearnerError
from antiphon.learner.weights import Weights
from antiphon.strategies import strategy_class
from antiphon.strategies.base import StartMix
from antiphon.transport.block import Block, Col, Head, Link, Status
from antiphon.transport.collectives import GroupRounds, gloo_group

PARAMETERS = 1000


class Ends:
    """Learners in one process, each with a block of its own, as if on a host of its own."""

    def __init__(self, learners, timeout_s=20.0):
        self.learners, store = learners, dist.HashStore()
        self.blocks = [Block.create(learners) for _ in range(learners)]
        draw = torch.Generator().manual_seed(0)
        self.weights = []
        for learner, block in enumerate(self.blocks):
            block.head[Head.HOST] = learner
            block.links_LC[:, Link.HOST] = range(learners)
            block.board_LC[:, Col.PID], block.board_LC[:, Col.STATE] = os.getpid(), Status.JOINED
            self.weights.append(Weights(block.allocate(PARAMETERS), learner))
            self.weights[-1].w_N.copy_(torch.randn(PARAMETERS, generator=draw))
        self.pool = ThreadPoolExecutor(learners)
        groups = self.each(lambda n: gloo_group(store, "run", n, learners, "127.0.0.1", timeout_s))
        self.rounds = [GroupRounds(self.blocks[n], n, self.weights[n], groups[n], timeout_s) for n in range(learners)]

    def each(self, action):
        return list(self.pool.map(action, range(self.learners)))

    def values(self):
        return torch.stack([weights.snapshot() for weights in self.weights])

    def mix(self, round, coefficients):
        def one(learner):
            self.rounds[learner].start_mix(round, coefficients[learner])
            self.rounds[learner].finish_mix(round)
            self.weights[learner].settle()

        self.each(one)


@pytest.fixture
def ends():
    made = []

    def make(*args, **more):
        made.append(Ends(*args, **more))
        return made[-1]

    yield make
    for each in made:
        for block in each.blocks:
            block.remove()


@pytest.mark.parametrize("learners", [2, 3, 5])
@pytest.mark.parametrize("name", ["sync-ring", "delay-by-one"])
def test_a_round_is_the_matrix_of_its_strategy(ends, name, learners):
    made = ends(learners)
    strategies = [strategy_class(name)(learner, learners) for learner in range(learners)]
    for round in range(3):
        before_LN, present = made.values(), range(learners)
        matrix_LL = torch.as_tensor(strategies[0].matrix(round), dtype=torch.float32)
        coefficients = []
        for strategy in strategies:
            (action,) = strategy.computing(round, present)
            assert isinstance(action, StartMix)
            coefficients.append(action.coefficients)
        made.mix(round, coefficients)
        torch.testing.assert_close(made.values(), matrix_LL.T @ before_LN)
        torch.testing.assert_close(made.values().sum(0), before_LN.sum(0))


def test_a_mean_is_equal_to_the_bit(ends):
    made = ends(3)

    def one(learner):
        mean_N = torch.empty(PARAMETERS)
        made.rounds[learner].start_average(0, made.weights[learner].w_N)
        made.rounds[learner].finish_average(0, mean_N)
        return mean_N

    means = made.each(one)
    assert all(torch.equal(mean_N, means[0]) for mean_N in means)
    torch.testing.assert_close(means[0], made.values().mean(0))


def test_who_is_late_is_named(ends):
    made = ends(2, timeout_s=0.2)
    made.rounds[0].start_mix(0, [(1, 0.5)])
    with pytest.raises(DeadlineError, match=r"learner 0 waited 0.2 s in round 0 for learners \[1\]"):
        made.rounds[0].finish_mix(0)


def test_a_round_ends_at_once_where_a_peer_has_failed(ends):
    made = ends(2)
    made.rounds[0].start_mix(0, [(1, 0.5)])
    made.blocks[0].board_LC[1, Col.STATE] = Status.FAILED
    with pytest.raises(LearnerError, match=r"learners \[1\] are gone"):
        made.rounds[0].finish_mix(0)
    assert made.blocks[0].board_LC[0, Col.BEREFT] == 2


def test_weights_that_are_not_finite_end_a_round(ends):
    made = ends(2)
    made.weights[0].w_N[0] = float("nan")
    made.rounds[0].start_mix(0, [(1, 0.5)])
    with pytest.raises(LearnerError, match="learner 0: the weights are not finite in round 0"):
        made.rounds[0].finish_mix(0)
