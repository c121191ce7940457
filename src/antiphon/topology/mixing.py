"""Mixing matrices, learners in columns: W_{k+1} = W_k T_k (arXiv 2110.11199)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from antiphon.topology.graphs import ring_coefficient, ring_neighbours

Matrix = NDArray[np.float64]


def uniform(learners: int) -> Matrix:
    """Return T_u: all entries 1/L."""
    return np.full((learners, learners), 1.0 / learners)


def ring(order: Sequence[int]) -> Matrix:
    """Return T_1 of the ring that visits learners in ``order``: P' T_1 P for the permutation P.

    >>> ring([0, 1, 2, 3]).round(3).tolist()[0]
    [0.333, 0.333, 0.0, 0.333]
    """
    learners = len(order)
    c, T_LL = ring_coefficient(learners), np.eye(learners)
    for learner in range(learners):
        for peer in ring_neighbours(order, learner):
            T_LL[peer, learner] += c
            T_LL[learner, learner] -= c
    return T_LL


def exchange(learners: int, first: int, second: int, c: float) -> Matrix:
    """Return the matrix of one exchange: ``first`` and ``second`` move by c times their difference, apart from others.

    >>> exchange(3, 0, 1, 0.5).tolist()
    [[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]
    """
    e_L = np.zeros((learners, 1))
    e_L[first], e_L[second] = 1.0, -1.0
    return np.eye(learners) - c * (e_L @ e_L.T)


def spectral_gap(T_LL: Matrix) -> float:
    """Return 1 - |lambda_2(T)|, the second largest modulus of the eigenvalues; 1 for a single learner.

    >>> round(spectral_gap(ring(range(8))), 3)
    0.195
    """
    moduli_L = np.sort(np.abs(np.linalg.eigvals(T_LL)))[::-1]
    return float(1.0 - moduli_L[1]) if len(moduli_L) > 1 else 1.0
