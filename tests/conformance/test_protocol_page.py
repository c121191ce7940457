"""docs/protocol.md and the code are the same machine: every row of the page's table is done by the protocol."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
from ends import DEADLINE_S, Ends

from antiphon.transport.protocol import Handle, Kind, Message

PAGE = Path(__file__).parents[2] / "docs" / "protocol.md"
STATES = ("none", "PROPOSED", "COMMITTED", "HELD")
MESSAGES = tuple(kind.name for kind in Kind if kind is not Kind.PUBLISHED)
EVENTS = ("propose", *MESSAGES, "deadline", "lost", "returned", "withdraw", "extend")
C = 1 / 3


@dataclass(frozen=True)
class Row:
    state: str
    event: str
    where: tuple[str, ...]
    says: tuple[tuple[str, str], ...]
    """Kinds, and whose number each carries: q or n."""
    adds: bool
    counts: frozenset[str]
    next: str

    @classmethod
    def read(cls, line: str) -> Row:
        state, event, where, says, adds, counts, following = (
            "" if cell.strip() == "-" else cell.strip() for cell in line.strip().strip("|").split("|")
        )
        said = tuple(re.findall(r"([A-Z]+)\(([qn])\)", says))
        assert " ".join(f"{kind}({number})" for kind, number in said) == says, f"cannot read {says!r}"
        # A comma within parentheses, as in (0, 1/2], separates no conditions.
        conditions = tuple(re.split(r", (?![^(]*\])", where)) if where else ()
        return cls(state, event, conditions, said, bool(adds), frozenset(counts.split()), following)

    def __str__(self) -> str:
        return " ".join((self.state, self.event, *self.where))


def table() -> list[Row]:
    text = PAGE.read_text().split("## The table")[1]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert lines[0] == "| state | event | where | says | adds | counts | next |"
    return [Row.read(line) for line in lines[2:]]


class Scene:
    """An end with a history with one peer, brought into a state by messages; a third learner stands by.

    It has committed its own number 1 with the peer, applied the peer's number 1, and forsaken the peer's number 2.
    """

    def __init__(self, state: str, where: tuple[str, ...]) -> None:
        self.me, self.peer = (0, 1) if "own number lower" in where else (1, 0)
        self.ends = Ends(3)
        self.end, self.own, self.theirs = (
            self.ends.ends[self.me],
            self.ends.snapshots[self.me],
            self.ends.snapshots[self.peer],
        )
        self.usable, self.coefficient = True, C
        self.past()
        getattr(self, f"reach_{state}")()
        self.ends.wire.clear()

    def past(self) -> None:
        for first, second in ((self.me, self.peer), (self.peer, self.me)):
            assert self.ends.ends[first].propose(second, C, self.ends.now)
            self.ends.settle()
        self.hear("PROPOSE", 2)
        self.end.lost(self.peer)
        for held in list(self.theirs.held.items()):
            self.theirs.release(Handle(*held))

    def hear(self, kind: str, number: int) -> None:
        handle, coefficient = Handle(0, 0), 0.0
        if kind in ("PROPOSE", "ACCEPT"):
            handle, coefficient = (self.theirs.take() if self.usable else Handle(2, 99)), self.coefficient
        self.end.receive(Message(Kind[kind], self.peer, number, handle, coefficient), self.ends.now)

    def reach_none(self) -> None:
        pass

    def reach_PROPOSED(self) -> None:  # noqa: N802 - named by the state
        assert self.end.propose(self.peer, C, self.ends.now)

    def reach_COMMITTED(self) -> None:  # noqa: N802
        self.reach_PROPOSED()
        self.hear("ACCEPT", self.end.open[self.peer].sequence)

    def reach_HELD(self) -> None:  # noqa: N802
        self.hear("PROPOSE", 5)

    @property
    def state(self) -> str:
        exchange = self.end.open.get(self.peer)
        return exchange.state.name if exchange else "none"

    def arrange(self, condition: str) -> int | None:
        """Make a condition of the table true; return the number that the message then carries, where it says so."""
        third = 2
        match condition:
            case "own number lower":
                assert self.me < self.peer
            case "own number higher":
                assert self.me > self.peer
            case "fresh one started":
                assert self.end.propose(third, C, self.ends.now)
            case "fresh one held":
                assert self.ends.ends[third].propose(self.me, C, self.ends.now)
                self.ends.give(*next(item for item in self.ends.wire if item[1].sender == third))
            case "weights not finite":
                self.own.finite = False
            case "no free slot":
                self.own.slots = 0
            case "not usable":
                self.usable = False
            case "c outside (0, 1/2]":
                self.coefficient = 0.75
            case _:
                open_number = self.end.open[self.peer].sequence if self.peer in self.end.open else None
                known = self.end.peers[self.peer]
                return {
                    "n = q": open_number,
                    "n < q": 4,
                    "n > seen": known.seen + 3,
                    "n <= seen": known.seen - 1,
                    "n = committed": known.committed,
                    "n = applied": known.applied,
                    "n = forsaken": known.forsaken,
                    "n unknown": 77,
                }[condition]
        return None

    def happen(self, event: str, number: int | None) -> None:
        match event:
            case "propose":
                self.end.propose(self.peer, C, self.ends.now)
            case "deadline":
                self.ends.now += DEADLINE_S
                self.end.tick(self.ends.now)
            case "lost" | "returned" | "withdraw":
                getattr(self.end, event)(self.peer)
            case "extend":
                self.end.extend(self.peer, self.ends.now)
            case _:
                assert number is not None, "the row must say which number the message carries"
                self.hear(event, number)


@pytest.mark.parametrize("row", table(), ids=str)
def test_the_protocol_does_what_the_row_says(row):
    scene = Scene(row.state, row.where)
    assert scene.state == row.state
    q = scene.end.open[scene.peer].sequence if scene.peer in scene.end.open else None
    numbers = [number for condition in row.where if (number := scene.arrange(condition)) is not None]
    assert len(numbers) <= 1
    n = numbers[0] if numbers else None
    scene.ends.wire.clear()
    counts, added = asdict(scene.end.counts), len(scene.own.added)
    scene.happen(row.event, n)
    if row.event == "propose" and row.next == "PROPOSED" and q is None:
        q = scene.end.open[scene.peer].sequence
    assert scene.state == row.next
    said = [(message.kind.name, message.sequence) for receiver, message in scene.ends.wire if receiver == scene.peer]
    assert said == [(kind, {"q": q, "n": n}[number]) for kind, number in row.says]
    changed = {name for name, value in asdict(scene.end.counts).items() if value != counts[name]}
    assert changed == row.counts
    assert len(scene.own.added) - added == row.adds
    # A slot is pinned for as long as its exchange is open, and no longer.
    assert len(scene.own.held) == len(scene.end.open)


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("state", STATES)
def test_the_table_has_every_event_in_every_state(state, event):
    assert [row for row in table() if (row.state, row.event) == (state, event)]


def test_the_table_names_nothing_else():
    for row in table():
        assert row.state in STATES and row.event in EVENTS and row.next in STATES
        assert all(kind in MESSAGES for kind, _ in row.says)
    rows = [str(row) for row in table()]
    assert len(set(rows)) == len(rows)


@pytest.mark.parametrize(("state", "moves"), [("PROPOSED", True), ("COMMITTED", True), ("HELD", True), ("none", False)])
def test_extend_moves_the_deadline_of_what_is_open(state, moves):
    scene = Scene(state, ())
    scene.ends.now += DEADLINE_S / 2
    scene.happen("extend", None)
    assert scene.end.next_due() == (scene.ends.now + DEADLINE_S if moves else None)


@pytest.mark.parametrize("state", ["COMMITTED", "HELD"])
def test_an_exchange_past_its_deadline_stays_open_but_no_longer_counts(state):
    scene = Scene(state, ())
    scene.happen("deadline", None)
    assert scene.state == state and not scene.end.open[scene.peer].fresh
    assert scene.end.next_due() == scene.ends.now + DEADLINE_S
    scene.arrange("fresh one started" if state == "COMMITTED" else "fresh one held")
    assert set(scene.end.open) == {scene.peer, 2}
