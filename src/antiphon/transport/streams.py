"""Vectors on their way, a chunk a frame: out of a slot, and into one as a difference.

No memory is set aside for what arrives. Each end turns its own pinned snapshot into the difference in place, chunk by
chunk: a chunk of it may be overwritten as soon as it has been sent, and a chunk that comes earlier waits. That cannot
lock up: an end that waits for its own chunk k to go has taken k chunks; would the other wait too, for its chunk j, then
j < k, for it has not got all of chunk k, and k < j.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from torch import Tensor

from antiphon.transport.frames import Frame, What
from antiphon.transport.protocol import Handle, Message
from antiphon.transport.wire import CHUNK, Float32, Wire, bytes_of, finite

PULL_S = 5.0
"""How long a pull may make no progress."""


def parts_of(parameters: int) -> int:
    """Return the number of chunks of a vector."""
    return -(-parameters // CHUNK)


def elements_of(part: int, parameters: int) -> int:
    """Return the number of elements of a chunk; 0 where there is no such chunk."""
    return max(0, min(CHUNK, parameters - part * CHUNK))


class Outgoing:
    """A vector on its way out.

    Args:
        frame: the header of its frames, length and part apart.
        values_N: the vector.
        wire: how it goes.
    """

    def __init__(self, frame: Frame, values_N: Tensor, wire: Wire) -> None:
        self._frame, self._values_N, self._wire = frame, values_N, wire
        self.parts = parts_of(values_N.numel())
        self.begun = self.sent = 0

    def next(self) -> tuple[bytes, memoryview] | None:
        """Return the next chunk's header and body, None where all have been begun."""
        if self.begun == self.parts:
            return None
        body = self._wire.encode(self._values_N[self.begun * CHUNK : (self.begun + 1) * CHUNK])
        header = self._frame._replace(length=len(body), part=self.begun).pack()
        self.begun += 1
        return header, body

    @property
    def free(self) -> int:
        """How many of the vector's chunks are no longer needed."""
        return self.sent if self._wire.borrows else self.begun

    @property
    def over(self) -> bool:
        """Whether all has been sent."""
        return self.sent == self.parts


class Transfer:
    """Both snapshots of one exchange on their way; the own one becomes their difference.

    Args:
        initiated: whether this end has started the exchange.
        sequence: its number.
        own: names the own snapshot.
        own_N: the own snapshot.
        wire: how they go.
    """

    def __init__(self, initiated: bool, sequence: int, own: Handle, own_N: Tensor, wire: type[Wire]) -> None:
        self.initiated, self.sequence, self.own = initiated, sequence, own
        self.difference_N = own_N
        self._wire = wire()
        self.outgoing = Outgoing(Frame(What.PART, int(initiated), number=sequence), own_N, self._wire)
        self.received = 0
        self.sound = True
        """Whether all that came so far came in order and is finite."""
        self.accept: Message | None = None
        """The acceptor's answer, which goes out behind its snapshot."""
        self.accepted = False
        """Whether it has gone."""

    def concerns(self, frame: Frame) -> bool:
        """Say whether the frame is of the other end's snapshot."""
        return frame.tag != int(self.initiated) and frame.number == self.sequence

    def take(self, part: int, data: Tensor) -> bool:
        """Take a chunk in; false where its place is still needed, and it has to wait."""
        if part != self.received or not self.sound:
            self.sound = False
            return True
        if part >= self.outgoing.free:
            return False
        own_C = self.difference_N[part * CHUNK : (part + 1) * CHUNK]
        self.sound = self._wire.subtract(data, own_C)
        self.received += 1
        return True

    @property
    def complete(self) -> bool:
        """Whether the other's snapshot is here, and the difference sound."""
        return self.sound and self.received == self.outgoing.parts


class Pull:
    """A copy of a peer's weights on its way here.

    Args:
        number: the request's.
        into_N: where it is written.
        done: is told whether it has come, whole and finite.
    """

    def __init__(self, number: int, into_N: Tensor, done: Callable[[bool], None]) -> None:
        self.number, self.done = number, done
        self._into_N, self._bytes = into_N, bytes_of(into_N)
        self.received = 0
        self.due_s = time.monotonic() + PULL_S

    def concerns(self, frame: Frame) -> bool:
        """Say whether the frame is the next of it."""
        return frame.number == self.number and frame.part == self.received

    def room(self) -> memoryview:
        """Return where the next chunk goes."""
        return self._bytes[4 * self.received * CHUNK : 4 * (self.received + 1) * CHUNK]

    def took(self) -> None:
        """Count a chunk."""
        self.received += 1
        self.due_s = time.monotonic() + PULL_S

    @property
    def over(self) -> bool:
        """Whether all has come."""
        return self.received == parts_of(self._into_N.numel())

    def end(self, came: bool) -> None:
        """Tell what became of it."""
        begins = range(0, self._into_N.numel(), CHUNK)
        self.done(came and all(finite(self._into_N[begin : begin + CHUNK]) for begin in begins))


def serve(number: int, values_N: Tensor) -> Outgoing:
    """Return the weights on their way to a peer that pulls them."""
    return Outgoing(Frame(What.PULLED, number=number), values_N, Float32())
