"""One learner's end as a thread: it answers proposals, makes copies and adds differences while the learner computes.

It waits in one poll for the computing thread and for all that its carriers watch: sockets, and the ends of processes.
"""

from __future__ import annotations

import collections
import os
import select
import threading
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from antiphon.errors import LearnerError
from antiphon.transport.base import CarriedSnapshots, Carrier, Coefficients, Rounds, Transport
from antiphon.transport.protocol import ExchangeProtocol, Kind, Message, Snapshots

LONGEST_WAIT_S = 0.5


class Loop:
    """A poll over descriptors, each with what to do once it is ready."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._ready: dict[int, Callable[[], None]] = {}

    def add(self, fd: int, ready: Callable[[], None], writable: bool = False, readable: bool = True) -> None:
        """Call ``ready()`` whenever the descriptor can be read, or written, as asked; adding again changes that."""
        self._ready[fd] = ready
        self._poll.register(fd, readable * select.POLLIN | writable * select.POLLOUT)

    def remove(self, fd: int) -> None:
        """Forget a descriptor."""
        if self._ready.pop(fd, None) is not None:
            self._poll.unregister(fd)

    def wait(self, seconds: float) -> list[int]:
        """Return the descriptors that are ready, after ``seconds`` at the latest."""
        return [fd for fd, _ in self._poll.poll(seconds * 1e3)]

    def act(self, fds: Sequence[int]) -> None:
        """Do what is to be done for them; one may have been removed by another's doing."""
        for fd in fds:
            if fd in self._ready:
                self._ready[fd]()


class PolledRounds(Rounds):
    """Rounds that the exchange thread helps along; `over` is set once the round in hand has ended."""

    wake: Callable[[], None] = staticmethod(lambda: None)
    check: Callable[[], None] = staticmethod(lambda: None)
    """Raises what ended the exchange thread."""
    tell: Callable[[int, Message], None] = staticmethod(lambda peer, message: None)

    def __init__(self) -> None:
        self.over = threading.Event()
        self.busy = False

    def advance(self, gone: set[int]) -> None:
        """Do what can be done for the round in hand."""


class ExchangeTransport(Transport):
    """One learner's end of everything.

    Args:
        learner: its number.
        weights: its weights, whose slots hold its snapshots.
        carriers: the ways to reach its peers; none for a learner alone.
        rounds: how synchronous strategies meet.
        deadline_s: how long the answer to a message is waited for.
        incarnation: how many processes were this learner before.
    """

    def __init__(
        self,
        learner: int,
        weights: Snapshots,
        carriers: Sequence[Carrier],
        rounds: Rounds,
        deadline_s: float = 0.25,
        incarnation: int = 0,
    ) -> None:
        self.learner, self.carriers, self.rounds = learner, carriers, rounds
        self._snapshots = CarriedSnapshots(weights, carriers)
        self.protocol = ExchangeProtocol(learner, self._snapshots, self._send, deadline_s, incarnation)
        self.counts = self.protocol.counts
        self.exchange_s = 0.0
        """CPU seconds of the exchange thread."""
        self.on_tick: list[Callable[[float], None]] = []
        """Called with the time in each turn of the exchange thread."""
        self.learners = tuple(sorted([learner, *self._snapshots.carrier]))
        self.gone: set[int] = set()
        self._present = self.learners
        self._wanted: collections.deque[tuple[int, float]] = collections.deque(maxlen=1)
        self._idle = threading.Event()
        self._stopping = self._closed = self._refusing = False
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        if not carriers:
            return
        self._kick = os.eventfd(0, os.EFD_NONBLOCK)
        if isinstance(rounds, PolledRounds):
            rounds.wake, rounds.check, rounds.tell = self._wake, self.check, self._send
        self._thread = threading.Thread(target=self._run, name=f"exchange-{learner}", daemon=True)

    def start(self) -> None:
        """Start answering; all peers have joined by now."""
        if self._thread:
            # A thread's first question fixes its number of computing threads; the exchange thread's 1 would become it.
            torch.get_num_threads()
            self._thread.start()

    # --- the computing thread

    @property
    def bytes_read(self) -> int:  # type: ignore[override]
        """Bytes read from the other learners."""
        return self.rounds.bytes_read + sum(carrier.bytes_read for carrier in self.carriers)

    def present(self) -> tuple[int, ...]:
        """Return the learners that answer now."""
        return self._present

    def propose(self, peer: int, coefficient: float) -> None:
        """Start an exchange as soon as the exchange thread gets to it; one not yet begun is replaced."""
        self.check()
        if self._wanted:
            self.counts.busy += 1
        self._wanted.append((peer, coefficient))
        self._wake()

    def start_mix(self, round: int, coefficients: Coefficients) -> None:
        """Publish a snapshot of the weights."""
        self.rounds.start_mix(round, coefficients)

    def finish_mix(self, round: int) -> None:
        """Wait until the differences of the round have been added."""
        self.rounds.finish_mix(round)

    def start_average(self, round: int, vector_N: Tensor) -> None:
        """Publish ``vector_N``."""
        self.rounds.start_average(round, vector_N)

    def finish_average(self, round: int, mean_N: Tensor) -> None:
        """Wait for all, and write the mean."""
        self.rounds.finish_average(round, mean_N)

    def check(self) -> None:
        """Raise what ended the exchange thread, if anything did."""
        if isinstance(self._failure, LearnerError):
            raise self._failure
        if self._failure is not None:
            raise LearnerError(f"learner {self.learner}: the exchange thread failed: {self._failure!r}") from (
                self._failure
            )

    def drain(self, deadline_s: float) -> bool:
        """Start nothing more and wait for what is in flight; say whether all of it came to an end."""
        if not self._thread or self._closed:
            return True
        self._stopping = True
        end = time.monotonic() + deadline_s
        while self._failure is None and time.monotonic() < end:
            self._idle.clear()
            self._wake()
            if self._idle.wait(max(0.0, min(0.05, end - time.monotonic()))):
                return True
        self.check()
        return False

    def refuse(self) -> None:
        """Take part in nothing new: proposals are refused from here on."""
        self._refusing = True

    def close(self) -> None:
        """End the thread and the carriers; an exchange that only this end has applied is torn."""
        if self._closed or not self._thread:
            return
        self._closed = True
        if self._thread.is_alive():
            self._wake()
            self._thread.join(timeout=10.0)
        for peer in list(self.protocol.open):
            self.protocol.lost(peer)
        for carrier in self.carriers:
            carrier.close()
        os.close(self._kick)

    def _wake(self) -> None:
        os.eventfd_write(self._kick, 1)

    # --- the exchange thread

    def _run(self) -> None:
        try:
            torch.set_num_threads(1)
            self._loop = Loop()
            self._loop.add(self._kick, lambda: None)
            for carrier in self.carriers:
                carrier.open(self._loop, self)
            while not self._closed:
                ready = self._loop.wait(self._wait_s())
                began = time.thread_time()
                self._turn(ready)
                self.exchange_s += time.thread_time() - began
        except BaseException as error:
            self._failure = error
        finally:
            if isinstance(self.rounds, PolledRounds):
                self.rounds.over.set()
            self._idle.set()

    def _wait_s(self) -> float:
        """Until the next deadline; a round in hand is looked at every 5 ms, for a full queue loses its messages."""
        limit = 0.005 if isinstance(self.rounds, PolledRounds) and self.rounds.busy else LONGEST_WAIT_S
        dues = [self.protocol.next_due(), *(carrier.next_due() for carrier in self.carriers)]
        due = min((each for each in dues if each is not None), default=None)
        return limit if due is None else max(0.0, min(limit, due - time.monotonic()))

    def _turn(self, ready: Sequence[int]) -> None:
        if self._kick in ready:
            os.eventfd_read(self._kick)
        self._loop.act(ready)
        now = time.monotonic()
        for carrier in self.carriers:
            carrier.tick(now)
        for tick in self.on_tick:
            tick(now)
        self.protocol.tick(now)
        if self._wanted and not self._stopping:
            peer, coefficient = self._wanted.popleft()
            if peer not in self.gone:
                self.protocol.propose(peer, coefficient, now)
        if isinstance(self.rounds, PolledRounds):
            self.rounds.advance(self.gone)
        self._present = tuple(
            learner
            for learner in self.learners
            if learner == self.learner or not (learner in self.gone or self.protocol.silent(learner, now))
        )
        if self._stopping and not self.protocol.open:
            self._idle.set()

    def _send(self, peer: int, message: Message) -> None:
        self._snapshots.carrier[peer].send(peer, message)

    # --- what carriers tell (base.Mail)

    def receive(self, message: Message) -> None:
        """Take in a message, unless its sender is gone."""
        if self._refusing and message.kind is Kind.PROPOSE and message.sender not in self.protocol.open:
            self._send(message.sender, Message(Kind.REFUSE, self.learner, message.sequence))
        elif message.sender not in self.gone:
            self.protocol.receive(message, time.monotonic())

    def lost(self, peer: int) -> None:
        """Go on without a peer."""
        self.gone.add(peer)
        self.protocol.lost(peer)

    def returned(self, peer: int, anew: bool = True) -> None:
        """Go on with a peer that is a new process, or that was taken for gone."""
        if anew:
            self.protocol.returned(peer)
        self.gone.discard(peer)

    def withdraw(self, peer: int) -> None:
        """Give up what is held for the peer."""
        self.protocol.withdraw(peer)

    def extend(self, peer: int) -> None:
        """Give an open exchange with the peer more time."""
        self.protocol.extend(peer, time.monotonic())
