"""The model of the exchange, checked by Spin: exhaustively where nothing else is said, and each planted fault caught.

Spin and gcc are Debian packages (`apt-get install spin gcc`). Without them the tests are skipped, unless the
environment variable ANTIPHON_NEEDS_SPIN says that they must be there, as `make test-long` does.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

MODEL = Path(__file__).with_name("exchange.pml")
FAULTS = dict(
    re.findall(r"^#define ([A-Z_]+) (\d+) +/\*", MODEL.read_text().split("#define PROPOSE")[0], flags=re.MULTILINE)
)
SAFETY = ("-DSAFETY", "-DCOLLAPSE")
LIVENESS = ("-DCOLLAPSE", "-DNFAIR=7")


@pytest.fixture(autouse=True)
def spin() -> None:
    missing = [name for name in ("spin", "gcc") if shutil.which(name) is None]
    if missing and os.environ.get("ANTIPHON_NEEDS_SPIN"):
        pytest.fail(f"{' and '.join(missing)} missing: apt-get install spin gcc")
    if missing:
        pytest.skip(f"needs {' and '.join(missing)}: apt-get install spin gcc")


@dataclass(frozen=True)
class Verdict:
    errors: int
    states: int
    text: str


def check(folder: Path, *settings: str, deadline_s: float = 600.0) -> Verdict:
    """Let Spin make a verifier with these settings (NAME=VALUE), and run it."""
    live = any(setting.startswith("LIVE") for setting in settings)
    commands = [
        ["spin", *(f"-D{setting}" for setting in settings), "-a", str(MODEL)],
        ["gcc", "-O1", "-w", *(LIVENESS if live else SAFETY), "-o", "pan", "pan.c"],
    ]
    for command in commands:
        made = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
        assert made.returncode == 0 and "rror:" not in made.stdout, made.stdout + made.stderr
    run = ["./pan", "-m1000000", *(("-a", "-f") if live else ())]
    text = subprocess.run(run, cwd=folder, capture_output=True, text=True, timeout=deadline_s).stdout
    errors, states = re.search(r"errors: (\d+)", text), re.search(r"(\d+(?:\.\d+e\+\d+)?) states, stored", text)
    assert errors and states, text
    assert "max search depth too small" not in text and "out of memory" not in text, text
    return Verdict(int(errors[1]), int(float(states[1])), text)


def assert_proved(verdict: Verdict, at_least: int) -> None:
    """No error, in a search no smaller than it has been: a model that is stuck at its start has none either."""
    assert verdict.errors == 0, verdict.text
    assert verdict.states >= at_least, verdict.text


def test_two_learners_with_everything_that_can_go_wrong_once(tmp_path):
    assert_proved(check(tmp_path, "N=2", "ROUNDS=1", "KILLS=1", "RETURNS=1"), 10_000)


def test_two_learners_come_to_an_end_once_losses_stop(tmp_path):
    assert_proved(check(tmp_path, "N=2", "ROUNDS=1", "KILLS=1", "LOSSES=1", "LIVE"), 1_000)


@pytest.mark.long
@pytest.mark.parametrize(
    ("settings", "at_least"),
    [
        ("N=2 ROUNDS=2 KILLS=1", 10_000),
        ("N=2 ROUNDS=3 KILLS=1", 300_000),
        ("N=2 ROUNDS=2 KILLS=1 MISTAKES=1", 50_000),
        ("N=2 ROUNDS=1 KILLS=2 RETURNS=1 MISTAKES=1", 50_000),
        ("N=3 ROUNDS=1 KILLS=1", 400_000),
        ("N=3 ROUNDS=1 KILLS=2", 450_000),
        ("N=3 ROUNDS=1 KILLS=0 MISTAKES=1", 300_000),
        ("N=2 ROUNDS=2 KILLS=1 LOSSES=2 LIVE", 10_000),
        ("N=2 ROUNDS=1 KILLS=1 RETURNS=1 MISTAKES=1 LOSSES=2 LIVE", 100_000),
    ],
)
def test_exhaustively(settings, at_least, tmp_path):
    assert_proved(check(tmp_path, *settings.split()), at_least)


CAUGHT_BY = {
    "ACCEPTS_MANY": "N=3 ROUNDS=1 KILLS=0",
    "STARTS_MANY": "N=3 ROUNDS=2 KILLS=0",
    "NUMBERS_AGAIN": "N=2 ROUNDS=1 RETURNS=1",
    "FORGETS_DEAD": "N=2 ROUNDS=1 RETURNS=1",
    "NEVER_REPEATS": "N=2 ROUNDS=1 KILLS=0 LIVE",
    "NEVER_ASKS": "N=2 ROUNDS=1 KILLS=0 LIVE",
    "FORSAKES_SILENTLY": "N=2 ROUNDS=1 KILLS=0 MISTAKES=1 LIVE",
}
"""Where a fault shows that two learners of two rounds and one kill do not."""


@pytest.mark.long
@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_a_planted_fault_is_caught(fault, tmp_path):
    settings = CAUGHT_BY.get(fault, "N=2 ROUNDS=2 KILLS=1").split()
    verdict = check(tmp_path, *settings, f"BUG={FAULTS[fault]}")
    assert verdict.errors == 1, verdict.text
    assert ("acceptance cycle" if "LIVE" in settings else "assertion violated") in verdict.text


def test_all_faults_are_planted():
    assert len(FAULTS) == 14 and set(CAUGHT_BY) < set(FAULTS)
