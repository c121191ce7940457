"""The contract of a strategy: events in, actions out.

A learner's round k runs through three events, and at each the strategy says what to do:

    computing(k)   the gradient of round k starts, at the weights as they are now (the snapshot Phi_k)
    gradient(k)    the gradient is known and not yet applied
    stepped(k)     the learner's own step has been added to its weights

A strategy holds no weights, starts no thread, reads no clock and sends nothing. Whoever drives it, a process or a
virtual learner, carries the actions out; `present` names the learners that answer now, the caller among them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from antiphon.errors import ArgumentError
from antiphon.topology.mixing import Matrix


@dataclass(frozen=True)
class Exchange:
    """Start one exchange with ``peer`` and go on at once: both ends add c (s_other - s_own), or neither does."""

    peer: int
    coefficient: float


@dataclass(frozen=True)
class StartMix:
    """Publish a snapshot for this round and let the others' come in: w += sum_j c_j (s_j - s_own) in the end."""

    coefficients: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class FinishMix:
    """Wait for the mix that was started, and add its difference."""


@dataclass(frozen=True)
class AverageGradients:
    """Replace the gradient by the mean of all learners' gradients of this round, waiting for them."""


Action = Exchange | StartMix | FinishMix | AverageGradients
Actions = tuple[Action, ...]


class Strategy(ABC):
    """One learner's part of a strategy.

    Args:
        learner: this learner's number, from 0.
        learners: how many there are, L.
        seed: of whatever the strategy draws; the same for all learners.

    Raises:
        ArgumentError: a number is outside its bounds.
    """

    name: ClassVar[str]
    waits: ClassVar[bool]
    """True where a round needs other learners, so that losing one ends the run."""

    def __init__(self, learner: int, learners: int, seed: int = 0) -> None:
        if learners < 1:
            raise ArgumentError(f"learners must be at least 1, not {learners}")
        if not 0 <= learner < learners:
            raise ArgumentError(f"learner must lie in 0..{learners - 1}, not {learner}")
        self.learner, self.learners, self.seed = learner, learners, seed

    def computing(self, round: int, present: Sequence[int]) -> Actions:
        """Return what to do as the gradient of ``round`` starts."""
        return ()

    def gradient(self, round: int, present: Sequence[int]) -> Actions:
        """Return what to do between the gradient of ``round`` and the step it makes."""
        return ()

    def stepped(self, round: int, present: Sequence[int]) -> Actions:
        """Return what to do after the step of ``round``."""
        return ()

    @abstractmethod
    def matrix(self, round: int) -> Matrix:
        """Return T_k of ``round`` when all learners are present and in step: [L, L], doubly stochastic."""
