"""The statistics of BatchNorm: each learner's are of its own weights, and a consensus model needs its own."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn


def warn_of_statistics(model: nn.Module) -> None:
    """Say what becomes of floating-point buffers where nobody has chosen."""
    if any(buffer.is_floating_point() for buffer in model.buffers()):
        warnings.warn(
            "the model's floating-point buffers (BatchNorm statistics, say) stay with each learner: give some training"
            " inputs to consensus(batches=...), which recomputes them, and say buffers='recompute' to the Learner (or"
            " 'local', or 'average')",
            stacklevel=3,
        )


def recomputed(model: nn.Module, state: dict[str, Tensor], batches: Iterable[Any]) -> dict[str, Tensor]:
    """Return ``state`` with the running statistics of ``model`` computed anew, on a copy of it.

    Args:
        model: whose class and buffers these are; it stays as it is.
        state: its weights.
        batches: any number of batches, each an input or a tuple of which the first is the input, such as a loader
            gives; or a single input.
    """
    if isinstance(batches, Tensor):
        batches = [batches]
    replica = copy.deepcopy(model)
    replica.load_state_dict(state)
    device = next(model.parameters()).device
    with torch.no_grad():
        update_bn(batches, replica, device)
    return {name: value.detach().clone() for name, value in replica.state_dict().items()}
