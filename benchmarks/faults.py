"""What a frozen, a killed and a broken learner cost the others: their steps a second during the fault over before.

Learners are processes that train the default acoustic model with `random-ring`, with a wait in each step that stands
for an accelerator (as in stragglers.py). In each repeat, and for each kind of fault, they do a given amount of work;
the last learner meets the fault at a step of its own. Before and during are windows of --seconds on both sides of it.

example: python benchmarks/faults.py --learners 4 --json
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import common
import numpy as np
from numpy.typing import NDArray
from straggling import KEEP_MEMORY, TRACE, Job, window_of

from antiphon.errors import ArgumentError, LearnerError
from antiphon.records import Json, record
from antiphon.training.launch import Launch, Watched
from antiphon.transport.block import Col
from antiphon.transport.faults import INJECT

SCRIPT = Path(__file__).with_name("faulted.py")
KINDS = ("freeze", "kill", "nan")
COMPUTE_S = 0.03
"""About what a step computes: only to tell how many make up a window."""
WARM_STEPS = 3
MARGIN_S = 6.0
"""Of work beyond the windows: a killed learner's new process starts meanwhile."""


@dataclasses.dataclass
class Seen:
    """What the watch has seen of the learners' weights and changes."""

    victim: int
    finite: bool = True
    """Whether the weights of all others were finite at every look."""
    changes: list[str] = dataclasses.field(default_factory=list)

    def __call__(self, watched: Watched) -> None:
        if not watched.begun:
            return
        weights_LN = watched.map_weights().weights_LN
        others = [learner for learner in watched.present if learner != self.victim]
        self.finite = self.finite and all(bool(weights_LN[learner].sum().isfinite()) for learner in others)
        self.changes += [note["change"] for note in watched.news if note["event"] == "membership"]
        watched.news.clear()


@dataclasses.dataclass(frozen=True)
class Plan:
    """How long things take, in steps of one learner."""

    job: Job
    seconds: float

    @property
    def step_s(self) -> float:
        """About how long a step takes."""
        return self.job.wait_s + COMPUTE_S

    @property
    def fault_step(self) -> int:
        """The victim's step at which it meets its fault."""
        return WARM_STEPS + int(self.seconds / self.step_s) + 2

    @property
    def samples(self) -> int:
        """Of all the work: both windows and what is beyond, for all learners."""
        steps = self.fault_step + int((self.seconds + MARGIN_S) / self.step_s)
        return steps * self.job.learners * self.job.local_batch

    def fault(self, kind: str) -> str:
        """Return the fault's text."""
        duration = f":{self.seconds:g}" if kind == "freeze" else ""
        return f"{kind}:{self.job.learners - 1}@{self.fault_step}{duration}"


def measure(plan: Plan, kind: str) -> Json:
    """Run the learners to the end of their work with one fault, and return its fields."""
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        job = dataclasses.replace(plan.job, traces=folder)
        environment = {"OMP_NUM_THREADS": "1", **KEEP_MEMORY, INJECT: plan.fault(kind)}
        command = [sys.executable, str(SCRIPT), job.to_text(), str(plan.samples)]
        seen = Seen(job.learners - 1)
        with Launch(
            command, job.learners, environment=environment, logs=Path(folder), restarts=int(kind == "kill")
        ) as launch:
            watched = launch.watch(seen)
            done = int(launch.block.board_LC[:, Col.SAMPLES].sum())
            again = int(launch.block.board_LC[:, Col.REPEATED].sum())
        traces = [np.fromfile(job.trace(learner)).reshape(-1, TRACE.size // 8) for learner in range(job.learners)]
    if len(watched.faults) != int(kind == "kill"):
        raise LearnerError(f"{kind}: a learner ended that was not to: {watched.faults}")
    at_s, back_s = gap(traces[-1], plan.fault_step)
    before, during = (
        sum(window_of(traces[:-1], begin_s, begin_s + plan.seconds).steps_per_s_L)
        for begin_s in (at_s - plan.seconds, at_s)
    )
    values = {"others_rate_ratio": during / before, "others_finite": seen.finite}
    match kind:
        case "freeze":
            exchanges_K = traces[-1][plan.fault_step :, 3]
            values["rejoined"] = bool(len(exchanges_K) > 1 and exchanges_K[-1] > exchanges_K[0])
        case "kill":
            values |= {"recovery_s": back_s - at_s, "returned": seen.changes == ["returned"]}
            values |= {"samples_lost": plan.samples - done, "samples_repeated": again}
        case _:
            values["reseeded"] = seen.changes == ["reseeded"]
    return values


def gap(trace_K4: NDArray[np.float64], step: int) -> tuple[float, float]:
    """Return when the fault at ``step`` struck, and when the learner's first step from then on ended.

    A fault strikes as a step begins, which is when the one before it ended.
    """
    if len(trace_K4) <= step:
        raise LearnerError(f"the learner that met the fault made {len(trace_K4)} steps, and none after it: --seconds")
    return float(trace_K4[step - 1, 0]), float(trace_K4[step, 0])


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the script's own arguments."""
    parser.add_argument("--learners", type=int, default=4, metavar="L", help="processes (default 4)")
    parser.add_argument("--seconds", type=float, default=8.0, metavar="S", help="of each window (default 8)")
    parser.add_argument("--batch", type=int, default=16, metavar="B", help="samples over all learners (default 16)")
    parser.add_argument("--wait", type=float, default=0.2, metavar="S", help="in each step, seconds (default 0.2)")
    parser.add_argument("--kinds", default=",".join(KINDS), metavar="A,B", help=f"(default {','.join(KINDS)})")


def plan_of(args: argparse.Namespace) -> Plan:
    """Check the arguments."""
    common.at_least("--learners", args.learners, 2)
    common.at_least("--seconds", args.seconds, 1)
    common.at_least("--wait", args.wait, 0)
    common.at_least("--batch", args.batch, args.learners)
    return Plan(Job("random-ring", args.learners, args.batch // args.learners, args.wait, {}), args.seconds)


def kinds_of(text: str) -> list[str]:
    """Read the kinds of faults.

    Raises:
        ArgumentError: one is none of them.
    """
    kinds = text.split(",")
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise ArgumentError(f"--kinds {text}: {unknown[0]!r} is none of {', '.join(KINDS)}")
    return kinds


def fields(samples: Sequence[Json]) -> Json:
    """Return the median of what is measured, whether all were so of what is true or not, and all ``samples``."""
    columns = {name: [sample[name] for sample in samples] for name in samples[0]}
    return {
        **{name: all(v) if isinstance(v[0], bool) else common.median(v) for name, v in columns.items()},
        "samples": columns,
    }


def run(args: argparse.Namespace) -> Json:
    """Measure, print, and return the record."""
    plan, kinds = plan_of(args), kinds_of(args.kinds)
    result = record("benchmarks/faults.py", threads_per_learner=1)
    samples: dict[str, list[Json]] = {kind: [] for kind in kinds}
    for number in range(args.repeats):
        for kind in kinds:
            samples[kind].append(measure(plan, kind))
            told = ", ".join(f"{name} {value:.3g}" for name, value in samples[kind][-1].items())
            common.progress(f"repeat {number + 1} of {args.repeats}, {kind}: {told}")
    result |= {"learners": args.learners, "seconds": args.seconds, "wait_s": args.wait, "repeats": args.repeats}
    result |= {kind: fields(samples[kind]) for kind in kinds}
    show(result, kinds, args.json)
    return result


def show(result: Json, kinds: Sequence[str], as_json: bool) -> None:
    """Print the table."""
    lines = []
    for kind in kinds:
        values = result[kind]
        ratios = values["samples"]["others_rate_ratio"]
        rest = ", ".join(
            f"{name} {value}" if isinstance(value, bool) else f"{name} {value:.3g}"
            for name, value in values.items()
            if name not in ("samples", "others_rate_ratio")
        )
        lines.append([kind, f"{values['others_rate_ratio']:.3f}", f"{min(ratios):.3f}..{max(ratios):.3f}", rest])
    columns = ("fault", "others, during over before", "(range)", "and")
    common.print_table(f"one of {result['learners']} learners", columns, lines, as_json)


if __name__ == "__main__":
    sys.exit(common.main(__doc__ or "", configure, run))
