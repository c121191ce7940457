"""Learners of two hosts, both of them this machine: each host has its own memory, and TCP lies between them."""

from __future__ import annotations

import os
import socket
from collections import Counter

import pytest
import torch
from forked import DEADLINE_S, Forked, train

from antiphon.strategies import STRATEGIES
from antiphon.transport.block import Block
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
            os.environ.update(self.environments[number])
            self.body()

        return Forked(body, self.folder / f"learner-{number}.log")

    def __exit__(self, *_):
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()

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
