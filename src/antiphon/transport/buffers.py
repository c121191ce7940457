"""The memory that learners' weights live in, and its reading from anywhere."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BLOCK = 1 << 20
"""Elements handled at a time: a block stays in the cache between the passes over it."""

SLOTS = 3
"""Slots of a learner that its exchanges use while all peers answer."""
GENERATION, PENDING, PENDING_GENERATION = range(3)


def slots_of(learners: int) -> int:
    """Return how many slots a learner of L has.

    A peer that is frozen amid an exchange pins one until it goes on, and has one exchange open at most: L - 1 slots
    suffice though all of them freeze. Slots that are never written cost no memory.
    """
    return max(SLOTS, learners - 1)


@dataclass(frozen=True)
class Buffers:
    """The memory of L learners with N parameters each; where it lies is the transport's business.

    ``clock_L3`` holds for each learner the generation of w, whether D holds anything, and the generation of D.
    """

    weights_LN: Tensor
    pending_LN: Tensor
    slots_LSN: Tensor
    versions_LS: NDArray[np.int64]
    clock_L3: NDArray[np.int64]

    @classmethod
    def in_process(cls, learners: int, parameters: int) -> Buffers:
        """Allocate ordinary memory: for one process and for tests."""
        return cls(
            torch.zeros(learners, parameters),
            torch.zeros(learners, parameters),
            torch.zeros(learners, slots_of(learners), parameters),
            np.zeros((learners, slots_of(learners)), np.int64),
            np.zeros((learners, 3), np.int64),
        )

    def read(self, learner: int, out_N: Tensor, tries: int = 50) -> bool:
        """Copy a learner's weights w + D into ``out_N`` from any process; say whether the copy is of one moment."""
        clock_3 = self.clock_L3[learner]
        for _ in range(tries):
            before = clock_3.copy()
            out_N.copy_(self.weights_LN[learner])
            if before[PENDING]:
                out_N.add_(self.pending_LN[learner])
            if not before[GENERATION] % 2 and not before[PENDING_GENERATION] % 2 and (before == clock_3).all():
                return True
            time.sleep(0.001)
        return False

    def consensus(self, present: Sequence[int]) -> tuple[Tensor, float]:
        """Return the mean of the weights of those present [N], and their RMS distance from it over all parameters.

        Weights that are not finite are left out: their learner is about to heal.

        One learner after the other, in two arrays, whatever their number (Chan, Golub and LeVeque 1983): with the k-th
        row x_k, mean_k = mean_{k-1} + (x_k - mean_{k-1}) / k, and the sum of squared distances grows by
        (1 - 1/k) |x_k - mean_{k-1}|^2.
        """
        mean_N, row_N = (torch.zeros(self.weights_LN.shape[1]) for _ in range(2))
        squares, count = 0.0, 0
        for learner in present:
            self.read(learner, row_N)
            if not math.isfinite(float(row_N.sum())):
                continue
            count += 1
            for mean_B, row_B in zip(torch.split(mean_N, BLOCK), torch.split(row_N, BLOCK), strict=True):
                row_B.sub_(mean_B)
                squares += (1 - 1 / count) * float(torch.linalg.vector_norm(row_B, dtype=torch.float64)) ** 2
                mean_B.add_(row_B, alpha=1 / count)
        if not count:
            return mean_N.fill_(math.nan), math.nan
        return mean_N, math.sqrt(squares / (count * len(mean_N)))
