"""The benchmark for one CUDA card, as far as it goes without one."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

import pytest
import torch

from antiphon.errors import ArgumentError


@pytest.fixture
def one_card(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    yield importlib.import_module("one_card")
    for name in ("one_card", "common"):
        sys.modules.pop(name, None)


def args_of(module, *words):
    parser = argparse.ArgumentParser()
    module.configure(parser)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json", action="store_true", default=True)
    return parser.parse_args(words)


@pytest.mark.long
def test_a_dry_run_gives_its_fields(one_card):
    args = args_of(one_card, "--device=cpu", "--model=small", "--batch=1", "--learners=2", "--seconds=1")
    result = one_card.run(args)
    (sample,) = result["samples"]
    assert (result["command"], result["device"], result["learners"]) == ("benchmarks/one_card.py", "cpu", 2)
    assert result["tests"]["passed"] is None
    assert sample["apart"]["exchanges_per_step"] == 0.0 < sample["together"]["exchanges_per_step"]
    assert result["step_ratio"] == sample["together"]["step_s"] / sample["apart"]["step_s"]
    assert 0.0 <= result["hidden"] <= 1.0 and sample["exchange_alone_s"] > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_card_it_says_so(one_card):
    with pytest.raises(ArgumentError, match="no CUDA device here: --device cpu"):
        one_card.run(args_of(one_card))
