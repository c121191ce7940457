"""A model's parameters as one flat vector, and back."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

from antiphon.errors import ArgumentError


def state_dict_of(model: nn.Module, weights_N: Tensor) -> dict[str, Tensor]:
    """Return the model's state_dict with its trainable parameters taken from a flat vector [N]."""
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    offset, places = 0, {}
    for parameter in trainable(model):
        places[id(parameter)] = offset
        offset += parameter.numel()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in places:
            begin = places[id(parameter)]
            state[name] = weights_N[begin : begin + parameter.numel()].view(parameter.shape).clone()
    return state


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that take part, tied ones once."""
    chosen = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not chosen:
        raise ArgumentError("the model has no parameter that requires a gradient")
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and (parameter.dtype != torch.float32 or parameter.device.type != "cpu"):
            raise ArgumentError(
                f"parameter {name} is {parameter.dtype} on {parameter.device}: this version exchanges float32"
                " parameters on the CPU; call model.float().cpu() first"
            )
    if any(buffer.is_floating_point() for buffer in model.buffers()):
        warnings.warn(
            "the model's floating-point buffers (BatchNorm statistics, say) stay with each learner: recompute them on"
            " the consensus model before evaluating it (torch.optim.swa_utils.update_bn)",
            stacklevel=4,
        )
    return chosen
