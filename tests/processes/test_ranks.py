"""Super-learners: several ranks that are one learner."""

from __future__ import annotations

import os
import re
import signal
from functools import partial

import numpy as np
import pytest
import torch
from forked import ForkLaunch, problem, train, until

import antiphon
from antiphon.errors import LearnerError
from antiphon.transport.block import Col


def numbers(text: str, word: str) -> list[float]:
    return [float(value) for line in text.splitlines() if line.startswith(f"{word} ") for value in line.split()[1:]]


def tell(learner: antiphon.Learner) -> None:
    print("weights", *torch.cat([p.detach().flatten() for p in learner.model.parameters()]).tolist(), flush=True)
    print("consensus", *torch.cat([v.flatten() for v in learner.consensus().values()]).tolist(), flush=True)


def alone(samples: int, batches: list[list[int]]) -> torch.Tensor:
    """Return the weights of an ordinary loop over the same batches."""
    data, model = problem(samples)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    _, inputs, targets = data.tensors
    for batch in batches:
        optimizer.zero_grad()
        (model(inputs[batch]) - targets[batch]).square().mean().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("ranks", [2, 3])
def test_one_learner_of_several_ranks_is_an_ordinary_loop(tmp_path, ranks):
    """12 samples a batch over all ranks: their gradients' mean is the gradient of the batch."""
    with ForkLaunch(partial(train, "random-ring", batch=12, samples=48, at_end=tell), 1, tmp_path, ranks) as launch:
        launch.watch(lambda seen: None)
        until(lambda: all(process.poll() is not None for process in launch._followers), "ranks that follow to end")
        logs = [launch._log(0, rank).read_text() for rank in range(ranks)]
    parts = [[line.split()[1:] for line in log.splitlines() if line.startswith("took")] for log in logs]
    batches = [[int(sample) for part in step for sample in part] for step in zip(*parts, strict=True)]
    assert sorted(sample for batch in batches for sample in batch) == sorted(3 * list(range(48)))
    expected_N = alone(48, batches)
    for log in logs:
        np.testing.assert_allclose(numbers(log, "weights"), expected_N, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(numbers(log, "consensus"), expected_N, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("strategy", ["random-ring", "allreduce", "delay-by-one", "sync-ring"])
def test_two_learners_of_two_ranks(tmp_path, strategy):
    with ForkLaunch(partial(train, strategy, batch=16, at_end=tell), 2, tmp_path, 2) as launch:
        launch.watch(lambda seen: None)
        until(lambda: all(process.poll() is not None for process in launch._followers), "ranks that follow to end")
        logs = [[launch._log(number, rank).read_text() for rank in range(2)] for number in range(2)]
        assert launch.watched.faults == []
        samples = launch.board(Col.SAMPLES)
    assert sum(samples) == 3 * 64
    taken = [int(n) for pair in logs for log in pair for line in re.findall("took (.*)", log) for n in line.split()]
    assert sorted(taken) == sorted(3 * list(range(64)))
    for leader, follower in logs:
        np.testing.assert_array_equal(numbers(leader, "weights"), numbers(follower, "weights"))
    ends = [numbers(log, "consensus") for pair in logs for log in pair]
    for end in ends[1:]:
        np.testing.assert_allclose(end, ends[0], rtol=1e-6)


def test_a_learner_fails_with_any_of_its_ranks_and_the_others_go_on(tmp_path):
    def die(learner: antiphon.Learner) -> None:
        if learner.place.learner == 1 and learner.place.rank == 1 and learner.round == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    with ForkLaunch(partial(train, "random-ring", before_step=die), 2, tmp_path, 2) as launch:
        launch.watch(lambda seen: None)
        faults = launch.watched.faults
        text = launch.log(1)
        assert [fault.learner for fault in faults] == [1]
        until(lambda: all(process.poll() is not None for process in launch._followers), "ranks that follow to end")
    assert "[1] are gone" in text


def test_a_rank_that_follows_ends_with_its_leader(tmp_path):
    def die(learner: antiphon.Learner) -> None:
        if learner.place.learner == 0 and learner.place.rank == 0 and learner.round == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    with ForkLaunch(partial(train, "random-ring", before_step=die), 2, tmp_path, 2) as launch:
        launch.watch(lambda seen: None)
        until(lambda: all(process.poll() is not None for process in launch._followers), "ranks that follow to end")
        text = launch._log(0, 1).read_text()
    assert "gone" in text or "has ended" in text


def test_too_small_a_batch_is_refused(tmp_path):
    with ForkLaunch(partial(train, "random-ring", batch=3), 2, tmp_path, 2) as launch, pytest.raises(LearnerError):
        launch.watch(lambda seen: None)
    assert "batch must be at least the number of learners' ranks (4), not 3" in launch.log(0)


def test_ranks_that_are_asked_to_stop_end_whatever_epochs_are_left(tmp_path):
    """More epochs are left than the list of tickets has room for their ends."""
    with ForkLaunch(partial(train, "random-ring", epochs=1000), 2, tmp_path, 2) as launch:
        until(lambda: min(launch.board(Col.STEPS)) > 3, "some steps")
        launch.stop()
        assert launch.wait(20.0)
        until(lambda: all(process.poll() is not None for process in launch._followers), "ranks that follow to end")
        assert [process.poll() for process in launch._followers] == [0, 0]
