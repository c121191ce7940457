"""The report, made from run folders of invented figures: four learners, one of them slowed."""

from __future__ import annotations

import io
import json
import math
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from fake_run import fake_events, write_fake_run
from rich.table import Table

from antiphon.cli.main import main
from antiphon.errors import ArgumentError, FolderError
from antiphon.records import Json, read_events, write_json, write_jsonl
from antiphon.report.figures import all_faults
from antiphon.report.page import write_report
from antiphon.report.plots import Curve, Panel, look, panel_figure, thin, time_unit
from antiphon.report.runs import learner_shares, load_run, load_runs, mean_staleness
from antiphon.report.tables import learner_table, print_table, run_table


class Reader(HTMLParser):
    """Gathers what a page fetches, its ids, its visible text, and checks that its elements close in order."""

    VOID = ("meta", "br", "link", "img")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.source = text
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "data")]
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def report_of(folder: Path, *runs: Path) -> Reader:
    write_report(runs, folder / "page.html")
    return Reader((folder / "page.html").read_text(encoding="utf-8"))


def shown(table: Table) -> str:
    file = io.StringIO()
    print_table(table, file)
    return file.getvalue()


def write_young_run(folder: Path, **config: object) -> Path:
    """A run that has just begun: its settings and nothing else."""
    folder.mkdir(parents=True)
    write_json(folder / "config.json", dict(config))
    return folder


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fake_run(tmp_path_factory.mktemp("runs") / "ring")


@pytest.fixture(scope="module")
def ring_page(ring: Path) -> Reader:
    return report_of(ring, ring)


@pytest.fixture(scope="module")
def both_page(tmp_path_factory: pytest.TempPathFactory, ring: Path) -> Reader:
    folder = tmp_path_factory.mktemp("runs")
    allreduce = write_fake_run(folder / "allreduce", "allreduce", seed=2, slowed=False, fault=True)
    return report_of(folder, ring, allreduce)


@pytest.mark.parametrize("which", ["ring_page", "both_page"])
def test_page_is_one_file_that_fetches_nothing(request: pytest.FixtureRequest, which: str) -> None:
    page: Reader = request.getfixturevalue(which)
    text = page.source
    assert [link for link in page.links if not link.startswith(("#", "data:image/png;base64,"))] == []
    assert not {"script", "link", "iframe", "object"} & set(page.tags)
    assert re.findall(r"url\((?!#)", text) == [] and "@import" not in text
    assert [target for target in page.links if target[0] == "#" and target[1:] not in page.ids] == []
    assert len(set(page.ids)) == len(page.ids)
    assert len(text.encode()) < 400_000


def test_page_says_what_was_run_and_how_it_ended(ring_page: Reader) -> None:
    text = ring_page.text
    for heading in ("Learning", "Behaviour", "The learners", "Exchanges", "Word error rate", "One utterance"):
        assert heading in text
    for figure in ("Loss against time", "Loss against epochs", "Held-out frame accuracy against epochs"):
        assert figure in text
    for figure in ("Consensus distance", "Staleness of the gradients", "Learning rate", "Speed"):
        assert figure in text
    assert "random-ring · 4 learners · corpus an4 · 1.23 M parameters · batch 64 (16 a learner)" in text
    assert "Word error rate 10.0 % 95 %: [8.2, 11.9] GMM 13.5 %" in text
    assert "ring test 9.96 % 8.2, 11.9 77 773 19 15 43" in text
    assert "GMM test 13.45 % 11.6, 15.4 104 773 26 20 58" in text
    assert "Configuration" in text and "model.cells 256" in text
    assert "Environment" in text and "versions.torch 2.9" in text
    assert "Not there yet" not in text


def test_slowed_learner_is_named(ring_page: Reader) -> None:
    text = ring_page.text
    assert "Learner 2 was slow: it took 4.0 times the median compute time for a step" in text
    assert "did 7.7 % of the work (equal share 25.0 %)" in text
    assert text.count("was slow") == 1


def test_every_value_is_escaped(tmp_path: Path) -> None:
    run = write_fake_run(tmp_path / "a<b>&'c", strategy="<script>alert(1)</script>")
    page = report_of(tmp_path, run)
    text = (tmp_path / "page.html").read_text()
    assert "script" not in page.tags and "<b>&" not in text
    assert "a<b>&'c" in page.text and "<script>alert(1)</script> · 4 learners" in page.text
    assert "enter four five <one> & erase" in page.text
    assert "Made-Up 3000 <fast>" in page.text


def test_two_runs_are_drawn_over_each_other(both_page: Reader) -> None:
    page = both_page
    assert "2 runs compared" in page.text
    assert page.text.count("Loss against time") == 1
    for index in (0, 1):
        assert page.source.count(f"stroke: {look(index).colour.lower()}") > 4
    assert "ring random-ring an4 4 64 10" in page.text and "allreduce allreduce an4 4 64 10" in page.text
    assert "Settings that differ setting ring allreduce strategy random-ring allreduce seed 1 2" in page.text
    assert "Configuration of ring" in page.text and "Configuration of allreduce" in page.text
    assert page.text.count("GMM test") == 1
    assert page.text.count("Learner by learner") == 2
    assert "Exchanges of all learners run proposed committed applied" in page.text
    assert "ring 5,609 5,215" in page.text


def test_fault_is_marked_and_told(both_page: Reader) -> None:
    text = both_page.text
    assert "F1 allreduce learner 3 died: killed by signal 9 1 min 39 s 5.50 2" in text
    assert text.split().count("F1") == 6 + 1, "in each curve against time or epochs, and in the list"
    assert "3 died" in text and text.count("was slow") == 1


def test_same_run_gives_the_same_page(tmp_path: Path, ring: Path, ring_page: Reader) -> None:
    assert report_of(tmp_path, ring).source == ring_page.source


def test_run_of_that_moment(tmp_path: Path) -> None:
    """No summary, no decoding, no example, one evaluation, and a last line cut short."""
    run = tmp_path / "young"
    run.mkdir()
    events = fake_events("random-ring", 1, [2.0] * 4, fault=False)
    first = next(place for place, event in enumerate(events) if event["event"] == "evaluation")
    lines = [json.dumps(event) for event in events[: first + 3]]
    (run / "events.jsonl").write_text("\n".join([*lines[:-1], lines[-1][:30]]))
    text = report_of(tmp_path, run).text
    assert "No summary.json: it has not finished, or it was cut off. The last event is of epoch 1.06." in text
    assert "Only one evaluation" in text and "No word error rate yet: antiphon decode" in text
    assert f"events.jsonl:{first + 3}: not JSON" in text and str(run) + "/events" not in text
    assert "No config.json" in text and "does not offer an utterance" in text
    assert "random-ring · 4 learners · 1.23 M parameters · batch 64" in text
    assert "Loss against time" in text and "Samples done by each learner" in text
    assert "Where its time went" not in text


def test_each_missing_part_is_told(tmp_path: Path, ring: Path) -> None:
    told = {
        "summary.json": ["No summary.json: it has not finished"],
        "config.json": ["No config.json: the settings are not known."],
        "events.jsonl": ["No events.jsonl, or nothing in it: there are no curves to draw."],
        "decode": [],
    }
    assert load_run(ring, "ring").missing == ()
    for name, sentences in told.items():
        run = shutil.copytree(ring, tmp_path / name, ignore=shutil.ignore_patterns(name))
        missing = load_run(run, "run").missing
        assert len(missing) == len(sentences)
        assert all(text.startswith(start) for text, start in zip(missing, sentences, strict=True))


def test_page_without_events_shows_the_rest(tmp_path: Path, ring: Path) -> None:
    run = shutil.copytree(ring, tmp_path / "run", ignore=shutil.ignore_patterns("events.jsonl"))
    text = report_of(tmp_path, run).text
    assert "Word error rate 10.0 %" in text and "One utterance" in text and "phones" in text
    assert "Loss against time" not in text and "Behaviour" not in text


def test_run_that_has_just_begun(tmp_path: Path) -> None:
    run = write_young_run(tmp_path / "new", strategy="random-ring", learners=2)
    (run / "events.jsonl").write_text("")
    text = report_of(tmp_path, run).text
    assert "random-ring · 2 learners" in text and "there are no curves to draw" in text
    assert "The events do not tell yet what the learners did." in text


def test_single_learner(tmp_path: Path) -> None:
    run = tmp_path / "alone"
    run.mkdir()
    write_jsonl(run / "events.jsonl", fake_events("allreduce", 1, [2.0], fault=False))
    text = report_of(tmp_path, run).text
    assert "1 learner ·" in text and "One learner: no work to share" in text
    assert "Final share" not in text and "was slow" not in text


def test_numbers_that_are_none_or_not_finite(tmp_path: Path) -> None:
    run = write_fake_run(tmp_path / "run")
    events = fake_events("random-ring", 1, [2.0] * 4, fault=False)
    for event in events:
        for name in event:
            if event["event"] == "evaluation" and event["epoch"] > 5 and isinstance(event[name], float):
                event[name] = math.nan if name != "epoch" else event[name]
            elif event["event"] == "learner" and name not in ("event", "learner", "schema"):
                event[name] = None
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (run / "summary.json").write_text('{"heldout_loss": NaN, "frame_accuracy": null, "wer": {"rate": null}}')
    (run / "example.json").write_text('{"spectrogram": [[1, null], [2]], "frame_shift_s": 0.01}')
    text = report_of(tmp_path, run).text
    assert "Some held-out losses are not finite" in text and "does not offer an utterance" in text
    assert re.search(r"\b(nan|inf|None)\b", text, re.IGNORECASE) is None


def test_resumed_run_keeps_one_clock(tmp_path: Path) -> None:
    run = tmp_path / "resumed"
    run.mkdir()
    parts = [
        ("run_started", 0.0, None),
        ("evaluation", 10.0, 1.0),
        ("evaluation", 20.0, 2.0),
        ("run_started", 0.0, None),
        ("evaluation", 9.0, 2.0),
        ("evaluation", 18.0, 3.0),
    ]
    rows = [{"event": event, "time_s": t} | ({"epoch": e, "heldout_loss": t} if e else {}) for event, t, e in parts]
    write_jsonl(run / "events.jsonl", rows)
    times, epochs = load_run(run, "resumed").series("evaluation", "time_s", "epoch")
    assert epochs.tolist() == [1.0, 2.0, 3.0]
    assert times.tolist() == [10.0, 29.0, 38.0]


def test_not_a_run(tmp_path: Path, ring: Path) -> None:
    with pytest.raises(FolderError, match="no such folder"):
        write_report([ring, tmp_path / "absent"], tmp_path / "page.html")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "data.json").write_text("{}")
    with pytest.raises(FolderError, match="is not a run: it holds a prepared corpus"):
        write_report([tmp_path / "data"], tmp_path / "page.html")
    with pytest.raises(ArgumentError, match="at least one run"):
        write_report([], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_runs_with_one_folder_name_are_told_apart(tmp_path: Path) -> None:
    runs = [tmp_path / "a" / "run", tmp_path / "b" / "run", tmp_path / "c" / "other"]
    for run in runs:
        write_young_run(run)
    assert [run.name for run in load_runs(runs)] == ["a/run", "b/run", "other"]


def test_many_runs_of_many_learners_stay_a_small_page(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    runs = [tmp_path / f"run{seed}" for seed in range(3)]
    for seed, run in enumerate(runs):
        run.mkdir()
        speeds = list(rng.uniform(0.1, 0.3, 64))
        write_jsonl(run / "events.jsonl", fake_events("random-ring", seed + 1, speeds, fault=False))
    page = report_of(tmp_path, *runs)
    assert "3 runs compared" in page.text
    assert len(page.source.encode()) < 500_000 * len(runs)
    assert len({look(index) for index in range(24)}) == 24


def test_learner_shares() -> None:
    events: list[Json] = [
        {"event": "progress", "steps_by_learner": [5, 5], "samples_by_learner": [60, 20]},
        {"event": "learner", "learner": 0, "steps": 6, "samples": 90, "compute_s": 3.0, "staleness": [0, 3, 1]},
        {"event": "learner", "learner": 1, "steps": 2, "samples": 30, "compute_s": 3.0, "exchanges": {"busy": 4}},
    ]
    fast, slow = learner_shares(events)
    assert (fast.steps, fast.share, fast.slow, fast.staleness_mean) == (6, 0.75, False, 1.25)
    assert (slow.steps, slow.share, slow.slow, slow.exchanges) == (2, 0.25, True, {"busy": 4})
    assert slow.slowness == pytest.approx(1.5)
    assert [row.share for row in learner_shares(events[:1])] == [0.75, 0.25]
    assert learner_shares([]) == []
    assert mean_staleness([]) is None and mean_staleness([0, 0]) is None


def test_tables(ring: Path) -> None:
    summary = json.loads((ring / "summary.json").read_text())
    text = shown(run_table([summary, {"strategy": "allreduce"}]))
    assert "10.0 [8.2, 11.9]" in text and "13.5" in text and "3 min 42 s" in text and "9,750" in text
    assert "run " not in text.splitlines()[0] and "allreduce" in text.splitlines()[2]
    text = shown(learner_table(load_run(ring, "ring").events))
    assert text.splitlines()[0].split()[:3] == ["learner", "steps", "share"]
    assert "2 (slow)" in text and "7.7 %" in text and "1.82" in text and "1,605" in text


def test_thinning_keeps_the_mean_and_the_ends() -> None:
    x_N = np.arange(1001.0)
    thin_x, thin_y = thin(x_N, 2 * x_N, 100)
    assert thin_x.size <= 100 and thin_y == pytest.approx(2 * thin_x)
    assert thin_x[0] < 11 and thin_x[-1] > 990
    assert thin(x_N[:5], x_N[:5], 5)[0].size == 5
    assert time_unit(100) == (1, "s") and time_unit(3000) == (60, "min") and time_unit(1e5) == (3600, "h")


def test_empty_panels_are_left_out() -> None:
    nothing = Panel("Nothing", "x", "y", [Curve(np.zeros(0), np.zeros(0), look(0))])
    point = Panel("Point", "x", "y", [Curve(np.array([1.0]), np.array([2.0]), look(0))])
    line = Panel("Line", "x", "y", [Curve(np.array([1.0, 2.0]), np.array([0.01, 3.0]), look(0))], spread_y=True)
    assert panel_figure("f", [nothing, point]) == ""
    svg = panel_figure("f", [nothing, point, line])
    assert "Line" in svg and "Nothing" not in svg and "Point" not in svg
    assert all(f">{tick}<" in svg for tick in ("0.01", "0.1", "1")), "a logarithmic axis in plain numbers"


def test_command(tmp_path: Path, ring: Path, capsys: pytest.CaptureFixture[str]) -> None:
    young = write_young_run(tmp_path / "young", strategy="allreduce")
    out = tmp_path / "new" / "page.html"
    assert main(["report", str(young), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "allreduce" in printed and str(out) in printed and out.is_file()
    assert main(["report", str(ring), "--out", str(out)]) == 2
    assert "pass --overwrite" in capsys.readouterr().err
    assert main(["report", str(ring), "--out", str(out), "--overwrite", "--json"]) == 0
    captured = capsys.readouterr()
    value = json.loads(captured.out)
    assert value["command"] == "report" and value["out"] == str(out) and value["strategy"] == "random-ring"
    assert value["wer"]["errors"] == 77 and value["size_bytes"] == out.stat().st_size
    assert [(run["name"], run["missing"]) for run in value["runs"]] == [("ring", [])]
    assert "random-ring" in captured.err


def test_command_refuses_what_it_cannot_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    young = str(write_young_run(tmp_path / "young"))
    (tmp_path / "folder.html").mkdir()
    for words, text in (
        ([young, "--out", str(tmp_path / "events.jsonl"), "--overwrite"], "ends in .html"),
        ([young, "--out", str(tmp_path / "folder.html")], "is a folder"),
        ([str(tmp_path)], "is not a run"),
    ):
        assert main(["report", *words]) == 2
        assert text in capsys.readouterr().err


def test_who_comes_and_goes_is_marked_among_the_faults(tmp_path: Path) -> None:
    run = write_fake_run(tmp_path / "run", "random-ring", seed=1, slowed=False, fault=True)
    events = read_events(run)
    change = {"learner": 2, "change": "reseeded", "step": 9, "source": 1, "jump": 0.5}
    write_jsonl(run / "events.jsonl", [{"event": "membership", "time_s": 0.01, **change}, *events])
    first, second = all_faults([load_run(run, "run")])
    assert (first.label, first.text) == ("F1", "learner 2 reseeded with the weights of learner 1")
    assert second.label == "F2" and second.text.startswith("learner 3 died")


def test_default_place_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [write_young_run(tmp_path / name) for name in ("a", "b")]
    monkeypatch.chdir(tmp_path)
    assert main(["report", "a"]) == 0 and (runs[0] / "report.html").is_file()
    assert main(["report", "a", "b"]) == 0 and (tmp_path / "report.html").is_file()


def test_tables_need_no_drawing_library() -> None:
    """Other commands print tables, and the help of this one is shown, without the second that drawing takes to load."""
    code = "import sys, antiphon.report.tables, antiphon.cli.report; print({'matplotlib'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"
