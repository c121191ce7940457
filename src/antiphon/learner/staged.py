"""Weights that live on a device, while exchanges go through this host's memory.

The master m lies on the device; the slots and D lie on the host, as ever. While the device computes a gradient, the
exchange thread lets m be copied into a slot, and D to the device, in a lane of its own; the computing thread folds with
one addition, on the device. No thread waits for the device but the exchange thread:

    begin_step   what follows on the device comes after the copy of m that is under way: no copy is ever torn
    end_step     marks m as whole: a copy comes after that mark
    fold         comes after D's copy has arrived; D's next copy comes after the fold

The row in which others see this learner's weights is a copy, made anew every `REFRESH_S` at most, and at the end.
"""

from __future__ import annotations

import math
import threading
import time

import numpy as np
import torch
from torch import Tensor

from antiphon.learner.lanes import Lane, Pinned, lane_of
from antiphon.learner.weights import Weights
from antiphon.transport.buffers import GENERATION, PENDING, SLOTS, Buffers
from antiphon.transport.protocol import Handle

REFRESH_S = 1.0
REFRESH_SHARE = 0.01
"""At most this share of the time goes into refreshing the row."""


class StagedWeights(Weights):
    """One learner's weights on a device.

    Args:
        buffers: the host memory of all learners.
        learner: which row is this one's own.
        device: where the weights live; the CPU will do too, for tests.
        lane: where copies are asked for; by default the device's.
    """

    def __init__(self, buffers: Buffers, learner: int, device: torch.device, lane: Lane | None = None) -> None:
        super().__init__(buffers, learner)
        self._row_N, self._row_clock_3 = self.w_N, self._clock_3
        # The row's clock tells of the row; that of the weights is this process's own.
        self._clock_3 = np.zeros(3, np.int64)
        self.w_N = torch.zeros_like(self._row_N, device=device)
        self._arrived_N = torch.zeros_like(self.w_N)
        """D as it lies on the device."""
        self._lane = lane or lane_of(device)
        self._asking = threading.Lock()
        """Held while something is asked of the device that has to keep its place; never while anybody waits for it."""
        self._whole = self._copied = self._uploaded = self._folded = self._lane.here()
        self._refresh_at_s = time.monotonic()
        self._retired = False
        on_gpu = device.type == "cuda"
        self._sum_1 = torch.zeros(1, pin_memory=on_gpu)
        own = (self._row_N, self._pending_N, buffers.slots_LSN[learner, :SLOTS])
        self._pinned = Pinned(own if on_gpu else ())

    # --- the computing thread

    def begin_step(self) -> None:
        """Announce that w is about to change: what follows on the device comes after copies of w."""
        with self._asking:
            super().begin_step()
            self._copied.hold()

    def end_step(self, fold: bool = True, wait: bool = False) -> None:
        """Fold what exchanges added, announce that w is whole, and refresh the row if it is old."""
        super().end_step(fold, wait)
        began_s = time.monotonic()
        # Where the exchange thread is at it, the row is refreshed at the next step.
        if wait or (began_s >= self._refresh_at_s and not self._lock.locked()):
            self.publish()
            now_s = time.monotonic()
            self._refresh_at_s = now_s + max(REFRESH_S, (now_s - began_s) / REFRESH_SHARE)

    def publish(self) -> None:
        """Copy w + D into the row, where others see it."""
        with self._lock:
            self._refresh()

    def retire(self) -> None:
        """No step comes any more: let the row follow each exchange from here on."""
        with self._lock:
            self._retired = True
            self._refresh()

    def close(self) -> None:
        """Wait for what the device is at, and let pinned memory go."""
        for mark in (self._copied, self._uploaded):
            mark.synchronize()
        self._pinned.release()

    def _stand_still(self) -> None:
        with self._asking:
            self._whole = self._lane.here()
            super()._stand_still()

    def _refresh(self) -> None:
        self._row_clock_3[GENERATION] += 1
        self._row_N.copy_(self.w_N)
        if self._clock_3[PENDING]:
            self._row_N.add_(self._pending_N)
        self._row_clock_3[GENERATION] += 1

    def _add_pending(self) -> None:
        self._uploaded.hold()
        self.w_N.add_(self._arrived_N)
        self._folded = self._lane.here()

    # --- the exchange thread

    def write(self, slot: int, tries: int = 50) -> Handle | None:
        """Copy w + D into ``slot``; None where the weights are not finite or a step was being asked for all along."""
        for _ in range(tries):
            with self._lock:
                if self._ask_for_copy(slot):
                    return self._finish_copy(slot)
            time.sleep(0.0005)
        return None

    def snapshot(self) -> Tensor:
        """Return a copy of w + D, in host memory of its own."""
        with self._lock:
            copy_N = torch.empty_like(self._row_N).copy_(self.w_N)
            return copy_N.add_(self._pending_N) if self._clock_3[PENDING] else copy_N

    def _add(self, others: list[tuple[Tensor, float]], own_N: Tensor | None) -> None:
        """Add to D, and let D go to the device."""
        self._uploaded.synchronize()
        super()._add(others, own_N)
        self._uploaded = self._lane.run(self._upload, after=self._folded)
        if self._retired:
            self._refresh()

    def _ask_for_copy(self, slot: int) -> bool:
        with self._asking:
            if self._clock_3[GENERATION] % 2:
                return False
            self.buffers.versions_LS[self.learner, slot] = -1
            self._copied = self._lane.run(lambda: self._copy_out(slot), after=self._whole)
            return True

    def _finish_copy(self, slot: int) -> Handle | None:
        self._copied.synchronize()
        slot_N, total = self.buffers.slots_LSN[self.learner, slot], float(self._sum_1)
        if self._clock_3[PENDING]:
            for begin, end in self._blocks():
                total += float(slot_N[begin:end].add_(self._pending_N[begin:end]).sum())
        self.finite = math.isfinite(total)
        if not self.finite:
            return None
        self._versions += 1
        self.buffers.versions_LS[self.learner, slot] = self._versions
        return Handle(slot, self._versions)

    def _copy_out(self, slot: int) -> None:
        self.buffers.slots_LSN[self.learner, slot].copy_(self.w_N, non_blocking=True)
        self._sum_1.copy_(self.w_N.sum().reshape(1), non_blocking=True)

    def _upload(self) -> None:
        self._arrived_N.copy_(self._pending_N, non_blocking=True)


def weights_on(device: torch.device, buffers: Buffers, learner: int) -> Weights:
    """Return a learner's weights for a model on ``device``: on the CPU they are the shared row itself."""
    return Weights(buffers, learner) if device.type == "cpu" else StagedWeights(buffers, learner, device)
