"""Randomized ring (ADPSGD, arXiv 2002.01119 and 2110.11199): T_k = P_k' T_1 P_k, P_k a fresh permutation."""

from __future__ import annotations

from collections.abc import Sequence

from antiphon.strategies.base import Actions, Exchange, Strategy
from antiphon.topology import mixing
from antiphon.topology.graphs import permuted, ring_coefficient, successor


class RandomRing(Strategy):
    """After each step a learner starts one exchange with its successor in the ring that (seed, its own round) gives."""

    name = "random-ring"
    waits = False

    def stepped(self, round: int, present: Sequence[int]) -> Actions:
        """Start an exchange with the successor in this round's permutation of those present."""
        peer = successor(permuted(present, self.seed, round), self.learner)
        return () if peer is None else (Exchange(peer, ring_coefficient(len(present))),)

    def matrix(self, round: int) -> mixing.Matrix:
        """Return P_k' T_1 P_k: what a round amounts to when all learners make it at once."""
        return mixing.ring(permuted(range(self.learners), self.seed, round))
