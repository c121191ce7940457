"""Reads what a run wrote, whole or not, into the few shapes that tables, plots and the page draw from."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from antiphon.errors import DataError, FolderError
from antiphon.records import CONFIG_NAME, EVENTS_NAME, SUMMARY_NAME, Json, read_json, read_jsonl

Floats = NDArray[np.float64]

SLOW_COMPUTE = 1.25
"""A learner counts as slow when a step costs it this many times the median of all learners ..."""
SLOW_SHARE = 0.75
"""... or when it did less than this part of an equal share."""


def number(value: Any) -> float | None:
    """Return ``value`` as a finite float, or None for anything else.

    >>> number(3), number(float("nan")), number("3")
    (3.0, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def numbers(value: Any) -> list[float]:
    """Return a list of finite floats from a JSON list, anything else in it taken as 0."""
    return [number(item) or 0.0 for item in value] if isinstance(value, list) else []


def wer_of(value: Any) -> Json | None:
    """Return the word error rate object in ``value`` (itself, or its field ``wer``), or None."""
    for candidate in (value, value.get("wer") if isinstance(value, dict) else None):
        if isinstance(candidate, dict) and number(candidate.get("rate")) is not None:
            return candidate
    return None


@dataclass(frozen=True)
class LearnerShare:
    """What one learner did: from its closing event, or from the last progress where it has none yet."""

    learner: int
    steps: float
    samples: float
    share: float
    compute_s: float | None
    wait_s: float | None
    exchange_s: float | None
    staleness_mean: float | None
    exchanges: dict[str, float]
    size_bytes: float | None
    slowness: float | None
    """Compute seconds a step over the median of all learners."""
    fault: str | None
    slow: bool


@dataclass(frozen=True)
class Run:
    """One run's folder as it stands: whatever is there, and a list of what is not."""

    folder: Path
    name: str
    summary: Json
    config: Json
    events: list[Json]
    example: Json | None
    wers: dict[str, Json]
    missing: tuple[str, ...] = ()

    def rows(self, event: str) -> list[Json]:
        """Return the events of one kind, in order."""
        return [row for row in self.events if row.get("event") == event]

    def fact(self, name: str) -> Any:
        """Return a field of the summary, or what the events say of it so far; None where neither does."""
        for row in (self.summary, *reversed(self.events)):
            if row.get(name) is not None:
                return row[name]
        return self.config.get(name)

    def last(self, name: str) -> float | None:
        """Return a figure of the summary, else the last finite one of the events, else None."""
        values = (number(row.get(name)) for row in (self.summary, *reversed(self.events)))
        return next((value for value in values if value is not None), None)

    def series(self, event: str, x: str, y: str) -> tuple[Floats, Floats]:
        """Return ``(x_N, y_N)`` of the events that have both as finite numbers."""
        pairs = [(number(row.get(x)), number(row.get(y))) for row in self.rows(event)]
        kept = [(a, b) for a, b in pairs if a is not None and b is not None]
        table_N2 = np.array(kept, dtype=np.float64).reshape(-1, 2)
        return table_N2[:, 0], table_N2[:, 1]

    def epoch_at(self, time_s: float) -> float | None:
        """Return the epoch at ``time_s``, interpolated between the events that name one; None if none does."""
        known = [self.series(event, "time_s", "epoch") for event in ("progress", "evaluation")]
        times, epochs = (np.concatenate([pair[axis] for pair in known]) for axis in (0, 1))
        if times.size == 0:
            return None
        order = np.argsort(times, kind="stable")
        return float(np.interp(time_s, times[order], epochs[order]))

    @property
    def wer(self) -> Json | None:
        """The word error rate of the test split, else of the first split decoded, else None."""
        return wer_of(self.summary.get("wer")) or self.wers.get("test") or next(iter(self.wers.values()), None)

    @property
    def gmm_wer(self) -> Json | None:
        """The word error rate of the GMM that made the alignment, or None."""
        return wer_of(self.summary.get("gmm_wer"))


def learner_shares(events: Sequence[Json]) -> list[LearnerShare]:
    """Return what each learner did, by its number; [] when the events do not tell yet."""
    progress: Json = next((row for row in reversed(events) if row.get("event") == "progress"), {})
    steps = dict(enumerate(numbers(progress.get("steps_by_learner"))))
    samples = dict(enumerate(numbers(progress.get("samples_by_learner"))))
    closing: dict[int, Json] = {}
    faults: dict[int, str] = {}
    for row in events:
        learner = number(row.get("learner"))
        if learner is None:
            continue
        if row.get("event") == "fault":
            faults[int(learner)] = str(row.get("kind", "failed"))
        elif row.get("event") == "learner":
            closing[int(learner)] = row
            steps[int(learner)] = number(row.get("steps")) or 0.0
            samples[int(learner)] = number(row.get("samples")) or 0.0
    work = samples if sum(samples.values()) > 0 else steps
    total = sum(work.values())
    costs = {i: cost for i, row in closing.items() if (cost := _compute_per_step(row)) is not None}
    median = float(np.median(list(costs.values()))) if costs else 0.0
    shares = []
    for learner in sorted({*steps, *samples}):
        row = closing.get(learner, {})
        share = work.get(learner, 0.0) / total if total else 0.0
        slowness = costs[learner] / median if learner in costs and median > 0 else None
        behind = share * len(work) < SLOW_SHARE or (slowness is not None and slowness >= SLOW_COMPUTE)
        exchanges = row.get("exchanges")
        shares.append(
            LearnerShare(
                learner=learner,
                steps=steps.get(learner, 0.0),
                samples=samples.get(learner, 0.0),
                share=share,
                compute_s=number(row.get("compute_s")),
                wait_s=number(row.get("wait_s")),
                exchange_s=number(row.get("exchange_s")),
                staleness_mean=mean_staleness(row.get("staleness")),
                exchanges={k: number(v) or 0.0 for k, v in exchanges.items()} if isinstance(exchanges, dict) else {},
                size_bytes=number(row.get("bytes")),
                slowness=slowness,
                fault=faults.get(learner),
                slow=total > 0 and len(work) > 1 and learner not in faults and behind,
            )
        )
    return shares


def _compute_per_step(row: Json) -> float | None:
    compute_s, steps = number(row.get("compute_s")), number(row.get("steps"))
    return compute_s / steps if compute_s is not None and steps else None


def mean_staleness(histogram: Any) -> float | None:
    """Return the mean of a histogram given as a list of counts, index = staleness.

    >>> mean_staleness([1, 2, 1])
    1.0
    """
    counts = np.array(numbers(histogram))
    return float(counts @ np.arange(counts.size) / counts.sum()) if counts.sum() > 0 else None


def load_runs(folders: Sequence[Path]) -> list[Run]:
    """Read several runs and give each a name of its own: the folder's, longer where two are alike.

    Raises:
        FolderError: one of them is not a run.
    """
    parts = [folder.resolve().parts for folder in folders]
    names = [_short_name(own, parts) for own in parts]
    return [load_run(folder, name) for folder, name in zip(folders, names, strict=True)]


def _short_name(own: tuple[str, ...], everyone: Sequence[tuple[str, ...]]) -> str:
    for length in range(1, len(own)):
        if sum(other[-length:] == own[-length:] for other in everyone) == 1:
            return "/".join(own[-length:])
    return own[-1]


def load_run(folder: Path, name: str) -> Run:
    """Read what is there of one run.

    Raises:
        FolderError: the folder is not a run.
    """
    if not folder.is_dir():
        raise FolderError(f"{folder} is not a run: no such folder")
    if not any((folder / file).is_file() for file in (EVENTS_NAME, SUMMARY_NAME, CONFIG_NAME)):
        holds = "a prepared corpus" if (folder / "data.json").is_file() else "nothing of one"
        raise FolderError(
            f"{folder} is not a run: it holds {holds}. Name a folder written by `antiphon train`"
            f" (with {CONFIG_NAME}, {EVENTS_NAME} or {SUMMARY_NAME})"
        )
    missing: list[str] = []
    summary = _optional_json(folder / SUMMARY_NAME, missing) or {}
    config = _optional_json(folder / CONFIG_NAME, missing) or {}
    example = _optional_json(folder / "example.json", missing)
    wers: dict[str, Json] = {}
    for path in sorted(folder.glob("decode/*/wer.json")):
        score = wer_of(_optional_json(path, missing))
        if score is not None:
            wers[path.parent.name] = score
    events = _continuous(_read_events(folder / EVENTS_NAME, missing))
    run = Run(folder, name, summary, config, events, example, wers)
    return replace(run, missing=(*missing, *_what_is_missing(run)))


def _optional_json(path: Path, missing: list[str]) -> Json | None:
    """Read a file that may not be there; one that is there but broken is noted in ``missing``."""
    if not path.exists():
        return None
    try:
        return read_json(path)
    except DataError as error:
        missing.append(_within_run(str(error), path))
        return None


def _read_events(path: Path, missing: list[str]) -> list[Json]:
    """Read the events up to the first line that a crash cut short, and note that line."""
    rows: list[Json] = []
    if not path.exists():
        return rows
    try:
        for _, row in read_jsonl(path):
            rows.append(row)
    except DataError as error:
        missing.append(f"{_within_run(str(error), path)}; what follows that line is not shown.")
    return rows


def _within_run(message: str, path: Path) -> str:
    """Leave the folder out of an error's text: the page names the run already."""
    return message.replace(str(path.parent) + os.sep, "")


def _continuous(events: list[Json]) -> list[Json]:
    """Join the parts of a resumed run: one clock, and what was done again replaces what was lost."""
    joined: list[Json] = []
    offset_s = last_s = 0.0
    resumed = False
    for row in events:
        time_s = number(row.get("time_s")) or 0.0
        if row.get("event") == "run_started" and joined:
            offset_s, resumed = last_s, True
        last_s = offset_s + time_s
        epoch = number(row.get("epoch"))
        if resumed and epoch is not None and row.get("event") in ("progress", "evaluation"):
            joined = [old for old in joined if "epoch" not in old or (number(old["epoch"]) or 0.0) < epoch]
            resumed = False
        joined.append({**row, "time_s": last_s})
    return joined


def _what_is_missing(run: Run) -> list[str]:
    """Say in sentences what the folder does not hold, and how to get it."""
    missing = []
    if not run.summary:
        stopped = next((str(row.get("reason")) for row in reversed(run.rows("run_stopped"))), None)
        epochs = [epoch for row in run.events if (epoch := number(row.get("epoch"))) is not None]
        so_far = f" The last event is of epoch {epochs[-1]:.2f}." if epochs else ""
        why = f"it was stopped ({stopped})" if stopped else "it has not finished, or it was cut off"
        missing.append(f"No {SUMMARY_NAME}: {why}.{so_far}")
    if not run.events:
        missing.append(f"No {EVENTS_NAME}, or nothing in it: there are no curves to draw.")
    else:
        evaluations = run.series("evaluation", "time_s", "heldout_loss")[0].size
        if evaluations < 2:
            few = "No evaluation yet" if evaluations == 0 else "Only one evaluation"
            missing.append(f"{few}: held-out curves begin with the second.")
        if any("heldout_loss" in row and number(row["heldout_loss"]) is None for row in run.rows("evaluation")):
            missing.append("Some held-out losses are not finite numbers: they are left out of the curves.")
    if not run.config:
        missing.append(f"No {CONFIG_NAME}: the settings are not known.")
    if run.wer is None:
        missing.append("No word error rate yet: antiphon decode measures it.")
    return missing
