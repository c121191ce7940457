"""Learners in one process, connected by real TCP on the loopback; a relay between them that cuts or stalls."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator

import torch

from antiphon.learner.weights import Weights
from antiphon.transport.base import Rounds
from antiphon.transport.buffers import Buffers
from antiphon.transport.exchange import ExchangeTransport
from antiphon.transport.network import Listener, NetworkCarrier

SECRET, RUN = b"a secret of some length", b"run"
LIMIT_S = 20.0


class NoRounds(Rounds):
    """For learners that exchange only."""

    def start_mix(self, round, coefficients):
        raise AssertionError("no rounds here")

    start_average = finish_average = start_mix

    def finish_mix(self, round):
        raise AssertionError("no rounds here")


def until(ready: Callable[[], bool], what: str = "it") -> None:
    end = time.monotonic() + LIMIT_S
    while not ready():
        assert time.monotonic() < end, f"waited {LIMIT_S:g} s for {what}"
        time.sleep(0.0005)


class End:
    """One learner: its weights, its carrier and its exchange thread."""

    def __init__(
        self, learner, listeners, parameters, addresses=None, deadline_s=5.0, secret=SECRET, run=RUN, **kwargs
    ):
        self.learner = learner
        peers = [peer for peer in listeners if peer != learner]
        self.weights = Weights(Buffers.in_process(max(listeners) + 1, parameters), learner)
        self.weights.w_N.normal_(generator=torch.Generator().manual_seed(learner))
        meeting = {peer: listeners[peer].addresses for peer in peers} | (addresses or {})
        self.carrier = NetworkCarrier(
            learner, peers, self.weights, listeners[learner], meeting, secret, run, **kwargs
        )  # fmt: skip
        incarnation = kwargs.get("incarnation", 0)
        self.transport = ExchangeTransport(
            learner, self.weights, [self.carrier], NoRounds(), deadline_s, incarnation
        )  # fmt: skip
        self.counts = self.transport.counts
        self.notes: list[tuple[int, bytes]] = []
        self.carrier.on_note[1] = lambda peer, data: self.notes.append((peer, data))

    def start(self):
        self.transport.start()
        return self

    def idle(self) -> bool:
        self.transport.check()
        return not self.transport.protocol.open

    def close(self):
        self.transport.check()
        self.transport.close()


def listen(learners: int = 2) -> dict[int, Listener]:
    return {learner: Listener(["127.0.0.1"]) for learner in range(learners)}


@contextlib.contextmanager
def pair(parameters: int, addresses=None, start: bool = True, **kwargs) -> Iterator[list[End]]:
    """Two learners; ``addresses(listeners)`` tells learner 0 where to find learner 1, a relay say."""
    listeners = listen()
    found = {1: addresses(listeners)} if addresses else None
    ends = [End(0, listeners, parameters, found, **kwargs), End(1, listeners, parameters, **kwargs)]
    try:
        if start:
            for end in ends:
                end.start()
            connected(ends)
        yield ends
    finally:
        for end in ends:
            end.transport.close()
    for end in ends:
        end.transport.check()


def connected(ends) -> None:
    until(lambda: all(end.carrier.connected(1 - end.learner) for end in ends), "a connection")


def total(ends) -> float:
    return sum(float(end.weights.snapshot().double().sum()) for end in ends)


def exchange(ends, initiator: int = 0, coefficient: float = 0.5) -> None:
    """Exchange until it has come about (a proposal may be refused, or be late)."""
    before = [end.weights.additions for end in ends]
    began = time.monotonic()
    while not all(end.weights.additions > count for end, count in zip(ends, before, strict=True)):
        assert time.monotonic() < began + LIMIT_S, [(end.counts, end.carrier.refused) for end in ends]
        if ends[initiator].idle() and ends[1 - initiator].idle():
            ends[initiator].transport.propose(1 - initiator, coefficient)
        time.sleep(0.001)
    settle(ends)


def settle(ends) -> None:
    until(lambda: all(end.idle() for end in ends), "the end of all exchanges")


class Relay:
    """Passes bytes between a learner and the one at ``target``; may cut or stall after so many, once.

    Args:
        target: where bytes go on to.
        forth, back: after how many bytes (from the caller, to the caller) it acts; None for never.
        stall: whether it then holds everything back until `go_on`, rather than cutting the connection.
    """

    def __init__(self, target, forth: int | None = None, back: int | None = None, stall: bool = False) -> None:
        self.target, self.limits, self.stall = target, [forth, back], stall
        self.acted = threading.Event()
        self._going = threading.Event()
        self._going.set()
        self._closed = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.addresses = [self._listener.getsockname()]
        self._threads = [threading.Thread(target=self._run, daemon=True)]
        self._threads[0].start()

    def go_on(self) -> None:
        self._going.set()

    def close(self) -> None:
        self._closed = True
        self._going.set()
        self._threads[0].join(5.0)
        self._listener.close()

    def _run(self) -> None:
        self._listener.settimeout(0.05)
        while not self._closed:
            try:
                caller, _ = self._listener.accept()
            except TimeoutError:
                continue
            with caller, socket.create_connection(self.target) as callee, contextlib.suppress(OSError):
                self._pass(caller, callee)

    def _pass(self, caller: socket.socket, callee: socket.socket) -> None:
        ways = {caller: (callee, 0), callee: (caller, 1)}
        with selectors.DefaultSelector() as selector:
            for end in ways:
                end.settimeout(5.0)
                selector.register(end, selectors.EVENT_READ)
            while not self._closed:
                for key, _ in selector.select(0.05):
                    other, way = ways[key.fileobj]
                    limit = self.limits[way]
                    data = key.fileobj.recv(min(65536, 65536 if limit is None else limit) or 1)
                    if not data:
                        return
                    if limit is not None and not self._act(len(data), way):
                        return
                    other.sendall(data)

    def _act(self, size: int, way: int) -> bool:
        """Count bytes; say whether the connection lives on."""
        self.limits[way] -= size
        if self.limits[way] > 0:
            return True
        self.limits = [None, None]
        self.acted.set()
        if self.stall:
            self._going.clear()
            self._going.wait(LIMIT_S)
        return self.stall
