"""Learners as processes forked from the test: the real launch, exchange and watch, without the imports' seconds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import antiphon
from antiphon.training.launch import Launch, _die_with
from antiphon.transport.block import Col, Status
from antiphon.transport.place import Place

DEADLINE_S = 30.0

# What torch imports at the first step is imported once, before the forks.
_parameter = nn.Parameter(torch.zeros(1))
_parameter.grad = torch.zeros(1)
torch.optim.SGD([_parameter], lr=0.1, momentum=0.9).step()


class Forked:
    """A child process with what `Launch` asks of a `subprocess.Popen`."""

    def __init__(self, body: Callable[[], None], log: Path) -> None:
        self.returncode: int | None = None
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            self._be(body, log, parent)

    @staticmethod
    def _be(body: Callable[[], None], log: Path, parent: int) -> None:
        status = 1
        try:
            _die_with(parent)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            output = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
            os.dup2(output, 1)
            os.dup2(output, 2)
            sys.stdout = os.fdopen(1, "w", closefd=False)
            sys.stderr = os.fdopen(2, "w", closefd=False)
            body()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int | None:
        end = time.monotonic() + (DEADLINE_S if timeout is None else timeout)
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("forked learner", timeout or DEADLINE_S)
            time.sleep(0.002)
        return self.returncode

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


class ForkLaunch(Launch):
    """A `Launch` whose learners run ``body()`` in a fork of this process."""

    def __init__(self, body: Callable[[], None], learners: int, logs: Path, ranks: int = 1, **others: Any) -> None:
        super().__init__(["forked"], learners, logs=logs, ranks=ranks, **others)
        logs.mkdir(exist_ok=True)
        self.body = body

    def _start(self, number: int, rank: int = 0) -> Forked:  # type: ignore[override]
        environment = {**self._environment, **self._place(number, rank).environment()}

        def body() -> None:
            os.environ.update(environment)
            self.body()

        return Forked(body, self._log(number, rank))

    def log(self, number: int) -> str:
        return self._log(number).read_text()

    def board(self, column: Col) -> list[int]:
        return self.block.board_LC[:, column].tolist()


def problem(samples: int = 64, features: int = 8) -> tuple[TensorDataset, nn.Module]:
    """Return data with the number of each sample beside it, and a small model; the same in every process."""
    draw = torch.Generator().manual_seed(1)
    inputs = torch.randn(samples, features, generator=draw)
    targets = inputs @ torch.randn(features, 1, generator=draw)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(features, 16), nn.Tanh(), nn.Linear(16, 1))
    return TensorDataset(torch.arange(samples), inputs, targets), model


def train(
    strategy: str,
    *,
    epochs: int = 3,
    batch: int = 16,
    samples: int = 64,
    slow: dict[int, float] | None = None,
    before_step: Callable[[antiphon.Learner], None] = lambda learner: None,
    at_end: Callable[[antiphon.Learner], None] = lambda learner: None,
    workers: int = 0,
    lr: float = 0.05,
) -> None:
    """Be one learner: train, and print the samples that were taken, an epoch a line."""
    torch.set_num_threads(1)
    data, model = problem(samples)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    number = Place.find().learner
    learner = antiphon.Learner(model, optimizer, strategy, slow=(slow or {}).get(number, 1.0), timeout_s=DEADLINE_S)
    loader = DataLoader(data, batch_sampler=learner.batch_sampler(data, batch, epochs), num_workers=workers)
    for _ in range(epochs):
        for which, inputs, targets in loader:
            with learner.step():
                before_step(learner)
                optimizer.zero_grad()
                (model(inputs) - targets).square().mean().backward()
                optimizer.step()
            print("took", *which.tolist(), flush=True)
    learner.finish()
    at_end(learner)
    learner.close()


def taken(launch: ForkLaunch) -> list[int]:
    """Return all samples that the learners' logs say they have stepped on."""
    words = [line.split() for n in range(launch.learners) for line in launch.log(n).splitlines()]
    return [int(sample) for line in words if line[:1] == ["took"] for sample in line[1:]]


def until(ready: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
    end = time.monotonic() + deadline_s
    while not ready():
        assert time.monotonic() < end, f"waited {deadline_s} s for {what}"
        time.sleep(0.002)


def done(launch: ForkLaunch) -> list[int]:
    return [n for n, state in enumerate(launch.board(Col.STATE)) if state == Status.DONE]
