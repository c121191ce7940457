"""Delay-by-one (ADPSGD): w_{k+1}^(l) = mean(W_k) - alpha_k g(w_k^(l)).

The weights are averaged over all learners while each computes its gradient at its own weights from before the
averaging. Reconstructed from arXiv 2110.11199, whose text leaves open whether weights or gradients are delayed.
"""

from __future__ import annotations

from collections.abc import Sequence

from antiphon.strategies.base import Actions, FinishMix, StartMix, Strategy
from antiphon.topology import mixing


class DelayByOne(Strategy):
    """The averaging hides behind the gradient; all learners move at the pace of the slowest."""

    name = "delay-by-one"
    waits = True

    def computing(self, round: int, present: Sequence[int]) -> Actions:
        """Publish the weights that the gradient is taken at."""
        others = (peer for peer in range(self.learners) if peer != self.learner)
        return (StartMix(tuple((peer, 1 / self.learners) for peer in others)),)

    def gradient(self, round: int, present: Sequence[int]) -> Actions:
        """Wait for the mean of the weights of the same round."""
        return (FinishMix(),)

    def matrix(self, round: int) -> mixing.Matrix:
        """Return T_u."""
        return mixing.uniform(self.learners)
