"""Draws how the learners shared the work, and one utterance with its alignment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from antiphon.report.plots import ALERT, grid_of, place_labels, size_in, svg_of, thin, time_unit
from antiphon.report.runs import Floats


@dataclass(frozen=True)
class Work:
    """What the figure of the learners' work shows, over L learners and N moments."""

    times_N: Floats
    done_LN: Floats
    what: str
    shares_L: Floats
    alert_L: Sequence[bool]
    names_L: Sequence[str]
    seconds_3L: Floats = field(default_factory=lambda: np.zeros((3, 0)))
    """Seconds of computing, waiting and exchanging of each learner; empty where not known."""


def work_figure(name: str, work: Work, colour: str) -> str:
    """Draw who did how much over time, the final shares, and where each learner's time went."""
    timed = work.seconds_3L.size > 0 and float(work.seconds_3L.sum()) > 0
    drawn = [work.times_N.size > 1, True, timed]

    def draw(figure: Figure) -> None:
        grid = grid_of(figure, 1, sum(drawn))
        all_axes = [figure.add_subplot(grid[0, place]) for place in range(sum(drawn))]
        waiting = list(all_axes)
        if drawn[0]:
            _draw_work_over_time(waiting.pop(0), work, colour)
        _draw_shares(waiting.pop(0), work, colour)
        if timed:
            _draw_seconds(waiting.pop(0), work, colour)
        for axes in all_axes:
            place_labels(axes)

    return svg_of(name, 2.7, draw)


def _draw_work_over_time(axes: Axes, work: Work, colour: str) -> None:
    longest_s = float(work.times_N[-1])
    divisor, unit = time_unit(longest_s)
    most = max(8, 6000 // max(1, len(work.done_LN)))
    for learner, done_N in enumerate(work.done_LN):
        alert = work.alert_L[learner]
        x_N, y_N = thin(work.times_N, done_N, min(most, 120))
        axes.plot(x_N / divisor, y_N, color=ALERT if alert else colour, alpha=1 if alert else 0.55, linewidth=1.3)
    highest = float(work.done_LN.max())
    alerts = [learner for learner, alert in enumerate(work.alert_L) if alert]
    for learner in alerts if len(alerts) == 1 else []:
        axes.annotate(
            work.names_L[learner],
            (longest_s / divisor, float(work.done_LN[learner][-1])),
            xytext=(0, 4),
            textcoords="offset points",
            ha="right",
            color=ALERT,
        )
    axes.set_title(f"{work.what.capitalize()} done by each learner")
    axes.set_xlabel(f"time, {unit}")
    scale, prefix = (1e6, "million ") if highest >= 2e6 else (1e3, "thousand ") if highest >= 2e4 else (1.0, "")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value / scale:g}")
    axes.set_ylabel(f"{prefix}{work.what}")
    axes.set_ylim(0, highest * 1.08 or 1)
    axes.set_xlim(0, longest_s / divisor)


def _draw_shares(axes: Axes, work: Work, colour: str) -> None:
    learners = np.arange(work.shares_L.size)
    colours = [ALERT if alert else colour for alert in work.alert_L]
    axes.bar(learners, 100 * work.shares_L, 0.72, color=colours)
    equal = 100 / work.shares_L.size
    axes.axhline(equal, color="#1f2933", linewidth=0.9, linestyle=(0, (4, 3)))
    if work.shares_L.size <= 10:
        for learner, share in enumerate(100 * work.shares_L):
            axes.annotate(
                f"{share:.0f} %" if share >= 9.95 else f"{share:.1f} %",
                (learner, share),
                xytext=(0, 3.5),
                textcoords="offset points",
                ha="center",
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6},
            )
    axes.set_title("Final share of the work (dashed: equal)")
    axes.set_xlabel("learner")
    axes.set_ylabel(f"share of the {work.what}, %")
    axes.set_ylim(0, max(100 * float(work.shares_L.max()), equal) * 1.15)
    _learner_axis(axes, work)


def _draw_seconds(axes: Axes, work: Work, colour: str) -> None:
    total_s = work.seconds_3L.sum(axis=0)
    divisor, unit = time_unit(float(total_s.max()))
    floor_L = np.zeros_like(total_s)
    learners = np.arange(total_s.size)
    for seconds_L, label, shade in zip(
        work.seconds_3L, ("computing", "waiting", "exchanging"), (colour, "#D9DEE4", "#1f2933"), strict=True
    ):
        axes.bar(learners, seconds_L / divisor, 0.72, bottom=floor_L / divisor, color=shade, label=label)
        floor_L = floor_L + seconds_L
    axes.set_title("Where its time went")
    axes.set_xlabel("learner")
    axes.set_ylabel(f"time, {unit}")
    axes.set_ylim(0, float(total_s.max()) / divisor * 1.22)
    axes.legend(loc="upper center", ncols=3, frameon=False, handlelength=0.9, columnspacing=1.1, fontsize=7.5)
    _learner_axis(axes, work)


def _learner_axis(axes: Axes, work: Work) -> None:
    axes.grid(axis="x", visible=False)
    if work.shares_L.size <= 10:
        axes.set_xticks(range(work.shares_L.size))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))


@dataclass(frozen=True)
class Utterance:
    """One utterance with its alignment; T frames, M mel bands; spans are (label, start in s, end in s)."""

    spectrogram_TM: Floats
    frame_shift_s: float
    phones: Sequence[tuple[str, float, float]]
    words: Sequence[tuple[str, float, float]]


def utterance_figure(name: str, utterance: Utterance) -> str:
    """Draw the log-mel spectrogram as a picture, with the phones and the words under it on one time axis."""
    frames, bands = utterance.spectrogram_TM.shape
    length_s = frames * utterance.frame_shift_s
    tiers = [spans for spans in (utterance.phones, utterance.words) if spans]

    def draw(figure: Figure) -> None:
        heights = [5.0, *([0.85] * len(tiers))]
        grid = grid_of(figure, len(heights), 1, gap_in=0.04, top_in=0.06, heights=heights)
        axes = figure.add_subplot(grid[0])
        low, high = np.percentile(utterance.spectrogram_TM, [1, 99.5])
        axes.imshow(
            utterance.spectrogram_TM.T,
            origin="lower",
            aspect="auto",
            extent=(0.0, length_s, 0.0, float(bands)),
            cmap="viridis",
            vmin=float(low),
            vmax=float(high) if high > low else float(low) + 1,
            interpolation="none",
        )
        axes.grid(visible=False)
        axes.set_ylabel("mel band")
        for start_s in sorted({span[1] for span in utterance.words}):
            axes.axvline(start_s, color="white", linewidth=0.6, alpha=0.7)
        lowest = axes
        for place, spans in enumerate(tiers, 1):
            lowest.tick_params(bottom=False, labelbottom=False)
            lowest = figure.add_subplot(grid[place], sharex=axes)
            _draw_tier(lowest, spans, length_s, "phones" if spans is utterance.phones else "words")
        lowest.tick_params(bottom=True, labelbottom=True)
        lowest.set_xlabel("time, s")
        axes.set_xlim(0, length_s)
        place_labels(lowest)
        place_labels(axes)

    return svg_of(name, 2.45 + 0.37 * len(tiers), draw)


def _draw_tier(axes: Axes, spans: Sequence[tuple[str, float, float]], length_s: float, name: str) -> None:
    """Draw labelled boxes; a label that does not fit its box is turned upright, then made smaller, or left out."""
    axes.set_ylim(0, 1)
    axes.set_yticks([])
    axes.grid(visible=False)
    axes.annotate(
        name, (0, 0.5), xycoords="axes fraction", xytext=(-6, 0), textcoords="offset points", ha="right", va="center"
    )
    points_per_s = 72 * size_in(axes)[0] / length_s
    height = 19.0
    for index, (label, start_s, end_s) in enumerate(spans):
        axes.axvspan(start_s, end_s, color="#EDF2F7" if index % 2 else "#DCE6F0", linewidth=0)
        room = (end_s - start_s) * points_per_s
        size, upright = 7.5, False
        if 0.62 * size * len(label) > room:
            size = max(6.0, room / (0.62 * max(1, len(label))))
            if 0.62 * size * len(label) > room:
                size, upright = min(7.0, height / (0.62 * max(1, len(label)))), True
                if size < 5 or size > room:
                    continue
        axes.text(
            (start_s + end_s) / 2,
            0.48,
            label,
            ha="center",
            va="center",
            fontsize=size,
            rotation=90 if upright else 0,
        )
