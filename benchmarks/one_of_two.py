"""The loops that overhead.py compares, and one of two learners, each a process, that has both."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import common
import torch
from driven import Driven, Took, obey
from torch import Tensor, nn

from antiphon.learner.learner import Learner

POOL = 512
WARMUP_STEPS = 5
PAIR_FIELDS = ("pair_cpu_ratio", "pair_exchange_cpu_ratio", "pair_wall_ratio", "pair_exchanges_per_step")

Batches = Iterable[tuple[Tensor, Tensor]]
Loop = Iterator[None]
"""Makes one step each time it is asked for the next element."""


def plain_loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches) -> Loop:
    """Train as one would without Antiphon."""
    for features_BTF, targets_BT in batches:
        optimizer.zero_grad()
        common.loss_of(model, features_BTF, targets_BT).backward()
        optimizer.step()
        yield


def engine_loop(learner: Learner, batches: Batches) -> Loop:
    """Train through the engine: the same lines within ``learner.step()``."""
    model, optimizer = learner.model, learner.optimizer
    for features_BTF, targets_BT in batches:
        with learner.step():
            optimizer.zero_grad()
            common.loss_of(model, features_BTF, targets_BT).backward()
            optimizer.step()
        yield


class OneOfTwo:
    """A learner that exchanges, and a plain loop beside it."""

    def __init__(self, strategy: str, batch: int) -> None:
        torch.set_num_threads(1)
        features_BTF, targets_BT = common.random_frames(POOL)
        batches = list(zip(features_BTF.split(batch), targets_BT.split(batch), strict=True))
        self.learner = Learner(*common.acoustic_model(), strategy, exchange_every=1)
        self.loops = {
            "plain": plain_loop(*common.acoustic_model(), itertools.cycle(batches)),
            "engine": engine_loop(self.learner, itertools.cycle(batches)),
        }

    def steps(self, loop: str, steps: int, seed: int) -> Took:
        """Make steps, and say what a step took."""
        torch.manual_seed(seed)
        counts = self.learner.transport.counts
        exchanges, exchange_s = counts.committed + counts.applied, self.learner.transport.exchange_s
        cpu_s, wall_s = time.thread_time(), time.perf_counter()
        for _ in range(steps):
            next(self.loops[loop])
        took = {
            "cpu_s": time.thread_time() - cpu_s,
            "wall_s": time.perf_counter() - wall_s,
            "exchange_cpu_s": self.learner.transport.exchange_s - exchange_s,
            "exchanges": counts.committed + counts.applied - exchanges,
        }
        return {name: value / steps for name, value in took.items()}


def pair_samples(strategy: str, batch: int, repeats: int, blocks: int, steps: int) -> dict[str, list[float]]:
    """Return what each repeat gave: ratios of the dearer learner."""
    samples: dict[str, list[float]] = {name: [] for name in PAIR_FIELDS}
    with Driven(Path(__file__), [strategy, str(batch)]) as both:
        for loop in ("plain", "engine"):
            both.all("steps", loop, WARMUP_STEPS, 0)
        for repeat in range(repeats):
            turns = [
                (both.all("steps", "plain", steps, seed), both.all("steps", "engine", steps, seed))
                for seed in range(1 + repeat * blocks, 1 + (repeat + 1) * blocks)
            ]
            plain_L, engine_L = (
                [_mean(side) for side in zip(*of_loop, strict=True)] for of_loop in zip(*turns, strict=True)
            )
            each = [_pair_fields(plain, engine) for plain, engine in zip(plain_L, engine_L, strict=True)]
            for name in PAIR_FIELDS:
                samples[name].append(max(fields[name] for fields in each))
            common.progress(
                f"repeat {repeat + 1} of {repeats}, one of two: ratio of CPU time {samples['pair_cpu_ratio'][-1]:.4f},"
                f" and {samples['pair_exchange_cpu_ratio'][-1]:.4f} beside it"
            )
    return samples


def _mean(takes: Sequence[Took]) -> Took:
    return {name: sum(took[name] for took in takes) / len(takes) for name in takes[0]}


def _pair_fields(plain: Took, engine: Took) -> dict[str, float]:
    values = (
        engine["cpu_s"] / plain["cpu_s"],
        engine["exchange_cpu_s"] / plain["cpu_s"],
        engine["wall_s"] / plain["wall_s"],
        engine["exchanges"],
    )
    return dict(zip(PAIR_FIELDS, values, strict=True))


if __name__ == "__main__":
    obey(OneOfTwo(sys.argv[1], int(sys.argv[2])))
