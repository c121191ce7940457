"""Draws a run's curves, histograms and alignment as SVG that can stand inside a page.

Figures are matplotlib's own, made without pyplot, so nothing global is left behind. Text stays text and takes
the page's font; every id carries the figure's name, so that many figures can stand on one page.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

from antiphon.report.runs import Floats

# Okabe and Ito's colours, told apart by colour-blind eyes; vermilion is kept for what went wrong or is slow.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#444444")
ALERT = "#D55E00"
DASHES = ("solid", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 1.5, 1, 1.5)))
WIDTH_IN = 10.4
MOST_POINTS = 240

_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 8.0,
    "axes.titlesize": 9.0,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#7b8794",
    "axes.labelcolor": "#3e4c59",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e7eb",
    "grid.linewidth": 0.7,
    "xtick.color": "#52606d",
    "ytick.color": "#52606d",
    "text.color": "#1f2933",
    "lines.markersize": 3.5,
}


@dataclass(frozen=True)
class Look:
    """How one run is drawn, in every figure."""

    colour: str
    dash: str | tuple[float, tuple[float, ...]]

    @property
    def dash_array(self) -> str:
        """The dashes as SVG's ``stroke-dasharray``, at three pixels a unit."""
        return "none" if isinstance(self.dash, str) else " ".join(f"{3 * length:g}" for length in self.dash[1])


def look(index: int) -> Look:
    """Return the look of run ``index``: colours first, then dashes once the colours are used up."""
    return Look(PALETTE[index % len(PALETTE)], DASHES[index // len(PALETTE) % len(DASHES)])


@dataclass(frozen=True)
class Curve:
    """One line of a panel; ``faint`` lines stand behind the others."""

    x_N: Floats
    y_N: Floats
    look: Look
    faint: bool = False


@dataclass(frozen=True)
class Panel:
    """One plot of a figure: curves, bars side by side (``heights`` of each run), or both left empty."""

    title: str
    x_label: str
    y_label: str
    curves: Sequence[Curve] = ()
    bars: Sequence[tuple[Floats, Look]] = ()
    bar_names: Sequence[str] = ()
    marks: Sequence[tuple[float, str, str]] = ()
    """Where something went wrong: place on the x axis, label, colour of the run."""
    log_y: bool = False
    zero_y: bool = False

    @property
    def empty(self) -> bool:
        """Whether there is nothing to draw."""
        return not any(curve.x_N.size for curve in self.curves) and not any(h.size for h, _ in self.bars)


def thin(x_N: Floats, y_N: Floats, most: int = MOST_POINTS) -> tuple[Floats, Floats]:
    """Return at most ``most`` points, each the mean of its neighbours, so that a long run stays a small page."""
    if x_N.size <= most:
        return x_N, y_N
    parts = np.array_split(np.arange(x_N.size), most)
    return np.array([x_N[part].mean() for part in parts]), np.array([y_N[part].mean() for part in parts])


def time_unit(longest_s: float) -> tuple[float, str]:
    """Return what to divide seconds by, and the unit's name, for an axis that ends at ``longest_s``."""
    if longest_s < 300:
        return 1.0, "s"
    return (60.0, "min") if longest_s < 3 * 3600 else (3600.0, "h")


def panel_figure(name: str, panels: Sequence[Panel]) -> str:
    """Draw the panels that are not empty, two in a row, and return the SVG; "" when all are empty."""
    full = [panel for panel in panels if not panel.empty]
    if not full:
        return ""
    rows = (len(full) + 1) // 2

    def draw(figure: Figure) -> None:
        grid = figure.add_gridspec(rows, 2)
        for place, panel in enumerate(full):
            alone = place == len(full) - 1 and len(full) % 2 == 1
            axes = figure.add_subplot(grid[place // 2, :] if alone else grid[place // 2, place % 2])
            _draw_panel(axes, panel)

    return _svg(name, 2.55 * rows, draw)


def _draw_panel(axes: Axes, panel: Panel) -> None:
    axes.set_title(panel.title, pad=16 if panel.marks else 8)
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    # The clear lines after the faint ones, so that no training loss hides a held-out one.
    for curve in sorted(panel.curves, key=lambda curve: not curve.faint):
        axes.plot(
            curve.x_N,
            curve.y_N,
            color=curve.look.colour,
            linestyle=curve.look.dash,
            linewidth=0.9 if curve.faint else 1.6,
            alpha=0.45 if curve.faint else 1.0,
            marker="o" if not curve.faint and curve.x_N.size <= 40 else "",
        )
    if panel.bars:
        _draw_bars(axes, panel)
    if panel.log_y:
        axes.set_yscale("log")
    elif panel.curves:
        _limit_y(axes, panel)
    if panel.curves and not any(curve.x_N.size > 1 for curve in panel.curves):
        centre = next(float(curve.x_N[0]) for curve in panel.curves if curve.x_N.size)
        axes.set_xlim(0, 2 * centre if centre > 0 else 1)
    _draw_marks(axes, panel)


def _limit_y(axes: Axes, panel: Panel) -> None:
    """Show all of the clear curves, and of the faint ones all but their first steep fall."""
    clear = [curve.y_N for curve in panel.curves if not curve.faint and curve.y_N.size]
    faint = [curve.y_N for curve in panel.curves if curve.faint and curve.y_N.size]
    low = min(float(y.min()) for y in [*clear, *faint])
    highs = [float(y.max()) for y in clear] + [float(np.percentile(y, 95)) for y in faint]
    low = 0.0 if panel.zero_y else low
    margin = 0.06 * (max(highs) - low) or 0.1 * abs(low) or 1.0
    axes.set_ylim(low if panel.zero_y else low - margin, max(highs) + margin)


def _draw_bars(axes: Axes, panel: Panel) -> None:
    width = 0.82 / len(panel.bars)
    for place, (heights, bar_look) in enumerate(panel.bars):
        shift = (place - (len(panel.bars) - 1) / 2) * width
        axes.bar(np.arange(heights.size) + shift, heights, 0.94 * width, color=bar_look.colour)
    axes.grid(axis="x", visible=False)
    axes.set_xticks(range(len(panel.bar_names)), panel.bar_names)


def _draw_marks(axes: Axes, panel: Panel) -> None:
    """Draw a dashed line where something went wrong, with its number above unless it would touch the last."""
    left, right = axes.get_xlim()
    last = -np.inf
    for x, label, colour in sorted(panel.marks):
        axes.axvline(x, color=ALERT, linewidth=0.9, linestyle=(0, (3, 2)))
        place = (x - left) / (right - left)
        if place - last > 0.045:
            axes.annotate(
                label,
                (x, 1.0),
                xycoords=("data", "axes fraction"),
                xytext=(0, 3),
                textcoords="offset points",
                ha="center",
                color=colour,
                weight="bold",
            )
            last = place
    axes.set_xlim(left, right)


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
        all_axes = list(np.ravel(figure.subplots(1, sum(drawn), squeeze=False)))
        if drawn[0]:
            _draw_work_over_time(all_axes.pop(0), work, colour)
        _draw_shares(all_axes.pop(0), work, colour)
        if timed:
            _draw_seconds(all_axes.pop(0), work, colour)

    return _svg(name, 2.75, draw)


def _draw_work_over_time(axes: Axes, work: Work, colour: str) -> None:
    longest_s = float(work.times_N[-1])
    divisor, unit = time_unit(longest_s)
    most = max(8, 6000 // max(1, len(work.done_LN)))
    for learner, done_N in enumerate(work.done_LN):
        alert = work.alert_L[learner]
        x_N, y_N = thin(work.times_N, done_N, min(most, 120))
        axes.plot(x_N / divisor, y_N, color=ALERT if alert else colour, alpha=1 if alert else 0.55, linewidth=1.3)
    highest = float(work.done_LN.max())
    for learner in [index for index, alert in enumerate(work.alert_L) if alert][:3]:
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
                xytext=(0, 2),
                textcoords="offset points",
                ha="center",
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
    if work.shares_L.size <= 16:
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
        grid = figure.add_gridspec(len(heights), 1, height_ratios=heights, hspace=0.06)
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

    return _svg(name, 2.4 + 0.42 * len(tiers), draw)


def _draw_tier(axes: Axes, spans: Sequence[tuple[str, float, float]], length_s: float, name: str) -> None:
    """Draw labelled boxes; a label that does not fit its box is turned upright, then made smaller, or left out."""
    axes.set_ylim(0, 1)
    axes.set_yticks([])
    axes.grid(visible=False)
    axes.set_ylabel(name, rotation=0, ha="right", va="center")
    points_per_s = 0.92 * WIDTH_IN * 72 / length_s
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


def _svg(name: str, height_in: float, draw: Callable[[Figure], None]) -> str:
    """Let ``draw`` fill a figure, and return it as an ``<svg>`` element without fixed size."""
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}):
        layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06, wspace=0.03, hspace=0.06)
        figure = Figure(figsize=(WIDTH_IN, height_in), layout=layout)
        FigureCanvasSVG(figure)
        draw(figure)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r'(<svg\b[^>]*?)\swidth="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg\b[^>]*?)\sheight="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'((?:xlink:)?href="|url\()#', rf"\1#{name}-", text)
    return re.sub(r"\n\s*", "\n", text)
