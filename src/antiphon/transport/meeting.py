"""The first meeting of a run on several hosts: everybody learns where everybody is, by a store of torch.distributed.

    learner l   writes  learner-l = (a fresh number, its host, its addresses, what it expects of the run)
    learner 0   writes  roster    = (the run's fresh name, all entries), again whenever an entry has changed
    learner l   writes  ack-l     = digest(roster), once its own fresh number is in it
    learner 0   writes  done      = digest(roster), once all have acknowledged it

A store may still hold what an earlier start of the same job wrote: the fresh numbers tell it apart. Every value is
signed with the run's secret (HMAC-SHA256), for anybody may write into the store. Nobody looks at it after the meeting.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import torch.distributed as dist

from antiphon.errors import ArgumentError, DeadlineError, LearnerError
from antiphon.transport.endpoint import SECRET, Endpoint, Store

Result = TypeVar("Result")
PROTOCOL = 1
POLL_S = 0.05
REFUSAL_S = 3.0
"""How long learner 0 waits for the others to read why the run cannot be."""


EXPECTED = {
    "protocol": "as its protocol",
    "learners": "learners",
    "parameters": "parameters",
    "wire": "as its wire format",
}
"""What all entries must have in common, and how that is said."""


@dataclass(frozen=True)
class Entry:
    """What a learner says of itself."""

    learners: int
    host: int
    parameters: int
    addresses: list[tuple[str, int]]
    wire: str = "float32"
    protocol: int = PROTOCOL
    fresh: str = field(default_factory=lambda: secrets.token_hex(16))


@dataclass(frozen=True)
class Roster:
    """What all know after the meeting: the run's fresh name, and an entry for each learner."""

    run: str
    entries: list[Entry]

    @classmethod
    def of(cls, value: Any) -> Roster:
        """Rebuild one from what `json` made of it."""
        return cls(value["run"], [_entry(each) for each in value["entries"]])

    @property
    def digest(self) -> str:
        """A name for exactly this roster."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


class SignedStore:
    """Values that only those who know the secret can have written; others are as if they were not there."""

    def __init__(self, store: Store, secret: bytes, purpose: str = "run") -> None:
        self.store, self._secret, self._purpose = store, secret, purpose
        self.forged: set[str] = set()
        """Keys whose last value was not signed with this secret."""

    def write(self, key: str, value: Any) -> None:
        """Write a value that JSON has a form for."""
        key, data = self._full(key), json.dumps(value).encode()
        self.store.set(key, self._tag(key, data) + data.decode())

    def read(self, key: str) -> Any:
        """Return the value of a key, None where there is none."""
        if not self.store.check([self._full(key)]):
            return None
        raw = self.store.get(self._full(key))
        tag, data = raw[:64], raw[64:]
        if not hmac.compare_digest(tag, self._tag(self._full(key), data).encode()):
            self.forged.add(key)
            return None
        self.forged.discard(key)
        return json.loads(data)

    def _full(self, key: str) -> str:
        return f"antiphon/{self._purpose}/{key}"

    def _tag(self, key: str, data: bytes) -> str:
        return hmac.new(self._secret, key.encode() + b" " + data, hashlib.sha256).hexdigest()


def confer(store: SignedStore, learner: int, entry: Entry, deadline_s: float) -> Roster:
    """Take part in the meeting.

    Raises:
        ArgumentError: the learners do not agree on what they are to run.
        DeadlineError: somebody did not come.
    """
    end = time.monotonic() + deadline_s
    turn = _Host(store, entry) if learner == 0 else _Guest(store, learner, entry)
    forged_s = None
    while (roster := turn.look()) is None:
        forged_s = (forged_s or time.monotonic()) if store.forged else None
        if forged_s and time.monotonic() - forged_s >= turn.patience_s:
            turn.part()
            raise ArgumentError(f"{turn.missing()}: give all hosts the same secret ({SECRET} or {SECRET}_FILE)")
        if time.monotonic() > end:
            raise DeadlineError(f"waited {deadline_s:g} s for {turn.missing()}")
        time.sleep(POLL_S)
    return roster


class _Host:
    """Learner 0's part."""

    patience_s = 5.0
    """How long it looks at entries that are signed with another secret: others may yet come in their place."""

    def __init__(self, store: SignedStore, entry: Entry) -> None:
        self.store, self.entry = store, entry
        self.run = secrets.token_hex(16)
        self._others = range(1, entry.learners)
        self._written: Roster | None = None
        self._entries: dict[int, Entry] = {}

    def look(self) -> Roster | None:
        """Bring the meeting forward; return the roster once all have acknowledged it."""
        read = {learner: self.store.read(f"learner-{learner}") for learner in self._others}
        self._entries = {learner: _entry(value) for learner, value in read.items() if value is not None}
        self._compare()
        if len(self._entries) < len(self._others):
            return None
        roster = Roster(self.run, [self.entry, *self._entries.values()])
        if roster != self._written:
            self.store.write("roster", asdict(roster))
            self._written = roster
        if any(self.store.read(f"ack-{learner}") != roster.digest for learner in self._others):
            return None
        self.store.write("done", roster.digest)
        return roster

    def part(self) -> None:
        """Leave a word for those who sign with another secret: they cannot read it, and so learn that they do."""
        self.store.write("refusal", {"text": "", "fresh": []})
        time.sleep(REFUSAL_S)

    def missing(self) -> str:
        """Say who has not come."""
        unsigned = [learner for learner in self._others if f"learner-{learner}" in self.store.forged]
        absent = [learner for learner in self._others if learner not in self._entries]
        text = f"learners {absent or list(self._others)} to meet"
        return text + (f"; what {unsigned} wrote is signed with another secret than this host's" if unsigned else "")

    def _compare(self) -> None:
        """Let all know where a learner expects another run."""
        for learner, other in self._entries.items():
            for name, what in EXPECTED.items():
                theirs, ours = getattr(other, name), getattr(self.entry, name)
                if theirs != ours:
                    self._refuse(
                        f"learner {learner} on host {other.host} has {theirs} {what}, learner 0 has {ours}: start the"
                        " same script, with the same settings and version, on all hosts"
                    )

    def _refuse(self, text: str) -> None:
        self.store.write("refusal", {"text": text, "fresh": [entry.fresh for entry in self._entries.values()]})
        end = time.monotonic() + REFUSAL_S
        while time.monotonic() < end and any(self.store.read(f"ack-{n}") != text for n in self._entries):
            time.sleep(POLL_S)
        raise ArgumentError(text)


class _Guest:
    """Any other learner's part."""

    patience_s = 0.0

    def __init__(self, store: SignedStore, learner: int, entry: Entry) -> None:
        self.store, self.learner, self.entry = store, learner, entry
        self._acknowledged = ""
        store.write(f"learner-{learner}", asdict(entry))

    def look(self) -> Roster | None:
        """Acknowledge the newest roster; return it once learner 0 says that all have."""
        refusal = self.store.read("refusal")
        if refusal and self.entry.fresh in refusal["fresh"]:
            self.store.write(f"ack-{self.learner}", refusal["text"])
            raise ArgumentError(refusal["text"])
        value = self.store.read("roster")
        if value is None:
            return None
        roster = Roster.of(value)
        if len(roster.entries) <= self.learner or roster.entries[self.learner].fresh != self.entry.fresh:
            return None
        if roster.digest != self._acknowledged:
            self._acknowledged = roster.digest
            self.store.write(f"ack-{self.learner}", roster.digest)
        return roster if self.store.read("done") == roster.digest else None

    def part(self) -> None:
        """Nobody waits for a word of this one."""

    def missing(self) -> str:
        """Say what has not come."""
        text = "learner 0, and all others, to meet"
        return text + ("; it signs with another secret than this host's" if self.store.forged else "")


def _entry(value: Mapping[str, Any]) -> Entry:
    addresses = [(str(host), int(port)) for host, port in value["addresses"]]
    return Entry(**{**value, "addresses": addresses})


def attend(
    endpoint: Endpoint, secret: bytes, learner: int, entry: Entry, deadline_s: float, purpose: str = "run"
) -> tuple[Roster, Store]:
    """Meet the learners of all hosts.

    Args:
        endpoint: where.
        secret: the run's.
        learner: this learner's number.
        entry: what it says of itself.
        deadline_s: how long to wait for all of them.
        purpose: of the meeting; one for another purpose knows nothing of it.

    Returns:
        The roster; and the store, which learner 0 may be the one to serve: to be kept until all have joined.

    Raises:
        ArgumentError: the store cannot be served, or learners do not agree on what they are to run.
        DeadlineError: nobody serves the meeting, or somebody did not come.
        LearnerError: the meeting broke off.
    """
    end = time.monotonic() + deadline_s

    def take_part() -> tuple[Roster, Store]:
        store = endpoint.store(learner == 0, deadline_s)
        return confer(SignedStore(store, secret, purpose), learner, entry, end - time.monotonic()), store

    try:
        return _within(deadline_s + REFUSAL_S, take_part)
    except DeadlineError as error:
        raise DeadlineError(f"{error} (the meeting is at {endpoint})") from error
    except TimeoutError as error:
        raise DeadlineError(f"waited {deadline_s:g} s for the meeting at {endpoint}, which does not answer") from error
    except dist.DistError as error:
        raise LearnerError(f"the meeting at {endpoint} broke off: {error}") from error


def _within(seconds: float, call: Callable[[], Result]) -> Result:
    """Return what ``call()`` returns, from a thread of its own: a store that is frozen keeps its callers for ever."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="meeting", daemon=True).start()
    return future.result(seconds)
