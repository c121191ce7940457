"""Learners of two hosts, both of them this machine: each host has its own memory, and TCP lies between them."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import socket
import sys
import time
from collections import Counter

import pytest
import torch
from forked import DEADLINE_S, Forked, train, until

from antiphon.strategies import STRATEGIES
from antiphon.training.launch import Watched
from antiphon.transport.block import Block, Col, Head, Status
from antiphon.transport.mirror import collect
from antiphon.transport.place import Place

NAMES = sorted(STRATEGIES)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


class HostRun:
    """Forked learners with what srun would tell them: ``sizes`` learners on each host."""

    def __init__(self, body, sizes, folder, **environment):
        self.body, self.folder, self.learners = body, folder, sum(sizes)
        places = [(host, rank) for host, size in enumerate(sizes) for rank in range(size)]
        shared = {
            "SLURM_JOB_ID": str(os.getpid()),
            "SLURM_STEP_ID": folder.name,
            "SLURM_STEP_NUM_TASKS": str(self.learners),
            "SLURM_STEP_NUM_NODES": str(len(sizes)),
            "MASTER_ADDR": "127.0.0.1",
            "ANTIPHON_MEETING_PORT": str(free_port()),
            "ANTIPHON_SECRET": "only these tests know it",
            **environment,
        }
        self.environments = [
            {**shared, "SLURM_PROCID": str(number), "SLURM_LOCALID": str(rank), "SLURM_NODEID": str(host)}
            for number, (host, rank) in enumerate(places)
        ]

    def __enter__(self):
        self.processes = [self._start(number) for number in range(self.learners)]
        return self

    def _start(self, number):
        def body():
            atexit._clear()
            os.environ.update(self.environments[number])
            try:
                self.body()
            finally:
                # As any process of a user's: learners have their last word.
                atexit._run_exitfuncs()

        return Forked(body, self.folder / f"learner-{number}.log")

    def __exit__(self, *_):
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        for environment in self.environments:
            # The first of a host removes its memory's folder, unless it was killed.
            if (folder := Place.find(environment).folder) is not None:
                shutil.rmtree(folder, ignore_errors=True)

    def log(self, number):
        return (self.folder / f"learner-{number}.log").read_text()

    def statuses(self):
        return [process.wait(2 * DEADLINE_S) for process in self.processes]

    def block(self, number):
        """The memory of a learner's host."""
        place = Place.find(self.environments[number])
        return Block.attach(place.folder, self.learners, DEADLINE_S)

    def taken(self):
        lines = [line.split() for number in range(self.learners) for line in self.log(number).splitlines()]
        return Counter(int(sample) for line in lines if line[:1] == ["took"] for sample in line[1:])


def save(folder):
    def at_end(learner):
        assert learner.block.buffers is not None
        torch.save([learner.weights.w_N.clone(), learner.consensus(), learner.metrics], folder / f"{learner.number}.pt")

    return at_end


def saved(folder, learners):
    return [torch.load(folder / f"{number}.pt") for number in range(learners)]


def assert_all_well(run):
    assert run.statuses() == [0] * run.learners, "\n".join(run.log(number)[-2000:] for number in range(run.learners))


@pytest.mark.parametrize("name", NAMES)
def test_every_strategy_over_two_hosts(name, tmp_path):
    with HostRun(lambda: train(name, epochs=3, at_end=save(tmp_path)), (2, 1), tmp_path) as run:
        assert_all_well(run)
    ends = saved(tmp_path, 3)
    mean_N = torch.stack([own_N for own_N, _, _ in ends]).mean(0)
    for _, state, metrics in ends:
        torch.testing.assert_close(torch.cat([value.reshape(-1) for value in state.values()]), mean_N)
        assert metrics["bytes"] > 0
    assert run.taken() == dict.fromkeys(range(64), 3)


@pytest.mark.parametrize("wire", ["bfloat16", "int8"])
def test_snapshots_go_by_any_wire_format_and_by_ipv6(wire, tmp_path):
    environment = {"ANTIPHON_WIRE": wire, "MASTER_ADDR": "::1"}
    with HostRun(lambda: train("random-ring", epochs=2, at_end=save(tmp_path)), (1, 1), tmp_path, **environment) as run:
        assert_all_well(run)
    ends = saved(tmp_path, 2)
    mean_N = torch.cat([value.reshape(-1) for value in ends[1][1].values()])
    torch.testing.assert_close(mean_N, (ends[0][0] + ends[1][0]) / 2)
    size = {"bfloat16": 2.0, "int8": 1.004}[wire] * len(mean_N)
    for _, _, metrics in ends:
        exchanges = metrics["exchanges"]["committed"] + metrics["exchanges"]["applied"]
        assert 0 < exchanges * size <= metrics["bytes"] * 1.05


def test_learners_of_two_ranks_each(tmp_path):
    with HostRun(
        lambda: train("random-ring", epochs=2, at_end=save(tmp_path)), (2, 2), tmp_path, ANTIPHON_RANKS_PER_LEARNER="2"
    ) as run:
        assert_all_well(run)
    assert run.taken() == dict.fromkeys(range(64), 2)


def waiting(learner):
    time.sleep(0.01)


def steps(block):
    return block.board_LC[:, Col.STEPS].tolist()


def until_all_have(block, more):
    goals = [count + more for count in steps(block)]
    until(lambda: all(now >= goal for now, goal in zip(steps(block), goals, strict=True)), f"{more} steps of each")


def endless(strategy="random-ring", **more):
    train(strategy, epochs=1000, before_step=waiting, **more)


def test_each_host_sees_all_and_a_request_to_stop_reaches_all(tmp_path):
    with HostRun(lambda: endless(at_end=save(tmp_path)), (1, 2), tmp_path) as run:
        near, far = run.block(0), run.block(2)
        until(lambda: min(steps(near)) > 0, "steps of all, as the first host sees them")
        assert (near.local, near.remote, far.local, far.remote) == ([0], [1, 2], [1, 2], [0])
        watched = Watched(near)
        assert watched.begun and watched.present == [0, 1, 2]
        watched.consensus()
        assert watched.missing == []
        near.request_stop()
        assert_all_well(run)
    assert near.board_LC[:, Col.STATE].tolist() == far.board_LC[:, Col.STATE].tolist() == [Status.DONE] * 3
    assert far.head[Head.STOP] == near.head[Head.STOP] > 0
    ends = saved(tmp_path, 3)
    own_N, mean_N = ends[0][0], torch.stack([own_N for own_N, _, _ in ends]).mean(0)
    torch.testing.assert_close(watched.consensus()[0], mean_N)
    assert near.buffers.weights_LN[0].tolist() == own_N.tolist()


def test_a_synchronous_run_stops_after_one_round(tmp_path):
    with HostRun(lambda: endless("sync-ring", at_end=save(tmp_path)), (1, 1), tmp_path) as run:
        until(lambda: min(steps(run.block(0))) > 2, "some rounds")
        run.block(1).request_stop()
        assert_all_well(run)
    assert len({metrics["steps"] for _, _, metrics in saved(tmp_path, 2)}) == 1


def test_an_asynchronous_run_goes_on_without_a_killed_learner_of_another_host(tmp_path):
    with HostRun(lambda: endless(at_end=save(tmp_path)), (1, 2), tmp_path) as run:
        near = run.block(0)
        until(lambda: min(steps(near)) > 0, "steps of all")
        os.kill(run.processes[2].pid, signal.SIGKILL)
        until(lambda: near.dead(2), "the news of its death")
        assert collect(near) == []
        before = steps(near)
        until(lambda: all(steps(near)[n] > before[n] + 5 for n in (0, 1)), "the others' steps")
        near.request_stop()
        assert run.statuses() == [0, 0, -signal.SIGKILL]
    first, second = torch.load(tmp_path / "0.pt"), torch.load(tmp_path / "1.pt")
    mean_N = torch.cat([value.reshape(-1) for value in first[1].values()])
    torch.testing.assert_close(mean_N, (first[0] + second[0]) / 2)


def test_a_synchronous_run_ends_with_a_killed_learner_of_another_host(tmp_path):
    with HostRun(lambda: endless("allreduce"), (1, 2), tmp_path) as run:
        until(lambda: min(steps(run.block(0))) > 0, "steps of all")
        os.kill(run.processes[2].pid, signal.SIGKILL)
        began_s = time.monotonic()
        assert run.statuses() == [1, 1, -signal.SIGKILL]
        assert time.monotonic() - began_s < DEADLINE_S / 2, "long before the rounds' own deadline"
    for number in range(2):
        assert "learners [2] are gone, and this strategy needs them in every round" in run.log(number), run.log(number)


def test_a_frozen_learner_is_left_out_of_the_consensus_and_named(tmp_path):
    with HostRun(endless, (1, 1), tmp_path) as run:
        near = run.block(0)
        until(lambda: min(steps(near)) > 0, "steps of all")
        os.kill(run.processes[1].pid, signal.SIGSTOP)
        try:
            assert collect(near, 0.5) == [1]
            assert not near.dead(1), "silence is not death"
        finally:
            os.kill(run.processes[1].pid, signal.SIGCONT)
        until(lambda: collect(near) == [], "the thawed one's weights")
        until_all_have(near, 3)
        near.request_stop()
        assert_all_well(run)


def test_learners_of_one_host_open_no_port_and_need_no_secret(tmp_path):
    def body():
        opened = []
        audit = lambda event, args: opened.append(args) if event == "socket.bind" else None  # noqa: E731
        sys.addaudithook(audit)
        train("random-ring", epochs=2)
        assert opened and all(one.family == socket.AF_UNIX for one, *_ in opened), opened

    with HostRun(body, (2,), tmp_path, ANTIPHON_SECRET="", MASTER_ADDR="no.such.host.invalid") as run:
        assert_all_well(run)


def test_what_is_missing_is_named(tmp_path):
    with HostRun(lambda: train("random-ring"), (1, 1), tmp_path, ANTIPHON_SECRET="") as run:
        assert run.statuses() == [1, 1]
    assert "set ANTIPHON_SECRET on all of them" in run.log(0)
