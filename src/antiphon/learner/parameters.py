"""A model as one flat vector, and back: which of its tensors take part, and where each of them lies."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor, nn

from antiphon.errors import ArgumentError

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What is exchanged, in float32: wider numbers would be rounded."""


@dataclass(frozen=True)
class Layout:
    """Where a model lies in its learner's vector [N]: its parameters, its averaged buffers, a first moment for each.

    >>> layout = Layout((nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(4))), moments=True)
    >>> layout.size, [tuple(part.shape) for part in layout.parameters_of(torch.zeros(20))]
    (20, [(2, 3), (4,)])
    """

    parameters: tuple[nn.Parameter, ...]
    buffers: tuple[Tensor, ...] = ()
    moments: bool = False

    @property
    def shared(self) -> int:
        """How many values begin as learner 0's: parameters and buffers."""
        return sum(tensor.numel() for tensor in chain(self.parameters, self.buffers))

    @property
    def size(self) -> int:
        """N."""
        return self.shared + self.moments * _count(self.parameters)

    def parameters_of(self, vector_N: Tensor) -> list[Tensor]:
        """Return the parameters' parts of a vector, in their shapes."""
        return _views(vector_N, self.parameters)

    def buffers_of(self, vector_N: Tensor) -> list[Tensor]:
        """Return the averaged buffers' parts."""
        return _views(vector_N[_count(self.parameters) :], self.buffers)

    def moments_of(self, vector_N: Tensor) -> list[Tensor]:
        """Return the first moments' parts, one a parameter."""
        return _views(vector_N[self.shared :], self.parameters) if self.moments else []

    def state_dict(self, model: nn.Module, vector_N: Tensor) -> dict[str, Tensor]:
        """Return the model's state_dict with what the vector holds of it."""
        state = {name: value.detach().clone() for name, value in model.state_dict().items()}
        parts = {id(tensor): part for tensor, part in zip(self.parameters, self.parameters_of(vector_N), strict=True)}
        parts |= {id(tensor): part for tensor, part in zip(self.buffers, self.buffers_of(vector_N), strict=True)}
        for name, tensor in chain(
            model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
        ):
            if id(tensor) in parts and name in state:
                state[name].copy_(parts[id(tensor)])
        return state


def state_dict_of(model: nn.Module, weights_N: Tensor) -> dict[str, Tensor]:
    """Return the model's state_dict with its trainable parameters taken from a flat vector [N]."""
    return Layout(trainable(model)).state_dict(model, weights_N)


def trainable(model: nn.Module) -> tuple[nn.Parameter, ...]:
    """Return the parameters that take part, tied ones once.

    Raises:
        ArgumentError: there is none, or one whose numbers cannot be exchanged.
    """
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not named:
        raise ArgumentError("the model has no parameter that requires a gradient")
    devices = {parameter.device for _, parameter in named}
    if len(devices) > 1 or next(iter(devices)).type not in ("cpu", "cuda"):
        raise ArgumentError(
            f"the model's parameters lie on {', '.join(sorted(map(str, devices)))}: a learner's must lie on the CPU,"
            " or all on one CUDA device"
        )
    for name, parameter in named:
        if parameter.dtype not in DTYPES:
            raise ArgumentError(
                f"parameter {name} is {parameter.dtype}: exchanges are in float32, which would round it;"
                " call model.float() first"
            )
    return tuple(parameter for _, parameter in named)


def averageable(model: nn.Module) -> tuple[Tensor, ...]:
    """Return the floating-point buffers of the model's state, tied ones once; integers are never mixed.

    Raises:
        ArgumentError: one of them cannot be averaged.
    """
    saved = model.state_dict().keys()
    named = [(name, buffer) for name, buffer in model.named_buffers() if buffer.is_floating_point() and name in saved]
    for name, buffer in named:
        if buffer.dtype not in DTYPES:
            raise ArgumentError(
                f"buffer {name} is {buffer.dtype}: averaging it in float32 would round it;"
                " choose buffers='recompute' or 'local'"
            )
        if not bool(torch.isfinite(buffer).all()):
            raise ArgumentError(
                f"buffer {name} holds infinity or NaN, which has no mean: choose buffers='recompute' or 'local'"
            )
    return tuple(buffer for _, buffer in named)


def _count(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def _views(vector_N: Tensor, tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """Return the beginning of the vector in the shapes of ``tensors``."""
    sizes = [tensor.numel() for tensor in tensors]
    parts = torch.split(vector_N[: sum(sizes)], sizes)
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
