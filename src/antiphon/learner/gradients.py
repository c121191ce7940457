"""The mean of all learners' gradients, for strategies that apply it."""

from __future__ import annotations

from itertools import chain

import torch
from torch import Tensor
from torch.optim import Optimizer

from antiphon.errors import ArgumentError
from antiphon.learner.replica import Replica
from antiphon.transport.base import Rounds


class GradientMean:
    """Replaces a replica's gradients by their mean over the learners; one that is missing counts as zero.

    Buffers that are averaged are averaged along with them.

    Args:
        replica: the model and its one optimizer.
        meetings: one after the other, whom the mean is taken over: a learner's ranks, the learners.
    """

    def __init__(self, replica: Replica, *meetings: Rounds) -> None:
        self.replica, self.meetings = replica, meetings
        self._local_N = torch.zeros(replica.layout.size, device=replica.device)
        on_cpu = replica.device.type == "cpu"
        self._mean_N = self._local_N if on_cpu else torch.empty(replica.layout.size, pin_memory=True)

    def take(self, round: int) -> None:
        """Publish this learner's gradients, wait for the others', and write the mean."""
        leaves, layout = self.replica.leaves, self.replica.layout
        parts = layout.parameters_of(self._local_N)
        for part, leaf in zip(parts, leaves, strict=True):
            _copy(part, leaf.grad)
        for part, buffer in zip(layout.buffers_of(self._local_N), layout.buffers, strict=True):
            part.copy_(buffer)
        for rounds in self.meetings:
            rounds.start_average(round, self._local_N)
            rounds.finish_average(round, self._mean_N)
            if self._mean_N is not self._local_N:
                self._local_N.copy_(self._mean_N)
        for leaf, mean in zip(leaves, parts, strict=True):
            if leaf.grad is None:
                leaf.grad = mean.clone()
            else:
                leaf.grad.copy_(mean)
        for part, buffer in zip(layout.buffers_of(self._local_N), layout.buffers, strict=True):
            buffer.copy_(part)

    def unscale(self, optimizer: Optimizer) -> bool:
        """Take a GradScaler's scale out, where an optimizer would do so itself: learners' scales differ.

        Returns:
            Whether the gradients are not finite: they are then zero, and the mean is what the others have.
        """
        scale, found = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
        if found is None:
            return False
        optimizer.grad_scale = optimizer.found_inf = None  # type: ignore[attr-defined]
        if bool(found):
            self.forget()
            return True
        for leaf in self.replica.leaves:
            if leaf.grad is not None and scale is not None:
                leaf.grad.div_(scale)
        return False

    def forget(self) -> None:
        """Let this learner's gradients be zero: it takes part in the round, and has nothing to say."""
        for tensor in chain(self.replica.leaves, self.replica.layout.parameters):
            if tensor.grad is not None:
                tensor.grad.zero_()


def _copy(part: Tensor, gradient: Tensor | None) -> None:
    if gradient is None:
        part.zero_()
    elif gradient.layout != torch.strided:
        raise ArgumentError(
            "a gradient is sparse, and means of gradients are dense: make its layer with sparse=False, or use an"
            " asynchronous strategy"
        )
    else:
        part.copy_(gradient)
