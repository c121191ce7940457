"""The watch over learners, each a process of `workers`, that counts their steps over a common window of time."""

from __future__ import annotations

import dataclasses
import json
import struct
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import common
import numpy as np
from numpy.typing import NDArray

from antiphon.errors import ArgumentError, DeadlineError, LearnerError, unknown_name
from antiphon.records import Json
from antiphon.strategies import STRATEGIES
from antiphon.training.launch import Launch
from antiphon.transport.block import process_runs

SCRIPT = Path(__file__).with_name("workers.py")
DDP, HIVEMIND = "ddp", "hivemind"
"""Peers, which stand where a strategy's name does."""
TRACE = struct.Struct("<4d")
"""A step's end on the clock that all processes share; by then, the process's CPU seconds, bytes read, and exchanges."""
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 32)}
"""Else the C library returns large gradients to the system in every step, and a step is mostly page faults."""
WARMUP_STEPS = 1
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
    task: str = "acoustic"
    """What they train: one of `workers.TASKS`."""
    target_batch_size: int = 0
    """Of hivemind: samples of all learners from one average to the next."""
    python: str = sys.executable
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


@dataclass(frozen=True)
class Window:
    """What learners did between two moments, the same for all; a step that an edge cuts counts in part."""

    steps_per_s_L: list[float]
    cpu_share_L: list[float]
    """CPU seconds of each process over the seconds of the window."""
    bytes_per_step: float
    exchanges_per_step: float
    """In how many exchanges a learner took part for each of its steps."""

    @property
    def steps_per_s(self) -> float:
        """Steps a second of all learners."""
        return sum(self.steps_per_s_L)


def window_of(traces: list[NDArray[np.float64]], begin_s: float, end_s: float) -> Window:
    """Return what happened in a window, from each learner's steps [K, 4] (see TRACE).

    Progress within a step is taken as even, so a learner's count is its steps' ends, interpolated at both edges.

    >>> steps_K4 = np.array([[0.0, 0, 0, 0], [2.0, 1, 8, 2], [4.0, 2, 16, 4]])
    >>> window_of([steps_K4], 1.0, 4.0).steps_per_s_L
    [0.5]
    """
    edges_s = np.array([begin_s, end_s])
    seconds = end_s - begin_s
    steps_L, totals_L3 = [], []
    for trace_K4 in traces:
        ends_K = trace_K4[:, 0]
        assert ends_K[0] <= begin_s and end_s <= ends_K[-1], "a learner's steps do not span the window"
        steps_L.append(float(np.diff(np.interp(edges_s, ends_K, np.arange(len(ends_K))))[0]))
        totals_L3.append([float(np.diff(np.interp(edges_s, ends_K, column_K))[0]) for column_K in trace_K4[:, 1:].T])
    cpu_L, bytes_L, exchanges_L = zip(*totals_L3, strict=True)
    steps = sum(steps_L)
    return Window(
        [steps / seconds for steps in steps_L],
        [cpu_s / seconds for cpu_s in cpu_L],
        sum(bytes_L) / steps,
        sum(exchanges_L) / steps,
    )


def measure(job: Job, seconds: float) -> Window:
    """Run the learners until all have made a step after a window of ``seconds``, which begins as all are under way.

    Raises:
        LearnerError: one ended.
        DeadlineError: they did not begin, or not get on, in time.
    """
    with tempfile.TemporaryDirectory(prefix="stragglers-") as folder:
        job = dataclasses.replace(job, traces=folder)
        environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **KEEP_MEMORY}
        command = [job.python, str(SCRIPT), job.to_text()]
        with Launch(command, job.learners, environment=environment, logs=Path(folder)) as launch:
            traces = _await(launch, job, None, job.patience_s)
            begin_s = max(trace_K4[WARMUP_STEPS - 1, 0] for trace_K4 in traces)
            traces = _await(launch, job, begin_s + seconds, seconds + job.patience_s)
    return window_of(traces, begin_s, begin_s + seconds)


def _await(launch: Launch, job: Job, end_s: float | None, limit_s: float) -> list[NDArray[np.float64]]:
    """Return all steps once every learner is warm (``end_s`` None), or has made one that ends after ``end_s``."""
    deadline_s = time.monotonic() + limit_s
    while True:
        traces = [_read(job.trace(learner)) for learner in range(job.learners)]
        if all(len(trace_K4) >= WARMUP_STEPS and (end_s is None or trace_K4[-1, 0] >= end_s) for trace_K4 in traces):
            return traces
        for learner, pid in enumerate(launch.pids):
            if not process_runs(pid):
                raise LearnerError(f"{job.strategy}: learner {learner} ended: {_last_line(job, learner)}")
        if time.monotonic() > deadline_s:
            steps = [len(trace_K4) for trace_K4 in traces]
            raise DeadlineError(f"{job.strategy}: waited {limit_s:g} s for the learners, whose steps are {steps}")
        time.sleep(LOOK_S)


def _read(path: Path) -> NDArray[np.float64]:
    """Return the whole rows of a trace [K, 4]."""
    data = path.read_bytes() if path.exists() else b""
    return np.frombuffer(data[: len(data) // TRACE.size * TRACE.size], np.float64).reshape(-1, 4)


def _last_line(job: Job, learner: int) -> str:
    lines = (Path(job.traces) / f"learner-{learner}.log").read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "without a word"


# --- what the scripts that compare have in common


def strategies_of(text: str) -> list[str]:
    """Read a list of names, each at most once.

    Raises:
        ArgumentError: one is unknown, or given twice.
    """
    names = text.split(",")
    for name in names:
        if name not in STRATEGIES and name != DDP:
            raise unknown_name("strategy", name, [*STRATEGIES, DDP])
    if len(set(names)) < len(names):
        raise ArgumentError(f"--strategies {text}: name each only once")
    return names


def over(rates: Sequence[float], references: Sequence[float]) -> list[float]:
    """Return the ratios within each repeat."""
    return [rate / reference for rate, reference in zip(rates, references, strict=True)]


def medians(values_RL: Sequence[Sequence[float]]) -> list[float]:
    """Return the medians over the repeats [L]."""
    return [common.median(values_R) for values_R in zip(*values_RL, strict=True)]


def summary(samples: dict[str, list[float]]) -> Json:
    """Return each figure's median, and all of them under ``samples``."""
    return {**{name: common.median(values) for name, values in samples.items()}, "samples": samples}
