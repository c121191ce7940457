"""The sections of the page: learning, behaviour, the learners, word errors and one utterance."""

from __future__ import annotations

from collections.abc import Sequence

from antiphon.records import Json
from antiphon.report import figures
from antiphon.report.html import Markup, drawing, element, folded, join, section, table
from antiphon.report.plots import look
from antiphon.report.runs import LearnerShare, Run, learner_shares, number, wer_of
from antiphon.report.tables import NOTHING, duration, fixed, interval_text, magnitude, percent

# The order in which exchanges are told; other kinds that a run counts come after these.
EXCHANGES = ("proposed", "committed", "applied", "refused", "busy", "late", "torn", "nonfinite", "asked")

MOST_ROWS = 8
"""Tables of more learners than this are folded away."""


def key(index: int, name: str) -> Markup:
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
    return element("div", *(key(index, run.name) for index, run in enumerate(runs)), class_="legend")


def learning(runs: Sequence[Run], faults: Sequence[figures.Fault]) -> Markup:
    """Show the curves of loss and accuracy, and what went wrong on the way."""
    svg = figures.learning(runs, faults)
    if not svg and not faults:
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
        element("p", note, class_="note") if svg else "",
        heading,
        listed,
    )


def behaviour(runs: Sequence[Run], faults: Sequence[figures.Fault]) -> Markup:
    """Show how far the learners were apart, how stale their gradients were, and how fast they went."""
    svg = figures.behaviour(runs, faults)
    if not svg:
        return Markup("")
    meanings = {
        "Consensus distance": "RMS over parameters of the learners' distance from their mean.",
        "Staleness of the gradients": "how many times the learner's weights changed while one was computed.",
    }
    note = " ".join(f"{title}: {text}" for title, text in meanings.items() if title in svg)
    described = "Consensus distance, staleness, learning rate and speed"
    return section("Behaviour", _legend(runs), drawing(svg, described), element("p", note, class_="note"))


def learners(runs: Sequence[Run]) -> Markup:
    """Show each run's learners: their work, time and exchanges."""
    several = len(runs) > 1
    parts: list[Markup] = []
    totals: list[tuple[object, Sequence[LearnerShare]]] = []
    for index, run in enumerate(runs):
        shares = learner_shares(run.events)
        if several:
            parts.append(element("h3", key(index, run.name)))
        parts.append(_learners_of(index, run, shares))
        tables = _learner_tables(run, shares)
        long = several or len(shares) > MOST_ROWS
        parts.append(folded("Learner by learner", tables) if tables and long else tables)
        totals.append((key(index, run.name), shares))
    if several:
        parts.append(_exchanges("Exchanges of all learners", "run", totals))
    return section("The learners", *parts)


def _learner_tables(run: Run, shares: Sequence[LearnerShare]) -> Markup:
    if not shares:
        return Markup("")
    groups: list[tuple[object, Sequence[LearnerShare]]] = [(_learner_name(row), [row]) for row in shares]
    exchanges = _exchanges("Exchanges", "learner", [*groups, ("all", shares)]) if len(shares) > 1 else ""
    return join([_learner_rows(shares), exchanges, _lost(run)])


def _learners_of(index: int, run: Run, shares: Sequence[LearnerShare]) -> Markup:
    """Show how one run's learners shared the work, and name the slow ones."""
    if not shares:
        return element("p", "The events do not tell yet what the learners did.", class_="note")
    if len(shares) == 1:
        return element("p", "One learner: no work to share and nothing to exchange.", class_="note")
    slow = [row for row in shares if row.slow]
    if len(slow) > 3:
        names = ", ".join(str(row.learner) for row in slow)
        remarks = [f"{len(slow)} of {len(shares)} learners were slow: {names}."]
    else:
        remarks = [_remark(row, len(shares)) for row in slow]
    svg = figures.work(run, shares, f"work-{index}", look(index).colour)
    described = "Work done by each learner, final shares, and where its time went"
    return join([*(element("p", text, class_="alert") for text in remarks), drawing(svg, described)])


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


def _exchanges(title: str, heading: str, groups: Sequence[tuple[object, Sequence[LearnerShare]]]) -> Markup:
    """Return a table of exchanges by kind, each row the sum of a group of learners."""
    counted = {kind for _, shares in groups for row in shares for kind in row.exchanges}
    if not counted:
        return Markup("")
    kinds = [kind for kind in EXCHANGES if kind in counted] + sorted(counted - set(EXCHANGES))
    rows: list[list[object]] = []
    for name, shares in groups:
        told = [row for row in shares if row.exchanges]
        sums = [sum(row.exchanges.get(kind, 0.0) for row in told) if told else None for kind in kinds]
        read = [row.size_bytes for row in shares if row.size_bytes is not None]
        rows.append([name, *map(fixed, sums), _bytes(sum(read) if read else None)])
    return join([element("h3", title), table([heading, *kinds, "read"], rows)])


def _lost(run: Run) -> Markup:
    """Say what got lost on the way, where the summary tells."""
    lost = [
        f"{name.replace('_', ' ')}: {fixed(run.summary[name])}"
        for name in ("samples_lost", "samples_repeated", "updates_lost")
        if number(run.summary.get(name)) is not None
    ]
    return element("p", "; ".join(lost).capitalize() + ".", class_="note") if lost else Markup("")


def _bytes(value: float | None) -> str:
    return NOTHING if value is None else f"{magnitude(value)}B"


def word_errors(runs: Sequence[Run]) -> Markup:
    """Show the word error rates of every split that was decoded, and the GMM's beneath."""
    rows: list[list[object]] = []
    gmms: list[tuple[str, Json]] = []
    for index, run in enumerate(runs):
        name = key(index, run.name) if len(runs) > 1 else run.name
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


def utterance(runs: Sequence[Run]) -> Markup:
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
