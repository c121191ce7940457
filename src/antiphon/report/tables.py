"""Tables of runs and learners for the terminal, and the wording of figures that the page shares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO, Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from antiphon.records import Json
from antiphon.report.runs import learner_shares, number, wer_of

NOTHING = "–"


def fixed(value: Any, digits: int = 0) -> str:
    """Write a number with a comma at the thousands, or a dash where there is none.

    >>> fixed(12345.6), fixed(0.5, 2), fixed(None)
    ('12,346', '0.50', '–')
    """
    known = number(value)
    return NOTHING if known is None else f"{known:,.{digits}f}"


def significant(value: Any, digits: int = 3) -> str:
    """Write a number with so many significant digits, or a dash where there is none.

    >>> significant(0.0123456), significant(1e-6)
    ('0.0123', '1e-06')
    """
    known = number(value)
    return NOTHING if known is None else f"{known:.{digits}g}"


def percent(value: Any, digits: int = 1) -> str:
    """Write a fraction in per cent.

    >>> percent(0.1234)
    '12.3 %'
    """
    known = number(value)
    return NOTHING if known is None else f"{100 * known:.{digits}f} %"


def magnitude(value: Any) -> str:
    """Write a large count in thousands or millions.

    >>> magnitude(1_234_567), magnitude(43_210), magnitude(97)
    ('1.23 M', '43.2 k', '97')
    """
    known = number(value)
    if known is None:
        return NOTHING
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(known) >= size:
            return f"{known / size:.3g} {unit}" if abs(known) < 999.5 * size else f"{known / size:.0f} {unit}"
    return f"{known:g}"


def duration(value: Any) -> str:
    """Write seconds as people say them.

    >>> duration(12.34), duration(192), duration(3 * 3600 + 300)
    ('12.3 s', '3 min 12 s', '3 h 05 min')
    """
    known = number(value)
    if known is None:
        return NOTHING
    if known < 59.95:
        return f"{known:.1f} s"
    whole = round(known)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600:,} h {whole % 3600 // 60:02d} min"


def wer_text(value: Any, interval: bool = True) -> str:
    """Write a word error rate, with its 95 % interval where it has one.

    >>> wer_text({"rate": 0.094, "ci95": [0.08, 0.109]})
    '9.4 % [8.0, 10.9]'
    """
    wer = wer_of(value)
    if wer is None:
        return NOTHING
    between = interval_text(wer) if interval else ""
    return percent(wer["rate"]) + (f" [{between}]" if between else "")


def interval_text(wer: Json) -> str:
    """Write the 95 % interval of a word error rate in per cent, or nothing where it has none."""
    ends = wer.get("ci95")
    ends = [number(end) for end in ends] if isinstance(ends, list) else []
    if len(ends) != 2 or ends[0] is None or ends[1] is None:
        return ""
    return f"{100 * ends[0]:.1f}, {100 * ends[1]:.1f}"


def run_table(summaries: Sequence[Json]) -> Table:
    """Return a table with one row for each summary of a run; what a summary lacks is a dash.

    Args:
        summaries: objects as in summary.json; ``name``, where present, is the run's name.

    >>> run_table([{"strategy": "random-ring", "learners": 4}]).row_count
    1
    """
    named = any(summary.get("name") for summary in summaries)
    table = _table("run" if named else None, "strategy", "learners", "epochs", "held-out loss", "frame accuracy")
    for heading in ("WER [95 %], %", "GMM WER, %", "wall", "frames/s"):
        table.add_column(heading, justify="right")
    for summary in summaries:
        name = [str(summary.get("name") or NOTHING)] if named else []
        table.add_row(
            *name,
            str(summary.get("strategy") or NOTHING),
            fixed(summary.get("learners")),
            significant(summary.get("epochs")),
            fixed(summary.get("heldout_loss"), 3),
            percent(summary.get("frame_accuracy")),
            wer_text(summary.get("wer")).replace(" %", ""),
            wer_text(summary.get("gmm_wer"), interval=False).replace(" %", ""),
            duration(summary.get("wall_s")),
            fixed(summary.get("frames_per_s")),
        )
    return table


def learner_table(events: Sequence[Json]) -> Table:
    """Return a table with one row for each learner, from a run's events.

    A learner that has not ended yet has its steps and share only, from the last ``progress``.
    """
    table = _table(None, "learner", "steps", "share", "staleness", "compute", "wait", "exchange", "exchanges")
    for row in learner_shares(events):
        note = f" ({row.fault})" if row.fault else " (slow)" if row.slow else ""
        table.add_row(
            f"{row.learner}{note}",
            fixed(row.steps),
            percent(row.share),
            fixed(row.staleness_mean, 2),
            duration(row.compute_s),
            duration(row.wait_s),
            duration(row.exchange_s),
            fixed(row.exchanges.get("committed")),
        )
    return table


def print_table(table: Table, file: IO[str] | None = None) -> None:
    """Print a table to ``file`` (default: standard output); where that is no terminal, as wide as the table is."""
    console = Console(file=file)
    if not console.is_terminal:
        natural = Measurement.get(console, console.options.update_width(1000), table).maximum
        console = Console(file=file, width=max(natural, console.width))
    console.print(table)


def _table(*headings: str | None) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in headings:
        if heading is not None:
            words = heading in ("run", "strategy", "learner")
            table.add_column(heading, justify="left" if words else "right", no_wrap=words)
    return table
