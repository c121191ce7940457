"""The settings of a training run: frozen, checked, and written whole into the run's folder. Knows no torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from antiphon.errors import ArgumentError, unknown_name

Json = dict[str, Any]
MOST_EPOCHS, MOST_S, MOST_SLOW = 1e9, 1e8, 1e6
Section = TypeVar("Section")


def _names(section: type[Any]) -> set[str]:
    return {entry.name for entry in fields(section)}


def _build(section: type[Section], values: Mapping[str, Any]) -> Section:
    for name in values:
        if name not in _names(section):
            raise unknown_name("setting", name, _names(section))
    return section(**values)


def _at_most(name: str, value: float, most: float) -> None:
    if not value <= most:
        raise ArgumentError(f"{name} must be at most {most:g}, not {value:g}")


def _at_least(name: str, value: float, least: float, reason: str = "") -> None:
    if not value >= least:  # so that NaN is refused too
        raise ArgumentError(f"{name} must be at least {least:g}{f' ({reason})' if reason else ''}, not {value:g}")


@dataclass(frozen=True)
class ModelConfig:
    """The acoustic model: bidirectional LSTM layers, a linear bottleneck, a softmax over the states.

    ``cells`` counts both directions, as the paper does: 1,024 cells are 512 a direction.
    """

    layers: int = 2
    cells: int = 256
    bottleneck: int = 128
    dropout: float = 0.2

    def __post_init__(self) -> None:
        """Check the bounds."""
        _at_least("layers", self.layers, 1)
        _at_least("cells", self.cells, 2)
        if self.cells % 2:
            raise ArgumentError(f"cells must be even, half of them for each direction, not {self.cells}")
        _at_least("bottleneck", self.bottleneck, 1)
        if not 0 <= self.dropout < 1:
            raise ArgumentError(f"dropout must lie in [0, 1), not {self.dropout}")


@dataclass(frozen=True)
class Schedule:
    """The learning rate over global progress (arXiv 2110.11199, section on large batches).

    From ``first_lr`` in a line to ``lr`` over the first ``warmup_epochs``, then times 1/sqrt(2) each epoch:
    lr 2^(-(floor(e) - hold + 1) / 2) from epoch ``hold_epochs`` on, which is the end of the warm-up in the paper.

    >>> paper = Schedule(lr=1.0, first_lr=0.1, warmup_epochs=10, hold_epochs=10)
    >>> [round(paper.at(epoch), 3) for epoch in (0, 5, 10, 11)]
    [0.1, 0.55, 0.707, 0.5]
    """

    lr: float = 1.0
    first_lr: float = 0.1
    warmup_epochs: float = 10.0
    hold_epochs: float = 10.0

    def __post_init__(self) -> None:
        """Check the bounds."""
        for name in ("lr", "first_lr"):
            if not 0 < getattr(self, name) < math.inf:
                raise ArgumentError(f"{name} must be above 0 and finite, not {getattr(self, name)}")
        _at_most("hold_epochs", self.hold_epochs, MOST_EPOCHS)
        if not 0 <= self.warmup_epochs <= self.hold_epochs:
            raise ArgumentError(
                f"warmup_epochs ({self.warmup_epochs:g}) must lie between 0 and hold_epochs ({self.hold_epochs:g})"
            )

    def at(self, epoch: float) -> float:
        """Return the rate after ``epoch`` epochs of all learners' work together."""
        if epoch < self.warmup_epochs:
            return self.first_lr + (self.lr - self.first_lr) * epoch / self.warmup_epochs
        return float(self.lr * 2 ** (-max(0.0, epoch // 1 - self.hold_epochs + 1) / 2))


@dataclass(frozen=True)
class TrainConfig:
    """Everything that a training run depends on besides its data."""

    strategy: str = "random-ring"
    learners: int = 4
    ranks_per_learner: int = 1
    seed: int = 0
    batch: int = 64
    epochs: int = 16
    momentum: float = 0.9
    clip: float = 5.0
    """Largest norm of a learner's gradient; 0 leaves it alone."""
    subsequence_frames: int = 21
    threads_per_learner: int = 1
    timeout_s: float = 300.0
    slow: dict[int, float] = field(default_factory=dict)
    schedule: Schedule = Schedule(lr=0.5, first_lr=0.1, warmup_epochs=3, hold_epochs=10)
    model: ModelConfig = ModelConfig()

    def __post_init__(self) -> None:
        """Check the bounds; the strategy's name is checked where strategies are known."""
        for name in ("learners", "ranks_per_learner", "epochs", "subsequence_frames", "threads_per_learner"):
            _at_least(name, getattr(self, name), 1)
        reason = f"one sample for each {'rank of each ' if self.ranks_per_learner > 1 else ''}learner"
        _at_least("batch", self.batch, self.learners * self.ranks_per_learner, reason)
        _at_least("seed", self.seed, 0)
        _at_least("clip", self.clip, 0)
        for name, most in (("seed", 2**63 - 1), ("clip", 1e30), ("timeout_s", MOST_S), ("threads_per_learner", 1024)):
            _at_most(name, getattr(self, name), most)
        if not 0 <= self.momentum < 1:
            raise ArgumentError(f"momentum must lie in [0, 1), not {self.momentum}")
        if not self.timeout_s > 0:
            raise ArgumentError(f"timeout_s must be above 0, not {self.timeout_s}")
        for learner, factor in self.slow.items():
            if not 0 <= learner < self.learners or not 1 <= factor <= MOST_SLOW:
                raise ArgumentError(
                    f"slow {learner}={factor:g}: learners are 0..{self.learners - 1}, the factor is 1 to {MOST_SLOW:g}"
                )

    @property
    def local_batch(self) -> int:
        """Samples in one learner's share of the batch."""
        return self.batch // self.learners

    def to_json(self) -> Json:
        """Return the settings as one JSON object."""
        return {**dataclasses.asdict(self), "slow": {str(k): v for k, v in self.slow.items()}}

    @classmethod
    def from_json(cls, row: Json) -> TrainConfig:
        """Build the settings from what `to_json` gave.

        Raises:
            ArgumentError: a field is unknown or outside its bounds.
        """
        values = dict(row)
        values["slow"] = {int(learner): float(factor) for learner, factor in row.get("slow", {}).items()}
        values["schedule"] = _build(Schedule, row.get("schedule", {}))
        values["model"] = _build(ModelConfig, row.get("model", {}))
        return _build(cls, values)

    def with_changes(self, **changes: Any) -> TrainConfig:
        """Return a copy with the changes that are not None; names may belong to the schedule or the model."""
        changes = {name: value for name, value in changes.items() if value is not None}
        own = {name: value for name, value in changes.items() if name in _names(TrainConfig)}
        schedule = {name: value for name, value in changes.items() if name in _names(Schedule)}
        model = {name: value for name, value in changes.items() if name in _names(ModelConfig)}
        if unknown := changes.keys() - own.keys() - schedule.keys() - model.keys():
            raise unknown_name("setting", min(unknown), _names(TrainConfig) | _names(Schedule) | _names(ModelConfig))
        own["schedule"] = dataclasses.replace(own.get("schedule", self.schedule), **schedule)
        own["model"] = dataclasses.replace(own.get("model", self.model), **model)
        return dataclasses.replace(self, **own)


def parse_slow(texts: list[str]) -> dict[int, float]:
    """Read ``LEARNER=FACTOR``.

    Raises:
        ArgumentError: it is not of that form.

    >>> parse_slow(["3=10"])
    {3: 10.0}
    """
    slow: dict[int, float] = {}
    for text in texts:
        learner, _, factor = text.partition("=")
        try:
            slow[int(learner)] = float(factor)
        except ValueError:
            raise ArgumentError(f"--slow {text}: expected LEARNER=FACTOR, such as 3=10") from None
    return slow
