"""Writes the report of one run or several: one HTML page that needs neither network nor JavaScript."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from antiphon.errors import ArgumentError
from antiphon.records import Json, record, write_text
from antiphon.report import figures, sections
from antiphon.report.html import Markup, element, folded, join, page, section, table
from antiphon.report.runs import Run, load_runs, number
from antiphon.report.tables import (
    NOTHING,
    duration,
    fixed,
    interval_text,
    magnitude,
    percent,
    significant,
    wer_text,
)


def write_report(runs: Sequence[Path], out: Path) -> Json:
    """Write one self-contained page about ``runs`` to ``out`` and return what it was made from.

    Args:
        runs: folders of runs, finished or not; what a folder lacks is named on the page.
        out: the HTML file; one that is there is replaced.

    Returns:
        With one run its summary's fields, and always ``runs`` (a summary each, as far as it goes, with ``name``
        and ``missing``), ``size_bytes`` and ``out``.

    Raises:
        ArgumentError: no run is given.
        FolderError: a folder is not a run.
    """
    if not runs:
        raise ArgumentError("a report needs at least one run: name a folder written by `antiphon train`")
    loaded = load_runs(runs)
    text = render(loaded)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, text)
    summaries = [summary_of(run) for run in loaded]
    own = ("schema", "command", "environment", "out")
    alone = {k: v for k, v in loaded[0].summary.items() if k not in own} if len(loaded) == 1 else {}
    return record("report", **alone, runs=summaries, size_bytes=len(text.encode()), out=str(out))


def summary_of(run: Run) -> Json:
    """Return the figures of a run, from its summary or, while that is not there, from its events."""
    last = {name: run.last(name) for name in ("heldout_loss", "frame_accuracy", "frames_per_s", "wall_s")}
    named = ("corpus", "strategy", "learners", "batch", "lr", "epochs", "parameters")
    return {
        "name": run.name,
        "folder": str(run.folder),
        **{name: run.fact(name) for name in named},
        **last,
        "wer": run.wer,
        "gmm_wer": run.gmm_wer,
        "missing": run.missing,
    }


def render(runs: Sequence[Run]) -> str:
    """Return the page as text; the same runs always give the same text."""
    several = len(runs) > 1
    title = f"{len(runs)} runs compared" if several else runs[0].name
    faults = figures.all_faults(runs)
    parts = [
        element(
            "header",
            element("p", "Antiphon training report", class_="over"),
            element("h1", title),
            *([] if several else [_sentence(runs[0])]),
        ),
        _runs_table(runs) if several else _tiles(runs[0]),
        _missing(runs),
        sections.learning(runs, faults),
        sections.behaviour(runs, faults),
        sections.learners(runs),
        sections.word_errors(runs),
        sections.utterance(runs),
        join([_folded_settings(run, several) for run in runs]),
        element("footer", "Written by antiphon report. Losses are nats a frame, of the consensus model."),
    ]
    return page(f"Antiphon: {title}", "\n".join(part for part in parts if part))


def _sentence(run: Run) -> Markup:
    """Say in one line what was run."""
    learners, lr = number(run.fact("learners")), number(run.fact("lr"))
    local = number(run.fact("local_batch"))
    each = f" ({local:g} a learner)" if local is not None and learners != 1 else ""
    known = [
        str(run.fact("strategy") or ""),
        f"{learners:g} learner{'s' * (learners != 1)}" if learners is not None else "",
        f"corpus {run.fact('corpus')}" if run.fact("corpus") else "",
        f"{magnitude(run.fact('parameters'))} parameters" if number(run.fact("parameters")) else "",
        f"batch {fixed(run.fact('batch'))}{each}" if number(run.fact("batch")) else "",
        f"learning rate {lr:g}" if lr is not None else "",
        f"{number(run.fact('epochs')):g} epochs" if number(run.fact("epochs")) else "",
        f"seed {run.fact('seed')}" if run.fact("seed") is not None else "",
    ]
    return element("p", " · ".join(filter(None, known)) or "Nothing is known of it yet.", class_="quiet sentence")


def _tiles(run: Run) -> Markup:
    staleness = run.summary.get("staleness")
    staleness = staleness if isinstance(staleness, dict) else {}
    gmm = f"GMM {wer_text(run.gmm_wer, interval=False)}" if run.gmm_wer else ""
    between = f"95 %: [{interval_text(run.wer)}]" if run.wer and interval_text(run.wer) else ""
    beside = join([text for text in (between, gmm) if text], Markup("<br>"))
    tiles = [
        ("Word error rate", wer_text(run.wer, interval=False), beside),
        ("Held-out loss", fixed(run.last("heldout_loss"), 3), "nats a frame"),
        ("Frame accuracy", percent(run.last("frame_accuracy")), "of held-out frames"),
        ("Training time", duration(run.last("wall_s")), "wall clock"),
        ("Speed", fixed(run.last("frames_per_s")), "frames/s, all learners"),
        ("Staleness", fixed(staleness.get("mean"), 2), f"mean; largest {fixed(staleness.get('max'))}"),
    ]
    shown = [tile for tile in tiles if tile[1] != NOTHING]
    return element(
        "div",
        *(
            element(
                "div",
                element("div", name, class_="name"),
                element("div", value, class_="value"),
                element("div", under, class_="under"),
                class_="tile",
            )
            for name, value, under in shown
        ),
        class_="tiles",
    )


def _runs_table(runs: Sequence[Run]) -> Markup:
    rows = []
    for index, run in enumerate(runs):
        facts = summary_of(run)
        rows.append(
            [
                sections.key(index, run.name),
                facts["strategy"] or NOTHING,
                facts["corpus"] or NOTHING,
                fixed(facts["learners"]),
                fixed(facts["batch"]),
                significant(facts["epochs"]),
                fixed(facts["heldout_loss"], 3),
                percent(facts["frame_accuracy"]),
                wer_text(facts["wer"]),
                duration(facts["wall_s"]),
                fixed(facts["frames_per_s"]),
            ]
        )
    headings = ["run", "strategy", "corpus", "learners", "batch", "epochs", "held\u2011out loss", "frame accuracy"]
    headings += ["WER [95\u00a0%]", "wall", "frames/s"]
    return section("Runs", table(headings, rows, words=3), _differences(runs))


def _differences(runs: Sequence[Run]) -> Markup:
    """Show the settings in which the runs differ; where they are written is no setting."""
    settings = [dict(_flat(run.config)) for run in runs]
    names = list(dict.fromkeys(name for each in settings for name in each))
    rows = []
    for name in names:
        values = [each.get(name, NOTHING) for each in settings]
        told = not name.startswith("environment.") and name.rpartition(".")[2] != "out"
        if told and len(set(values)) > 1:
            rows.append([name, *values])
    if not rows or not all(settings):
        return Markup("")
    headings = ["setting", *(run.name for run in runs)]
    return join([element("h3", "Settings that differ"), table(headings, rows, words=len(headings))])


def _missing(runs: Sequence[Run]) -> Markup:
    """List what is missing, once for all the runs that miss it."""
    names: dict[str, list[str]] = {}
    for run in runs:
        for text in run.missing:
            names.setdefault(text, []).append(run.name)
    if not names:
        return Markup("")
    several = len(runs) > 1
    items = [element("li", f"{', '.join(who)}: {text}" if several else text) for text, who in names.items()]
    return element("section", element("h2", "Not there yet"), element("ul", *items), class_="missing")


def _folded_settings(run: Run, several: bool) -> Markup:
    of_run = f" of {run.name}" if several else ""
    environment = run.summary.get("environment") or run.config.get("environment") or {}
    config = {k: v for k, v in run.config.items() if k not in ("environment", "schema", "command")}
    parts = []
    for title, values in (("Configuration", config), ("Environment", environment)):
        if isinstance(values, dict) and values:
            parts.append(folded(title + of_run, table(["name", "value"], list(_flat(values)), words=2)))
    return join(parts)


def _flat(values: Json, prefix: str = "") -> list[tuple[str, str]]:
    """Return nested settings as (dotted name, text) pairs."""
    pairs: list[tuple[str, str]] = []
    for name, value in values.items():
        if isinstance(value, dict):
            pairs += _flat(value, f"{prefix}{name}.")
        else:
            pairs.append((f"{prefix}{name}", NOTHING if value is None else str(value)))
    return pairs
