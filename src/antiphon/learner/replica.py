"""One learner's model and optimizers, laid into its vector of weights.

What the vector w holds, in float32:
- a float32 parameter *is* its part of w: nothing is ever copied;
- a parameter of lower precision has a master there, on which the optimizer steps (in bfloat16, w + lr g is often w);
- a buffer that is averaged has a master too: its learner's forward pass moves the buffer, exchanges move the master;
- a first moment that is averaged *is* its part of w, as soon as the optimizer has made it.

Masters come into play as the optimizer's step begins, and go as it ends: outside of it everybody (zero_grad, clipping,
GradScaler, schedulers, state_dict) sees the model's own parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from antiphon.errors import ArgumentError
from antiphon.learner.parameters import Layout, averageable, trainable

BUFFERS = ("recompute", "local", "average")
OPTIMIZER_STATES = ("local", "average")
FIRST_MOMENTS = ("momentum_buffer", "exp_avg")
"""Their mean is that of the steps. A second moment's is not, and mixing differences could leave it negative: local."""


class Replica:
    """A model and its optimizers as one vector.

    Args:
        model: its trainable parameters take part.
        optimizers: over these parameters, each in one of them at most.
        buffers: ``average`` makes the floating-point buffers part of the vector; else they stay out of it.
        optimizer_state: ``average`` makes the first moments part of the vector.

    Raises:
        ArgumentError: a tensor or an optimizer that cannot take part, an unknown choice.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        buffers: str = "recompute",
        optimizer_state: str = "local",
    ) -> None:
        _known("buffers", buffers, BUFFERS)
        _known("optimizer_state", optimizer_state, OPTIMIZER_STATES)
        self.model, self.optimizers = model, tuple(optimizers)
        averaged = averageable(model) if buffers == "average" else ()
        self.layout = Layout(trainable(model), averaged, moments=optimizer_state == "average")
        self.device = self.layout.parameters[0].device
        self.leaves: list[Tensor] = []
        """What the optimizers step on, in the order of the vector: the parameters, or their masters."""
        self._masters: dict[nn.Parameter, nn.Parameter] = {}
        self._owners: dict[nn.Parameter, nn.Parameter] = {}
        self._buffers: list[tuple[Tensor, Tensor]] = []
        self._moments: dict[Tensor, Tensor] = {}
        self._adopted: set[Tensor] = set()
        self._frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
        self._check(optimizers)

    def fill(self, vector_N: Tensor) -> None:
        """Write the parameters and buffers into a vector."""
        tensors = chain(self.layout.parameters, self.layout.buffers)
        parts = chain(self.layout.parameters_of(vector_N), self.layout.buffers_of(vector_N))
        for part, tensor in zip(parts, tensors, strict=True):
            part.copy_(tensor.detach())

    def bind(self, w_N: Tensor) -> None:
        """Live in ``w_N`` from here on, with the weights that it holds."""
        self._w_N = w_N
        own = _with_memory_of_their_own(self.model)
        for parameter, part in zip(self.layout.parameters, self.layout.parameters_of(w_N), strict=True):
            if parameter.dtype == torch.float32 and parameter not in own:
                parameter.data = part
            else:
                self._masters[parameter] = nn.Parameter(part)
        self._owners = {master: parameter for parameter, master in self._masters.items()}
        self.leaves = [self._masters.get(parameter, parameter) for parameter in self.layout.parameters]
        self._buffers = list(zip(self.layout.buffers, self.layout.buffers_of(w_N), strict=True))
        if self.layout.moments:
            self._moments = dict[Tensor, Tensor](zip(self.layout.parameters, self.layout.moments_of(w_N), strict=True))
        self.scatter()
        self._adopt()

    def begin(self, optimizer: Optimizer) -> None:
        """Let the optimizer step on the masters, with the gradients of the parameters."""
        for parameter in self._frozen:
            if parameter.requires_grad:
                raise ArgumentError(
                    "a parameter that was frozen when the Learner was made requires a gradient now, and would not be"
                    " exchanged: make the Learner with it trainable, and hold it by a learning rate of 0 meanwhile"
                )
        for group in optimizer.param_groups if self._masters else ():
            # In place: an optimizer such as LBFGS keeps the list.
            for place, parameter in enumerate(group["params"]):
                if (master := self._masters.get(parameter)) is not None:
                    group["params"][place] = master
                    _move_state(optimizer, parameter, master)
                    _give_gradient(parameter, master)

    def end(self, optimizer: Optimizer) -> None:
        """Give the optimizer the model's own parameters back; doing so twice is harmless."""
        for group in optimizer.param_groups if self._masters else ():
            for place, master in enumerate(group["params"]):
                if (parameter := self._owners.get(master)) is not None:
                    group["params"][place] = parameter
                    _move_state(optimizer, master, parameter)

    def gather(self) -> None:
        """Take into w what has changed outside of it: buffers, and moments that the optimizer has just made."""
        for buffer, part in self._buffers:
            part.copy_(buffer)
        self._adopt()

    def scatter(self) -> None:
        """Bring w to what lies outside of it: parameters of lower precision, and buffers."""
        with torch.no_grad():
            for parameter, master in self._masters.items():
                parameter.copy_(master)
            for buffer, part in self._buffers:
                buffer.copy_(part)

    def unbind(self) -> None:
        """Give everything memory of its own: w, which others may still read, keeps the last weights."""
        shared = self._w_N.untyped_storage().data_ptr()
        for parameter in self.layout.parameters:
            if parameter.data.untyped_storage().data_ptr() == shared:
                parameter.data = parameter.data.clone()
        for optimizer in self.optimizers:
            self.end(optimizer)
            for state in optimizer.state.values():
                for key in FIRST_MOMENTS:
                    if isinstance(value := state.get(key), Tensor) and value.untyped_storage().data_ptr() == shared:
                        state[key] = value.clone()

    def restart(self) -> None:
        """Go on with other weights, which lie in w already: the optimizers begin anew."""
        for optimizer in self.optimizers:
            optimizer.state.clear()
        self._adopted.clear()
        self.scatter()

    def finite(self) -> bool:
        """Say whether all gradients are finite."""
        gradients = (p.grad for o in self.optimizers for group in o.param_groups for p in group["params"])
        return all(bool(torch.isfinite(gradient).all()) for gradient in gradients if gradient is not None)

    def check_moments(self, optimizer: Optimizer) -> None:
        """See, after a step, that there are first moments to average."""
        if self._moments and not any(key in state for state in optimizer.state.values() for key in FIRST_MOMENTS):
            raise ArgumentError(
                f"{type(optimizer).__name__} keeps no first moment ({' or '.join(FIRST_MOMENTS)}) that could be"
                " averaged: choose optimizer_state='local'"
            )

    def _adopt(self) -> None:
        """Lay first moments into w: one made anew is added to what exchanges have brought, one loaded replaces it."""
        for optimizer in self.optimizers if self._moments else ():
            for parameter, state in optimizer.state.items():
                for key in FIRST_MOMENTS:
                    value, part = state.get(key), self._moments.get(parameter)
                    if value is None or part is None or value.data_ptr() == part.data_ptr():
                        continue
                    if parameter in self._adopted:
                        part.copy_(value)
                    else:
                        part.add_(value)
                    self._adopted.add(parameter)
                    state[key] = part

    def _check(self, optimizers: Sequence[Optimizer]) -> None:
        if not optimizers:
            raise ArgumentError("optimizer must be one of torch.optim, or a list of them, not an empty list")
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        seen: set[Tensor] = set()
        for parameter in (p for o in optimizers for group in o.param_groups for p in group["params"]):
            if parameter not in names:
                raise ArgumentError(
                    f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that is not the model's, and"
                    " would not be exchanged: make both part of one module, torch.nn.ModuleList([...]) say"
                )
            if parameter in seen:
                raise ArgumentError(f"parameter {names[parameter]} is in two optimizers: it can be in one only")
            seen.add(parameter)


def _known(argument: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ArgumentError(f"{argument} must be one of {', '.join(choices)}, not {value!r}")


def _with_memory_of_their_own(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters of recurrent layers on a GPU: cuDNN wants each layer's in one piece, in its own order."""
    layers = (module for module in model.modules() if isinstance(module, nn.RNNBase))
    return {parameter for layer in layers for parameter in layer.parameters() if parameter.is_cuda}


def _move_state(optimizer: Optimizer, old: Tensor, new: Tensor) -> None:
    """Let the state of ``old`` be that of ``new``, in float32 where it follows the parameter."""
    if old not in optimizer.state:
        return
    state = optimizer.state[new] = optimizer.state.pop(old)
    for key, value in state.items():
        if isinstance(value, Tensor) and value.shape == new.shape and value.dtype in (torch.bfloat16, torch.float16):
            state[key] = value.float()


def _give_gradient(parameter: nn.Parameter, master: nn.Parameter) -> None:
    if parameter.grad is None:
        master.grad = None
    elif master.grad is None or parameter.grad.is_sparse:
        master.grad = parameter.grad.float()
    else:
        master.grad.copy_(parameter.grad)
