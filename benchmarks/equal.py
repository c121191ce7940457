"""What exchanging costs learners that are all equally fast: steps a second, by strategy, over those of torch's DDP.

Every learner is a process of one thread; DDP (over gloo) is measured within the same repeat.
Load `compute`: the default acoustic model on batches at which arithmetic dominates.
Load `communication`: one layer of 10 million parameters on a tiny batch, where moving the weights dominates.

example: python benchmarks/equal.py --learners 2 --json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import common
from straggling import DDP, Job, Window, measure, over, strategies_of, summary

from antiphon.errors import ArgumentError
from antiphon.records import Json, record

DEFAULT = ("random-ring", "fixed-ring", "allreduce", "delay-by-one", DDP)
LOADS = {"compute": ("acoustic", 64), "communication": ("wide", 1)}
"""What is trained, and the samples of one learner's batch."""

Repeat = dict[str, Window]
"""What was measured one after the other, by strategy."""


def job_of(load: str, strategy: str, learners: int, batch: int | None = None) -> Job:
    """Return what the learners of one measurement are told."""
    task, local_batch = LOADS[load]
    return Job(strategy, learners, batch or local_batch, wait_s=0.0, slow={}, task=task)


def row(strategy: str, load: str, repeats: Sequence[Repeat]) -> Json:
    """Return one strategy's row: medians over the repeats, and the repeats as ``samples``."""
    windows = [repeat[strategy] for repeat in repeats]
    rates = [window.steps_per_s for window in windows]
    samples = {
        "steps_per_s": rates,
        "over_ddp": over(rates, [repeat[DDP].steps_per_s for repeat in repeats]),
        "cpu_s_per_step": [sum(window.cpu_share_L) / window.steps_per_s for window in windows],
    }
    if strategy != DDP:
        samples["exchanges_per_step"] = [window.exchanges_per_step for window in windows]
    return {"load": load, "strategy": strategy, **summary(samples)}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the script's own arguments."""
    parser.add_argument("--learners", type=int, default=2, metavar="L", help="processes, one a core (default 2)")
    parser.add_argument(
        "--strategies", default=",".join(DEFAULT), metavar="A,B", help=f"what to compare (default {','.join(DEFAULT)})"
    )
    parser.add_argument("--load", choices=(*LOADS, "both"), default="both", help="(default both)")
    parser.add_argument("--seconds", type=float, default=5.0, metavar="S", help="of each measurement (default 5)")
    parser.add_argument(
        "--local-batch", type=int, metavar="B", help="samples of a learner's step (default 64 for compute, else 1)"
    )


def run(args: argparse.Namespace) -> Json:
    """Measure, print, and return the record."""
    common.at_least("--learners", args.learners, 2)
    common.at_least("--seconds", args.seconds, 1)
    if args.local_batch is not None:
        common.at_least("--local-batch", args.local_batch, 1)
    strategies = strategies_of(args.strategies)
    if DDP not in strategies:
        raise ArgumentError(f"--strategies {args.strategies}: {DDP} must be among them, for it is compared with")
    result = record("benchmarks/equal.py", threads_per_learner=1)
    loads = tuple(LOADS) if args.load == "both" else (args.load,)
    repeats: dict[str, list[Repeat]] = {load: [] for load in loads}
    for number in range(args.repeats):
        for load in loads:
            repeat: Repeat = {}
            for strategy in strategies:
                repeat[strategy] = measure(job_of(load, strategy, args.learners, args.local_batch), args.seconds)
                rate = repeat[strategy].steps_per_s
                common.progress(f"repeat {number + 1} of {args.repeats}, {load}: {strategy}: {rate:.2f} steps/s")
            repeats[load].append(repeat)
    result |= {
        "learners": args.learners,
        "seconds": args.seconds,
        "repeats": args.repeats,
        "local_batch": {load: job_of(load, DDP, args.learners, args.local_batch).local_batch for load in loads},
        "rows": [row(strategy, load, repeats[load]) for load in loads for strategy in strategies],
    }
    show(result, args.json)
    return result


def show(result: Json, as_json: bool) -> None:
    """Print the table."""
    columns = ("load", "strategy", "steps/s", "over ddp", "(range)", "CPU ms/step", "exch./step")
    lines = []
    for values in result["rows"]:
        ratios = values["samples"]["over_ddp"]
        lines.append(
            [
                values["load"],
                values["strategy"],
                f"{values['steps_per_s']:.2f}",
                f"{values['over_ddp']:.3f}",
                f"{min(ratios):.3f}..{max(ratios):.3f}",
                f"{values['cpu_s_per_step'] * 1e3:.1f}",
                f"{values['exchanges_per_step']:.2f}" if "exchanges_per_step" in values else "",
            ]
        )
    common.print_table(f"{result['learners']} learners, all equally fast", columns, lines, as_json)


if __name__ == "__main__":
    sys.exit(common.main(__doc__ or "", configure, run))
