"""From recorded speech to a word error rate and a page, by the commands alone, on a part of the prompts.

Measured over three seeds: a word error rate of 40 to 45 %, a held-out loss of 1.9 to 2.0 nats a frame.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import Result, antiphon, documented, events, fields, is_number
from conftest import Prepared

from antiphon.records import Json, read_json, read_jsonl

LEARNERS, EPOCHS = 3, 8
MODEL = ("--layers", 1, "--cells", 64, "--bottleneck", 48)
SETTINGS = ("--batch", 24, "--lr", 0.6, "--warmup-epochs", 2, "--hold-epochs", 5)


@dataclass(frozen=True)
class Trained:
    """A run, and what the commands that made it printed."""

    run: Path
    train: Result
    decode: Result
    report: Result

    @property
    def summary(self) -> Json:
        """Its closing file."""
        return read_json(self.run / "summary.json")


@pytest.fixture(scope="module")
def trained(prompts: Prepared, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    run = tmp_path_factory.mktemp("trained") / "run"
    words = ("--strategy", "random-ring", "--learners", LEARNERS, "--epochs", EPOCHS, *MODEL, *SETTINGS)
    train = antiphon("train", prompts.data, "--out", run, *words, "--json")
    assert train.status == 0, train.err
    return Trained(run, train, antiphon("decode", run, "--json"), antiphon("report", run, "--json"))


# Data and alignment


def test_the_prepared_folder_is_as_documented(prompts: Prepared) -> None:
    table = documented("A prepared corpus: DATA")
    assert all((prompts.data / name).is_file() for name in table)
    info = read_json(prompts.data / "data.json")
    assert fields(table["data.json"]) - {"speaker", "utterance", "align", "train", "decode"} <= set(info)
    assert info["corpus"] == "prompts" and info["skipped"] == 0
    rows = [row for _, row in read_jsonl(prompts.data / "utterances.jsonl")]
    assert {"id", "speaker", "split", "words", "duration_s", "audio", "first_frame", "frames"} <= set(rows[0])
    assert len(rows) == sum(info["utterances"].values())
    frames = sum(row["frames"] for row in rows)
    for name, features in (("fbank.npy", 120), ("mfcc.npy", 39)):
        assert np.load(prompts.data / name, mmap_mode="r").shape == (frames, features)


def test_the_alignment_is_as_documented(prompts: Prepared) -> None:
    folder, table = prompts.data / "align", documented("Its alignment: DATA/align")
    assert all((folder / name).is_file() for name in table)
    info = read_json(folder / "align.json")
    assert fields(table["align.json"]) - {"total"} <= set(info)
    assert info["failed"] == [] and info["gmm_wer"]["rate"] < 0.7
    frames = sum(row["frames"] for _, row in read_jsonl(prompts.data / "utterances.jsonl"))
    pdf_T = np.load(folder / "pdf.npy")
    assert pdf_T.shape == (frames,) and pdf_T.min() >= 0 and pdf_T.max() < info["states"]
    assert np.exp(np.load(folder / "priors.npy")).sum() == pytest.approx(1, abs=1e-4)


# The run


def test_the_run_is_as_documented(trained: Trained) -> None:
    table = documented("A run: RUN")
    names = {name for name in table if "/" not in name}
    assert len(names) > 5 and all((trained.run / name).is_file() for name in names)
    decoded = set(re.findall(r"[\w.]+", next(name for name in table if name.startswith("decode/")))) - {
        "decode",
        "SPLIT",
    }
    assert decoded == {path.name for path in (trained.run / "decode" / "test").iterdir()}
    assert (trained.run / "checkpoints" / f"epoch-{EPOCHS:03d}.pt").is_file()
    assert list((trained.run / "tensorboard").glob("events.*"))
    assert len(list((trained.run / "logs").glob("learner-*.log"))) == LEARNERS
    assert [path for path in trained.run.rglob("*") if path.name.endswith(".part") or path.name == "resume.pt"] == []
    documented_fields = fields(table["summary.json"])
    assert len(documented_fields) > 20 and documented_fields <= set(trained.summary)


def test_every_sample_was_taken_once_an_epoch(trained: Trained, prompts: Prepared) -> None:
    summary = trained.summary
    rows = [row for _, row in read_jsonl(prompts.data / "utterances.jsonl") if row["split"] == "train"]
    samples = sum(-(-(row["frames"] + 20) // 21) for row in rows)
    assert summary["samples"] == EPOCHS * samples
    assert (summary["samples_lost"], summary["samples_repeated"], summary["updates_lost"]) == (0, 0, 0)
    assert summary["local_batch"] == 8
    batches = LEARNERS * -(-samples // (8 * LEARNERS))
    assert sum(summary["steps_by_learner"]) == EPOCHS * batches
    assert all(steps > 0 for steps in summary["steps_by_learner"])


def test_the_summary_speaks_of_this_run(trained: Trained, prompts: Prepared) -> None:
    summary = trained.summary
    assert (summary["strategy"], summary["learners"], summary["epochs"]) == ("random-ring", LEARNERS, EPOCHS)
    assert summary["data_sha256"] == prompts.prepare.object["data_sha256"]
    assert summary["gmm_wer"] == prompts.align.object["gmm_wer"]
    state = torch.load(trained.run / "model.pt", weights_only=True)
    assert summary["parameters"] == sum(value.numel() for value in state.values())
    assert summary["staleness"]["max"] >= summary["staleness"]["mean"] > 0
    assert 0 < summary["consensus_distance"] < 0.1
    assert summary["wall_s"] > 0 and summary["frames_per_s"] > 0


def test_events_are_as_documented(trained: Trained) -> None:
    table = documented("Events")
    rows = events(trained.run)
    for row in rows:
        assert row["schema"] == 1 and is_number(row["time_s"])
        assert fields(table[row["event"]]) <= set(row), row
    kinds = [row["event"] for row in rows]
    assert kinds[0] == "run_started" and kinds[-1] == "run_finished"
    assert kinds.count("learner") == LEARNERS and "fault" not in kinds and "run_stopped" not in kinds
    times = [row["time_s"] for row in rows]
    assert times == sorted(times)
    evaluations = events(trained.run, "evaluation")
    epochs = [int(row["epoch"]) for row in evaluations]
    # On a busy machine two epochs may pass between two looks.
    assert epochs == sorted(set(epochs)) and epochs[-1] == EPOCHS and len(epochs) > EPOCHS / 2
    assert evaluations[-1]["heldout_loss"] == trained.summary["heldout_loss"] == rows[-1]["heldout_loss"]
    by_learner = [row["steps"] for row in events(trained.run, "learner")]
    assert by_learner == trained.summary["steps_by_learner"]
    assert sum(row["samples"] for row in events(trained.run, "learner")) == trained.summary["samples"]


def test_the_model_has_learned(trained: Trained, prompts: Prepared) -> None:
    losses = [row["heldout_loss"] for row in events(trained.run, "evaluation")]
    untrained = math.log(prompts.align.object["states"])
    assert losses[-1] < losses[0] < untrained
    assert losses[-1] < untrained - 1.5
    assert trained.summary["frame_accuracy"] > 0.3


def test_the_word_error_rate(trained: Trained) -> None:
    wer = trained.decode.object["wer"]
    assert wer == trained.summary["wer"] == read_json(trained.run / "decode" / "test" / "wer.json")["wer"]
    assert wer["errors"] == wer["substitutions"] + wer["insertions"] + wer["deletions"]
    assert wer["rate"] == pytest.approx(wer["errors"] / wer["words"])
    low, high = wer["ci95"]
    assert 0 < low <= wer["rate"] <= high <= 1
    # Without training it is 100 %.
    assert wer["rate"] < 0.7
    references = (trained.run / "decode" / "test" / "ref.trn").read_text().splitlines()
    assert sum(len(line.split()) - 1 for line in references) == wer["words"]
    hypotheses = (trained.run / "decode" / "test" / "hyp.trn").read_text().splitlines()
    ids = [line.rsplit("(", 1)[1] for line in references]
    assert ids == [line.rsplit("(", 1)[1] for line in hypotheses]


def test_decoding_with_given_weights_needs_no_dev(trained: Trained) -> None:
    chosen = trained.decode.object
    again = antiphon(
        "decode", trained.run, "--split", "dev", "--scale", chosen["scale"], "--prior-weight", chosen["prior_weight"],
        "--json",
    ).object  # fmt: skip
    best = min(row["errors"] for row in chosen["chosen_on_dev"])
    assert again["wer"]["errors"] == best and again["chosen_on_dev"] == []
    assert trained.summary["wer"] == chosen["wer"]


def test_the_page_needs_nothing_else(trained: Trained) -> None:
    page = (trained.run / "report.html").read_text()
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:|//|file:)""", page)
    assert "<script" not in page and "@import" not in page and "</html>" in page
    assert f"{100 * trained.summary['wer']['rate']:.1f}" in page
    assert trained.report.object["wer"] == trained.summary["wer"]


# Other commands on the same data


def test_json_is_all_that_is_on_standard_output(trained: Trained, prompts: Prepared) -> None:
    commands = {
        "prepare": prompts.prepare,
        "align": prompts.align,
        "train": trained.train,
        "decode": trained.decode,
        "report": trained.report,
    }
    for name, result in commands.items():
        assert result.object["command"] == name and result.object["schema"] == 1
        assert {"commit", "dirty", "versions", "cpu", "cores", "load_at_start"} <= set(result.object["environment"])


def test_synchronous_learners_are_equal(prompts: Prepared, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ("--strategy", "allreduce", "--learners", 2, "--epochs", 2, *MODEL, *SETTINGS)
    result = antiphon("train", prompts.data, "--out", run, *words, "--json").object
    assert result["consensus_distance"] == 0
    first, second = result["steps_by_learner"]
    assert first == second > 0
    assert result["samples_lost"] == 0
    assert result["staleness"] == {"mean": 0, "max": 0}
    # Those before the last may have met one learner before its step of a round, and the other after it.
    assert events(run, "evaluation")[-1]["consensus_distance"] == 0
    # The demo's last stage, on the folders as the demo names them.
    (tmp_path / "data").symlink_to(prompts.data)
    page = antiphon("demo", "--out", tmp_path, "--stage", "report", "--json").object
    assert page["command"] == "demo" and list(page["seconds"]) == ["report", "total"]
    assert (tmp_path / "report.html").is_file()
    assert page["strategy"] == "allreduce"
