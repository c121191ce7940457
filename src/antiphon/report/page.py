"""Writes the report of one run or several: one HTML page that needs neither network nor JavaScript."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from antiphon.errors import ArgumentError
from antiphon.records import Json, record, write_text
from antiphon.report import figures
from antiphon.report.html import Markup, drawing, element, folded, join, page, section, table
from antiphon.report.plots import look
from antiphon.report.runs import LearnerShare, Run, learner_shares, load_runs, number, wer_of
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

# The order in which exchanges are told; other kinds that a run counts come after these.
EXCHANGES = ("proposed", "committed", "applied", "refused", "busy", "late", "torn", "nonfinite", "asked")


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
        _learning(runs, faults),
        _between(runs, faults),
        section("The learners", *(_learners(index, run, several) for index, run in enumerate(runs))),
        _wer_table(runs),
        _utterance(runs),
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
                _key(index, run.name),
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
    headings += ["WER [95 %]", "wall", "frames/s"]
    return section("Runs", table(headings, rows, words=3), _differences(runs))


def _differences(runs: Sequence[Run]) -> Markup:
    """Show the settings in which the runs differ; where they are written is no setting."""
    settings = [dict(_flat(run.config)) for run in runs]
    names = list(dict.fromkeys(name for each in settings for name in each))
    rows = []
    for name in names:
        values = [each.get(name, NOTHING) for each in settings]
        if len(set(values)) > 1 and name.rpartition(".")[2] != "out":
            rows.append([name, *values])
    if not rows or not all(settings):
        return Markup("")
    headings = ["setting", *(run.name for run in runs)]
    return join([element("h3", "Settings that differ"), table(headings, rows, words=len(headings))])


def _key(index: int, name: str) -> Markup:
    """Return a run's name with the line that stands for it in the plots."""
    style = look(index)
    line = (
        f'<svg width="28" height="10" aria-hidden="true"><line x1="0" y1="5" x2="28" y2="5" stroke="{style.colour}"'
        f' stroke-width="3" stroke-dasharray="{style.dash_array}"/></svg>'
    )
    return element("span", Markup(line), name, class_="key")


def _legend(runs: Sequence[Run]) -> Markup:
    if len(runs) == 1:
        return Markup("")
    return element("div", *(_key(index, run.name) for index, run in enumerate(runs)), class_="legend")


def _missing(runs: Sequence[Run]) -> Markup:
    several = len(runs) > 1
    items = [element("li", f"{run.name}: {text}" if several else text) for run in runs for text in run.missing]
    if not items:
        return Markup("")
    return element("section", element("h2", "Not there yet"), element("ul", *items), class_="missing")


def _learning(runs: Sequence[Run], faults: Sequence[figures.Fault]) -> Markup:
    svg = figures.learning(runs, faults)
    if not svg:
        return Markup("")
    described = "Held-out loss and frame accuracy against time and against epochs"
    note = "Held-out, of the consensus model." + (
        " The faint line is the training loss." if figures.shows_training_loss(runs) else ""
    )
    rows = [
        [
            element("span", fault.label, class_="alert"),
            *([fault.run.name] if len(runs) > 1 else []),
            fault.text,
            duration(fault.time_s),
            fixed(fault.epoch, 2),
            fixed(fault.tickets),
        ]
        for fault in faults
    ]
    run_heading = ["run"] if len(runs) > 1 else []
    headings = ["mark", *run_heading, "what happened", "time", "epoch", "tickets returned"]
    listed = table(headings, rows, words=2 + len(run_heading)) if rows else ""
    heading = element("h3", "Faults") if rows else ""
    return section(
        "Learning",
        _legend(runs),
        drawing(svg, described),
        element("p", note, class_="note"),
        heading,
        listed,
    )


def _between(runs: Sequence[Run], faults: Sequence[figures.Fault]) -> Markup:
    svg = figures.behaviour(runs, faults)
    if not svg:
        return Markup("")
    note = (
        "Consensus distance: RMS over parameters of the learners' distance from their mean."
        " Staleness of a gradient: how many times the learner's weights changed while it was computed."
    )
    described = "Consensus distance, staleness, learning rate and speed"
    return section("Behaviour", _legend(runs), drawing(svg, described), element("p", note, class_="note"))


def _learners(index: int, run: Run, several: bool) -> Markup:
    shares = learner_shares(run.events)
    heading = element("h3", _key(index, run.name)) if several else ""
    if not shares:
        return join([heading, element("p", "The events do not tell yet what the learners did.", class_="note")])
    if len(shares) == 1:
        note = "One learner: no work to share and nothing to exchange."
        return join([heading, element("p", note, class_="note"), _learner_rows(shares)])
    svg = figures.work(run, shares, f"work-{index}", look(index).colour)
    described = "Work done by each learner, final shares, and where its time went"
    remarks = [element("p", _remark(row, len(shares)), class_="alert") for row in shares if row.slow]
    return join([heading, *remarks[:4], drawing(svg, described), _learner_rows(shares), _exchanges(run, shares)])


def _remark(row: LearnerShare, learners: int) -> str:
    cost = f" took {row.slowness:.1f} times the median compute time for a step and" if row.slowness else ""
    return (
        f"Learner {row.learner} was slow: it{cost} did {percent(row.share)} of the work"
        f" (equal share {percent(1 / learners)})."
    ).replace(" %", "\u00a0%")


def _learner_rows(shares: Sequence[LearnerShare]) -> Markup:
    headings = ["learner", "steps", "samples", "share", "mean staleness", "computing", "waiting", "exchanging"]
    rows = [
        [
            _learner_name(row),
            fixed(row.steps),
            fixed(row.samples),
            percent(row.share),
            fixed(row.staleness_mean, 2),
            duration(row.compute_s),
            duration(row.wait_s),
            duration(row.exchange_s),
        ]
        for row in shares
    ]
    return table(headings, rows)


def _learner_name(row: LearnerShare) -> Markup:
    note = row.fault or ("slow" if row.slow else "")
    return join([row.learner, *([" ", element("span", note, class_="alert")] if note else [])])


def _exchanges(run: Run, shares: Sequence[LearnerShare]) -> Markup:
    counted = {kind for row in shares for kind in row.exchanges}
    if not counted:
        return Markup("")
    kinds = [kind for kind in EXCHANGES if kind in counted] + sorted(counted - set(EXCHANGES))
    rows: list[list[object]] = [
        [_learner_name(row), *(fixed(row.exchanges.get(kind)) for kind in kinds), _bytes(row.size_bytes)]
        for row in shares
    ]
    totals = [sum(row.exchanges.get(kind, 0.0) for row in shares) for kind in kinds]
    sent = [row.size_bytes for row in shares if row.size_bytes is not None]
    rows.append(["all", *map(fixed, totals), _bytes(sum(sent) if sent else None)])
    lost = [
        f"{name.replace('_', ' ')}: {fixed(run.summary[name])}"
        for name in ("samples_lost", "samples_repeated", "updates_lost")
        if number(run.summary.get(name)) is not None
    ]
    note = element("p", "; ".join(lost).capitalize() + ".", class_="note") if lost else ""
    return join([element("h3", "Exchanges"), table(["learner", *kinds, "sent"], rows), note])


def _bytes(value: float | None) -> str:
    return NOTHING if value is None else f"{magnitude(value)}B"


def _wer_table(runs: Sequence[Run]) -> Markup:
    rows: list[list[object]] = []
    gmms: list[tuple[str, Json]] = []
    for index, run in enumerate(runs):
        name = _key(index, run.name) if len(runs) > 1 else run.name
        scores = dict(run.wers)
        summed = wer_of(run.summary.get("wer"))
        if summed is not None and summed not in scores.values():
            scores.setdefault("test", summed)
        rows += [_wer_row(name, split, wer) for split, wer in scores.items()]
        gmm = run.gmm_wer
        if gmm is not None and gmm not in (known for _, known in gmms):
            gmms.append((run.name, gmm))
    rows += [_wer_row(f"GMM of {name}" if len(gmms) > 1 else "GMM", "test", gmm) for name, gmm in gmms]
    headings = ["system", "split", "rate", "95 % interval, %", "errors", "words"]
    headings += ["insertions", "deletions", "substitutions"]
    return section("Word error rate", table(headings, rows, words=2)) if rows else Markup("")


def _wer_row(name: object, split: str, wer: Json) -> list[object]:
    counts = [fixed(wer.get(kind)) for kind in ("errors", "words", "insertions", "deletions", "substitutions")]
    return [name, split, percent(wer["rate"], 2), interval_text(wer) or NOTHING, *counts]


def _utterance(runs: Sequence[Run]) -> Markup:
    """Show the first utterance that any run offers: the corpus is the same picture for all of them."""
    for run in runs:
        svg = figures.utterance(run.example)
        if svg and run.example is not None:
            words = run.example.get("words")
            said = " ".join(map(str, words)) if isinstance(words, list) else str(words or "")
            quote = element("p", element("b", run.example.get("id", "")), f" {said}", class_="quiet sentence")
            return section("One utterance and its alignment", quote, drawing(svg, f"Spectrogram of: {said}"))
    what = "No run offers" if len(runs) > 1 else "The run does not offer"
    return section(
        "One utterance and its alignment",
        element("p", f"{what} an utterance to look at (example.json).", class_="note"),
    )


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
