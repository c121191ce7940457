"""After which steps exchanges are started, and how that is chosen from what they cost."""

from __future__ import annotations

import os

import pytest

from antiphon.errors import ArgumentError
from antiphon.learner.pace import FIRST_LOOK, LONGEST, LOOK, Pace
from antiphon.strategies import strategy_class

CORES = len(os.sched_getaffinity(0))


class Machine:
    """Steps of a given length, and exchanges of a given cost, under clocks of its own."""

    def __init__(self, learners, step_s=0.1, fold_s=0.0, exchange_s=0.0, cpu=1.0):
        self.now_s = self.cpu_s = self.folded_s = self.exchanged_s = 0.0
        self.step_s, self.fold_s, self.exchange_s, self.cpu = step_s, fold_s, exchange_s, cpu
        self.pace = Pace("auto", learners, clock=lambda: self.now_s, cpu_clock=lambda: self.cpu_s)
        self.started = 0

    def run(self, steps):
        for _ in range(steps):
            self.now_s += self.step_s
            self.cpu_s += self.step_s * self.cpu
            if self.pace.due(self.folded_s, self.exchanged_s) is not None:
                self.started += 1
                self.folded_s += self.fold_s
                self.exchanged_s += self.exchange_s
        return self.pace.every


@pytest.mark.parametrize("every", [1, 4])
def test_every_kth_step(every):
    pace = Pace(every, learners=2)
    asked = [pace.due(0.0, 0.0) for _ in range(12)]
    assert [k for k, which in enumerate(asked) if which is not None] == list(range(0, 12, every))
    assert [which for which in asked if which is not None] == list(range(len(range(0, 12, every))))


@pytest.mark.parametrize("name", ["random-ring", "fixed-ring"])
def test_the_peers_are_the_same_in_the_same_order_whatever_k(name):
    """So an exchange contracts as much as ever: of a topology that alternates, none is left out for good."""
    strategy = strategy_class(name)(0, 5, seed=3)

    def peers(every, exchanges=20):
        pace = Pace(every, learners=5)
        asked = (pace.due(0.0, 0.0) for _ in range(exchanges * every))
        return [strategy.stepped(which, range(5)) for which in asked if which is not None]

    assert peers(1) == peers(2) == peers(7)


def test_exchanges_that_cost_little_come_with_every_step():
    assert Machine(2, fold_s=0.004).run(500) == 1


def test_k_keeps_the_share():
    """A fold of 18 % of a step is below 5 % of every fourth."""
    machine = Machine(2, fold_s=0.018)
    assert machine.run(FIRST_LOOK - 1) == 1
    assert machine.run(LOOK) == 4
    assert machine.run(1000) == 4
    assert machine.folded_s / machine.now_s < 0.06


def test_the_exchange_threads_work_counts_only_where_no_core_is_free():
    assert Machine(CORES, exchange_s=0.018, cpu=1.0).run(1000) == 4
    assert Machine(CORES, exchange_s=0.018, cpu=0.15).run(1000) == 1


def test_k_has_an_end_and_comes_back():
    machine = Machine(2, fold_s=10.0)
    assert machine.run(500) == LONGEST
    machine.fold_s = 0.0
    assert machine.run(30 * LOOK) == 1


@pytest.mark.parametrize("every", [0, 65, "often", 1.5])
def test_bounds(every):
    with pytest.raises(ArgumentError, match="exchange_every must be 'auto', or a whole number from 1 to 64"):
        Pace(every, learners=2)


def test_rounds_cannot_be_left_out():
    with pytest.raises(ArgumentError, match="exchange_every must be 1, not 2, for a strategy whose learners meet"):
        Pace(2, learners=2, waits=True)
    pace = Pace("auto", learners=2, waits=True)
    assert [pace.due(100.0, 100.0) for _ in range(300)] == list(range(300))
