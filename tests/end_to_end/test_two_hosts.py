"""`antiphon train` on two hosts, both of them this machine: started by torchrun, and as srun would."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from commands import SMALL, Started, antiphon, events, learners, until

from antiphon.records import read_json
from antiphon.transport.block import process_runs

SECRET = "only these tests know it"
EPOCHS = 3


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


@contextlib.contextmanager
def tasks(folder: Path, patch: pytest.MonkeyPatch, *words: object) -> Iterator[list[Started]]:
    """Start a command on two hosts, one task on each, with the variables that srun sets."""
    step = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": folder.name,
        "SLURM_NTASKS": "2",
        "SLURM_STEP_NODELIST": "127.0.0.1,elsewhere",
        "SLURM_LOCALID": "0",
        "ANTIPHON_MEETING_PORT": str(free_port()),
        "ANTIPHON_SECRET": SECRET,
    }
    with contextlib.ExitStack() as stack, patch.context() as inner:
        for name, value in step.items():
            inner.setenv(name, value)
        started = []
        for host in range(2):
            inner.setenv("SLURM_PROCID", str(host))
            inner.setenv("SLURM_NODEID", str(host))
            started.append(stack.enter_context(Started(folder / f"host-{host}", *words)))
        yield started


def words(data: Path, run: Path, *more: object) -> list[object]:
    return ["train", data, "--out", run, "--learners", 2, "--epochs", EPOCHS, *SMALL, *more]


def test_stopped_by_ctrl_c_on_all_hosts_and_resumed(
    aligned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    slow = ("--slow", "0=40", "--slow", "1=40")
    with tasks(tmp_path / "first", monkeypatch, *words(aligned, run, *slow)) as (near, far):
        until(lambda: bool(events(run, "checkpoint")), "the first checkpoint")
        pids = [*learners(run), near.process.pid, far.process.pid]
        for task in (near, far):  # as srun does
            os.kill(task.process.pid, signal.SIGINT)
        results = [near.result(), far.result()]
        assert [result.status for result in results] == [130, 0], results
        assert "Traceback" not in results[0].err + results[1].err
        until(lambda: not any(process_runs(pid) for pid in pids), "the end of all", 5.0)
        assert near.leftovers == far.leftovers == []
    path = run / events(run, "checkpoint")[-1]["path"]
    assert f"stopped at {path}: go on with --resume" in results[0].err
    state = torch.load(path, weights_only=True)
    assert 1 <= state["epoch"] < EPOCHS
    assert [bool(each) for each in state["optimizers"]] == [True, True], "of the learner on the other host too"

    with tasks(tmp_path / "second", monkeypatch, *words(aligned, run, *slow, "--resume", "--json")) as (near, far):
        summary = near.result().object
        assert far.result().status == 0
    assert summary == read_json(run / "summary.json")
    assert summary["samples_lost"] == 0 and min(summary["steps_by_learner"]) > 0
    assert {row["learner"] for row in events(run, "learner")} == {0, 1}
    assert events(run)[-1]["event"] == "run_finished"
    assert list((run / "logs").glob("optimizer-*")) == []


def test_a_dead_learner_of_another_host_does_not_end_the_run(
    aligned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under srun --kill-on-bad-exit=0."""
    run = tmp_path / "run"
    with tasks(tmp_path, monkeypatch, *words(aligned, run, "--slow", "0=20", "--slow", "1=20")) as (near, far):
        until(lambda: any(min(row["steps_by_learner"]) > 0 for row in events(run, "progress")), "steps of both")
        os.kill(far.process.pid, signal.SIGKILL)
        result = near.result()
        assert result.status == 0, result.err
    assert "antiphon: learner 1 vanished; the others go on" in result.err
    assert [row["learner"] for row in events(run, "fault")] == [1]
    assert read_json(run / "summary.json")["samples_lost"] == 0


def test_what_is_wrong_is_said_in_one_line(aligned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_NODEID": "1",
                        "SLURM_LOCALID": "0", "SLURM_STEP_NODELIST": "127.0.0.1,b"}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    run = tmp_path / "run"
    assert antiphon(*words(aligned, run, "--learners", 4)).complaint == (
        "antiphon: 2 learners were started: pass --learners 2"
    )
    assert "set ANTIPHON_SECRET on all of them" in antiphon(*words(aligned, run)).complaint
    monkeypatch.setenv("ANTIPHON_SECRET", SECRET)
    monkeypatch.setenv("ANTIPHON_MEETING_PORT", str(port := free_port()))
    monkeypatch.setattr("antiphon.transport.assembly.gather.__defaults__", (0.3,))
    result = antiphon(*words(aligned, run))
    assert result.status == 1
    (line,) = result.err.splitlines()
    assert line.startswith(f"antiphon: waited 0.3 s for the meeting at 127.0.0.1:{port} (Connection refused)")


@pytest.mark.long
def test_torchrun_on_two_hosts(aligned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, port = tmp_path / "run", free_port()
    monkeypatch.setenv("ANTIPHON_SECRET", SECRET)
    with contextlib.ExitStack() as stack:
        jobs = []
        for host in range(2):
            launcher = ("-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(host), "--nproc-per-node",
                        "1", "--rdzv-backend", "static", "--master-addr", "127.0.0.1", "--master-port", str(port),
                        "-m", "antiphon")  # fmt: skip
            job = Started(tmp_path / f"host-{host}", *words(aligned, run, "--json"), program=launcher)
            jobs.append(stack.enter_context(job))
        summary = jobs[0].result().object
        assert jobs[1].result().status == 0
        assert [job.leftovers for job in jobs] == [[], []]
    assert summary == read_json(run / "summary.json")
    assert (summary["learners"], summary["samples_lost"]) == (2, 0)
    assert min(summary["steps_by_learner"]) > 0 and len(events(run, "learner")) == 2
