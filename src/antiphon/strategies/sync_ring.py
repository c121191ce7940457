"""Synchronous ring (D-PSGD, arXiv 1705.09056): W_{k+1} = W_k T_1 - alpha_k G(W_k)."""

from __future__ import annotations

from collections.abc import Sequence

from antiphon.strategies.base import Actions, FinishMix, StartMix, Strategy
from antiphon.topology import mixing
from antiphon.topology.graphs import ring_coefficient, ring_neighbours


class SyncRing(Strategy):
    """Each learner averages with both neighbours (1/3 each) while it computes, and waits for the two of them."""

    name = "sync-ring"
    waits = True

    def computing(self, round: int, present: Sequence[int]) -> Actions:
        """Publish the weights that the gradient is taken at."""
        c = ring_coefficient(self.learners)
        return (StartMix(tuple((peer, c) for peer in ring_neighbours(range(self.learners), self.learner))),)

    def gradient(self, round: int, present: Sequence[int]) -> Actions:
        """Wait for the neighbours' weights of the same round."""
        return (FinishMix(),)

    def matrix(self, round: int) -> mixing.Matrix:
        """Return T_1."""
        return mixing.ring(range(self.learners))
