"""The benchmarks: their arguments, their fields, how steps are counted; the claims are theirs alone."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from antiphon.errors import ArgumentError

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MODULES = ("common", "overhead", "straggling", "stragglers", "straggler_rows", "hivemind_peer", "workers", "equal")


@pytest.fixture(scope="module", autouse=True)
def _path() -> Iterator[None]:
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.fixture
def common() -> ModuleType:
    return importlib.import_module("common")


@pytest.fixture
def overhead() -> ModuleType:
    return importlib.import_module("overhead")


@pytest.fixture
def straggling() -> ModuleType:
    return importlib.import_module("straggling")


@pytest.fixture
def stragglers() -> ModuleType:
    return importlib.import_module("stragglers")


def args_of(module: ModuleType, *words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    module.configure(parser)
    return parser.parse_args(words)


# --- overhead


def test_overhead_gives_its_fields_and_the_weights_of_the_plain_loop(
    common: ModuleType, overhead: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--repeats", "1", "--blocks", "2", "--steps", "2", "--batch", "2", "--json"]
    assert common.main("", overhead.configure, overhead.run, words) == 0
    out, err = capsys.readouterr()
    result = json.loads(out.splitlines()[-1])
    assert out.count("\n") == 1 and "ratio" in err
    assert result["schema"] == 1 and result["command"] == "benchmarks/overhead.py"
    assert result["environment"]["threads_per_learner"] == 1
    samples = result["samples"]
    pair = {"pair_cpu_ratio", "pair_exchange_cpu_ratio", "pair_wall_ratio", "pair_exchanges_per_step"}
    assert set(samples) == {"ratio", "cpu_ratio", "plain_step_s", "engine_step_s"} | pair
    assert result["pair_exchanges_per_step"] > 0 and result["pair_exchange_cpu_ratio"] > 0
    assert result["ratio"] == samples["ratio"][0] == pytest.approx(result["engine_step_s"] / result["plain_step_s"])
    assert result["parameters"] > 500_000
    assert result["largest_weight_difference"] == 0.0


def test_overhead_sums_repeats_up_by_the_median_of_their_ratios(overhead: ModuleType) -> None:
    seconds = overhead.Seconds
    pairs = [(seconds(2.0, 1.0), seconds(2.0, 1.0)), (seconds(1.0, 1.0), seconds(3.0, 2.0))]
    pairs.append((seconds(4.0, 1.0), seconds(5.0, 1.0)))
    fields = overhead.fields(pairs, steps=10)
    assert fields["samples"]["ratio"] == [1.0, 3.0, 1.25]
    assert (fields["ratio"], fields["cpu_ratio"]) == (1.25, 1.0)
    assert (fields["plain_step_s"], fields["engine_step_s"]) == (0.2, 0.3)


@pytest.mark.parametrize("words", [["--repeats", "0"], ["--steps", "0"], ["--batch", "0"]])
def test_a_number_outside_its_bound_is_told_in_one_line(
    common: ModuleType, overhead: ModuleType, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    assert common.main("", overhead.configure, overhead.run, words) == 2
    assert f"{words[0]} must be at least 1, not 0" in capsys.readouterr().err


# --- stragglers: what is asked for


def test_defaults_are_the_documented_ones(stragglers: ModuleType) -> None:
    args = args_of(stragglers)
    assert stragglers.strategies_of(args.strategies) == [
        "random-ring",
        "fixed-ring",
        "allreduce",
        "sync-ring",
        "delay-by-one",
        "ddp",
    ]
    job = stragglers.job_of(args)
    assert (job.learners, job.slow, args.load, args.seconds) == (4, {3: 10.0}, "waiting", 5.0)
    assert job.factors == [1.0, 1.0, 1.0, 10.0]


def test_a_job_survives_its_way_to_a_learner(stragglers: ModuleType, straggling: ModuleType) -> None:
    job = stragglers.job_of(args_of(stragglers, "--learners", "3", "--slow", "0=2.5", "--slow", "2=4", "--batch", "9"))
    assert straggling.Job.from_text(job.to_text()) == job
    assert (job.local_batch, job.factors) == (3, [2.5, 1.0, 4.0])


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--learners", "1"], "--learners must be at least 2, not 1"),
        (["--slow", "4=10"], "learners are 0..3"),
        (["--slow", "3=0.5"], "the factor is 1 to"),
        (["--slow", "three"], "expected LEARNER=FACTOR"),
        (["--seconds", "0"], "--seconds must be at least 1"),
        (["--wait", "-1"], "--wait must be at least 0"),
        (["--batch", "3"], "batch must be at least 4"),
    ],
)
def test_what_cannot_be_measured_is_refused(stragglers: ModuleType, words: list[str], text: str) -> None:
    with pytest.raises(ArgumentError, match=text.replace(".", r"\.")):
        stragglers.job_of(args_of(stragglers, *words))


def test_unknown_and_repeated_strategies_are_refused(stragglers: ModuleType) -> None:
    with pytest.raises(ArgumentError, match="did you mean 'random-ring'"):
        stragglers.strategies_of("ddp,random_ring")
    with pytest.raises(ArgumentError, match="name each only once"):
        stragglers.strategies_of("ddp,ddp")


# --- stragglers: what is counted


def test_ideal_rates() -> None:
    ideal_steps_per_s = importlib.import_module("straggler_rows").ideal_steps_per_s
    steps_s = [0.2, 0.2, 0.2, 2.0]
    assert ideal_steps_per_s("hivemind", steps_s) == ideal_steps_per_s("fixed-ring", steps_s) == pytest.approx(15.5)
    for strategy in ("allreduce", "sync-ring", "delay-by-one", "ddp"):
        assert ideal_steps_per_s(strategy, steps_s) == pytest.approx(2.0)


def trace(straggling: ModuleType, ends_s: np.ndarray, cpu_s: float, size: int) -> np.ndarray:
    """Return the trace of steps that end at ``ends_s``, with so much CPU time, so many bytes and two exchanges each."""
    count_K = np.arange(len(ends_s))
    return np.stack([ends_s, count_K * cpu_s, count_K * float(size), count_K * 2.0], axis=1)


@pytest.mark.parametrize("begin_s", [100.0, 100.7, 101.9])
def test_steps_cut_by_an_edge_count_in_part(straggling: ModuleType, begin_s: float) -> None:
    fast = trace(straggling, np.arange(99.93, 112, 0.2), cpu_s=0.02, size=8)
    slow = trace(straggling, np.arange(99.1, 115, 2.0), cpu_s=0.03, size=4)
    window = straggling.window_of([fast, slow], begin_s, begin_s + 5.3)
    assert window.steps_per_s_L == pytest.approx([5.0, 0.5])
    assert window.cpu_share_L == pytest.approx([0.1, 0.015])
    assert window.steps_per_s == pytest.approx(5.5)
    assert window.bytes_per_step == pytest.approx((5.0 * 8 + 0.5 * 4) / 5.5)
    assert window.exchanges_per_step == pytest.approx(2.0)


def test_a_trace_that_is_being_written_is_read_up_to_its_last_whole_row(straggling: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "learner-0.steps"
    assert straggling._read(path).shape == (0, 4)
    path.write_bytes(straggling.TRACE.pack(1.0, 2.0, 3.0, 4.0) + straggling.TRACE.pack(5.0, 6.0, 7.0, 8.0)[:28])
    assert straggling._read(path).tolist() == [[1.0, 2.0, 3.0, 4.0]]


def test_rows_hold_medians_of_ratios_within_a_repeat(stragglers: ModuleType, straggling: ModuleType) -> None:
    settings = stragglers.settings_of(
        stragglers.job_of(args_of(stragglers)), ["random-ring", "ddp"], [16, 64], "python"
    )
    assert [job.target_batch_size for job in settings.values()] == [0, 0, 16, 64]

    def window(*rates_L: float) -> object:
        return straggling.Window(list(rates_L), [0.1 * rate / rates_L[0] for rate in rates_L], 8.0, 2.0)

    def repeat(speed: float, ddp: float) -> object:
        alone = {1.0: window(speed), 10.0: window(speed / 10)}
        together = {"random-ring": window(*[0.9 * speed] * 3, 0.09 * speed), "ddp": window(*[ddp / 4] * 4)}
        together |= {"hivemind 16": window(0.5 * speed), "hivemind 64": window(0.9 * speed)}
        return stragglers.Repeat(alone, together)

    repeats = [repeat(5.0, 2.0), repeat(4.0, 1.0), repeat(2.0, 0.9)]
    (row, reference, hivemind), tried = stragglers.rows("waiting", settings, repeats)
    assert row["samples"]["ideal_steps_per_s"] == pytest.approx([15.5, 12.4, 6.2])
    assert row["samples"]["over_ideal"] == pytest.approx([0.9, 0.9, 0.9])
    assert row["samples"]["over_ddp"] == pytest.approx([6.975, 11.16, 6.2])
    assert row["samples"]["over_hivemind"] == pytest.approx([3.1, 3.1, 3.1])
    assert row["over_ddp"] == pytest.approx(6.975)
    assert row["steps_per_s"] == pytest.approx(11.16)
    assert row["cpu_share"] == pytest.approx(0.1)
    assert row["cpu_share_by_learner"] == pytest.approx([0.1, 0.1, 0.1, 0.01])
    assert row["bytes_read_per_step"] == 8.0 and row["exchanges_per_step"] == 2.0
    assert reference["over_ddp"] == 1.0 and reference["bytes_read_per_step"] is None
    assert (hivemind["strategy"], hivemind["target_batch_size"], hivemind["over_hivemind"]) == ("hivemind", 64, 1.0)
    assert hivemind["samples"]["ideal_steps_per_s"] == row["samples"]["ideal_steps_per_s"]
    assert [values["target_batch_size"] for values in tried] == [16, 64]
    alone = stragglers.alone_row("waiting", settings["ddp"], repeats)
    assert alone["step_s_by_learner"] == pytest.approx([0.25] * 3 + [2.5])


# --- stragglers: hivemind


def test_hivemind_is_measured_only_when_asked_for(stragglers: ModuleType) -> None:
    assert stragglers.targets_of(args_of(stragglers)) == []
    assert stragglers.targets_of(args_of(stragglers, "--peers", "hivemind")) == [16, 64, 256]
    assert stragglers.targets_of(args_of(stragglers, "--peers", "hivemind", "--targets", "20", "50")) == [20, 50]
    with pytest.raises(ArgumentError, match="--targets must be at least 16, not 8"):
        stragglers.targets_of(args_of(stragglers, "--peers", "hivemind", "--targets", "8"))
    with pytest.raises(ArgumentError, match="give each only once"):
        stragglers.targets_of(args_of(stragglers, "--peers", "hivemind", "--targets", "16", "16"))


@pytest.mark.parametrize(("answer", "what"), [(None, "is missing"), ("1.0.0", "has hivemind 1.0.0"), ("", "holds no")])
def test_a_missing_hivemind_is_told_with_the_commands_that_install_it(
    common: ModuleType,
    stragglers: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    answer: str | None,
    what: str,
) -> None:
    python = tmp_path / "other/bin/python"
    python.parent.mkdir(parents=True)
    if answer is not None:
        python.write_text(f"#!/bin/sh\necho {answer}\n")
        python.chmod(0o755)
    words = ["--peers", "hivemind", "--hivemind-python", str(python)]
    assert common.main("", stragglers.configure, stragglers.run, words) == 2
    text = capsys.readouterr().err
    assert what in text and f"python3 -m venv {tmp_path / 'other'}" in text
    assert f"{tmp_path / 'other/bin/pip'} install -c constraints.txt hivemind==1.1.12 -e ." in text


def test_the_right_hivemind_is_taken(tmp_path: Path) -> None:
    peer = importlib.import_module("hivemind_peer")
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho {peer.VERSION}\n")
    python.chmod(0o755)
    assert peer.find_python(python) == str(python)


# --- equal


def test_equal_compares_with_ddp_within_a_repeat(straggling: ModuleType) -> None:
    equal = importlib.import_module("equal")

    def repeat(ring: float, ddp: float) -> dict[str, object]:
        return {
            "random-ring": straggling.Window([ring / 2] * 2, [0.8, 1.2], 8.0, 1.5),
            "ddp": straggling.Window([ddp / 2] * 2, [0.5, 0.5], 0.0, 0.0),
        }

    repeats = [repeat(10.0, 5.0), repeat(8.0, 2.0), repeat(9.0, 9.0)]
    row, reference = (equal.row(name, "compute", repeats) for name in ("random-ring", "ddp"))
    assert (row["load"], row["strategy"], row["over_ddp"], row["steps_per_s"]) == ("compute", "random-ring", 2.0, 9.0)
    assert row["samples"]["over_ddp"] == [2.0, 4.0, 1.0]
    assert row["samples"]["cpu_s_per_step"] == pytest.approx([0.2, 0.25, 2 / 9])
    assert row["exchanges_per_step"] == 1.5
    assert reference["over_ddp"] == 1.0 and "exchanges_per_step" not in reference


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--strategies", "random-ring"], "ddp must be among them"),
        (["--learners", "1"], "--learners must be at least 2, not 1"),
        (["--local-batch", "0"], "--local-batch must be at least 1, not 0"),
    ],
)
def test_equal_refuses_what_it_cannot_compare(
    common: ModuleType, capsys: pytest.CaptureFixture[str], words: list[str], text: str
) -> None:
    equal = importlib.import_module("equal")
    assert common.main("", equal.configure, equal.run, words) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("strategy", ["fixed-ring", "ddp"])
def test_learners_of_every_task_are_watched(straggling: ModuleType, strategy: str) -> None:
    job = importlib.import_module("equal").job_of("communication", strategy, learners=2)
    window = straggling.measure(job, 0.2)
    assert len(window.steps_per_s_L) == 2 and min(window.steps_per_s_L) > 0
    assert (window.exchanges_per_step > 0) == (window.bytes_per_step > 0)
    if strategy == "ddp":
        assert window.exchanges_per_step == 0


@pytest.mark.long
def test_hivemind_where_it_is_installed(straggling: ModuleType) -> None:
    peer = importlib.import_module("hivemind_peer")
    if not peer.PYTHON.exists():
        pytest.skip("no hivemind: benchmarks/README.md says how to install it")
    python = peer.find_python(peer.PYTHON)
    window = straggling.measure(straggling.Job("hivemind", 2, 4, 0.1, {}, target_batch_size=8, python=python), 5.0)
    assert min(window.steps_per_s_L) > 0 and window.exchanges_per_step > 0


@pytest.mark.parametrize("name", ["overhead", "stragglers", "equal"])
def test_help_shows_an_example_and_no_hidden_argument(
    common: ModuleType, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    module = importlib.import_module(name)
    with pytest.raises(SystemExit) as stop:
        common.main(module.__doc__, module.configure, module.run, ["--help"])
    out = capsys.readouterr().out
    assert stop.value.code == 0
    assert "--repeats" in out and "--json" in out and f"example: python benchmarks/{name}.py" in out
    assert "--worker" not in out
