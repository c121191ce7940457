"""Fixed ring (ADPSGD, arXiv 1710.06952 and 2110.11199): W_{k+1} = W_k T_1 - alpha_k G(Phi_k), asynchronously."""

from __future__ import annotations

from collections.abc import Sequence

from antiphon.strategies.base import Actions, Exchange, Strategy
from antiphon.topology import mixing
from antiphon.topology.graphs import ring_coefficient, successor


class FixedRing(Strategy):
    """After each step a learner starts one exchange with its right neighbour, and waits for nobody."""

    name = "fixed-ring"
    waits = False

    def stepped(self, round: int, present: Sequence[int]) -> Actions:
        """Start an exchange with the right neighbour among those present."""
        peer = successor(sorted(present), self.learner)
        return () if peer is None else (Exchange(peer, ring_coefficient(len(present))),)

    def matrix(self, round: int) -> mixing.Matrix:
        """Return T_1: what a round of exchanges amounts to when all learners make it at once."""
        return mixing.ring(range(self.learners))
