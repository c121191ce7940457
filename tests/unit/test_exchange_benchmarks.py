"""The benchmarks of the exchange and of memory: their fields and what they count; the claims are theirs alone."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from antiphon.errors import LearnerError

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NETWORK = ("network_bytes_over_sockets", "network_exchange_over_sockets", "sockets_s")
MODULES = ("common", "driven", "exchange", "exchanging", "link", "memory", "one_of_two")


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
def memory() -> ModuleType:
    return importlib.import_module("memory")


def run(common: ModuleType, capsys: pytest.CaptureFixture[str], name: str, words: list[str]) -> dict[str, object]:
    module = importlib.import_module(name)
    assert common.main("", module.configure, module.run, [*words, "--json"]) == 0
    out, _ = capsys.readouterr()
    assert out.count("\n") == 1
    return json.loads(out)


# --- exchange


def test_exchange_gives_its_fields_and_keeps_the_sum(common: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    result = run(common, capsys, "exchange", ["--repeats", "2", "--parameters", "3000", "--no-link"])
    samples = result["samples"]
    for name in ("shared_over_lerp_cpu", "shared_over_lerp_wall", "floor_over_lerp_cpu", "lerp_cpu_s", *NETWORK):
        assert len(samples[name]) == 2 and result[name] == common.median(samples[name]) > 0
    assert result["floor_over_lerp_bytes"] == pytest.approx(8 / 3)
    assert result["sum_error"] < 1e-6
    assert result["limited_link"] == "left out (--no-link)" and "bfloat16_gain" not in result


def test_exchange_takes_the_dearer_end_and_the_later_commit() -> None:
    exchange = importlib.import_module("exchange")
    lerp = [{"cpu_s": 1.0}, {"cpu_s": 2.0}]
    ends = [{"cpu_s": 3.0, "began_s": 10.0, "ended_s": 11.0}, {"cpu_s": 4.0, "began_s": 9.0, "ended_s": 12.0}]
    assert exchange._over(ends, lerp) == 3.0
    assert exchange._from_start(ends) == 2.0
    assert exchange.wall_s(ends) == 3.0


@pytest.mark.parametrize("name", ["shared", "float32", "bfloat16"])
def test_ends_really_exchange(common: ModuleType, name: str) -> None:
    exchanging = importlib.import_module("exchanging")
    with exchanging.pair(1000) as ends:
        if name == "shared":
            ends.all("start")
        else:
            exchanging.connect(ends, ["127.0.0.1", "127.0.0.1"])
        before, _ = ends.all("checksum"), ends.all("exchange", name)
        after = ends.all("checksum")
    assert after[0]["sum"] != before[0]["sum"]
    assert after[0]["sum"] == pytest.approx(after[1]["sum"], abs=0.3 if name == "bfloat16" else 1e-3), (
        "halfway from both ends is the same place"
    )


def test_a_process_that_ends_is_told(common: ModuleType, tmp_path: Path) -> None:
    driven = importlib.import_module("driven")
    script = tmp_path / "ends.py"
    script.write_text("print('{}', flush=True)\n")
    with pytest.raises(LearnerError, match="learner [01] ended"), driven.Driven(script, []) as both:
        folder = both.block.folder
        both.all("anything")
    assert not folder.exists()


def test_a_machine_without_namespaces_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    exchange, link = importlib.import_module("exchange"), importlib.import_module("link")

    def refuse(words: list[str], **_: object) -> None:
        raise subprocess.CalledProcessError(1, words, stderr="Operation not permitted\n")

    monkeypatch.setattr(link.subprocess, "run", refuse)
    samples, note = exchange.limited_samples(1000, repeats=1)
    assert samples == {} and "Operation not permitted" in note and "ip netns add" in note


def test_the_limited_link_limits() -> None:
    exchange, link = importlib.import_module("exchange"), importlib.import_module("link")
    parameters = 5_000_000
    try:
        with link.limited_link(0.4):
            pass
    except link.LinkUnavailableError as error:
        pytest.skip(str(error))
    samples, note = exchange.limited_samples(parameters, repeats=1)
    assert note == ""
    least_s = (4 * parameters - link.BURST_BYTES) / (exchange.LINK_GBIT_PER_S * 1e9 / 8)
    assert samples["limited_sockets_s"][0] > least_s
    assert samples["bfloat16_gain"][0] == samples["limited_float32_s"][0] / samples["limited_bfloat16_s"][0]
    namespaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert f"antiphon-{os.getpid()}-" not in namespaces


# --- memory


def test_memory_counts_what_the_engine_adds(common: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--repeats", "1", "--parameters", "4000000", "--learners", "2", "--seconds", "0.5"]
    result = run(common, capsys, "memory", [*words, "--strategies", "allreduce"])
    (row,) = result["rows"]
    assert (row["strategy"], row["frozen"], result["parameters"]) == ("allreduce", False, 4_000_000)
    assert 2.9 < row["shared_copies"] < 3.2, "the weights and two slots"
    # Besides the copies: a block of 4 MB that differences pass through, a quarter of a copy at this size.
    assert 1.5 < row["extra_copies"] < 4.25


def test_memory_freezes_those_that_wait_for_nobody(memory: ModuleType) -> None:
    assert memory.scenarios(["random-ring", "allreduce"]) == [
        ("random-ring", False),
        ("allreduce", False),
        ("random-ring", True),
    ]


def test_memory_refuses_strategies_that_are_none(
    common: ModuleType, memory: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert common.main("", memory.configure, memory.run, ["--strategies", "ring"]) == 2
    assert "--strategies must be of" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["exchange", "memory"])
def test_help_shows_an_example(common: ModuleType, capsys: pytest.CaptureFixture[str], name: str) -> None:
    module = importlib.import_module(name)
    with pytest.raises(SystemExit):
        common.main(module.__doc__, module.configure, module.run, ["--help"])
    assert f"python benchmarks/{name}.py" in capsys.readouterr().out
