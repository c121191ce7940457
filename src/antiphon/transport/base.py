"""The contracts: a transport is one learner's end of what goes on between learners; carriers bring its messages.

A transport carries out a strategy's actions. The real one (`exchange.ExchangeTransport`) is made of carriers, one for
each way to reach a peer, and of rounds, the way that synchronous strategies meet; the one of the virtual clock
(`memory.MemoryTransport`) does all by itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol as Interface

from torch import Tensor

from antiphon.transport.protocol import Counts, Handle, Message, Snapshots

Coefficients = Sequence[tuple[int, float]]


class Rounds(ABC):
    """How synchronous strategies meet: numbered rounds, alike for all learners, one at a time.

    In each every learner publishes one vector, a snapshot of its weights or its gradient, and takes the others'.
    """

    bytes_read: int = 0

    @abstractmethod
    def start_mix(self, round: int, coefficients: Coefficients) -> None:
        """Publish a snapshot of the weights, and return at once."""

    @abstractmethod
    def finish_mix(self, round: int) -> None:
        """Wait for the peers' snapshots of the round; sum_j c_j (s_j - s_own) has then been added to the weights.

        Raises:
            DeadlineError: one did not come in time.
            LearnerError: one of those peers is gone.
        """

    @abstractmethod
    def start_average(self, round: int, vector_N: Tensor) -> None:
        """Publish ``vector_N``, and return at once."""

    @abstractmethod
    def finish_average(self, round: int, mean_N: Tensor) -> None:
        """Wait for all learners' vectors of the round, and write their mean; equal to the bit for all of them.

        Raises:
            DeadlineError: one did not come in time.
            LearnerError: a learner is gone.
        """


class Transport(Rounds):
    """Carries out a strategy's actions for one learner: exchanges, which never wait, and synchronous rounds."""

    counts: Counts

    @abstractmethod
    def present(self) -> tuple[int, ...]:
        """Return the learners that answer now, this one among them, in order."""

    @abstractmethod
    def propose(self, peer: int, coefficient: float) -> None:
        """Start an exchange with ``peer`` if its rules allow one now, and return at once."""

    @abstractmethod
    def close(self) -> None:
        """Let go of whatever is held; closing twice is harmless."""


class Mail(Interface):
    """What a carrier tells the exchange thread, from within it."""

    def receive(self, message: Message) -> None:
        """A message has come."""

    def lost(self, peer: int) -> None:
        """A peer's process is gone for good."""

    def returned(self, peer: int, anew: bool = True) -> None:
        """A new process is that peer; or, if not ``anew``, the old one after all, which was taken for gone."""

    def withdraw(self, peer: int) -> None:
        """The snapshots of the exchange that is held for the peer will never be whole; ACCEPT was not sent."""

    def extend(self, peer: int) -> None:
        """A part of the peer's snapshot has come."""


class Poll(Interface):
    """The exchange thread's wait, to which carriers add their descriptors."""

    def add(self, fd: int, ready: Callable[[], None], writable: bool = False, readable: bool = True) -> None:
        """Call ``ready()`` whenever the descriptor can be read, or written, as asked; adding again changes that."""

    def remove(self, fd: int) -> None:
        """Forget a descriptor."""


class Carrier(ABC):
    """One way to reach some of the peers. All but the constructor and `close` run in the exchange thread.

    Messages may get lost. The snapshots of an exchange are the carrier's business too: where a peer's lies, whether
    both ends hold the same pair, and how the difference gets into the weights.
    """

    peers: tuple[int, ...]
    bytes_read: int = 0
    streams: bool = False
    """Whether snapshots travel with the messages that name them, so that these cannot be sent later, or otherwise."""

    @abstractmethod
    def open(self, poll: Poll, mail: Mail) -> None:
        """Begin: the exchange thread runs."""

    @abstractmethod
    def send(self, peer: int, message: Message) -> None:
        """Send a message, or lose it; never wait."""

    @abstractmethod
    def usable(self, peer: int, handle: Handle) -> bool:
        """Say whether the peer's snapshot is whole and finite as far as this end can tell."""

    @abstractmethod
    def apply(self, peer: int, theirs: Handle, own: Handle, coefficient: float) -> None:
        """Add c (s_peer - s_own) to the weights."""

    def released(self, own: Handle) -> None:  # noqa: B027 - most have nothing to do
        """A slot of one's own is free again: nothing may be read from it or written to it any more."""

    def tick(self, now: float) -> None:  # noqa: B027 - most have nothing to do
        """Act on what the time asks for; called at least twice a second."""

    def next_due(self) -> float | None:
        """Return when `tick` has something to do, where that is sooner."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Let go of whatever is held; the exchange thread has ended."""


class CarriedSnapshots(Snapshots):
    """What the protocol sees: one's own slots are the weights' business, a pair of snapshots is its carrier's."""

    def __init__(self, own: Snapshots, carriers: Iterable[Carrier]) -> None:
        self.own, self.carriers = own, tuple(carriers)
        self.carrier = {peer: carrier for carrier in self.carriers for peer in carrier.peers}

    @property
    def finite(self) -> bool:  # type: ignore[override]
        """Whether the weights were finite when they were last copied."""
        return self.own.finite

    def take(self) -> Handle | None:
        """Copy the weights into a free slot."""
        return self.own.take()

    def release(self, handle: Handle) -> None:
        """Free a slot of one's own."""
        for carrier in self.carriers:
            carrier.released(handle)
        self.own.release(handle)

    def usable(self, peer: int, handle: Handle) -> bool:
        """Ask the peer's carrier."""
        return self.carrier[peer].usable(peer, handle)

    def apply(self, peer: int, theirs: Handle, own: Handle, coefficient: float) -> None:
        """Let the peer's carrier do it."""
        self.carrier[peer].apply(peer, theirs, own, coefficient)
