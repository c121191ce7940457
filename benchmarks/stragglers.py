"""What one slow learner costs the others: steps a second of all learners, by strategy, over the ideal and over peers.

Every learner is a process that trains the default acoustic model, one thread each, and exchanges for real.
Load `waiting`: a step is a small gradient and a wait that stands for an accelerator, so that the learners do not
compete for the host's cores (their CPU shares are reported). Load `cpu`: no wait; they do compete.
Ideal: sum(1/t_i) for a strategy that waits for nobody, L/max(t_i) for one that does, with t_i the seconds a step of
one learner alone, as slow as learner i, measured in the same repeat. Strategy `ddp` is torch's own
DistributedDataParallel, over gloo. `--peers hivemind` adds hivemind with local updates, at each size in --targets; the
setting with the most steps a second is its row.

example: python benchmarks/stragglers.py --learners 4 --slow 3=10 --json
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import common
import hivemind_peer
from straggler_rows import Repeat, alone_row, rows
from straggling import DDP, HIVEMIND, Job, measure, strategies_of

from antiphon.config import TrainConfig, parse_slow
from antiphon.errors import ArgumentError
from antiphon.records import Json, record

DEFAULT = ("random-ring", "fixed-ring", "allreduce", "sync-ring", "delay-by-one", DDP)
LOADS = ("waiting", "cpu")
CPU_SHARE_MAX = 0.15
"""Above it, `waiting` would not stand for an accelerator that does the work."""
TARGETS = (1, 4, 16)
"""Total batches from one average of hivemind's to the next that are tried."""
HIVEMIND_SECONDS = 20.0
"""At the least: several averages are to fall into a window at any of these sizes."""


def settings_of(job: Job, strategies: Sequence[str], targets: Sequence[int], python: str) -> dict[str, Job]:
    """Return what is measured, by name: each strategy, and hivemind at each target batch size."""
    settings = {name: dataclasses.replace(job, strategy=name) for name in strategies}
    for target in targets:
        settings[f"{HIVEMIND} {target}"] = dataclasses.replace(
            job, strategy=HIVEMIND, target_batch_size=target, python=python
        )
    return settings


def measure_repeat(settings: Mapping[str, Job], seconds: float, label: str) -> Repeat:
    """Measure one learner alone, at each slowness that occurs, then every setting."""
    repeat, job = Repeat({}, {}), next(iter(settings.values()))
    for factor in sorted(set(job.factors)):
        single = Job("random-ring", 1, job.local_batch, job.wait_s, {0: factor})
        repeat.alone[factor] = measure(single, seconds)
        step_s = 1 / repeat.alone[factor].steps_per_s
        common.progress(f"{label}: alone, {factor:g} times as long: {step_s * 1e3:.1f} ms a step")
    for name, job in settings.items():
        window_s = max(seconds, HIVEMIND_SECONDS) if job.strategy == HIVEMIND else seconds
        repeat.together[name] = measure(job, window_s)
        rate = repeat.together[name].steps_per_s
        common.progress(f"{label}: {name}: {rate:.2f} steps/s, {rate / repeat.ideal(job):.3f} of the ideal")
    return repeat


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
    parser.add_argument("--seconds", type=float, default=5.0, metavar="S", help="of each measurement (default 5)")
    parser.add_argument("--batch", type=int, default=16, metavar="B", help="samples over all learners (default 16)")
    parser.add_argument("--wait", type=float, default=0.2, metavar="S", help="of load waiting, seconds (default 0.2)")
    parser.add_argument("--peers", choices=(HIVEMIND,), help=f"compare with hivemind {hivemind_peer.VERSION} too")
    parser.add_argument(
        "--targets",
        type=int,
        nargs="+",
        metavar="N",
        help="hivemind's target_batch_size: sizes to try, samples (default 1, 4 and 16 times --batch)",
    )
    parser.add_argument(
        "--hivemind-python",
        type=Path,
        default=hivemind_peer.PYTHON,
        metavar="PATH",
        help="of the environment with hivemind (default benchmarks/.venv-hivemind/bin/python)",
    )


def job_of(args: argparse.Namespace) -> Job:
    """Check the arguments, and return what the learners have in common."""
    common.at_least("--learners", args.learners, 2)
    common.at_least("--seconds", args.seconds, 1)
    common.at_least("--wait", args.wait, 0)
    slow = parse_slow(args.slow if args.slow is not None else [f"{args.learners - 1}=10"])
    config = TrainConfig(learners=args.learners, batch=args.batch, slow=slow)
    return Job("random-ring", args.learners, config.local_batch, args.wait, config.slow)


def targets_of(args: argparse.Namespace) -> list[int]:
    """Return hivemind's target batch sizes, or none without --peers.

    Raises:
        ArgumentError: one is smaller than a learner's batch, or given twice.
    """
    targets: list[int] = args.targets or [factor * args.batch for factor in TARGETS]
    for target in targets:
        common.at_least("--targets", target, args.batch)
    if len(set(targets)) < len(targets):
        raise ArgumentError(f"--targets {' '.join(map(str, targets))}: give each only once")
    return targets if args.peers else []


def run(args: argparse.Namespace) -> Json:
    """Measure, print, and return the record."""
    strategies, job, targets = strategies_of(args.strategies), job_of(args), targets_of(args)
    python = hivemind_peer.find_python(args.hivemind_python) if targets else ""
    result = record("benchmarks/stragglers.py", threads_per_learner=1)
    loads = LOADS if args.load == "both" else (args.load,)
    settings = {
        load: settings_of(
            job if load == "waiting" else dataclasses.replace(job, wait_s=0.0), strategies, targets, python
        )
        for load in loads
    }
    repeats: dict[str, list[Repeat]] = {load: [] for load in loads}
    for number in range(args.repeats):
        for load in loads:
            label = f"repeat {number + 1} of {args.repeats}, {load}"
            repeats[load].append(measure_repeat(settings[load], args.seconds, label))
    tables = [rows(load, settings[load], repeats[load]) for load in loads]
    result |= {
        "learners": job.learners,
        "slow": {str(learner): factor for learner, factor in job.slow.items()},
        "local_batch": job.local_batch,
        "wait_s": job.wait_s,
        "seconds": args.seconds,
        "repeats": args.repeats,
        "alone": [alone_row(load, job, repeats[load]) for load in loads],
        "rows": [values for chosen, _ in tables for values in chosen],
    }
    if targets:
        result["hivemind"] = {
            "version": hivemind_peer.VERSION,
            "matchmaking_s": hivemind_peer.MATCHMAKING_S,
            "rows": [values for _, tried in tables for values in tried],
        }
    show(result, args.json)
    return result


def show(result: Json, as_json: bool) -> None:
    """Print the table, and say where the load was not what it stands for."""
    columns = (
        "strategy",
        "load",
        "steps/s",
        "ideal",
        "over ideal",
        "(range)",
        "over ddp",
        "over hivemind",
        "exch./step",
        "CPU share",
    )
    lines = []
    for values in [*result["rows"], *result.get("hivemind", {}).get("rows", [])]:
        ratios = values["samples"]["over_ideal"]
        target = f", {values['target_batch_size']} samples" if "target_batch_size" in values else ""
        lines.append(
            [
                values["strategy"] + target,
                values["load"],
                f"{values['steps_per_s']:.2f}",
                f"{values['ideal_steps_per_s']:.2f}",
                f"{values['over_ideal']:.3f}",
                f"{min(ratios):.3f}..{max(ratios):.3f}",
                *(f"{values[name]:.2f}" if name in values else "" for name in ("over_ddp", "over_hivemind")),
                "" if values["exchanges_per_step"] is None else f"{values['exchanges_per_step']:.2f}",
                f"{values['cpu_share']:.1%}",
            ]
        )
    slow = ", ".join(f"{learner} x{factor:g}" for learner, factor in sorted(result["slow"].items())) or "none"
    common.print_table(f"{result['learners']} learners, slow: {slow}", columns, lines, as_json)
    for values in [*result["alone"], *result["rows"]]:
        if values["load"] == "waiting" and values["cpu_share"] > CPU_SHARE_MAX:
            common.progress(
                f"{values.get('strategy', 'one learner alone')}: a CPU share of {values['cpu_share']:.1%} is above"
                f" {CPU_SHARE_MAX:.0%}: wait longer (--wait) or take a smaller batch (--batch)"
            )


if __name__ == "__main__":
    sys.exit(common.main(__doc__ or "", configure, run))
