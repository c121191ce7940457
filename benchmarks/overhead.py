"""What the engine costs one learner: seconds a step through it over those of a plain PyTorch loop.

Both train the default acoustic model in this process, on the same batches with the same dropout and one thread, in
blocks of steps that take turns: plain, engine, plain, engine. They end with the same weights.
Then the same for one of two learners that start an exchange each round, each a process that takes its turns when the
other does: CPU time of its computing thread, and of its exchange thread beside it.

example: python benchmarks/overhead.py --json
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass

import common
import torch
from one_of_two import POOL, WARMUP_STEPS, Loop, engine_loop, pair_samples, plain_loop
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from antiphon.config import TrainConfig
from antiphon.errors import DeadlineError
from antiphon.learner.learner import Learner
from antiphon.learner.progress import EpochOrder
from antiphon.records import Json, record
from antiphon.strategies import STRATEGIES

STEP_LIMIT_S = 10.0
"""No machine on which this is worth measuring takes as long for a step."""


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """As many samples as one epoch needs, drawn from a small pool: nothing depends on an epoch's end."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.features_BTF, self.targets_BT = common.random_frames(POOL)

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.features_BTF[index % POOL], self.targets_BT[index % POOL]


@dataclass
class Seconds:
    """What a block of steps took."""

    wall_s: float = 0.0
    cpu_s: float = 0.0

    def add(self, loop: Loop, steps: int) -> None:
        """Make ``steps`` steps, and add what they took."""
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        for _ in range(steps):
            next(loop)
        self.wall_s += time.perf_counter() - wall_s
        self.cpu_s += time.process_time() - cpu_s


def measure(plain: Loop, engine: Loop, repeats: int, blocks: int, steps: int) -> list[tuple[Seconds, Seconds]]:
    """Return what each repeat took, plain and engine: the sums of ``blocks`` blocks of ``steps`` steps of each."""
    deadline_s = time.monotonic() + STEP_LIMIT_S * 2 * (WARMUP_STEPS + repeats * blocks * steps)
    for loop in (plain, engine):
        torch.manual_seed(0)
        Seconds().add(loop, WARMUP_STEPS)
    pairs = []
    for repeat in range(repeats):
        pair = Seconds(), Seconds()
        for block in range(blocks):
            for loop, seconds in zip((plain, engine), pair, strict=True):
                torch.manual_seed(1 + repeat * blocks + block)  # the same dropout in both
                seconds.add(loop, steps)
                if time.monotonic() > deadline_s:
                    raise DeadlineError(f"a step takes longer than {STEP_LIMIT_S:g} s: measure on a faster machine")
        pairs.append(pair)
        common.progress(f"repeat {repeat + 1} of {repeats}: ratio {pair[1].wall_s / pair[0].wall_s:.4f}")
    return pairs


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the script's own arguments."""
    config = TrainConfig()
    parser.add_argument(
        "--strategy",
        default=config.strategy,
        choices=sorted(STRATEGIES),
        help="of the one learner (default random-ring)",
    )
    asynchronous = sorted(name for name, strategy in STRATEGIES.items() if not strategy.waits)
    parser.add_argument(
        "--pair-strategy",
        default=config.strategy,
        choices=asynchronous,
        help="of the two (default random-ring)",
    )
    parser.add_argument(
        "--batch", type=int, default=config.local_batch, metavar="B", help="samples of one step (default 16)"
    )
    parser.add_argument(
        "--blocks", type=int, default=25, metavar="N", help="blocks of each loop in a repeat (default 25)"
    )
    parser.add_argument("--steps", type=int, default=4, metavar="N", help="steps of a block (default 4)")


def run(args: argparse.Namespace) -> Json:
    """Measure, print, and return the record."""
    for name in ("batch", "blocks", "steps"):
        common.at_least(f"--{name}", getattr(args, name), 1)
    torch.set_num_threads(1)
    result = record("benchmarks/overhead.py", threads_per_learner=1)
    total = WARMUP_STEPS + args.repeats * args.blocks * args.steps
    samples = Samples(total * args.batch)
    order = EpochOrder(len(samples), args.batch, learners=1)
    plain_model, plain_optimizer = common.acoustic_model()
    plain_loader = DataLoader(samples, batch_sampler=[order.batch(ticket) for ticket in range(total)])
    learner = Learner(*common.acoustic_model(), args.strategy)
    try:
        engine_loader = DataLoader(samples, batch_sampler=learner.batch_sampler(samples, args.batch))
        pairs = measure(
            plain_loop(plain_model, plain_optimizer, plain_loader),
            engine_loop(learner, engine_loader),
            args.repeats,
            args.blocks,
            args.steps,
        )
    finally:
        learner.close()
    difference = max(
        float((a - b).detach().abs().max())
        for a, b in zip(plain_model.parameters(), learner.model.parameters(), strict=True)
    )
    of_two = pair_samples(args.pair_strategy, args.batch, args.repeats, args.blocks, args.steps)
    result |= fields(pairs, args.blocks * args.steps)
    result |= {name: common.median(values) for name, values in of_two.items()}
    result["samples"] |= of_two
    result |= {
        "strategy": args.strategy,
        "batch": args.batch,
        "parameters": sum(parameter.numel() for parameter in plain_model.parameters()),
        "repeats": args.repeats,
        "blocks": args.blocks,
        "steps_per_block": args.steps,
        "largest_weight_difference": difference,
    }
    show(result, args.json)
    return result


def fields(pairs: list[tuple[Seconds, Seconds]], steps: int) -> Json:
    """Return the medians of the repeats, and the repeats as ``samples``."""
    samples = {
        "ratio": [engine.wall_s / plain.wall_s for plain, engine in pairs],
        "cpu_ratio": [engine.cpu_s / plain.cpu_s for plain, engine in pairs],
        "plain_step_s": [plain.wall_s / steps for plain, _ in pairs],
        "engine_step_s": [engine.wall_s / steps for _, engine in pairs],
    }
    return {**{name: common.median(values) for name, values in samples.items()}, "samples": samples}


def show(result: Json, as_json: bool) -> None:
    """Print the table."""
    low, high = min(result["samples"]["ratio"]), max(result["samples"]["ratio"])
    rows = [
        ["plain loop, ms a step", f"{result['plain_step_s'] * 1e3:.2f}"],
        ["one learner, ms a step", f"{result['engine_step_s'] * 1e3:.2f}"],
        ["ratio", f"{result['ratio']:.4f}  ({low:.4f} to {high:.4f})"],
        ["ratio of CPU time", f"{result['cpu_ratio']:.4f}"],
        ["one of two, ratio of CPU time of the computing thread", f"{result['pair_cpu_ratio']:.4f}"],
        ["its exchange thread's CPU time beside it", f"{result['pair_exchange_cpu_ratio']:.4f}"],
        ["exchanges a step, started and accepted", f"{result['pair_exchanges_per_step']:.2f}"],
        ["largest difference of weights", f"{result['largest_weight_difference']:g}"],
        ["load at start", f"{result['environment']['load_at_start']}"],
    ]
    common.print_table("What the engine costs one learner", ["", "median"], rows, as_json)


if __name__ == "__main__":
    sys.exit(common.main(__doc__ or "", configure, run))
