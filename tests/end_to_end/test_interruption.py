"""Training that is stopped, killed or loses a learner: what is left, what goes on, and what is told.

Learners are slowed, so that a run lasts long enough to be met in the middle at little cost of computing.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path

import pytest
import torch
from commands import SMALL, Result, Started, all_gone, antiphon, events, learners, meanwhile, until

from antiphon.recipes.acoustics import Acoustics
from antiphon.records import Json, read_json

EPOCHS = 3


def slowed(*factors: int) -> list[str]:
    return [word for number, factor in enumerate(factors) for word in ("--slow", f"{number}={factor}")]


def test_stopped_by_ctrl_c_and_resumed(aligned: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ["train", aligned, "--out", run, "--learners", 2, "--epochs", EPOCHS, *SMALL, *slowed(40, 40)]
    with Started(tmp_path / "first", *words) as first:
        until(lambda: bool(events(run, "checkpoint")), "the first checkpoint")
        pids = learners(run)

        # In the meantime nobody else may write there.
        before = sorted(path.name for path in run.iterdir())
        for option in ("--overwrite", "--resume"):
            second = antiphon(*words, option).complaint
            assert second == (
                f"antiphon: {run} is in use by process {first.process.pid}: wait for it to end, or name another folder"
            )
        assert "is not empty" in antiphon(*words).complaint
        assert sorted(path.name for path in run.iterdir()) == before and not all_gone(pids)

        os.kill(first.process.pid, signal.SIGINT)
        result = first.result()
        assert result.status == 130, result.err
        assert "Traceback" not in result.err and result.err.endswith("antiphon: stopped\n")
        until(lambda: all_gone(pids), "the learners' end", 5.0)
        assert first.leftovers == []
    assert not (run / "summary.json").exists() and not (run / "model.pt").exists()
    assert [row["reason"] for row in events(run, "run_stopped")] == ["interrupted"]
    path = run / events(run, "checkpoint")[-1]["path"]
    assert f"stopped at {path}: go on with --resume" in result.err
    state = torch.load(path, weights_only=True)
    assert state["earlier"]["samples"] > 0 and 1 <= state["epoch"] < EPOCHS
    assert len(state["optimizers"]) == 2
    assert "was not trained to its end" in antiphon("decode", run).complaint

    # A run's own settings hold: others are refused, and the same ones are not.
    refused = antiphon("train", aligned, "--out", run, "--resume", "--epochs", EPOCHS + 1, "--lr", 0.4).complaint
    assert refused.endswith(f"goes on with the settings of {run}: leave out epochs, lr, or train anew")
    resumed = antiphon(*words, "--resume", "--json").object
    check_whole(run, resumed, state)

    # Once it is whole, there is nothing to resume, and nothing of it changes.
    again = antiphon("train", aligned, "--out", run, "--resume", "--json")
    assert again.object == read_json(run / "summary.json") and "trained to its end already" in again.err
    assert "pass one of the two" in antiphon(*words, "--resume", "--overwrite").complaint
    assert (run / "model.pt").is_file()


def check_whole(run: Path, summary: Json, state: Json) -> None:
    """The resumed run counts the work of both sessions."""
    session = sum(row["samples"] for row in events(run, "learner"))
    assert summary["samples"] == state["earlier"]["samples"] + session
    # Nothing was left out; a batch that was in hand when the run was stopped may have been taken twice.
    wanted = EPOCHS * len(Acoustics.of_run(run).samples("train"))
    assert wanted <= summary["samples"] <= wanted + 2 * summary["local_batch"]
    assert summary["wall_s"] > state["earlier"]["wall_s"]
    frames = summary["frames_per_s"] * summary["wall_s"]
    assert frames == pytest.approx(EPOCHS * Acoustics.of_run(run).samples("train").frames, rel=0.05)
    assert all(now > then for now, then in zip(summary["steps_by_learner"], state["earlier"]["steps"], strict=True))
    assert [row["event"] for row in events(run, "run_started", "run_stopped", "run_finished")] == [
        "run_started",
        "run_stopped",
        "run_started",
        "run_finished",
    ]
    assert not (run / "resume.pt").exists()


def test_a_killed_parent_takes_its_learners_along(aligned: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ["train", aligned, "--out", run, "--learners", 2, "--epochs", 100, *SMALL, *slowed(200, 200)]
    with Started(tmp_path / "parent", *words) as parent:
        until(lambda: bool(events(run, "progress")), "the first steps")
        pids = learners(run)
        assert not all_gone(pids)
        os.kill(parent.process.pid, signal.SIGKILL)
        parent.result()
        until(lambda: all_gone(pids), "the learners' end", 5.0)
    # Half a run is not taken for a whole one; it is no longer in use, and can be begun again.
    assert "was not trained to its end" in antiphon("decode", run).complaint
    assert "no checkpoint to resume from" in antiphon("train", aligned, "--out", run, "--resume").complaint


def kill_one(run: Path, number: int, killed_s: list[float]) -> None:
    """Kill a learner in the middle of its work."""
    until(lambda: any(min(row["steps_by_learner"]) > 0 for row in events(run, "progress")), "steps of all learners")
    os.kill(learners(run)[number], signal.SIGKILL)
    killed_s.append(time.monotonic())


def test_an_asynchronous_run_goes_on_without_a_killed_learner(
    aligned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, temporary = tmp_path / "run", tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    with meanwhile(lambda: kill_one(run, 1, [])):
        result = antiphon(
            "train", aligned, "--out", run, "--learners", 3, "--epochs", 5, *SMALL, *slowed(20, 60, 20), "--restart", 0,
            "--json",
        )  # fmt: skip
    summary = result.object
    (fault,) = events(run, "fault")
    assert (fault["learner"], fault["kind"], fault["text"]) == (1, "died", "was killed by SIGKILL")
    assert "antiphon: learner 1 was killed by SIGKILL; the others go on" in result.err
    # What it held, the batch of its step, was done by another.
    assert summary["samples_lost"] == 0
    assert summary["samples_repeated"] <= fault["tickets_returned"] * summary["local_batch"]
    assert bool(summary["samples_repeated"]) == bool(fault["tickets_returned"])
    assert [row["learner"] for row in events(run, "learner")] == [0, 2]
    first, dead, third = summary["steps_by_learner"]
    assert 0 < dead < min(first, third)
    assert events(run)[-1]["event"] == "run_finished" and (run / "model.pt").is_file()
    assert all_gone(learners(run)) and list(temporary.glob("antiphon-*")) == []


def test_injected_faults_heal_and_are_told(aligned: Path, tmp_path: Path) -> None:
    """Learner 1 is killed and started again, learner 2 becomes not finite and takes a neighbour's weights."""
    run, faults = tmp_path / "run", ("--inject", "kill:1@3", "--inject", "nan:2@4")
    result = antiphon(
        "train", aligned, "--out", run, "--learners", 3, "--epochs", 30, *SMALL, *slowed(20, 20, 20), *faults, "--json"
    )
    summary = result.object
    assert summary["samples_lost"] == 0 and summary["heldout_loss"] > 0 and summary["updates_lost"] <= 3
    assert "antiphon: learner 1 was killed by SIGKILL; it is started again" in result.err
    assert "antiphon: learner 2 had weights that were not finite, and began again with" in result.err
    (fault,) = events(run, "fault")
    assert fault["restarted"] and fault["updates_lost"] == summary["updates_lost"] and fault["jump"] > 0
    assert {(row["learner"], row["change"]) for row in events(run, "membership")} == {(1, "returned"), (2, "reseeded")}
    assert all(row["jump"] >= 0 and row["source"] != row["learner"] for row in events(run, "membership"))
    assert {(row["learner"], row["incarnation"]) for row in events(run, "learner")} == {(0, 0), (1, 1), (2, 0)}
    assert events(run, "run_started")[0]["inject"] == ["kill:1@3", "nan:2@4"]
    steps = sum(summary["steps_by_learner"])
    assert steps == sum(row["tickets"]["ended"] for row in events(run, "learner")) + 3
    assert any(row["consensus_distance"] for row in events(run, "progress"))
    assert all(row["loss"] is None or row["loss"] > 0 for row in events(run, "progress"))


def test_faults_that_are_none_are_refused(aligned: Path, tmp_path: Path) -> None:
    def complaint(*more: object) -> str:
        return antiphon("train", aligned, "--out", tmp_path / "run", "--learners", 2, *more).complaint

    assert "expected KIND:LEARNER@STEP" in complaint("--inject", "kill")
    assert "learners are 0..1" in complaint("--inject", "kill:2@1")
    assert "wait for each other" in complaint("--inject", "leave:1@1", "--strategy", "allreduce")
    assert "--restart must be at least 0, not -1" in complaint("--restart", -1)
    assert not (tmp_path / "run").exists()


def test_a_synchronous_run_ends_with_a_killed_learner(
    aligned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, temporary = tmp_path / "run", tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    killed_s: list[float] = []
    words = ["--strategy", "allreduce", "--learners", 2, "--epochs", 1000, *SMALL, *slowed(20, 20)]
    with meanwhile(lambda: kill_one(run, 1, killed_s)):
        result = antiphon("train", aligned, "--out", run, *words, "--json")
        took_s = time.monotonic() - killed_s[0]
    assert result.status == 1 and result.out == ""
    assert result.err.splitlines()[-1] == "antiphon: learner 1 was killed by SIGKILL"
    assert "Traceback" not in result.err
    assert took_s < 20
    assert [row["reason"] for row in events(run, "run_stopped")] == ["learner 1 was killed by SIGKILL"]
    assert not (run / "summary.json").exists()
    assert all_gone(learners(run)) and list(temporary.glob("antiphon-*")) == []


def test_torchrun(aligned: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "antiphon")
    words = ["train", aligned, "--out", run, "--learners", 2, "--epochs", 1, *SMALL, "--json"]
    with Started(tmp_path / "job", *words, program=launcher) as job:
        result: Result = job.result()
        # Learner 0 alone tells what came out.
        summary = result.object
        assert job.leftovers == []
    assert summary == read_json(run / "summary.json")
    assert (summary["learners"], summary["samples_lost"]) == (2, 0)
    assert min(summary["steps_by_learner"]) > 0
    assert len(events(run, "learner")) == 2 and events(run)[-1]["event"] == "run_finished"


def test_a_disk_that_fills_up_in_the_middle(aligned: Path, tmp_path: Path, tiny_disk: Path) -> None:
    """The model's checkpoint, of 1 MB, does not fit beside the small files of the run."""
    run = tiny_disk / "run"
    words = ["--learners", 1, "--epochs", 3, "--layers", 1, "--cells", 256, "--batch", 64]
    result = antiphon("train", aligned, "--out", run, *words)
    checkpoint = run / "checkpoints" / "epoch-001.pt"
    assert result.status == 2 and "Traceback" not in result.err
    assert result.err.splitlines()[-1].startswith(f"antiphon: the disk is full ({checkpoint}): free some space")
    assert list((run / "checkpoints").iterdir()) == []
    assert not (run / "summary.json").exists()
    assert all_gone(learners(run))
