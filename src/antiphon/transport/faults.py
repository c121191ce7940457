"""Faults on purpose: what happens to a learner at a named step, or at a named point of its exchanges.

    KIND:LEARNER@STEP[/POINT][:SECONDS]      freeze:1@20:5   kill:2@30   kill:0@5/after-send-commit   drop:3@10/accept:2

STEP counts the learner's own steps, but for `join`, where it counts those of all learners. A fault happens once: at the
step itself, or, where a POINT is named, when the learner first gets there from that step on.

| kind | what happens | SECONDS | POINT |
|---|---|---|---|
| freeze | the process stops (SIGSTOP), and goes on by itself | how long; 5 | as kill |
| kill | the process is killed (SIGKILL) | - | {before,after}-{send,receive}-MESSAGE, {before,after}-apply |
| nan | its weights become not a number | - | - |
| leave | it ends its part in an orderly way | - | - |
| join | it comes in late | - | - |
| jitter | from there on each step takes a random time more, exponential | its mean; 0.05 | - |
| drop, double, corrupt | what it sends is lost, sent twice, names no snapshot | for how long; one message | MESSAGE |
| delay | a message that it sends comes late | how late; 0.5 | MESSAGE |

MESSAGE is propose, accept, refuse, commit, abort or done. Over the network, where a snapshot belongs to its message,
one that would be corrupt or late is lost instead.
"""

from __future__ import annotations

import ctypes
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from antiphon.errors import ArgumentError, unknown_name
from antiphon.transport.base import Carrier, Mail, Poll
from antiphon.transport.protocol import Handle, Kind, Message

INJECT = "ANTIPHON_INJECT"
"""The environment variable by which learners are told: faults, with blanks between them."""

MESSAGES = tuple(kind.name.lower() for kind in Kind if kind is not Kind.PUBLISHED)
POINTS = tuple(
    f"{side}-{act}" for side in ("before", "after")
    for act in ("apply", *(f"{way}-{message}" for way in ("send", "receive") for message in MESSAGES))
)  # fmt: skip
SECONDS: dict[str, float | None] = {
    "freeze": 5.0,
    "kill": None,
    "nan": None,
    "leave": None,
    "join": None,
    "jitter": 0.05,
    "drop": 0.0,
    "double": 0.0,
    "corrupt": 0.0,
    "delay": 0.5,
}
"""The kinds, and how many seconds each takes where none are given; None where it takes none."""
ENDS = ("freeze", "kill")
ON_MESSAGES = ("drop", "double", "corrupt", "delay")
NEEDS_ASYNCHRONY = ("nan", "leave", "join")
MOST_S = 1e6
SHORTEST_FREEZE_S = 0.05
_FORM = re.compile(r"(?P<kind>[^:@/]+):(?P<learner>\d+)@(?P<step>\d+)(?:/(?P<point>[^:]*))?(?::(?P<seconds>.*))?")
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Fault:
    """One fault: what, to whom, when.

    >>> parse("freeze:1@20:2.5")
    Fault(kind='freeze', learner=1, step=20, seconds=2.5, point='')
    """

    kind: str
    learner: int
    step: int
    seconds: float = 0.0
    point: str = ""


def parse(text: str) -> Fault:
    """Read one fault.

    Raises:
        ArgumentError: it is not of the form, or names a kind, a point or a duration that is none.
    """
    form = _FORM.fullmatch(text)
    if not form:
        raise ArgumentError(
            f"fault {text!r}: expected KIND:LEARNER@STEP[/POINT][:SECONDS], such as freeze:1@20:5 or kill:2@30"
        )
    kind, point, seconds = form["kind"], form["point"] or "", form["seconds"]
    if kind not in SECONDS:
        raise unknown_name("kind of fault", kind, SECONDS)
    points = POINTS if kind in ENDS else MESSAGES if kind in ON_MESSAGES else ()
    if form["point"] is not None and point not in points:
        raise unknown_name(f"point of {kind}", point, points) if points else _no_such(text, "point", kind)
    if seconds is not None and SECONDS[kind] is None:
        raise _no_such(text, "duration", kind)
    try:
        duration_s = SECONDS[kind] or 0.0 if seconds is None else float(seconds)
    except ValueError:
        raise ArgumentError(f"fault {text!r}: seconds must be a number, not {seconds!r}") from None
    if not 0.0 <= duration_s <= MOST_S:
        raise ArgumentError(f"fault {text!r}: seconds must lie in 0..{MOST_S:g}, not {duration_s:g}")
    return Fault(kind, int(form["learner"]), int(form["step"]), duration_s, point)


def parse_all(texts: Iterable[str], learners: int, waits: bool = False) -> list[Fault]:
    """Read several.

    Args:
        texts: one fault each.
        learners: L, above every learner's number.
        waits: whether the strategy's learners wait for each other, so that nobody can go, come or heal.

    Raises:
        ArgumentError: as `parse`, or there is no such learner, or the strategy does not allow it.
    """
    faults = [parse(text) for text in texts]
    for fault in faults:
        if fault.learner >= learners:
            raise ArgumentError(f"{fault.kind}:{fault.learner}@{fault.step}: learners are 0..{learners - 1}")
        if waits and fault.kind in NEEDS_ASYNCHRONY:
            raise ArgumentError(
                f"{fault.kind}:{fault.learner}@{fault.step}: learners of this strategy wait for each other, so none can"
                " leave, join or heal: use an asynchronous one, such as random-ring"
            )
        if fault.kind == "join" and fault.learner == 0:
            raise ArgumentError("join:0: learner 0 brings the first weights, and cannot come in late")
    return faults


def _no_such(text: str, what: str, kind: str) -> ArgumentError:
    return ArgumentError(f"fault {text!r}: {kind} takes no {what}")


def script_of(
    learner: int, learners: int, waits: bool, step: Callable[[], int], returned_at: int | None = None
) -> Script:
    """Return this learner's faults, as the environment tells; arguments as those of `parse_all` and `Script`."""
    texts = os.environ.get(INJECT, "").split()
    return Script(parse_all(texts, learners, waits), learner, step, returned_at)


class Script:
    """The faults of one learner.

    Args:
        faults: of all learners.
        learner: whose are meant.
        step: tells how many steps the learner has made.
        returned_at: the step at which this process took over from one that died: what was due until then is past.
    """

    def __init__(
        self, faults: Iterable[Fault], learner: int, step: Callable[[], int], returned_at: int | None = None
    ) -> None:
        own = (fault for fault in faults if fault.learner == learner)
        self._faults = [fault for fault in own if returned_at is None or fault.step > returned_at]
        self._step = step
        self._until_s: dict[Fault, float] = {}

    def late(self) -> int | None:
        """Return the number of steps of all learners after which this one joins, or None where it joins at once."""
        return next((fault.step for fault in self._faults if fault.kind == "join"), None)

    def take(self, kind: str, point: str = "") -> Fault | None:
        """Return a fault of that kind which is due now, once."""
        for fault in self._faults:
            if fault.kind == kind and fault.point == point and fault.step <= self._step():
                self._faults.remove(fault)
                return fault
        return None

    def at(self, point: str) -> None:
        """Freeze or kill this process, if that is due at this point."""
        if fault := self.take("freeze", point):
            freeze(fault.seconds)
        if self.take("kill", point):
            os.kill(os.getpid(), signal.SIGKILL)

    def fates(self, message: Message) -> list[tuple[float, Message]]:
        """Return what becomes of a message: what is sent, each with how many seconds later."""
        fates = [(0.0, message)]
        for fault in [fault for fault in self._faults if fault.kind in ON_MESSAGES]:
            if fault.point in ("", message.kind.name.lower()) and self._strikes(fault):
                fates = [fate for before in fates for fate in _struck(fault.kind, fault.seconds, *before)]
        return fates

    def _strikes(self, fault: Fault) -> bool:
        """Say whether a fault of messages is in force; one without a duration strikes once."""
        if fault.step > self._step():
            return False
        lasting = fault.kind != "delay" and fault.seconds > 0
        if not lasting:
            self._faults.remove(fault)
        elif time.monotonic() > self._until_s.setdefault(fault, time.monotonic() + fault.seconds):
            self._faults.remove(fault)
            return False
        return True


Fates = Callable[[Message], list[tuple[float, Message]]]


def noise(
    seed: int, *, drop: float = 0.0, double: float = 0.0, corrupt: float = 0.0, delay: float = 0.0, delay_s: float = 0.5
) -> Fates:
    """Return fates drawn for each message by itself: each argument is how likely it is."""
    draw = random.Random(seed)

    def fates(message: Message) -> list[tuple[float, Message]]:
        result = [(0.0, message)]
        for kind, likely in (("drop", drop), ("double", double), ("corrupt", corrupt), ("delay", delay)):
            if draw.random() < likely:
                result = [fate for before in result for fate in _struck(kind, delay_s, *before)]
        return result

    return fates


def _struck(kind: str, seconds: float, later_s: float, message: Message) -> Sequence[tuple[float, Message]]:
    match kind:
        case "drop":
            return ()
        case "double":
            return ((later_s, message), (later_s, message))
        case "delay":
            return ((later_s + seconds, message),)
        case _:
            nowhere = Handle(message.handle.slot ^ 0x40, message.handle.version ^ 0x40)
            return ((later_s, message._replace(handle=nowhere, coefficient=float("nan"))),)


class FaultyCarrier(Carrier):
    """Another carrier, with faults.

    Args:
        carrier: the one that does the work.
        at: is called at every point of an exchange, with its name (`POINTS`).
        fates: says what becomes of a message that is sent. Late ones go out when the exchange thread next wakes up.
    """

    def __init__(
        self,
        carrier: Carrier,
        at: Callable[[str], None] = lambda point: None,
        fates: Fates = lambda message: [(0.0, message)],
    ) -> None:
        self.carrier, self.peers, self._at, self._fates = carrier, carrier.peers, at, fates
        self._late: list[tuple[float, int, Message]] = []

    @property
    def bytes_read(self) -> int:  # type: ignore[override]
        """Bytes read from the peers."""
        return self.carrier.bytes_read

    def open(self, poll: Poll, mail: Mail) -> None:
        """Begin, and stand between the carrier and the exchange thread."""
        self.carrier.open(poll, _FaultyMail(mail, self._at))

    def send(self, peer: int, message: Message) -> None:
        """Send a message, as its fate wills."""
        name = message.kind.name.lower()
        self._at(f"before-send-{name}")
        for later_s, fated in self._fates(message):
            if self.carrier.streams and (later_s > 0 or fated != message):
                continue
            if later_s > 0:
                self._late.append((time.monotonic() + later_s, peer, fated))
            else:
                self.carrier.send(peer, fated)
        self._at(f"after-send-{name}")

    def usable(self, peer: int, handle: Handle) -> bool:
        """Ask the carrier."""
        return self.carrier.usable(peer, handle)

    def apply(self, peer: int, theirs: Handle, own: Handle, coefficient: float) -> None:
        """Let the carrier do it."""
        self._at("before-apply")
        self.carrier.apply(peer, theirs, own, coefficient)
        self._at("after-apply")

    def released(self, own: Handle) -> None:
        """Tell the carrier."""
        self.carrier.released(own)

    def tick(self, now: float) -> None:
        """Send what is late enough."""
        for late in [late for late in self._late if late[0] <= now]:
            self._late.remove(late)
            self.carrier.send(*late[1:])
        self.carrier.tick(now)

    def close(self) -> None:
        """Close the carrier."""
        self.carrier.close()


class _FaultyMail:
    """The exchange thread as a faulty carrier shows it to the one within."""

    def __init__(self, mail: Mail, at: Callable[[str], None]) -> None:
        self._mail, self._at = mail, at
        self.lost, self.returned = mail.lost, mail.returned
        self.withdraw, self.extend = mail.withdraw, mail.extend

    def receive(self, message: Message) -> None:
        """Take in a message, with the points around it."""
        name = message.kind.name.lower()
        self._at(f"before-receive-{name}")
        self._mail.receive(message)
        self._at(f"after-receive-{name}")


class _SigEvent(ctypes.Structure):
    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signo", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("rest", ctypes.c_char * 48),
    )


def freeze(seconds: float) -> None:
    """Stop this process (SIGSTOP) and let the kernel continue it: a timer's SIGCONT needs no other process.

    Raises:
        OSError: there is no timer to be had.
    """
    timer, event = ctypes.c_void_p(), _SigEvent(None, signal.SIGCONT, 0)
    # Interval (none) and first time, each in seconds and nanoseconds. SIGCONT must not come before SIGSTOP has.
    seconds = max(seconds, SHORTEST_FREEZE_S)
    times = (ctypes.c_long * 4)(0, 0, int(seconds), int(seconds % 1 * 1e9))
    if _libc.timer_create(time.CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(timer)):
        raise OSError(ctypes.get_errno(), "timer_create")
    try:
        if _libc.timer_settime(timer, 0, times, None):
            raise OSError(ctypes.get_errno(), "timer_settime")
        # To this very thread, which stops before it gets to the next line; another would let it run on for a while.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
    finally:
        _libc.timer_delete(timer)
