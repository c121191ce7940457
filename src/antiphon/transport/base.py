"""The contract of a transport: one learner's end of what goes on between learners."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from antiphon.transport.protocol import Counts

Coefficients = Sequence[tuple[int, float]]


class Transport(ABC):
    """Carries out a strategy's actions for one learner.

    An exchange never waits. In a synchronous round, numbered alike by all learners, each publishes one vector, a
    snapshot of its weights or its gradient, and takes the others'; there is one such round at a time.
    """

    counts: Counts
    bytes_read: int

    @abstractmethod
    def present(self) -> tuple[int, ...]:
        """Return the learners that answer now, this one among them, in order."""

    @abstractmethod
    def propose(self, peer: int, coefficient: float) -> None:
        """Start an exchange with ``peer`` if its rules allow one now, and return at once."""

    @abstractmethod
    def start_mix(self, round: int, coefficients: Coefficients) -> None:
        """Publish a snapshot of the weights, and return at once."""

    @abstractmethod
    def finish_mix(self, round: int) -> None:
        """Wait for the peers' snapshots of the round; sum_j c_j (s_j - s_own) has then been added to the weights.

        Raises:
            DeadlineError: one did not come in time.
            LearnerError: one of those peers is gone.
        """

    @abstractmethod
    def start_average(self, round: int, vector_N: Tensor) -> None:
        """Publish ``vector_N``, and return at once."""

    @abstractmethod
    def finish_average(self, round: int, mean_N: Tensor) -> None:
        """Wait for all learners' vectors of the round, and write their mean; equal to the bit for all of them.

        Raises:
            DeadlineError: one did not come in time.
            LearnerError: a learner is gone.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of whatever is held; closing twice is harmless."""
