"""Draws panels of curves and histograms as SVG that can stand inside a page; the look that all figures share.

Figures are matplotlib's own, made without pyplot, so nothing global is left behind. Text stays text and takes
the page's font; every id carries the figure's name, so that many figures can stand on one page.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.gridspec import GridSpec
from matplotlib.ticker import LogLocator, NullFormatter

from antiphon.report.runs import Floats

# Okabe and Ito's colours, told apart by colour-blind eyes; vermilion is kept for what went wrong or is slow.
PALETTE = ("#0072B2", "#009E73", "#CC79A7", "#56B4E9", "#444444", "#E69F00")
ALERT = "#D55E00"
DASHES = ("solid", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 1.5, 1, 1.5)))
WIDTH_IN = 10.4
MOST_POINTS = 240

_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # a word of a corpus is no formula
    "axes.titley": 1.0,
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
    """One line of a panel; ``faint`` lines stand behind the others, ``dots`` mark each point."""

    x_N: Floats
    y_N: Floats
    look: Look
    faint: bool = False
    dots: bool = False


@dataclass(frozen=True)
class Panel:
    """One plot of a figure: curves, or bars side by side (the heights for each run)."""

    title: str
    x_label: str
    y_label: str
    curves: Sequence[Curve] = ()
    bars: Sequence[tuple[Floats, Look]] = ()
    bar_names: Sequence[str] = ()
    marks: Sequence[tuple[float, str, str]] = ()
    """Where something went wrong: place on the x axis, label, colour of the run."""
    zero_y: bool = False
    spread_y: bool = False
    """Take a logarithmic axis where the values spread over more than a factor of ten."""

    @property
    def empty(self) -> bool:
        """Whether there is nothing to see: no bars, and no curve of two points or more."""
        return not self.bars and all(curve.x_N.size < 2 for curve in self.curves)


def thin(x_N: Floats, y_N: Floats, most: int = MOST_POINTS) -> tuple[Floats, Floats]:
    """Return at most ``most`` points, each the mean of its neighbours, so that a long run stays a small page."""
    if x_N.size <= most:
        return x_N, y_N
    starts = np.arange(0, x_N.size, -(-x_N.size // most))
    sizes = np.diff(np.append(starts, x_N.size))
    return np.add.reduceat(x_N, starts) / sizes, np.add.reduceat(y_N, starts) / sizes


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
    marked = any(panel.marks for panel in full)

    def draw(figure: Figure) -> None:
        grid = grid_of(figure, rows, 2)
        for place, panel in enumerate(full):
            alone = place == len(full) - 1 and len(full) % 2 == 1
            axes = figure.add_subplot(grid[place // 2, :] if alone else grid[place // 2, place % 2])
            axes.set_title(panel.title, pad=15 if marked else 7)
            _draw_panel(axes, panel)
            place_labels(axes)

    return svg_of(name, 2.5 * rows, draw)


def _draw_panel(axes: Axes, panel: Panel) -> None:
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
            marker="o" if curve.dots and curve.x_N.size <= 40 else "",
        )
    if panel.bars:
        _draw_bars(axes, panel)
    if panel.curves:
        _limit(axes, panel)
    _draw_marks(axes, panel)


def _limit(axes: Axes, panel: Panel) -> None:
    """Begin at 0 of time or epochs; show all of the clear curves, and all but the first steep fall of the faint."""
    longest = max(float(curve.x_N.max()) for curve in panel.curves if curve.x_N.size)
    axes.set_xlim(0, 1.03 * longest or 1)
    clear = [curve.y_N for curve in panel.curves if not curve.faint and curve.y_N.size]
    faint = [curve.y_N for curve in panel.curves if curve.faint and curve.y_N.size]
    # Plain numbers: matplotlib's own write powers and offsets as formulas, and text.parse_math is off.
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:g}")
    low = min(float(y.min()) for y in [*clear, *faint])
    high = max([float(y.max()) for y in clear] + [float(np.percentile(y, 95)) for y in faint])
    if panel.spread_y and low > 0 and high > 10 * low:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 1000 * low else (1,)))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
        return
    low = 0.0 if panel.zero_y else low
    margin = 0.06 * (high - low) or 0.1 * abs(low) or 1.0
    axes.set_ylim(low if panel.zero_y else low - margin, high + margin)


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


def grid_of(
    figure: Figure,
    rows: int,
    columns: int,
    *,
    gap_in: float = 0.85,
    top_in: float = 0.36,
    heights: Sequence[float] | None = None,
) -> GridSpec:
    """Return a grid with margins in inches, so that the plots of different figures stand under each other.

    A layout engine would measure every label instead, and take longer than the drawing.
    """
    width_in, height_in = figure.get_size_inches()
    left, right, bottom, between = 0.68, 0.1, 0.45, 0.85
    free_in = width_in - left - right - (columns - 1) * between
    free_high_in = height_in - top_in - bottom - (rows - 1) * gap_in
    return figure.add_gridspec(
        rows,
        columns,
        left=left / width_in,
        right=1 - right / width_in,
        top=1 - top_in / height_in,
        bottom=bottom / height_in,
        wspace=between * columns / free_in,
        hspace=gap_in * rows / free_high_in,
        height_ratios=heights,
    )


def size_in(axes: Axes) -> tuple[float, float]:
    """Return the width and height of a plot in inches."""
    box = axes.get_position()
    figure = axes.get_figure(root=True)
    assert figure is not None
    width_in, height_in = figure.get_size_inches()
    return box.width * width_in, box.height * height_in


def place_labels(axes: Axes) -> None:
    """Put the axes' labels at a fixed distance from the plot."""
    width_in, height_in = size_in(axes)
    axes.xaxis.set_label_coords(0.5, -0.27 / height_in)
    axes.yaxis.set_label_coords(-0.48 / width_in, 0.5)


def svg_of(name: str, height_in: float, draw: Callable[[Figure], None]) -> str:
    """Let ``draw`` fill a figure, and return it as an ``<svg>`` element without fixed size."""
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(WIDTH_IN, height_in), dpi=72)
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
