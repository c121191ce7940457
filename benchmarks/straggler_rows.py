"""What stragglers.py reports: the ideal, and a row for each setting, from windows measured one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import common
from straggling import DDP, HIVEMIND, Job, Window, medians, over, summary

from antiphon.records import Json
from antiphon.strategies import strategy_class


def waits(strategy: str) -> bool:
    """Say whether a learner waits for others in each step."""
    return strategy == DDP or (strategy != HIVEMIND and strategy_class(strategy).waits)


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
    """What was measured one after the other: a learner alone, by its factor of slowness, and every setting."""

    alone: dict[float, Window]
    together: dict[str, Window]

    def steps_s(self, job: Job) -> list[float]:
        """Return t_i of every learner [L], seconds."""
        return [1 / self.alone[factor].steps_per_s for factor in job.factors]

    def ideal(self, job: Job) -> float:
        """Return the ideal steps a second."""
        return ideal_steps_per_s(job.strategy, self.steps_s(job))


def row(name: str, load: str, settings: Mapping[str, Job], repeats: Sequence[Repeat]) -> Json:
    """Return one setting's row: medians over the repeats, and the repeats as ``samples``."""
    job, windows = settings[name], [repeat.together[name] for repeat in repeats]
    rates = {other: [repeat.together[other].steps_per_s for repeat in repeats] for other in settings}
    ideals = [repeat.ideal(job) for repeat in repeats]
    samples = {
        "steps_per_s": rates[name],
        "ideal_steps_per_s": ideals,
        "over_ideal": over(rates[name], ideals),
        "cpu_share": [max(window.cpu_share_L) for window in windows],
    }
    if DDP in settings:
        samples["over_ddp"] = over(rates[name], rates[DDP])
    if best := best_hivemind(settings, repeats):
        samples["over_hivemind"] = over(rates[name], rates[best])
    peer = job.strategy in (DDP, HIVEMIND)
    result = {
        "strategy": job.strategy,
        "load": load,
        **summary(samples),
        "steps_per_s_by_learner": medians([window.steps_per_s_L for window in windows]),
        "cpu_share_by_learner": medians([window.cpu_share_L for window in windows]),
        "bytes_read_per_step": None if peer else common.median([window.bytes_per_step for window in windows]),
        "exchanges_per_step": None if job.strategy == DDP else common.median([w.exchanges_per_step for w in windows]),
    }
    return {**result, "target_batch_size": job.target_batch_size} if job.strategy == HIVEMIND else result


def best_hivemind(settings: Mapping[str, Job], repeats: Sequence[Repeat]) -> str | None:
    """Return the name of hivemind's setting with the most steps a second, or None where it was not measured."""
    names = [name for name, job in settings.items() if job.strategy == HIVEMIND]
    rates = {name: common.median([repeat.together[name].steps_per_s for repeat in repeats]) for name in names}
    return max(names, key=rates.__getitem__, default=None)


def rows(load: str, settings: Mapping[str, Job], repeats: Sequence[Repeat]) -> tuple[list[Json], list[Json]]:
    """Return a row for each strategy, hivemind at its best among them, and one for each of hivemind's settings."""
    all_rows = {name: row(name, load, settings, repeats) for name in settings}
    best = best_hivemind(settings, repeats)
    chosen = [values for name, values in all_rows.items() if settings[name].strategy != HIVEMIND or name == best]
    return chosen, [values for name, values in all_rows.items() if settings[name].strategy == HIVEMIND]


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
