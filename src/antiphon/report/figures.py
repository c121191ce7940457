"""Chooses what of the runs goes into each figure of the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from antiphon.records import Json
from antiphon.report.pictures import Utterance, Work, utterance_figure, work_figure
from antiphon.report.plots import Curve, Panel, look, panel_figure, thin, time_unit
from antiphon.report.runs import Floats, LearnerShare, Run, number, numbers

MOST_STALENESS = 12
"""Staleness from here on shares one bar."""
MOST_TRAINING_CURVES = 3
"""With more runs than this the training losses would hide the held-out ones."""


@dataclass(frozen=True)
class Fault:
    """Something that went wrong in a run, with the label of its mark in the curves."""

    label: str
    run: Run
    index: int
    time_s: float
    epoch: float | None
    text: str
    tickets: float | None


def all_faults(runs: Sequence[Run]) -> list[Fault]:
    """Return the faults of all runs, and who came or went, labelled F1, F2 ... in the order of the runs and of time."""
    faults: list[Fault] = []
    for index, run in enumerate(runs):
        rows = [*run.rows("fault"), *run.rows("membership")]
        for row in sorted(rows, key=lambda row: number(row.get("time_s")) or 0.0):
            time_s = number(row.get("time_s")) or 0.0
            learner, source = number(row.get("learner")), number(row.get("source"))
            who = f"learner {learner:g} " if learner is not None else ""
            text = f"{who}{row.get('kind') or row.get('change') or 'failed'}"
            text += f": {row['text']}" if row.get("text") else ""
            text += f" with the weights of learner {source:g}" if source is not None else ""
            label, tickets = f"F{len(faults) + 1}", number(row.get("tickets_returned"))
            faults.append(Fault(label, run, index, time_s, run.epoch_at(time_s), text, tickets))
    return faults


def shows_training_loss(runs: Sequence[Run]) -> bool:
    """Whether the training loss is drawn behind the held-out one: it is told, and by few runs."""
    told = any(run.series("progress", "time_s", "loss")[0].size for run in runs)
    return told and len(runs) <= MOST_TRAINING_CURVES


def learning(runs: Sequence[Run], faults: Sequence[Fault]) -> str:
    """Draw held-out loss and frame accuracy, each against time and against epochs."""
    divisor, unit = time_unit(_longest_s(runs))
    panels = []
    for field, title, y_label, scale in (
        ("heldout_loss", "Loss", "nats a frame", 1.0),
        ("frame_accuracy", "Held-out frame accuracy", "frames right, %", 100.0),
    ):
        for x, x_label, over in (("time_s", f"time, {unit}", divisor), ("epoch", "epoch", 1.0)):
            curves = []
            for index, run in enumerate(runs):
                x_N, y_N = run.series("evaluation", x, field)
                curves.append(Curve(x_N / over, y_N * scale, look(index), dots=True))
                if field == "heldout_loss" and shows_training_loss(runs):
                    x_N, y_N = thin(*run.series("progress", x, "loss"))
                    curves.append(Curve(x_N / over, y_N, look(index), faint=True))
            panels.append(
                Panel(
                    f"{title} against {'time' if x == 'time_s' else 'epochs'}",
                    x_label,
                    y_label,
                    curves,
                    marks=_marks(faults, x == "time_s", over),
                )
            )
    return panel_figure("learning", panels)


def behaviour(runs: Sequence[Run], faults: Sequence[Fault]) -> str:
    """Draw consensus distance, staleness, learning rate and speed."""
    divisor, unit = time_unit(_longest_s(runs))
    distances, rates, speeds = [], [], []
    for index, run in enumerate(runs):
        x_N, y_N = run.series("evaluation", "epoch", "consensus_distance")
        apart = y_N > 0
        distances.append(Curve(x_N[apart], y_N[apart], look(index), dots=True))
        x_N, y_N = run.series("progress", "epoch", "lr")
        rates.append(Curve(*thin(*((x_N, y_N) if x_N.size else run.series("evaluation", "epoch", "lr"))), look(index)))
        x_N, y_N = thin(*run.series("progress", "time_s", "frames_per_s"), 120)
        speeds.append(Curve(x_N / divisor, y_N, look(index)))
    by_epoch, by_time = _marks(faults, False, 1.0), _marks(faults, True, divisor)
    return panel_figure(
        "behaviour",
        [
            Panel(
                "Consensus distance, RMS over parameters",
                "epoch",
                "",
                distances,
                marks=by_epoch,
                zero_y=True,
                spread_y=True,
            ),
            _staleness(runs),
            Panel("Learning rate", "epoch", "learning rate", rates, zero_y=True),
            Panel("Speed", f"time, {unit}", "frames/s", speeds, marks=by_time, zero_y=True),
        ],
    )


def _staleness(runs: Sequence[Run]) -> Panel:
    """Every learner's histogram added up, as shares of a run's gradients, over the range that they take."""
    counts = [_staleness_counts(run) for run in runs]
    longest = max((int(np.flatnonzero(each)[-1]) + 1 for each in counts if each.any()), default=0)
    bins = min(longest, MOST_STALENESS + 1)
    bars = []
    for index, each in enumerate(counts):
        if not each.any():
            continue
        heights = np.zeros(bins)
        np.add.at(heights, np.minimum(np.arange(each.size), bins - 1), each)
        bars.append((100 * heights / heights.sum(), look(index)))
    names = [str(value) for value in range(bins)]
    if longest > bins:
        names[-1] = f"{bins - 1}+"
    return Panel("Staleness of the gradients", "weight changes meanwhile", "gradients, %", bars=bars, bar_names=names)


def _staleness_counts(run: Run) -> Floats:
    histograms = [numbers(row.get("staleness")) for row in run.rows("learner")]
    total = np.zeros(max(map(len, histograms), default=0))
    for histogram in histograms:
        total[: len(histogram)] += histogram
    return total


def work(run: Run, shares: Sequence[LearnerShare], name: str, colour: str) -> str:
    """Draw the learners' work over time, their final shares and their time."""
    what = "samples" if any(row.samples for row in shares) else "steps"
    field = f"{what}_by_learner"
    rows = [(number(row.get("time_s")), numbers(row.get(field))) for row in run.rows("progress")]
    # A learner that joined later has no place in the first lists: its work so far is nothing.
    kept = [(time_s, done) for time_s, done in rows if time_s is not None and done]
    done_NL = np.zeros((len(kept), len(shares)))
    for row_index, (_, done) in enumerate(kept):
        for place, share in enumerate(shares):
            done_NL[row_index, place] = done[share.learner] if share.learner < len(done) else 0.0
    seconds = [[row.compute_s or 0.0, row.wait_s or 0.0, row.exchange_s or 0.0] for row in shares]
    return work_figure(
        name,
        Work(
            times_N=np.array([time_s for time_s, _ in kept], dtype=np.float64),
            done_LN=done_NL.T,
            what=what,
            shares_L=np.array([row.share for row in shares]),
            alert_L=[row.slow or row.fault is not None for row in shares],
            names_L=[f"learner {row.learner}" + (f" {row.fault}" if row.fault else "") for row in shares],
            seconds_3L=np.array(seconds).T,
        ),
        colour,
    )


def utterance(example: Json | None) -> str:
    """Draw the utterance of example.json; "" where there is none or it holds no spectrogram."""
    rows = example.get("spectrogram") if example else None
    shift_s = number(example.get("frame_shift_s")) if example else None
    if example is None or not isinstance(rows, list) or not rows or shift_s is None or shift_s <= 0:
        return ""
    bands = [numbers(row) for row in rows]
    if len(bands[0]) == 0 or any(len(band) != len(bands[0]) for band in bands):
        return ""
    phones, words = _spans(example.get("phones")), _spans(example.get("words_at"))
    return utterance_figure("utterance", Utterance(np.array(bands), shift_s, phones, words))


def _spans(value: object) -> list[tuple[str, float, float]]:
    spans = []
    for item in value if isinstance(value, list) else []:
        if isinstance(item, list) and len(item) == 3:
            start_s, end_s = number(item[1]), number(item[2])
            if start_s is not None and end_s is not None and end_s > start_s:
                spans.append((str(item[0]), start_s, end_s))
    return spans


def _marks(faults: Sequence[Fault], against_time: bool, over: float) -> list[tuple[float, str, str]]:
    places = [(fault.time_s / over if against_time else fault.epoch, fault) for fault in faults]
    return [(x, fault.label, look(fault.index).colour) for x, fault in places if x is not None]


def _longest_s(runs: Sequence[Run]) -> float:
    return max((number(run.events[-1].get("time_s")) or 0.0 for run in runs if run.events), default=0.0)
