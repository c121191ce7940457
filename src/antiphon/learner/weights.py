"""A learner's weights, the exchanges that wait to be folded into them, and their snapshots.

The weights are w + D. The gradient works on w itself; D collects what exchanges add, and the computing thread folds it
into w between two steps. So the computing thread never waits for an exchange: one pass over the weights, and only if
the lock is free, is all that it ever does for them. Snapshots copy w + D from the exchange thread while the gradient is
computed; a generation counter, odd while w changes, tells a torn copy, which is made again.

Every row of the buffers is written by its owner alone, so a learner that is frozen or killed stops nobody.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from antiphon.transport.protocol import Handle

BLOCK = 1 << 20
"""Elements handled at a time: a block stays in the cache between the passes over it."""

SLOTS = 3
GENERATION, PENDING, PENDING_GENERATION = range(3)


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
            torch.zeros(learners, SLOTS, parameters),
            np.zeros((learners, SLOTS), np.int64),
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

    def consensus(self, present: list[int]) -> tuple[Tensor, float]:
        """Return the mean of the weights of those present [N], and their RMS distance from it over all parameters."""
        rows_LN = torch.empty(len(present), self.weights_LN.shape[1])
        for row_N, learner in zip(rows_LN, present, strict=True):
            self.read(learner, row_N)
        mean_N = rows_LN.mean(0)
        return mean_N, math.sqrt(float((rows_LN - mean_N).double().square().mean()))


class Weights:
    """One learner's row of the buffers, seen by its computing thread and its exchange thread.

    Args:
        buffers: the memory of all learners.
        learner: which row is this one's own.
    """

    def __init__(self, buffers: Buffers, learner: int) -> None:
        self.buffers, self.learner = buffers, learner
        self.w_N = buffers.weights_LN[learner]
        self.additions = 0
        """How many differences were added so far: staleness is read off this."""
        self._pending_N = buffers.pending_LN[learner]
        self._clock_3 = buffers.clock_L3[learner]
        self._pins = [False] * buffers.slots_LSN.shape[1]
        self._versions = 0
        self._lock = threading.Lock()
        self._block_B = torch.empty(min(BLOCK, self.w_N.numel()))

    # --- the computing thread

    def begin_step(self) -> None:
        """Announce that w is about to change."""
        self._clock_3[GENERATION] += 1

    def end_step(self) -> None:
        """Fold what exchanges added, if the exchange thread is not at it just now, and announce that w is whole."""
        self._fold(wait=False)
        self._clock_3[GENERATION] += 1

    def settle(self) -> None:
        """Fold what exchanges added, for certain: at the end of a run, or where a round has waited for its mix."""
        self._clock_3[GENERATION] += 1
        self._fold(wait=True)
        self._clock_3[GENERATION] += 1

    def _fold(self, wait: bool) -> None:
        if self._clock_3[PENDING] and self._lock.acquire(wait):
            try:
                self.w_N.add_(self._pending_N)
                self._clock_3[PENDING] = 0
            finally:
                self._lock.release()

    # --- the exchange thread (the protocol's Snapshots)

    def take(self) -> Handle | None:
        """Copy w + D into a free slot and pin it; None where no slot is free or the weights are not finite."""
        if all(self._pins):
            return None
        slot = self._pins.index(False)
        handle = self.write(slot)
        self._pins[slot] = handle is not None
        return handle

    def write(self, slot: int, tries: int = 50) -> Handle | None:
        """Copy w + D into ``slot``; None where the weights are not finite or never stood still."""
        for _ in range(tries):
            generation = int(self._clock_3[GENERATION])
            if generation % 2 == 0:
                with self._lock:
                    finite = self._copy_into(slot)
                if int(self._clock_3[GENERATION]) == generation:
                    if not finite:
                        return None
                    self._versions += 1
                    self.buffers.versions_LS[self.learner, slot] = self._versions
                    return Handle(slot, self._versions)
            time.sleep(0.0005)
        return None

    def snapshot(self) -> Tensor:
        """Return a copy of w + D, in memory of its own."""
        return self.w_N + self._pending_N if self._clock_3[PENDING] else self.w_N.clone()

    def release(self, handle: Handle) -> None:
        """Free a slot of one's own."""
        self._pins[handle.slot] = False

    def usable(self, peer: int, handle: Handle) -> bool:
        """Say whether the peer's slot still holds that version (its owner let only finite weights into it)."""
        versions_S = self.buffers.versions_LS[peer]
        return 0 <= handle.slot < len(versions_S) and int(versions_S[handle.slot]) == handle.version > 0

    def apply(self, peer: int, theirs: Handle, own: Handle, coefficient: float) -> None:
        """Add c (s_peer - s_own); both ends round the very same difference, so the sum is conserved."""
        slots_LSN = self.buffers.slots_LSN
        self.add_differences([(slots_LSN[peer, theirs.slot], coefficient)], slots_LSN[self.learner, own.slot])

    def add_differences(self, others: list[tuple[Tensor, float]], own_N: Tensor) -> None:
        """Add sum_j c_j (s_j - s_own) to D."""
        with self._lock:
            self._clock_3[PENDING_GENERATION] += 1
            if not self._clock_3[PENDING]:
                self._pending_N.zero_()
            for begin, end in self._blocks():
                block_B = self._block_B[: end - begin]
                for other_N, coefficient in others:
                    torch.sub(other_N[begin:end], own_N[begin:end], out=block_B)
                    self._pending_N[begin:end].add_(block_B, alpha=coefficient)
            self._clock_3[PENDING] = 1
            self._clock_3[PENDING_GENERATION] += 1
        self.additions += 1

    def _copy_into(self, slot: int) -> bool:
        self.buffers.versions_LS[self.learner, slot] = -1
        slot_N = self.buffers.slots_LSN[self.learner, slot]
        pending, finite = bool(self._clock_3[PENDING]), True
        for begin, end in self._blocks():
            block_B = slot_N[begin:end]
            if pending:
                torch.add(self.w_N[begin:end], self._pending_N[begin:end], out=block_B)
            else:
                block_B.copy_(self.w_N[begin:end])
            finite = finite and bool(torch.isfinite(block_B.sum()))
        return finite

    def _blocks(self) -> Iterator[tuple[int, int]]:
        parameters = self.w_N.numel()
        return ((begin, min(begin + BLOCK, parameters)) for begin in range(0, parameters, BLOCK))
