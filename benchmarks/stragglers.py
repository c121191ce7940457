"""What one slow learner costs the others: steps a second of all learners, by strategy, over the ideal and over DDP.

Every learner is a process that trains the default acoustic model, one thread each, and exchanges for real.
Load `waiting`: a step is a small gradient and a wait that stands for an accelerator, so that the learners do not
compete for the host's cores (their CPU shares are reported). Load `cpu`: no wait; they do compete.
Ideal: sum(1/t_i) for a strategy that waits for nobody, L/max(t_i) for one that does, with t_i the seconds a step of
one learner alone, as slow as learner i, measured in the same repeat. Strategy `ddp` is torch's own
DistributedDataParallel, over gloo.

example: python benchmarks/stragglers.py --learners 4 --slow 3=10 --json
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import common
from straggling import Job, Window, measure, work

from antiphon.config import TrainConfig, parse_slow
from antiphon.errors import ArgumentError, unknown_name
from antiphon.records import Json, record
from antiphon.strategies import STRATEGIES, strategy_class

DDP = "ddp"
DEFAULT = ("random-ring", "fixed-ring", "allreduce", "sync-ring", "delay-by-one", DDP)
LOADS = ("waiting", "cpu")
CPU_SHARE_MAX = 0.15
"""Above it, `waiting` would not stand for an accelerator that does the work."""


def waits(strategy: str) -> bool:
    """Say whether a learner waits for others in each step."""
    return strategy == DDP or strategy_class(strategy).waits


def ideal_steps_per_s(strategy: str, steps_s: Sequence[float]) -> float:
    """Return the rate of all learners together, were exchanges free; ``steps_s`` are their times a step, t_i.

    >>> ideal_steps_per_s("random-ring", [1, 1, 1, 10]), ideal_steps_per_s("allreduce", [1, 1, 1, 10])
    (3.1, 0.4)
    """
    if waits(strategy):
        return len(steps_s) / max(steps_s)
    return sum(1 / step_s for step_s in steps_s)


@dataclass(frozen=True)
class Repeat:
    """What was measured one after the other: a learner alone, by its factor of slowness, and every strategy."""

    alone: dict[float, Window]
    together: dict[str, Window]

    def steps_s(self, job: Job) -> list[float]:
        """Return t_i of every learner [L], seconds."""
        return [1 / self.alone[factor].steps_per_s for factor in job.factors]

    def ideal(self, strategy: str, job: Job) -> float:
        """Return the ideal steps a second."""
        return ideal_steps_per_s(strategy, self.steps_s(job))


def measure_repeat(job: Job, strategies: Sequence[str], seconds: float, label: str) -> Repeat:
    """Measure one learner alone, at each slowness that occurs, then every strategy."""
    repeat = Repeat({}, {})
    for factor in sorted(set(job.factors)):
        repeat.alone[factor] = measure(dataclasses.replace(job, learners=1, slow={0: factor}), seconds)
        step_s = 1 / repeat.alone[factor].steps_per_s
        common.progress(f"{label}: alone, {factor:g} times as long: {step_s * 1e3:.1f} ms a step")
    for strategy in strategies:
        repeat.together[strategy] = measure(dataclasses.replace(job, strategy=strategy), seconds)
        rate = repeat.together[strategy].steps_per_s
        common.progress(
            f"{label}: {strategy}: {rate:.2f} steps/s, {rate / repeat.ideal(strategy, job):.3f} of the ideal"
        )
    return repeat


def row(strategy: str, load: str, job: Job, repeats: Sequence[Repeat]) -> Json:
    """Return one strategy's row: medians over the repeats, and the repeats as ``samples``."""
    windows = [repeat.together[strategy] for repeat in repeats]
    rates = [window.steps_per_s for window in windows]
    ideals = [repeat.ideal(strategy, job) for repeat in repeats]
    samples = {
        "steps_per_s": rates,
        "ideal_steps_per_s": ideals,
        "over_ideal": [rate / ideal for rate, ideal in zip(rates, ideals, strict=True)],
        "cpu_share": [max(window.cpu_share_L) for window in windows],
    }
    if DDP in repeats[0].together:
        ddp = [repeat.together[DDP].steps_per_s for repeat in repeats]
        samples["over_ddp"] = [rate / reference for rate, reference in zip(rates, ddp, strict=True)]
    return {
        "strategy": strategy,
        "load": load,
        **{name: common.median(values) for name, values in samples.items()},
        "steps_per_s_by_learner": medians([window.steps_per_s_L for window in windows]),
        "cpu_share_by_learner": medians([window.cpu_share_L for window in windows]),
        "bytes_read_per_step": None if strategy == DDP else common.median([w.bytes_per_step for w in windows]),
        "samples": samples,
    }


def alone_row(load: str, job: Job, repeats: Sequence[Repeat]) -> Json:
    """Return what one learner alone did: t_i of every learner, and the CPU share of the least slow."""
    quickest = [repeat.alone[min(repeat.alone)] for repeat in repeats]
    steps_s_RL = [repeat.steps_s(job) for repeat in repeats]
    return {
        "load": load,
        "step_s_by_learner": medians(steps_s_RL),
        "cpu_share": common.median([window.cpu_share_L[0] for window in quickest]),
        "cpu_s_per_step": common.median([window.cpu_share_L[0] / window.steps_per_s for window in quickest]),
        "samples": {"step_s_by_learner": steps_s_RL},
    }


def medians(values_RL: Sequence[Sequence[float]]) -> list[float]:
    """Return the medians over the repeats [L]."""
    return [common.median(values_R) for values_R in zip(*values_RL, strict=True)]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the script's own arguments."""
    parser.add_argument("--learners", type=int, default=4, metavar="L", help="processes (default 4)")
    parser.add_argument(
        "--slow", action="append", metavar="I=F", help="learner I takes F times as long (default: the last, 10 times)"
    )
    parser.add_argument(
        "--strategies", default=",".join(DEFAULT), metavar="A,B", help=f"what to compare (default {','.join(DEFAULT)})"
    )
    parser.add_argument("--load", choices=(*LOADS, "both"), default="waiting", help="(default waiting)")
    parser.add_argument("--seconds", type=float, default=20.0, metavar="S", help="of each measurement (default 20)")
    parser.add_argument("--batch", type=int, default=16, metavar="B", help="samples over all learners (default 16)")
    parser.add_argument("--wait", type=float, default=0.2, metavar="S", help="of load waiting, seconds (default 0.2)")
    parser.add_argument("--worker", help=argparse.SUPPRESS)


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


def job_of(args: argparse.Namespace) -> Job:
    """Check the arguments, and return what the learners have in common."""
    common.at_least("--learners", args.learners, 2)
    common.at_least("--seconds", args.seconds, 1)
    common.at_least("--wait", args.wait, 0)
    slow = parse_slow(args.slow if args.slow is not None else [f"{args.learners - 1}=10"])
    config = TrainConfig(learners=args.learners, batch=args.batch, slow=slow)
    return Job("random-ring", args.learners, config.local_batch, args.wait, config.slow)


def run(args: argparse.Namespace) -> Json:
    """Measure, print, and return the record."""
    if args.worker:
        work(Job.from_text(args.worker))
    strategies, job = strategies_of(args.strategies), job_of(args)
    result = record("benchmarks/stragglers.py", threads_per_learner=1)
    loads = LOADS if args.load == "both" else (args.load,)
    jobs = {load: job if load == "waiting" else dataclasses.replace(job, wait_s=0.0) for load in loads}
    repeats: dict[str, list[Repeat]] = {load: [] for load in loads}
    for number in range(args.repeats):
        for load in loads:
            label = f"repeat {number + 1} of {args.repeats}, {load}"
            repeats[load].append(measure_repeat(jobs[load], strategies, args.seconds, label))
    result |= {
        "learners": job.learners,
        "slow": {str(learner): factor for learner, factor in job.slow.items()},
        "local_batch": job.local_batch,
        "wait_s": job.wait_s,
        "seconds": args.seconds,
        "repeats": args.repeats,
        "alone": [alone_row(load, jobs[load], repeats[load]) for load in loads],
        "rows": [row(name, load, jobs[load], repeats[load]) for load in loads for name in strategies],
    }
    show(result, args.json)
    return result


def show(result: Json, as_json: bool) -> None:
    """Print the table, and say where the load was not what it stands for."""
    columns = ("strategy", "load", "steps/s", "ideal", "over ideal", "(range)", "over ddp", "CPU share", "MB/step")
    rows = []
    for values in result["rows"]:
        ratios = values["samples"]["over_ideal"]
        rows.append(
            [
                values["strategy"],
                values["load"],
                f"{values['steps_per_s']:.2f}",
                f"{values['ideal_steps_per_s']:.2f}",
                f"{values['over_ideal']:.3f}",
                f"{min(ratios):.3f}..{max(ratios):.3f}",
                f"{values['over_ddp']:.2f}" if "over_ddp" in values else "",
                f"{values['cpu_share']:.1%}",
                "" if values["bytes_read_per_step"] is None else f"{values['bytes_read_per_step'] / 1e6:.1f}",
            ]
        )
    slow = ", ".join(f"{learner} x{factor:g}" for learner, factor in sorted(result["slow"].items())) or "none"
    common.print_table(f"{result['learners']} learners, slow: {slow}", columns, rows, as_json)
    for values in [*result["alone"], *result["rows"]]:
        if values["load"] == "waiting" and values["cpu_share"] > CPU_SHARE_MAX:
            common.progress(
                f"{values.get('strategy', 'one learner alone')}: a CPU share of {values['cpu_share']:.1%} is above"
                f" {CPU_SHARE_MAX:.0%}: wait longer (--wait) or take a smaller batch (--batch)"
            )


if __name__ == "__main__":
    sys.exit(common.main(__doc__ or "", configure, run))
