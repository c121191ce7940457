"""Learners in one process under a virtual clock: a function gives how long each message takes, or that it is lost."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol as Interface

import torch
from torch import Tensor

from antiphon.transport.base import Coefficients, Transport
from antiphon.transport.protocol import ExchangeProtocol, Message, Snapshots

Latency = Callable[[int, int, float], float | None]
"""(sender, receiver, time) -> seconds that a message takes, or None where it is lost."""


class MixableWeights(Snapshots, Interface):
    """What this transport asks of a learner's weights."""

    def snapshot(self) -> Tensor:
        """Return a copy of the weights."""

    def add_differences(self, others: list[tuple[Tensor, float]], own_N: Tensor) -> None:
        """Add sum_j c_j (s_j - s_own)."""


@dataclass
class VirtualClock:
    """Events in order of their time, and of their making where times are equal.

    >>> clock, seen = VirtualClock(), []
    >>> clock.at(2.0, lambda: seen.append("b")); clock.at(1.0, lambda: seen.append("a"))
    >>> clock.run(until=lambda: False); seen, clock.now
    (['a', 'b'], 2.0)
    """

    now: float = 0.0
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _made: itertools.count[int] = field(default_factory=itertools.count)

    def at(self, time: float, event: Callable[[], None]) -> None:
        """Let ``event`` happen at ``time``."""
        heapq.heappush(self._events, (max(time, self.now), next(self._made), event))

    def run(self, until: Callable[[], bool], deadline: float = float("inf")) -> None:
        """Let events happen until ``until()`` holds, none is left, or the next lies after ``deadline``."""
        while self._events and not until() and self._events[0][0] <= deadline:
            self.now, _, event = heapq.heappop(self._events)
            event()


class MemoryTransport(Transport):
    """One learner's end; `connect` makes all of them."""

    def __init__(self, learner: int, weights: MixableWeights, clock: VirtualClock, latency: Latency) -> None:
        self.learner, self.weights, self.clock, self.latency = learner, weights, clock, latency
        self.protocol = ExchangeProtocol(learner, weights, self._send)
        self.counts, self.bytes_read = self.protocol.counts, 0
        self.ends: list[MemoryTransport] = []
        self.gone: set[int] = set()
        self.on_arrival: Callable[[], None] = lambda: None
        self._published: dict[int, dict[int, Tensor]] = {}
        self._coefficients: Coefficients = ()
        self._tick_at = float("inf")

    def present(self) -> tuple[int, ...]:
        """Return the learners that answer now."""
        now = self.clock.now
        return tuple(
            end.learner
            for end in self.ends
            if end is self or not (end.learner in self.gone or self.protocol.silent(end.learner, now))
        )

    def propose(self, peer: int, coefficient: float) -> None:
        """Start an exchange with ``peer`` if the rules allow one now."""
        self.protocol.propose(peer, coefficient, self.clock.now)
        self._plan_tick()

    def start_mix(self, round: int, coefficients: Coefficients) -> None:
        """Publish a snapshot to the peers named."""
        self._coefficients = coefficients
        self._publish(round, self.weights.snapshot(), [peer for peer, _ in coefficients])

    def start_average(self, round: int, vector_N: Tensor) -> None:
        """Publish a vector to all."""
        self._publish(round, vector_N.clone(), [end.learner for end in self.ends if end is not self])

    def ready(self, round: int) -> bool:
        """Say whether all vectors of the round that this learner waits for are here."""
        return round in self._published and self._expected <= self._published[round].keys()

    def finish_mix(self, round: int) -> None:
        """Add the differences; to be called once `ready`."""
        assert self.ready(round), "a virtual learner does not wait: its driver does"
        vectors = self._published.pop(round)
        others = [(vectors[peer], coefficient) for peer, coefficient in self._coefficients]
        if others:
            self.weights.add_differences(others, vectors[self.learner])

    def finish_average(self, round: int, mean_N: Tensor) -> None:
        """Write the mean; to be called once `ready`."""
        assert self.ready(round), "a virtual learner does not wait: its driver does"
        vectors = self._published.pop(round)
        torch.mean(torch.stack([vectors[learner] for learner in sorted(vectors)]), 0, out=mean_N)

    def close(self) -> None:
        """Nothing is held."""

    def lose(self, peer: int) -> None:
        """Take note that ``peer`` is gone."""
        self.gone.add(peer)
        self.protocol.lost(peer)

    def _publish(self, round: int, vector_N: Tensor, peers: Sequence[int]) -> None:
        self._expected = {self.learner, *peers}
        self._published.setdefault(round, {})[self.learner] = vector_N
        for peer in peers:
            delay = self.latency(self.learner, peer, self.clock.now)
            if delay is not None:
                end = self.ends[peer]
                self.clock.at(self.clock.now + delay, lambda end=end: end._arrive(round, self.learner, vector_N))  # type: ignore[misc]

    def _arrive(self, round: int, sender: int, vector_N: Tensor) -> None:
        self._published.setdefault(round, {})[sender] = vector_N
        self.on_arrival()

    def _send(self, peer: int, message: Message) -> None:
        delay = self.latency(self.learner, peer, self.clock.now)
        if delay is not None:
            self.clock.at(self.clock.now + delay, lambda: self.ends[peer]._receive(message))

    def _receive(self, message: Message) -> None:
        if message.sender not in self.gone:
            self.protocol.receive(message, self.clock.now)
            self._plan_tick()

    def _plan_tick(self) -> None:
        due = self.protocol.next_due()
        if due is not None and due < self._tick_at:
            self._tick_at = due
            self.clock.at(due, self._tick)

    def _tick(self) -> None:
        self._tick_at = float("inf")
        self.protocol.tick(self.clock.now)
        self._plan_tick()


def connect(weights: Sequence[MixableWeights], clock: VirtualClock, latency: Latency) -> list[MemoryTransport]:
    """Return one end for each learner's weights, all of them on ``clock``."""
    ends = [MemoryTransport(learner, each, clock, latency) for learner, each in enumerate(weights)]
    for end in ends:
        end.ends = ends
    return ends
