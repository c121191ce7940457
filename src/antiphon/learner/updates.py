"""Watches the optimizers of a learner: each of their steps is a change of the weights, with a beginning and an end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from antiphon.errors import ArgumentError
from antiphon.learner.gradients import GradientMean
from antiphon.learner.replica import Replica
from antiphon.learner.weights import Weights

NO_STEP = "step() ended without a call of the optimizer's step()"


class Updates:
    """Between `begin` and `finish` each optimizer may step once, and one has to.

    Args:
        replica: the model and its optimizers.
        weights: what the replica lives in.
        gradients: their mean, where the strategy averages them.
        known: called once a step, when the gradients are known and none has been applied.
    """

    def __init__(
        self, replica: Replica, weights: Weights, gradients: GradientMean | None, known: Callable[[], None]
    ) -> None:
        self.replica, self.weights, self.gradients, self._known = replica, weights, gradients, known
        self.skipped = 0
        """Steps that an optimizer did not make, for a GradScaler found gradients that are not finite."""
        self._waiting: list[Optimizer] = []
        """The optimizers that have not stepped yet in the step in hand."""
        self._known_already = False
        self._hooks = [
            hook
            for optimizer in replica.optimizers
            for hook in (
                optimizer.register_step_pre_hook(self._before),
                optimizer.register_step_post_hook(lambda optimizer, *_: self._after(optimizer)),
            )
        ]

    def begin(self) -> None:
        """Expect one step of each optimizer."""
        self._waiting, self._known_already = list(self.replica.optimizers), False

    def finish(self) -> None:
        """Take what has not stepped for resting, and fold.

        Of several optimizers some may rest. Where none has stepped, a GradScaler has found gradients that are not
        finite: the learner takes part in the round nonetheless, and where gradients are averaged it has nothing to
        say and applies the mean as the others do, so that all stay equal.

        Raises:
            ArgumentError: none has stepped, though the gradients are finite.
        """
        if not self._waiting:
            return
        if not self._known_already:
            if self.replica.finite():
                raise ArgumentError(NO_STEP)
            self.skipped += 1
            if self.gradients:
                self.gradients.forget()
                self.replica.optimizers[0].step()
                return
            self._gradient_known()
        self._waiting.clear()
        self.settle(wait=False)

    def settle(self, wait: bool = True) -> None:
        """Fold what exchanges added, without a step."""
        self.weights.begin_step()
        self._land(fold=True, wait=wait)

    def replace(self, w_N: Tensor) -> None:
        """Go on with other weights [N]."""
        self.weights.begin_step()
        self.weights.w_N.copy_(w_N)
        self.weights.end_step(fold=False)
        self.replica.scatter()

    def give_up(self) -> None:
        """Leave the optimizers whole after a step that has failed."""
        self._waiting.clear()
        for optimizer in self.replica.optimizers:
            self.replica.end(optimizer)

    def close(self) -> None:
        """Watch no more."""
        for hook in self._hooks:
            hook.remove()

    def _before(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A step begins: its gradient is known, or is as soon as its closure has been evaluated."""
        if optimizer not in self._waiting:
            raise ArgumentError("the optimizer's step() must be called once, inside `with learner.step():`")
        args = tuple(self._evaluated(optimizer, value) if callable(value) else value for value in args)
        kwargs = {key: self._evaluated(optimizer, value) if callable(value) else value for key, value in kwargs.items()}
        self.replica.begin(optimizer)
        if self.gradients:
            self.skipped += self.gradients.unscale(optimizer)
        if not self._known_already:
            self._gradient_known()
        self.weights.begin_step()
        return args, kwargs

    def _gradient_known(self) -> None:
        self._known_already = True
        self._known()

    def _after(self, optimizer: Optimizer) -> None:
        """A step has moved w: with the last of them, fold what exchanges have added."""
        self.replica.end(optimizer)
        self.replica.check_moments(optimizer)
        self._waiting.remove(optimizer)
        self._land(fold=not self._waiting, wait=False)

    def _land(self, fold: bool, wait: bool) -> None:
        self.replica.gather()
        self.weights.end_step(fold, wait)
        self.replica.scatter()

    def _evaluated(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Evaluate a closure while the weights stand still; return one that gives its value, and evaluates after that.

        Most optimizers evaluate theirs once. LBFGS does so many times a step, at weights of its own choosing.
        """
        with torch.enable_grad():
            values = [closure()]

        def again() -> Any:
            if values:
                return values.pop()
            if self.gradients:
                raise ArgumentError(
                    f"{type(optimizer).__name__} evaluates its closure several times a step, and this strategy averages"
                    " gradients once a step: use one that does not, such as random-ring"
                )
            self.replica.end(optimizer)
            self.replica.scatter()
            value = closure()
            self.replica.begin(optimizer)
            return value

        return again
