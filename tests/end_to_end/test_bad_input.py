"""What users get wrong: one clear line, exit status 2, and nothing half-written that is taken for whole."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from commands import SMALL, Started, antiphon

from antiphon.cli.main import COMMANDS
from antiphon.config import TrainConfig
from antiphon.recipes.acoustics import Acoustics
from antiphon.records import Json, read_json, read_jsonl, write_json

WORDS = ("yes", "no", "go", "stop", "help", "enter")


def test_every_help_has_an_example() -> None:
    for name in COMMANDS:
        result = antiphon(name, "--help")
        assert result.status == 0
        assert f"example:\n  antiphon {name} " in result.out and "--json" in result.out


# prepare


def write_audio(path: Path, seed: int, rate: int = 8000) -> None:
    soundfile.write(path, np.random.default_rng(seed).normal(size=rate // 2) * 0.1, rate)


@pytest.fixture
def recordings(tmp_path: Path) -> Path:
    """A manifest of 24 recordings in all three splits."""
    folder = tmp_path / "recordings"
    folder.mkdir()
    rows = []
    for i in range(24):
        write_audio(folder / f"u{i}.wav", i)
        split = ("train", "train", "dev", "test")[i // 6]
        rows.append({"audio": f"u{i}.wav", "text": WORDS[i % 6], "speaker": f"s{i // 6}", "split": split})
    (folder / "manifest.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "manifest.jsonl"


def edit_line(path: Path, number: int, **changes: Any) -> None:
    lines = path.read_text().splitlines()
    lines[number - 1] = json.dumps(json.loads(lines[number - 1]) | changes)
    path.write_text("\n".join(lines) + "\n")


def test_recordings_that_cannot_be_used_are_skipped_and_told(recordings: Path, tmp_path: Path) -> None:
    folder = recordings.parent
    (folder / "u0.wav").unlink()
    (folder / "u1.wav").write_text("this is no recording")
    write_audio(folder / "u2.wav", 2, rate=16000)
    edit_line(recordings, 4, text=" ")
    edit_line(recordings, 5, text="brzkt")
    result = antiphon("prepare", "manifest", "--source", recordings, "--out", tmp_path / "data")
    assert result.status == 0, result.err
    reasons = {row["id"]: row["reason"] for _, row in read_jsonl(tmp_path / "data" / "skipped.jsonl")}
    assert sorted(reasons) == ["u0", "u1", "u2", "u3", "u4"]
    for number, (name, text) in enumerate(
        {
            "u0": "u0.wav: no such recording",
            "u1": "u1.wav",
            "u2": "u2.wav is at 16000 Hz, the corpus at 8000 Hz: pass --resample or --rate",
            "u3": "",
            "u4": "no pronunciation for 'brzkt'",
        }.items(),
        1,
    ):
        assert reasons[name].startswith(f"{recordings}:{number}: ") and text in reasons[name]
    assert "5 skipped, all in" in result.out and "brzkt" in result.out


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ('{"audio": "u9.wav"', "not JSON"),
        ("[1, 2]", "expected an object"),
        ('{"text": "yes", "speaker": "s"}', '"audio" must be a text that is not empty, found nothing'),
        ('{"audio": "u9.wav", "text": 5, "speaker": "s"}', '"text" must be a text, found 5'),
        ('{"audio": "u9.wav", "text": "yes", "speaker": "s", "split": "eval"}', "split is 'eval', expected one of"),
        ('{"audio": "u9.wav", "id": "u1", "text": "yes", "speaker": "s"}', "id 'u1' already stands on line 2"),
    ],
)
def test_a_bad_line_of_a_manifest_is_named(recordings: Path, tmp_path: Path, line: str, text: str) -> None:
    lines = recordings.read_text().splitlines()
    recordings.write_text("\n".join([*lines[:2], line, *lines[3:]]))
    complaint = antiphon("prepare", "manifest", "--source", recordings, "--out", tmp_path / "data").complaint
    assert complaint.startswith(f"antiphon: {recordings}:3: ") and text in complaint
    assert not (tmp_path / "data" / "data.json").exists()


def test_nothing_of_use_is_no_data(recordings: Path, tmp_path: Path) -> None:
    for file in recordings.parent.glob("*.wav"):
        file.unlink()
    complaint = antiphon("prepare", "manifest", "--source", recordings, "--out", tmp_path / "data").complaint
    assert "no utterance of manifest can be used; 24 were skipped: " in complaint and ":1: " in complaint
    assert not (tmp_path / "data" / "data.json").exists()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["prepare", "manifset"], "unknown corpus 'manifset': did you mean 'manifest'?"),
        (["prepare", "manifest"], "no manifest named: pass --source FILE"),
        (["prepare", "manifest", "--source", "{}/none.jsonl"], "none.jsonl: No such file"),
        (["prepare", "an4"], "pass --source DIR"),
        (["prepare", "manifest", "--rate", "5"], "5"),
        (["demo", "--strategy", "random_ring"], "unknown strategy 'random_ring': did you mean 'random-ring'?"),
        (["demo", "--learners", "0"], "learners must be at least 1, not 0"),
        (["demo", "--stage", "trian"], "--stage trian: stages are prepare, align, train, decode, report"),
        (["demo", "--stage", "train:align"], "--stage train:align: train comes after align"),
    ],
)
def test_a_wrong_argument_writes_nothing(tmp_path: Path, words: list[str], text: str) -> None:
    out = tmp_path / "out"
    assert text in antiphon(*(word.format(tmp_path) for word in words), "--out", out).complaint
    assert not (out / "data.json").exists() and not (out / "demo.json").exists()


def test_a_full_disk_leaves_no_data(recordings: Path, tiny_disk: Path) -> None:
    complaint = antiphon("prepare", "manifest", "--source", recordings, "--out", tiny_disk / "data").complaint
    assert complaint.startswith("antiphon: the disk is full")
    assert not (tiny_disk / "data" / "data.json").exists()
    assert "was prepared only in part" in antiphon("align", tiny_disk / "data").complaint


# align and train


def train_complaint(data: Path, out: Path, *words: object) -> str:
    """Train with bad arguments; no run may have begun."""
    complaint = antiphon("train", data, "--out", out, *SMALL, *words).complaint
    assert not (out / "events.jsonl").exists()
    return complaint


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--strategy", "random_ring"], "unknown strategy 'random_ring': did you mean 'random-ring'? Known: allreduce"),
        (["--learners", "0"], "learners must be at least 1, not 0"),
        (["--learners", "x"], "argument --learners: invalid int value: 'x'"),
        (["--batch", "3"], "batch must be at least 4 (one sample for each learner), not 3"),
        (["--learners", "9000", "--batch", "9000"], "samples cannot feed 9000 learners: use fewer learners"),
        (["--slow", "9=2"], "slow 9=2: learners are 0..3, the factor is 1 to 1e+06"),
        (["--slow", "foo"], "--slow foo: expected LEARNER=FACTOR, such as 3=10"),
        (["--lr", "nan"], "lr must be above 0 and finite, not nan"),
        (["--epochs", "0"], "epochs must be at least 1, not 0"),
        (["--cells", "7"], "cells must be even"),
        (["--model", "swb-lstn"], "unknown model 'swb-lstn': did you mean 'swb-lstm'?"),
        (["--epoch", "3"], "unrecognized arguments: --epoch 3"),
    ],
)
def test_train_with_a_wrong_argument(aligned: Path, tmp_path: Path, words: list[str], text: str) -> None:
    complaint = train_complaint(aligned, tmp_path / "run", *words)
    assert text in complaint and complaint.startswith(("antiphon: ", "antiphon train: "))
    assert not (tmp_path / "run").exists()


@pytest.fixture
def data(aligned: Path, tmp_path: Path) -> Path:
    """A copy of the aligned data, to be spoilt."""
    shutil.copytree(aligned, tmp_path / "data")
    return tmp_path / "data"


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_train_on_what_is_not_ready(data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    edit(data / "data.json", data_sha256="1" * 64)
    assert train_complaint(data, run) == (
        f"antiphon: {data} was prepared anew after it was aligned: run `antiphon align {data} --overwrite`"
    )
    (data / "align" / "align.json").unlink()
    assert train_complaint(data, run).endswith(f"is not whole (no align.json): run `antiphon align {data}` --overwrite")
    shutil.rmtree(data / "align")
    assert train_complaint(data, run) == (
        f"antiphon: {data} is not aligned (no {data}/align/align.json): run `antiphon align {data}` first"
    )
    (data / "data.json").unlink()
    half = f"antiphon: {data} was prepared only in part (no data.json): run `antiphon prepare` with --overwrite"
    assert train_complaint(data, run) == half
    assert antiphon("align", data).complaint == half
    assert train_complaint(tmp_path, run).startswith(f"antiphon: {tmp_path} is not a prepared corpus (no data.json)")
    assert "no such folder" in train_complaint(tmp_path / "nowhere", run)
    assert not run.exists()


@pytest.mark.parametrize("name", ["fbank.npy", "utterances.jsonl", "align/pdf.npy", "align/states.txt"])
def test_train_on_a_file_cut_short(data: Path, tmp_path: Path, name: str) -> None:
    path = data / name
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2 - 1])
    assert str(path.parent) in train_complaint(data, tmp_path / "run")


def test_train_into_a_folder_of_others(aligned: Path, tmp_path: Path) -> None:
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "to ann").write_text("dear ann")
    assert "is not empty: name a new folder, or pass --overwrite" in train_complaint(aligned, tmp_path / "letters")
    assert "--overwrite does not delete it" in train_complaint(aligned, tmp_path / "letters", "--overwrite")
    assert f"{tmp_path}/letters is not a run" in train_complaint(aligned, tmp_path / "letters", "--resume")
    assert f"{tmp_path}/none is not a run" in train_complaint(aligned, tmp_path / "none", "--resume")
    file = tmp_path / "letters" / "to ann"
    assert f"{file} is a file: name a folder" in train_complaint(aligned, file)
    assert file.read_text() == "dear ann" and list(file.parent.iterdir()) == [file]


def test_the_installed_command_says_it_in_one_line(aligned: Path, tmp_path: Path) -> None:
    with Started(tmp_path / "process", "train", aligned, "--out", tmp_path / "run", "--learners", 0) as process:
        assert process.result().complaint == "antiphon: learners must be at least 1, not 0"


# decode and report


@pytest.fixture
def run(data: Path, tmp_path: Path) -> Path:
    """A run that looks finished; its model was never trained."""
    folder = tmp_path / "run"
    folder.mkdir()
    acoustics = Acoustics.of_data(TrainConfig().with_changes(layers=1, cells=16, bottleneck=8), data)
    write_json(folder / "config.json", acoustics.to_json())
    torch.save(acoustics.model().state_dict(), folder / "model.pt")
    write_json(folder / "summary.json", {"schema": 1, "wer": None})
    return folder


def test_decode_what_is_no_run(tmp_path: Path) -> None:
    assert antiphon("decode", tmp_path).complaint == (
        f"antiphon: {tmp_path} is not a run (no config.json): name a folder that `antiphon train` wrote"
    )
    assert str(tmp_path) in antiphon("report", tmp_path).complaint
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--split", "eval"], "split must be one of train, dev, test, not 'eval'"),
        (["--scale", "0.1"], "give both --scale and --prior-weight, or neither"),
        (["--scale", "0", "--prior-weight", "1"], "scale must be above 0 and finite, not 0.0"),
        (["--scale", "1", "--prior-weight", "nan"], "prior_weight must be at least 0 and finite, not nan"),
        (["--beam", "0"], "beam must be above 0"),
        (["--max-active", "0"], "max_active must be at least 1"),
    ],
)
def test_decode_with_a_wrong_argument(run: Path, words: Sequence[str], text: str) -> None:
    assert text in antiphon("decode", run, *words).complaint
    assert not (run / "decode").exists()


def unlink(name: str) -> Callable[[Path], object]:
    return lambda run: (run / name).unlink()


def write(name: str, text: str) -> Callable[[Path], object]:
    return lambda run: (run / name).write_text(text)


def cut(name: str) -> Callable[[Path], object]:
    return lambda run: (run / name).write_bytes((run / name).read_bytes()[:500])


def narrower(run: Path) -> None:
    row: Json = read_json(run / "config.json")
    row["train"]["model"]["cells"] = 8
    write_json(run / "config.json", row)


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (unlink("summary.json"), "was not trained to its end (no summary.json)"),
        (unlink("model.pt"), "model.pt is not there"),
        (cut("model.pt"), "model.pt is not a whole file of weights"),
        (write("model.pt", ""), "model.pt is not a whole file of weights"),
        (write("model.pt", "these are no weights"), "model.pt is not a whole file of weights"),
        (narrower, "model.pt holds other weights than"),
        (cut("config.json"), "config.json does not hold a run's settings"),
        (write("config.json", "{}"), "config.json does not hold a run's settings (no 'train')"),
    ],
)
def test_decode_a_damaged_run(run: Path, damage: Callable[[Path], object], text: str) -> None:
    damage(run)
    complaint = antiphon("decode", run, "--scale", 0.1, "--prior-weight", 1).complaint
    assert text in complaint and str(run) in complaint
    assert not (run / "decode").exists()


def test_decode_onto_a_full_disk(run: Path, tiny_disk: Path) -> None:
    full = tiny_disk / "run"
    shutil.copytree(run, full)
    with pytest.raises(OSError, match="No space left"), (tiny_disk / "ballast").open("wb", buffering=0) as ballast:
        while True:
            ballast.write(bytes(4096))
    complaint = antiphon("decode", full, "--scale", 0.1, "--prior-weight", 1).complaint
    assert complaint.startswith("antiphon: the disk is full")
    assert list(full.rglob("wer.json")) == [] and read_json(full / "summary.json")["wer"] is None
    (tiny_disk / "ballast").unlink()
    result = antiphon("decode", full, "--scale", 0.1, "--prior-weight", 1, "--json").object
    assert result["wer"] == read_json(full / "summary.json")["wer"]


def test_resume_without_a_checkpoint(run: Path, data: Path) -> None:
    (run / "summary.json").unlink()
    assert antiphon("train", data, "--out", run, "--resume").complaint == (
        f"antiphon: {run} has no checkpoint to resume from: start it anew with --overwrite"
    )


def test_resume_on_other_data(run: Path, aligned: Path, data: Path) -> None:
    complaint = antiphon("train", aligned, "--out", run, "--resume").complaint
    assert complaint == f"antiphon: {run} was trained on {data}: --resume goes on with that, not with {aligned}"


# launch


def test_launch(tmp_path: Path) -> None:
    assert "no such script" in antiphon("launch", tmp_path / "none.py").complaint
    script = tmp_path / "script.py"
    script.write_text("print('never')")
    assert "must be at least 1, not 0" in antiphon("launch", "--learners", 0, script).complaint
