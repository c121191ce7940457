"""Settings: their bounds, their way through JSON, and the schedule of the learning rate."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from antiphon.config import ModelConfig, Schedule, TrainConfig, parse_slow
from antiphon.errors import ArgumentError


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("learners", 0, "learners must be at least 1, not 0"),
        ("epochs", 0, "epochs must be at least 1, not 0"),
        ("subsequence_frames", 0, "subsequence_frames must be at least 1, not 0"),
        ("threads_per_learner", 0, "threads_per_learner must be at least 1, not 0"),
        ("batch", 3, r"batch must be at least 4 \(one sample for each learner\), not 3"),
        ("seed", -1, "seed must be at least 0, not -1"),
        ("clip", -0.5, "clip must be at least 0, not -0.5"),
        ("clip", math.nan, "clip must be at least 0, not nan"),
        ("momentum", 1.0, r"momentum must lie in \[0, 1\), not 1.0"),
        ("momentum", math.nan, "momentum must lie"),
        ("timeout_s", 0.0, "timeout_s must be above 0, not 0.0"),
        ("lr", 0.0, "lr must be above 0 and finite, not 0.0"),
        ("lr", math.inf, "lr must be above 0 and finite, not inf"),
        ("first_lr", math.nan, "first_lr must be above 0 and finite, not nan"),
        ("warmup_epochs", -1.0, r"warmup_epochs \(-1\) must lie between 0 and hold_epochs \(10\)"),
        ("warmup_epochs", 12.0, r"warmup_epochs \(12\) must lie between 0 and hold_epochs \(10\)"),
        ("layers", 0, "layers must be at least 1, not 0"),
        ("cells", 0, "cells must be at least 2, not 0"),
        ("cells", 5, "cells must be even, half of them for each direction, not 5"),
        ("bottleneck", 0, "bottleneck must be at least 1, not 0"),
        ("dropout", 1.0, r"dropout must lie in \[0, 1\), not 1.0"),
        ("slow", {4: 2.0}, r"slow 4=2: learners are 0..3, the factor is 1 to 1e\+06"),
        ("slow", {-1: 2.0}, r"slow -1=2: learners are 0..3"),
        ("slow", {0: 0.5}, r"slow 0=0.5: learners are 0..3, the factor is 1 to 1e\+06"),
        ("slow", {0: math.inf}, r"slow 0=inf"),
        ("clip", math.inf, "clip must be at most"),
        ("hold_epochs", math.inf, "hold_epochs must be at most"),
        ("timeout_s", math.inf, "timeout_s must be at most"),
        ("seed", 2**64, "seed must be at most"),
        ("slow", {0: math.nan}, r"slow 0=nan"),
    ],
)
def test_bounds(name: str, value: Any, text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        TrainConfig().with_changes(**{name: value})


def test_the_least_values_are_allowed() -> None:
    config = TrainConfig(learners=1, batch=1, epochs=1, clip=0.0, momentum=0.0, slow={0: 1.0})
    assert config.local_batch == 1
    assert ModelConfig(layers=1, cells=2, bottleneck=1, dropout=0.0).cells == 2


def test_the_share_of_a_learner_is_rounded_down() -> None:
    assert TrainConfig(batch=64, learners=3).local_batch == 21


def test_settings_survive_a_file() -> None:
    config = TrainConfig(
        strategy="allreduce",
        learners=8,
        batch=100,
        slow={3: 2.5},
        schedule=Schedule(lr=0.2, first_lr=0.1, warmup_epochs=1, hold_epochs=2.5),
        model=ModelConfig(layers=3, cells=10, bottleneck=7, dropout=0.1),
    )
    assert TrainConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


@pytest.mark.parametrize(
    ("path", "offered"), [((), "learners"), (("schedule",), "hold_epochs"), (("model",), "bottleneck")]
)
def test_an_unknown_field_of_a_file_is_named(path: tuple[str, ...], offered: str) -> None:
    row = TrainConfig().to_json()
    section = row
    for name in path:
        section = section[name]
    section[offered + "s"] = 1
    with pytest.raises(ArgumentError, match=f"unknown setting '{offered}s': did you mean '{offered}'"):
        TrainConfig.from_json(row)


def test_changes_reach_their_section_and_none_changes_nothing() -> None:
    config = TrainConfig().with_changes(learners=2, lr=0.3, cells=64, epochs=None, strategy=None)
    assert (config.learners, config.schedule.lr, config.model.cells) == (2, 0.3, 64)
    assert config.epochs == TrainConfig().epochs and config.strategy == TrainConfig().strategy
    assert config.schedule.first_lr == TrainConfig().schedule.first_lr
    assert TrainConfig().with_changes() == TrainConfig()


def test_a_section_may_be_replaced_and_changed_at_once() -> None:
    config = TrainConfig().with_changes(model=ModelConfig(layers=6, cells=1024), cells=512)
    assert (config.model.layers, config.model.cells) == (6, 512)


def test_an_unknown_change_is_named() -> None:
    with pytest.raises(ArgumentError, match="unknown setting 'learner': did you mean 'learners'"):
        TrainConfig().with_changes(learner=3)


def test_slow_learners_are_read() -> None:
    assert parse_slow(["3=10", "0=1.5"]) == {3: 10.0, 0: 1.5}
    assert parse_slow([]) == {}


@pytest.mark.parametrize("text", ["foo", "3", "3=", "=2", "x=2", "1.5=2", "1=fast"])
def test_a_slow_learner_that_cannot_be_read(text: str) -> None:
    with pytest.raises(ArgumentError, match=f"--slow {text}: expected LEARNER=FACTOR, such as 3=10"):
        parse_slow([text])


# Schedule


def test_the_schedule_of_the_paper_at_batch_8192() -> None:
    # arXiv 2110.11199: from 0.1 to 1.0 in a line over 10 epochs, then times 1/sqrt(2) an epoch up to epoch 16.
    paper = Schedule(lr=1.0, first_lr=0.1, warmup_epochs=10, hold_epochs=10)
    assert paper.at(0) == pytest.approx(0.1)
    assert paper.at(5) == pytest.approx(0.55)
    assert paper.at(9.999) == pytest.approx(1.0, abs=1e-3)
    for epoch in range(10, 16):
        assert paper.at(epoch) == pytest.approx(2 ** (-(epoch - 9) / 2))
        assert paper.at(epoch + 0.99) == paper.at(epoch)


def test_the_rate_is_held_between_warm_up_and_decay() -> None:
    schedule = Schedule(lr=0.4, first_lr=0.1, warmup_epochs=2, hold_epochs=5)
    assert [schedule.at(epoch) for epoch in (2, 3.5, 4.9)] == [0.4] * 3
    assert schedule.at(5) == pytest.approx(0.4 / math.sqrt(2))
    assert schedule.at(7) == pytest.approx(0.4 / math.sqrt(8))


def test_without_warm_up_the_rate_starts_full() -> None:
    assert Schedule(lr=0.4, first_lr=0.1, warmup_epochs=0, hold_epochs=3).at(0) == 0.4
