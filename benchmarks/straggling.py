"""The learners of stragglers.py, each a process, and the watch that counts their steps over a common window of time."""

from __future__ import annotations

import dataclasses
import datetime
import json
import struct
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NoReturn

import common
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from antiphon.errors import DeadlineError, LearnerError
from antiphon.learner.learner import Learner
from antiphon.training.launch import Launch
from antiphon.transport.block import process_runs
from antiphon.transport.place import Place

SCRIPT = Path(__file__).with_name("stragglers.py")
TRACE = struct.Struct("<3d")
"""A step's end on the clock that all processes share, the process's CPU seconds by then, and its bytes read."""
POOL = 16
WARMUP_STEPS = 2
LOOK_S = 0.1
START_LIMIT_S = 180.0
STEP_LIMIT_S = 5.0
"""Of a learner that is not slow: many times what a step takes, on a busy machine too."""


@dataclass(frozen=True)
class Job:
    """What all learners of one measurement are told."""

    strategy: str
    learners: int
    local_batch: int
    wait_s: float
    slow: dict[int, float]
    traces: str = ""
    """The folder that they write to."""

    @property
    def factors(self) -> list[float]:
        """How many times as long each learner takes [L]."""
        return [self.slow.get(learner, 1.0) for learner in range(self.learners)]

    @property
    def patience_s(self) -> float:
        """How long the start and the first steps may take, or a step from then on, seconds."""
        return START_LIMIT_S + max(self.factors) * (STEP_LIMIT_S + self.wait_s)

    def to_text(self) -> str:
        """Return it as one argument of a command."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Job:
        """Read what `to_text` gave."""
        values = json.loads(text)
        return cls(**{**values, "slow": {int(learner): factor for learner, factor in values["slow"].items()}})

    def trace(self, learner: int) -> Path:
        """Return the file in which a learner notes its steps."""
        return Path(self.traces) / f"learner-{learner}.steps"


# --- one learner


def work(job: Job) -> NoReturn:
    """Be one learner, until this process is ended."""
    torch.set_num_threads(1)
    learner = Place.find().learner
    features_BTF, targets_BT = common.random_frames(POOL * job.local_batch, seed=learner)
    batches = list(zip(features_BTF.split(job.local_batch), targets_BT.split(job.local_batch), strict=True))
    with job.trace(learner).open("wb", buffering=0) as trace:
        if job.strategy == "ddp":
            _work_ddp(job, learner, batches, trace)
        _work_engine(job, learner, batches, trace)


def _note(trace: BinaryIO, bytes_read: int) -> None:
    trace.write(TRACE.pack(time.perf_counter(), time.process_time(), bytes_read))


def _work_engine(job: Job, number: int, batches: list[tuple[Tensor, Tensor]], trace: BinaryIO) -> NoReturn:
    model, optimizer = common.acoustic_model()
    learner = Learner(model, optimizer, job.strategy, slow=job.slow.get(number, 1.0), timeout_s=job.patience_s)
    while True:
        features_BTF, targets_BT = batches[learner.round % len(batches)]
        with learner.step():
            optimizer.zero_grad()
            loss = common.loss_of(model, features_BTF, targets_BT)
            time.sleep(job.wait_s)
            loss.backward()
            optimizer.step()
        _note(trace, learner.transport.bytes_read)


def _work_ddp(job: Job, number: int, batches: list[tuple[Tensor, Tensor]], trace: BinaryIO) -> NoReturn:
    """Train with torch's own: gradients are averaged during the backward pass, so all waits come before it."""
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{job.traces}/meeting",
        rank=number,
        world_size=job.learners,
        timeout=datetime.timedelta(seconds=job.patience_s),
    )
    model, optimizer = common.acoustic_model()
    parallel, slow, backward_s, steps = DistributedDataParallel(model), job.slow.get(number, 1.0), 0.0, 0
    while True:
        features_BTF, targets_BT = batches[steps % len(batches)]
        optimizer.zero_grad()
        began_s = time.perf_counter()
        if steps < WARMUP_STEPS:
            # By itself, to know how long a backward pass takes that waits for nobody.
            with parallel.no_sync():
                loss = common.loss_of(parallel, features_BTF, targets_BT)
                forward_s = time.perf_counter() - began_s
                loss.backward()
                backward_s = time.perf_counter() - began_s - forward_s
        else:
            loss = common.loss_of(parallel, features_BTF, targets_BT)
            time.sleep(job.wait_s)
            time.sleep((slow - 1.0) * (time.perf_counter() - began_s + backward_s))
            loss.backward()
            optimizer.step()
            _note(trace, 0)
        steps += 1


# --- the watch over them


@dataclass(frozen=True)
class Window:
    """What learners did between two moments, the same for all; a step that an edge cuts counts in part."""

    steps_per_s_L: list[float]
    cpu_share_L: list[float]
    """CPU seconds of each process over the seconds of the window."""
    bytes_per_step: float

    @property
    def steps_per_s(self) -> float:
        """Steps a second of all learners."""
        return sum(self.steps_per_s_L)


def window_of(traces: list[NDArray[np.float64]], begin_s: float, end_s: float) -> Window:
    """Return what happened in a window, from each learner's steps [K, 3] (see TRACE).

    Progress within a step is taken as even, so a learner's count is its steps' ends, interpolated at both edges.

    >>> steps_K3 = np.array([[0.0, 0, 0], [2.0, 1, 8], [4.0, 2, 16]])
    >>> window_of([steps_K3], 1.0, 4.0).steps_per_s_L
    [0.5]
    """
    edges_s = np.array([begin_s, end_s])
    seconds = end_s - begin_s
    steps_L, cpu_L, bytes_L = [], [], []
    for trace_K3 in traces:
        ends_K = trace_K3[:, 0]
        assert ends_K[0] <= begin_s and end_s <= ends_K[-1], "a learner's steps do not span the window"
        steps_L.append(float(np.diff(np.interp(edges_s, ends_K, np.arange(len(ends_K))))[0]))
        cpu_L.append(float(np.diff(np.interp(edges_s, ends_K, trace_K3[:, 1]))[0]))
        bytes_L.append(float(np.diff(np.interp(edges_s, ends_K, trace_K3[:, 2]))[0]))
    return Window(
        [steps / seconds for steps in steps_L], [cpu_s / seconds for cpu_s in cpu_L], sum(bytes_L) / sum(steps_L)
    )


def measure(job: Job, seconds: float) -> Window:
    """Run the learners until all have made a step after a window of ``seconds``, which begins as all are under way.

    Raises:
        LearnerError: one ended.
        DeadlineError: they did not begin, or not get on, in time.
    """
    with tempfile.TemporaryDirectory(prefix="stragglers-") as folder:
        job = dataclasses.replace(job, traces=folder)
        environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        command = [sys.executable, str(SCRIPT), "--worker", job.to_text()]
        with Launch(command, job.learners, environment=environment, logs=Path(folder)) as launch:
            traces = _await(launch, job, None, job.patience_s)
            begin_s = max(trace_K3[WARMUP_STEPS - 1, 0] for trace_K3 in traces)
            traces = _await(launch, job, begin_s + seconds, seconds + job.patience_s)
    return window_of(traces, begin_s, begin_s + seconds)


def _await(launch: Launch, job: Job, end_s: float | None, limit_s: float) -> list[NDArray[np.float64]]:
    """Return all steps once every learner is warm (``end_s`` None), or has made one that ends after ``end_s``."""
    deadline_s = time.monotonic() + limit_s
    while True:
        traces = [_read(job.trace(learner)) for learner in range(job.learners)]
        if all(len(trace_K3) >= WARMUP_STEPS and (end_s is None or trace_K3[-1, 0] >= end_s) for trace_K3 in traces):
            return traces
        for learner, pid in enumerate(launch.pids):
            if not process_runs(pid):
                raise LearnerError(f"{job.strategy}: learner {learner} ended: {_last_line(job, learner)}")
        if time.monotonic() > deadline_s:
            steps = [len(trace_K3) for trace_K3 in traces]
            raise DeadlineError(f"{job.strategy}: waited {limit_s:g} s for the learners, whose steps are {steps}")
        time.sleep(LOOK_S)


def _read(path: Path) -> NDArray[np.float64]:
    """Return the whole rows of a trace [K, 3]."""
    data = path.read_bytes() if path.exists() else b""
    return np.frombuffer(data[: len(data) // TRACE.size * TRACE.size], np.float64).reshape(-1, 3)


def _last_line(job: Job, learner: int) -> str:
    lines = (Path(job.traces) / f"learner-{learner}.log").read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "without a word"
