"""The benchmark of faults: its plan, its fields, and one short run of it."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from antiphon.errors import ArgumentError, LearnerError

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def faults() -> Iterator[object]:
    sys.path.insert(0, str(BENCHMARKS))
    yield importlib.import_module("faults")
    sys.path.remove(str(BENCHMARKS))
    for name in ("common", "straggling", "faults"):
        sys.modules.pop(name, None)


def args_of(faults, *words):
    parser = argparse.ArgumentParser()
    faults.configure(parser)
    return parser.parse_args(words)


def test_the_fault_comes_after_a_whole_window(faults):
    plan = faults.plan_of(args_of(faults, "--seconds", "4", "--wait", "0.17", "--learners", "3", "--batch", "9"))
    assert plan.fault_step == 3 + 20 + 2
    assert (plan.fault("freeze"), plan.fault("kill")) == ("freeze:2@25:4", "kill:2@25")
    assert plan.samples == (25 + 50) * 3 * 3


def test_when_a_fault_struck_is_read_off_the_steps(faults):
    trace_K4 = np.zeros((4, 4))
    trace_K4[:, 0] = [1.0, 2.0, 7.5, 8.5]
    assert faults.gap(trace_K4, 2) == (2.0, 7.5)
    with pytest.raises(LearnerError, match="made 4 steps, and none after it"):
        faults.gap(trace_K4, 4)


def test_fields_are_medians_and_what_always_held(faults):
    rows = [{"others_rate_ratio": r, "rejoined": ok} for r, ok in ((0.9, True), (1.1, False), (1.0, True))]
    assert faults.fields(rows) == {
        "others_rate_ratio": 1.0,
        "rejoined": False,
        "samples": {"others_rate_ratio": [0.9, 1.1, 1.0], "rejoined": [True, False, True]},
    }


def test_arguments_outside_their_bounds(faults):
    for words in (["--learners", "1"], ["--seconds", "0"], ["--batch", "3"]):
        with pytest.raises(ArgumentError):
            faults.plan_of(args_of(faults, *words))
    with pytest.raises(ArgumentError, match="'frieze' is none of"):
        faults.kinds_of("kill,frieze")


@pytest.mark.long
def test_a_short_run(faults, monkeypatch):
    monkeypatch.setattr(faults, "MARGIN_S", 1.0)
    words = ("--learners", "2", "--seconds", "1", "--wait", "0.05", "--batch", "2", "--kinds", "nan")
    args = args_of(faults, *words)
    args.repeats, args.json = 1, True
    values = faults.run(args)["nan"]
    assert values["others_finite"] and values["reseeded"] and 0.2 < values["others_rate_ratio"] < 5
