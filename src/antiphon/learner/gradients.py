"""The mean of all learners' gradients, for strategies that apply it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from antiphon.transport.base import Transport


class GradientMean:
    """Replaces the gradients of ``parameters`` by their mean over the learners; one that is missing counts as zero."""

    def __init__(self, parameters: Sequence[nn.Parameter], transport: Transport) -> None:
        self.parameters, self.transport = parameters, transport
        self._sizes = [parameter.numel() for parameter in parameters]
        self._mean_N = torch.empty(sum(self._sizes))

    def take(self, round: int) -> None:
        """Publish this learner's gradients, wait for the others', and write the mean."""
        parts = [
            torch.zeros(size) if parameter.grad is None else parameter.grad.reshape(-1)
            for parameter, size in zip(self.parameters, self._sizes, strict=True)
        ]
        torch.cat(parts, out=self._mean_N)
        self.transport.start_average(round, self._mean_N)
        self.transport.finish_average(round, self._mean_N)
        for parameter, mean in zip(self.parameters, torch.split(self._mean_N, self._sizes), strict=True):
            if parameter.grad is None:
                parameter.grad = mean.view(parameter.shape).clone()
            else:
                parameter.grad.copy_(mean.view(parameter.shape))
