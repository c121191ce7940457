"""Virtual learners with real strategies, the real protocol and real weights, in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from antiphon.learner.weights import Weights
from antiphon.strategies import strategy_class
from antiphon.strategies.base import Action, AverageGradients, Exchange, FinishMix, StartMix
from antiphon.transport.buffers import Buffers
from antiphon.transport.memory import Latency, MemoryTransport, VirtualClock, connect

Gradient = Callable[[int, int, Tensor], Tensor]
"""(learner, round, weights [N]) -> gradient [N]."""


@dataclass
class VirtualLearner:
    """One learner: computes for a while, then does what its strategy says, over and over."""

    simulation: Simulation
    number: int
    weights: Weights
    transport: MemoryTransport
    round: int = 0
    staleness: list[int] = field(default_factory=list)
    _waiting: list[Action] | None = None

    def __post_init__(self) -> None:
        """Bind the strategy, and hear of arrivals."""
        self.strategy = strategy_class(self.simulation.strategy)(
            self.number, self.simulation.learners, self.simulation.seed
        )
        self.transport.on_arrival = self._resume

    def compute(self) -> None:
        """Begin the gradient of this round at the weights as they are now."""
        self.weights.settle()
        self._snapshot_N = self.weights.w_N.clone()
        self._additions = self.weights.additions
        for action in self.strategy.computing(self.round, self.transport.present()):
            self._act(action)
        clock, seconds = self.simulation.clock, self.simulation.step_s(self.number, self.round)
        clock.at(clock.now + seconds, self._computed)

    def _computed(self) -> None:
        self._gradient_N = self.simulation.gradient(self.number, self.round, self._snapshot_N)
        self._waiting = list(self.strategy.gradient(self.round, self.transport.present()))
        if any(isinstance(action, AverageGradients) for action in self._waiting):
            self.transport.start_average(self.round, self._gradient_N)
        self._resume()

    def _resume(self) -> None:
        """Go on once everything that this round waits for is here."""
        if self._waiting is None or (self._waiting and not self.transport.ready(self.round)):
            return
        actions, self._waiting = self._waiting, None
        for action in actions:
            self._act(action)
        self.staleness.append(self.weights.additions - self._additions)
        self.weights.w_N.sub_(self._gradient_N, alpha=self.simulation.lr)
        self.weights.settle()
        round, self.round = self.round, self.round + 1
        # Learners that end a step at one time all see each other's step before anybody's exchange begins.
        self.simulation.clock.at(self.simulation.clock.now, lambda: self._stepped(round))

    def _stepped(self, round: int) -> None:
        for action in self.strategy.stepped(round, self.transport.present()):
            self._act(action)
        if self.round < self.simulation.rounds:
            self.compute()

    def _act(self, action: Action) -> None:
        match action:
            case Exchange(peer, coefficient):
                self.transport.propose(peer, coefficient)
            case StartMix(coefficients):
                self.transport.start_mix(self.round, coefficients)
            case FinishMix():
                self.transport.finish_mix(self.round)
            case AverageGradients():
                self.transport.finish_average(self.round, self._gradient_N)


@dataclass
class Simulation:
    """L virtual learners of one strategy.

    Args:
        strategy: its name.
        initial_LN: the learners' first weights, float32 [L, N].
        gradient: (learner, round, weights) -> gradient.
        rounds: steps of each learner.
        lr: the step is -lr times the gradient.
        step_s: (learner, round) -> virtual seconds of a gradient.
        latency: (sender, receiver, time) -> virtual seconds of a message, or None where it is lost.
        seed: of the strategy.

    >>> run = Simulation("fixed-ring", torch.eye(4), lambda l, k, w: torch.zeros(4), rounds=30)
    >>> bool((run.run() - 0.25).abs().max() < 1e-6)
    True
    """

    strategy: str
    initial_LN: Tensor
    gradient: Gradient
    rounds: int
    lr: float = 0.0
    step_s: Callable[[int, int], float] = lambda learner, round: 1.0
    latency: Latency = lambda sender, receiver, now: 0.01
    seed: int = 0

    def __post_init__(self) -> None:
        """Allocate the learners."""
        self.learners, parameters = self.initial_LN.shape
        self.clock = VirtualClock()
        self.buffers = Buffers.in_process(self.learners, parameters)
        self.buffers.weights_LN.copy_(self.initial_LN)
        weights = [Weights(self.buffers, learner) for learner in range(self.learners)]
        ends = connect(weights, self.clock, self.latency)
        self.virtual = [VirtualLearner(self, end.learner, end.weights, end) for end in ends]  # type: ignore[arg-type]

    def run(self, each_round: Callable[[int, Tensor], None] | None = None) -> Tensor:
        """Run to the end, exchanges in flight included, and return the weights [L, N].

        ``each_round(k, W_k)`` is called when all learners have ended round k and nothing is in flight.
        """
        for learner in self.virtual:
            self.clock.at(0.0, learner.compute)
        if each_round is None:
            self.clock.run(until=lambda: False)
        else:
            for round in range(self.rounds):
                # Half a step after the round's end its exchanges are over, where a step takes one second.
                self.clock.run(until=lambda: False, deadline=round + 1.5)
                each_round(round, self.weights())
        return self.weights()

    def weights(self) -> Tensor:
        """Return all weights as they are now, float32 [L, N]."""
        return torch.stack([learner.weights.snapshot() for learner in self.virtual])


def distances(weights_LN: Tensor) -> float:
    """Return the RMS distance of the learners from their mean, over all parameters."""
    return float((weights_LN.double() - weights_LN.double().mean(0)).square().mean().sqrt())
