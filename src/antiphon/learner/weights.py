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

import torch
from torch import Tensor

from antiphon.transport.buffers import BLOCK, GENERATION, PENDING, PENDING_GENERATION, Buffers
from antiphon.transport.protocol import Handle


def scaled_difference(first_B: Tensor, second_B: Tensor, coefficient: float, out_B: Tensor) -> None:
    """Write c (a - b) into ``out_B``, rounded as mul(sub(a, b), c) is.

    One pass over memory instead of two: torch has it under the name of the gradient of (a - b)^2, 2 (a - b) times what
    comes from above, here c / 2; doubling and halving are exact.
    """
    above = torch.tensor(coefficient / 2)
    torch.ops.aten.mse_loss_backward.grad_input(above, first_B, second_B, 0, grad_input=out_B)


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
        """How many differences were added so far, folded or not."""
        self.folded = 0
        """How many of them w holds: a gradient taken on w is stale by ``additions - folded`` as it is applied."""
        self.fold_s = 0.0
        """Seconds that folding took the computing thread."""
        self._pending_N = buffers.pending_LN[learner]
        self._clock_3 = buffers.clock_L3[learner]
        self._pins = [False] * buffers.slots_LSN.shape[1]
        self.finite = True
        """Whether the weights were finite when they were last copied; `replace` makes them so again."""
        # Above those of a process that was this learner before, had it counted so: what it named is not found again.
        self._versions = time.monotonic_ns() if buffers.versions_LS[learner].any() else 0
        self._lock = threading.Lock()
        self._block_B = torch.empty(min(BLOCK, self.w_N.numel()))

    # --- the computing thread

    def begin_step(self) -> None:
        """Announce that w is about to change."""
        self._clock_3[GENERATION] += 1

    def end_step(self, fold: bool = True, wait: bool = False) -> None:
        """Fold what exchanges added, and announce that w is whole.

        Args:
            fold: whether to fold at all.
            wait: for the exchange thread, should it be at it just now; what is not folded is at a later step.
        """
        if fold:
            self._fold(wait)
        self._stand_still()

    def settle(self) -> None:
        """Fold what exchanges added, for certain, without a step."""
        self.begin_step()
        self.end_step(wait=True)

    def replace(self, vector_N: Tensor) -> None:
        """Let the weights be ``vector_N``, whatever they were, and whatever waited to be added to them.

        What a process that was killed amid a change has left of the row is whole again too.
        """
        with self._lock:
            if self._clock_3[GENERATION] % 2:
                self._stand_still()
            self._clock_3[PENDING_GENERATION] += self._clock_3[PENDING_GENERATION] % 2
            self.begin_step()
            self.w_N.copy_(vector_N)
            self._clock_3[PENDING] = 0
            self.folded = self.additions
            self.finite = True
            self._stand_still()
        self.publish()

    def publish(self) -> None:
        """Let others see the weights as they are now: here, they see w itself."""

    def retire(self) -> None:
        """Let others see what exchanges still add, though no step comes any more: here, they see D as ever."""

    def close(self) -> None:
        """Nothing is held."""

    def _fold(self, wait: bool) -> None:
        if self._clock_3[PENDING] and self._lock.acquire(wait):
            try:
                began_s = time.perf_counter()
                self._add_pending()
                self.fold_s += time.perf_counter() - began_s
                self._clock_3[PENDING] = 0
                self.folded = self.additions
            finally:
                self._lock.release()

    def _stand_still(self) -> None:
        self._clock_3[GENERATION] += 1

    def _add_pending(self) -> None:
        self.w_N.add_(self._pending_N)

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
                    whole = int(self._clock_3[GENERATION]) == generation
                    self.finite = finite or not whole
                if whole:
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
        """Add sum_j c_j (s_j - s_own) to D; where D is empty, what lies in it is overwritten by the first of them."""
        if not others:
            return
        with self._lock:
            self._add(others, own_N)

    def add(self, difference_N: Tensor, coefficient: float) -> None:
        """Add c d to D, where d = s_other - s_own is known already."""
        with self._lock:
            self._add([(difference_N, coefficient)], None)

    def _add(self, others: list[tuple[Tensor, float]], own_N: Tensor | None) -> None:
        self._clock_3[PENDING_GENERATION] += 1
        empty = not self._clock_3[PENDING]
        for begin, end in self._blocks():
            pending_B, block_B = self._pending_N[begin:end], self._block_B[: end - begin]
            for place, (other_N, coefficient) in enumerate(others):
                first, difference_B = empty and place == 0, other_N[begin:end]
                if first and own_N is not None:
                    scaled_difference(difference_B, own_N[begin:end], coefficient, pending_B)
                elif first:
                    torch.mul(difference_B, coefficient, out=pending_B)
                else:
                    if own_N is not None:
                        difference_B = torch.sub(difference_B, own_N[begin:end], out=block_B)
                    pending_B.add_(difference_B, alpha=coefficient)
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
            finite = finite and math.isfinite(block_B.sum().item())
        return finite

    def _blocks(self) -> Iterator[tuple[int, int]]:
        parameters = self.w_N.numel()
        return ((begin, min(begin + BLOCK, parameters)) for begin in range(0, parameters, BLOCK))
