"""Faults on purpose: how they are written, when they strike, and what they do to messages."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from antiphon.errors import ArgumentError
from antiphon.transport import faults
from antiphon.transport.base import Carrier
from antiphon.transport.faults import Fault, FaultyCarrier, Script, noise, parse, parse_all
from antiphon.transport.protocol import Handle, Kind, Message

PROPOSE = Message(Kind.PROPOSE, 0, 7, Handle(1, 5), 0.5)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("freeze:1@20:5", Fault("freeze", 1, 20, 5.0)),
        ("freeze:1@20", Fault("freeze", 1, 20, 5.0)),
        ("kill:0@3", Fault("kill", 0, 3)),
        ("kill:0@3/after-send-commit", Fault("kill", 0, 3, 0.0, "after-send-commit")),
        ("freeze:0@3/before-apply:.5", Fault("freeze", 0, 3, 0.5, "before-apply")),
        ("nan:2@1", Fault("nan", 2, 1)),
        ("leave:2@1", Fault("leave", 2, 1)),
        ("join:2@100", Fault("join", 2, 100)),
        ("jitter:3@0", Fault("jitter", 3, 0, 0.05)),
        ("drop:1@5", Fault("drop", 1, 5)),
        ("drop:1@5/accept:2", Fault("drop", 1, 5, 2.0, "accept")),
        ("delay:1@5", Fault("delay", 1, 5, 0.5)),
    ],
)
def test_forms(text, fault):
    assert parse(text) == fault


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "fault '': expected KIND:LEARNER@STEP"),
        ("kill", "fault 'kill': expected KIND:LEARNER@STEP"),
        ("kill:1", "expected KIND:LEARNER@STEP"),
        ("kill:-1@5", "expected KIND:LEARNER@STEP"),
        ("kill:a@5", "expected KIND:LEARNER@STEP"),
        ("kil:1@5", "unknown kind of fault 'kil': did you mean 'kill'?"),
        ("kill:1@5:3", "kill takes no duration"),
        ("nan:1@5/before-apply", "nan takes no point"),
        ("jitter:1@5/:1", "jitter takes no point"),
        ("kill:1@5/before-comit", "unknown point of kill 'before-comit'"),
        ("kill:1@5/", "unknown point of kill ''"),
        ("drop:1@5/before-apply", "unknown point of drop"),
        ("freeze:1@5:long", "seconds must be a number, not 'long'"),
        ("freeze:1@5:-1", r"seconds must lie in 0..1e\+06, not -1"),
        ("freeze:1@5:nan", "seconds must lie in"),
        ("freeze:1@5:inf", "seconds must lie in"),
    ],
)
def test_what_is_no_fault(text, error):
    with pytest.raises(ArgumentError, match=error):
        parse(text)


def test_learners_and_strategies_that_do_not_allow_it():
    assert len(parse_all(["kill:3@5", "leave:0@1"], learners=4)) == 2
    with pytest.raises(ArgumentError, match=r"kill:4@5: learners are 0\.\.3"):
        parse_all(["kill:4@5"], learners=4)
    for kind in ("nan", "leave", "join"):
        with pytest.raises(ArgumentError, match=f"{kind}:1@5: learners of this strategy wait for each other"):
            parse_all([f"{kind}:1@5"], learners=4, waits=True)
    with pytest.raises(ArgumentError, match="learner 0 brings the first weights"):
        parse_all(["join:1@5", "join:0@5"], learners=2)


class Steps:
    """A learner's steps, counted by the test."""

    def __init__(self):
        self.made = 0

    def script(self, *texts, returned_at=None):
        return Script([parse(text) for text in texts], 0, lambda: self.made, returned_at)


def test_a_fault_strikes_once_from_its_step_on():
    steps = Steps()
    script = steps.script("nan:0@3", "nan:1@0")
    assert script.take("nan") is None
    steps.made = 5
    assert script.take("kill") is None and script.take("nan") == Fault("nan", 0, 3)
    assert script.take("nan") is None


def test_what_was_due_before_a_learner_returned_is_past():
    steps = Steps()
    steps.made = 5
    script = steps.script("nan:0@5", "leave:0@6", returned_at=5)
    steps.made = 6
    assert script.take("nan") is None and script.take("leave")


def kinds(fates):
    return [(later_s, message.kind) for later_s, message in fates]


def test_messages_are_lost_doubled_late_or_spoilt():
    steps = Steps()
    script = steps.script("drop:0@0/commit", "double:0@1", "delay:0@2:.25", "corrupt:0@3")
    assert kinds(script.fates(PROPOSE)) == [(0.0, Kind.PROPOSE)]
    assert script.fates(PROPOSE._replace(kind=Kind.COMMIT)) == []
    assert len(script.fates(PROPOSE._replace(kind=Kind.COMMIT))) == 1
    steps.made = 1
    assert script.fates(PROPOSE) == [(0.0, PROPOSE)] * 2
    steps.made = 2
    assert script.fates(PROPOSE) == [(0.25, PROPOSE)]
    steps.made = 3
    ((_, spoilt),) = script.fates(PROPOSE)
    assert spoilt.handle != PROPOSE.handle and spoilt.coefficient != spoilt.coefficient
    assert spoilt.sequence == PROPOSE.sequence


def test_a_lasting_fault_of_messages_ends(monkeypatch):
    now_s = 100.0
    monkeypatch.setattr(faults.time, "monotonic", lambda: now_s)
    script = Steps().script("drop:0@0:2")
    assert script.fates(PROPOSE) == [] == script.fates(PROPOSE)
    now_s = 102.5
    assert script.fates(PROPOSE) == [(0.0, PROPOSE)]


def test_noise_is_as_likely_as_asked_for():
    fates = noise(3, drop=0.2, double=0.1)
    counts = [len(fates(PROPOSE)) for _ in range(4000)]
    assert 600 < counts.count(0) < 1000 and 220 < counts.count(2) < 420
    assert all(fates(PROPOSE) == [(0.0, PROPOSE)] for fates in [noise(1)] for _ in range(9))


class Recorded(Carrier):
    """A carrier that notes what it is asked for."""

    peers = (1, 2)

    def __init__(self, seen):
        self.seen = seen

    def open(self, poll, mail):
        self.mail = mail

    def send(self, peer, message):
        self.seen.append(("send", peer, message.kind))

    def usable(self, peer, handle):
        return handle == Handle(1, 5)

    def apply(self, peer, theirs, own, coefficient):
        self.seen.append(("apply", peer))

    def tick(self, now):
        self.seen.append("tick")

    def close(self):
        self.seen.append("close")


class Mail:
    """The exchange thread."""

    def __init__(self, seen):
        self.seen = seen

    def receive(self, message):
        self.seen.append(("receive", message.kind))

    lost = returned = withdraw = extend = None


def test_points_stand_around_what_they_name():
    seen = []
    carrier = FaultyCarrier(Recorded(seen), at=seen.append)
    carrier.open(None, Mail(seen))
    carrier.send(1, PROPOSE)
    carrier.carrier.mail.receive(PROPOSE._replace(kind=Kind.COMMIT))
    carrier.apply(2, Handle(0, 1), Handle(0, 1), 0.5)
    assert seen == [
        "before-send-propose",
        ("send", 1, Kind.PROPOSE),
        "after-send-propose",
        "before-receive-commit",
        ("receive", Kind.COMMIT),
        "after-receive-commit",
        "before-apply",
        ("apply", 2),
        "after-apply",
    ]
    assert set(seen[::3]) | set(seen[2::3]) <= set(faults.POINTS)
    assert carrier.peers == (1, 2) and carrier.usable(1, Handle(1, 5)) and not carrier.usable(1, Handle(1, 6))


def test_a_late_message_goes_out_when_its_time_has_come():
    seen = []
    carrier = FaultyCarrier(Recorded(seen), fates=lambda message: [(5.0, message), (0.0, message)])
    carrier.send(1, PROPOSE)
    assert seen == [("send", 1, Kind.PROPOSE)]
    now_s = time.monotonic()
    carrier.tick(now_s + 1.0)
    assert seen[1:] == ["tick"]
    carrier.tick(now_s + 6.0)
    carrier.tick(now_s + 7.0)
    assert seen[2:] == [("send", 1, Kind.PROPOSE), "tick", "tick"]


def test_a_frozen_process_goes_on_by_itself():
    """Frozen by any of its threads; seen from its parent, which does nothing for it."""
    pid = os.fork()
    if pid == 0:
        thread = threading.Thread(target=faults.freeze, args=(0.3,))
        thread.start()
        thread.join()
        os._exit(7)
    _, status = os.waitpid(pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status) and os.WSTOPSIG(status) == signal.SIGSTOP
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 7


@pytest.mark.parametrize("text", ["kill:0@2", "kill:0@2/before-apply"])
def test_a_killed_process_is_killed(text):
    pid = os.fork()
    if pid == 0:
        steps = Steps()
        script = steps.script(text)
        script.at(parse(text).point)
        steps.made = 2
        script.at("after-apply")
        script.at(parse(text).point)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def test_where_snapshots_travel_with_messages_a_late_or_corrupt_one_is_lost():
    sent = []

    class Streaming(Recorded):
        streams = True

        def send(self, peer, message):
            sent.append(message)

    plain = Message(Kind.PROPOSE, 0, 1, Handle(0, 1), 0.5)
    for kind in ("corrupt", "delay"):
        FaultyCarrier(Streaming([]), fates=noise(0, **{kind: 1.0})).send(1, plain)
    assert sent == []
    FaultyCarrier(Streaming([]), fates=noise(0, double=1.0)).send(1, plain)
    assert sent == [plain, plain]
