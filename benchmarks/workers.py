"""One learner of a measurement: a process that makes steps until it is ended, and notes each (see `straggling`).

It trains through the engine, through torch's own DistributedDataParallel over gloo, or through hivemind.
"""

from __future__ import annotations

import datetime
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import BinaryIO, NoReturn

import common
import hivemind_peer
import torch
from straggling import DDP, HIVEMIND, TRACE, Job
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from antiphon.learner.learner import Learner
from antiphon.transport.place import Place

POOL = 16
"""Batches of a learner, which take turns."""
UNSYNCHRONISED_STEPS = 2
WIDE_INPUTS, WIDE_OUTPUTS = 1024, 9764
"""A layer of 10 million parameters."""
Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Task:
    """A model, what it trains on, and how a step tells that it is done."""

    job: Job
    learner: int
    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: list[tuple[Tensor, Tensor]]
    loss: Loss
    trace: BinaryIO

    @property
    def slow(self) -> float:
        """How many times as long a step takes."""
        return self.job.factors[self.learner]

    def forward(self, model: nn.Module, step: int) -> Tensor:
        """Return the loss of a step's batch."""
        return self.loss(model, *self.batches[step % POOL])

    def note(self, bytes_read: int = 0, exchanges: int = 0) -> None:
        """Note that a step has ended, with the totals so far."""
        self.trace.write(TRACE.pack(time.perf_counter(), time.process_time(), bytes_read, exchanges))


def acoustic_task(job: Job, learner: int, trace: BinaryIO) -> Task:
    """Return the default acoustic model on random frames."""
    features_BTF, targets_BT = common.random_frames(POOL * job.local_batch, seed=learner)
    batches = list(zip(features_BTF.split(job.local_batch), targets_BT.split(job.local_batch), strict=True))
    return Task(job, learner, *common.acoustic_model(), batches, common.loss_of, trace)


def wide_task(job: Job, learner: int, trace: BinaryIO) -> Task:
    """Return one linear layer of 10 M parameters, and plain SGD: as little arithmetic a parameter as there can be."""
    torch.manual_seed(0)
    model = nn.Linear(WIDE_INPUTS, WIDE_OUTPUTS, bias=False)
    draw = torch.Generator().manual_seed(learner)
    inputs_BI = torch.randn(POOL * job.local_batch, WIDE_INPUTS, generator=draw)
    targets_B = torch.randint(WIDE_OUTPUTS, (len(inputs_BI),), generator=draw)
    batches = list(zip(inputs_BI.split(job.local_batch), targets_B.split(job.local_batch), strict=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=common.LR)
    return Task(job, learner, model, optimizer, batches, _wide_loss, trace)


def _wide_loss(model: nn.Module, inputs_BI: Tensor, targets_B: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(inputs_BI), targets_B)


TASKS = {"acoustic": acoustic_task, "wide": wide_task}


def work_engine(task: Task) -> NoReturn:
    """Train through the engine, with the job's strategy."""
    job, model, optimizer = task.job, task.model, task.optimizer
    learner = Learner(model, optimizer, job.strategy, slow=task.slow, timeout_s=job.patience_s)
    while True:
        with learner.step():
            optimizer.zero_grad()
            loss = task.forward(model, learner.round)
            time.sleep(job.wait_s)
            loss.backward()
            optimizer.step()
        metrics = learner.metrics
        exchanges = metrics["exchanges"]
        task.note(metrics["bytes"], exchanges["committed"] + exchanges["applied"])


def work_ddp(task: Task) -> NoReturn:
    """Train with torch's own: gradients are averaged during the backward pass, so all waits come before it."""
    job, optimizer = task.job, task.optimizer
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{job.traces}/meeting",
        rank=task.learner,
        world_size=job.learners,
        timeout=datetime.timedelta(seconds=job.patience_s),
    )
    parallel, backward_s, step = DistributedDataParallel(task.model), 0.0, 0
    while True:
        optimizer.zero_grad()
        began_s = time.perf_counter()
        if step < UNSYNCHRONISED_STEPS:
            # By itself, to know how long a backward pass takes that waits for nobody.
            with parallel.no_sync():
                loss = task.forward(parallel, step)
                forward_s = time.perf_counter() - began_s
                loss.backward()
                backward_s = time.perf_counter() - began_s - forward_s
        else:
            loss = task.forward(parallel, step)
            time.sleep(job.wait_s)
            time.sleep((task.slow - 1.0) * (time.perf_counter() - began_s + backward_s))
            loss.backward()
            optimizer.step()
            task.note()
        step += 1


def work_hivemind(task: Task) -> NoReturn:
    """Train with hivemind's optimizer: local updates, and an average whenever all together have seen enough samples."""
    job, model = task.job, task.model
    optimizer = hivemind_peer.join(job, task.learner, model)
    step = 0
    while True:
        began_s = time.perf_counter()
        optimizer.zero_grad()
        loss = task.forward(model, step)
        time.sleep(job.wait_s)
        loss.backward()
        time.sleep((task.slow - 1.0) * (time.perf_counter() - began_s))
        optimizer.step()
        step += 1
        task.note(exchanges=optimizer.local_epoch)


WORK = {DDP: work_ddp, HIVEMIND: work_hivemind}


def work(job: Job) -> NoReturn:
    """Be one learner, until this process is ended."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    learner = Place.find().learner
    with job.trace(learner).open("wb", buffering=0) as trace:
        WORK.get(job.strategy, work_engine)(TASKS[job.task](job, learner, trace))


if __name__ == "__main__":
    work(Job.from_text(sys.argv[1]))
