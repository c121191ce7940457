"""Synchronous allreduce (SC-PSGD): W_{k+1} = (W_k - alpha_k G(W_k)) T_u (arXiv 2110.11199)."""

from __future__ import annotations

from collections.abc import Sequence

from antiphon.strategies.base import Actions, AverageGradients, Strategy
from antiphon.topology import mixing


class Allreduce(Strategy):
    """All learners apply the mean of their gradients, and so stay equal; everybody waits for everybody."""

    name = "allreduce"
    waits = True

    def gradient(self, round: int, present: Sequence[int]) -> Actions:
        """Average the gradients of the round."""
        return (AverageGradients(),)

    def matrix(self, round: int) -> mixing.Matrix:
        """Return T_u, which acts after the gradient."""
        return mixing.uniform(self.learners)
