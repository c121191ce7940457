"""One learner on another host, as this one sees it: the exchange with it, and what else goes between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol as Interface

import torch
from torch import Tensor

from antiphon.transport.base import Mail
from antiphon.transport.buffers import Buffers
from antiphon.transport.frames import NOTE_BYTES, Frame, MalformedError, What
from antiphon.transport.link import Link
from antiphon.transport.protocol import Handle, Kind, Message, Snapshots
from antiphon.transport.shared import WIRE as MESSAGE
from antiphon.transport.shared import pack, unpack
from antiphon.transport.streams import Outgoing, Pull, Transfer, elements_of, serve
from antiphon.transport.wire import CHUNK, Float32, Wire, bytes_of


class NetworkWeights(Snapshots, Interface):
    """What is asked of a learner's weights."""

    buffers: Buffers

    def add(self, difference_N: Tensor, coefficient: float) -> None:
        """Add a difference that is known already."""


class Remote:
    """A peer across the network, whether it is connected or not; it takes its link's frames.

    Args:
        learner: this learner's number.
        peer: the other one's.
        weights: this learner's weights.
        wire: how snapshots travel.
        on_note: by channel, what takes a note from a peer.
        went_down: is told that the link is gone, and why.
    """

    def __init__(
        self,
        learner: int,
        peer: int,
        weights: NetworkWeights,
        wire: type[Wire],
        on_note: dict[int, Callable[[int, bytes], None]],
        went_down: Callable[[Remote, str], None],
    ) -> None:
        self.learner, self.peer, self.weights = learner, peer, weights
        self.link: Link | None = None
        self.bytes_read = 0
        self._wire, self._on_note, self._went_down = wire, on_note, went_down
        self._slots_SN = weights.buffers.slots_LSN[learner]
        self._transfer: Transfer | None = None
        self._stalled = False
        self._committed = 0
        """The number of the exchange whose COMMIT went out before this end's adding, and is not to go out again."""
        self._pull: Pull | None = None
        self._pulls = 0
        self._served: tuple[Handle, Outgoing] | None = None
        self._part_bytes = 0
        self._scratch: Tensor | None = None
        self._scratch_bytes = memoryview(b"")

    def start(self, mail: Mail) -> None:
        """Begin: the exchange thread runs."""
        self._mail = mail

    # --- out

    def send(self, message: Message) -> None:
        """Send a message of the exchange, a proposal with its snapshot behind it, an ACCEPT behind its snapshot."""
        if message.kind is Kind.ACCEPT:
            self._answer(message)
            return
        if message.kind is Kind.COMMIT and message.sequence == self._committed:
            self._committed = 0
            return
        self._push(message)
        if message.kind is Kind.PROPOSE:
            self._begin(True, message)

    def note(self, channel: int, data: bytes) -> None:
        """Send a note, or lose it."""
        if self.link is not None:
            self.link.push(Frame(What.NOTE, channel), data)

    def pull(self, into_N: Tensor, done: Callable[[bool], None]) -> None:
        """Ask for a copy of the peer's weights."""
        if self.link is None or self._pull is not None:
            done(False)
            return
        self._pulls += 1
        self._pull = Pull(self._pulls, into_N, done)
        self.link.push(Frame(What.PULL, number=self._pulls))

    def _push(self, message: Message) -> None:
        if self.link is not None:
            self.link.push(Frame(What.MESSAGE), pack(message))

    def _begin(self, initiated: bool, message: Message) -> Transfer:
        """Let the own snapshot stream, unless it does already; without a link it never becomes whole."""
        old = self._transfer
        if old and (old.initiated, old.sequence) == (initiated, message.sequence):
            return old
        own_N = self._slots_SN[message.handle.slot]
        self._transfer = Transfer(initiated, message.sequence, message.handle, own_N, self._wire)
        if self.link is not None:
            self.link.stream(self._transfer.outgoing)
        return self._transfer

    def _answer(self, message: Message) -> None:
        """Stream, and keep the ACCEPT until the whole pair of snapshots is here; once it is given, give it again."""
        transfer = self._transfer
        if transfer is None or transfer.initiated or transfer.sequence != message.sequence:
            self._begin(False, message).accept = message
            self._stalled = self.link is None
        elif transfer.accepted:
            self._push(message)
        else:
            # The protocol asks again: nothing has moved for as long as it waits for an answer.
            self._stalled = True

    # --- the exchange's snapshots

    def usable(self, handle: Handle) -> bool:
        """Say whether the peer's snapshot is here and sound, as far as it can be known by now."""
        return handle.version > 0 and (self._transfer is None or self._transfer.complete)

    def apply(self, coefficient: float) -> None:
        """Add the difference; an initiator says COMMIT first, so that both ends add at the same time.

        Nobody reads this end's snapshot any more, and should this process die in between, its weights die with it.
        """
        transfer = self._transfer
        assert transfer is not None and transfer.complete
        if transfer.initiated and self.link is not None:
            self._push(Message(Kind.COMMIT, self.learner, transfer.sequence))
            self.link.urge()
            self._committed = transfer.sequence
        self.weights.add(transfer.difference_N, coefficient)

    def released(self, own: Handle) -> None:
        """Let go of the own snapshot, if it is this one."""
        if self._transfer and self._transfer.own == own:
            outgoing, self._transfer, self._stalled = self._transfer.outgoing, None, False
            if self.link is not None:
                self.link.stop(outgoing)

    def tick(self, now: float) -> None:
        """Give up what makes no progress."""
        if self._stalled:
            self._stalled = False
            self._mail.withdraw(self.peer)
        if self._pull and now > self._pull.due_s:
            self._end_pull(False)

    # --- in (the link's Receiver)

    def room(self, frame: Frame) -> memoryview:
        """Return where a frame's body goes."""
        parameters = self._slots_SN.shape[1]
        match frame.what:
            case What.PART if elements := elements_of(frame.part, parameters):
                return self._scratch_for(self._wire.size(elements))
            case What.PULLED if elements := elements_of(frame.part, parameters):
                if self._pull and self._pull.concerns(frame):
                    return self._pull.room()
                return self._scratch_for(4 * elements)
            case What.MESSAGE:
                return memoryview(bytearray(MESSAGE.size))
            case What.NOTE if frame.length <= NOTE_BYTES:
                return memoryview(bytearray(frame.length))
            case What.PULL | What.EMPTY:
                return memoryview(b"")
            case _:
                raise MalformedError(f"{frame.what.name} out of bounds")

    def arrived(self, frame: Frame, body: memoryview) -> bool:
        """Take a frame."""
        transfer, pull = self._transfer, self._pull
        match frame.what:
            case What.PART if transfer and transfer.concerns(frame):
                assert self._scratch is not None
                taken = transfer.take(frame.part, self._scratch[: frame.length])
                self.bytes_read += frame.length * taken
                return taken
            case What.PULLED if pull and pull.concerns(frame):
                pull.took()
                if pull.over:
                    self._end_pull(True)
            case What.EMPTY if pull and pull.number == frame.number:
                self._end_pull(False)
            case What.PULL:
                self._serve(frame.number)
            case What.NOTE if frame.tag in self._on_note:
                self._on_note[frame.tag](self.peer, bytes(body))
            case What.MESSAGE:
                self._hear(body)
            case _:
                pass
        return True

    def moved(self) -> None:
        """Bytes went out or came in: the peer is at work, and the pair of snapshots may be whole now."""
        if self._served and self._served[1].over:
            self._end_serving()
        transfer = self._transfer
        if transfer is None:
            return
        if self.link is not None and self.link.part_bytes != self._part_bytes:
            # Notes do not count: they go on where the exchange's own messages were lost.
            self._part_bytes, self._stalled = self.link.part_bytes, False
            self._mail.extend(self.peer)
        if transfer.accept and not transfer.accepted:
            if not transfer.sound:
                self._mail.withdraw(self.peer)
            elif transfer.complete and transfer.outgoing.over:
                transfer.accepted = True
                self._push(transfer.accept)

    def down(self, link: Link, reason: str) -> None:
        """Give up what can no longer become whole; what is in doubt stays."""
        if link is not self.link:
            return
        self.link = None
        self._scratch = None
        if self._served:
            self._end_serving()
        if self._pull:
            self._end_pull(False)
        transfer = self._transfer
        if transfer and not transfer.initiated and not transfer.accepted:
            self._mail.withdraw(self.peer)
        elif transfer and not transfer.complete:
            transfer.sound = False
        self._went_down(self, reason)

    def _hear(self, body: memoryview) -> None:
        message = unpack(bytes(body), self.peer + 1)
        if message is None or message.sender != self.peer or message.kind is Kind.PUBLISHED:
            raise MalformedError("a message that is none of the peer's")
        transfer = self._transfer
        held = transfer is not None and not transfer.initiated and transfer.sequence == message.sequence
        if message.kind is Kind.COMMIT and held and transfer and not transfer.accepted:
            raise MalformedError("COMMIT before ACCEPT")
        self._mail.receive(message)

    def _serve(self, number: int) -> None:
        assert self.link is not None
        if self._served:
            self._end_serving()
        handle = self.weights.take()
        if handle is None:
            self.link.push(Frame(What.EMPTY, number=number))
            return
        outgoing = serve(number, self._slots_SN[handle.slot])
        self._served = handle, outgoing
        self.link.stream(outgoing)

    def _end_serving(self) -> None:
        assert self._served is not None
        (handle, outgoing), self._served = self._served, None
        if self.link is not None:
            self.link.stop(outgoing)
        self.weights.release(handle)

    def _end_pull(self, came: bool) -> None:
        assert self._pull is not None
        pull, self._pull = self._pull, None
        pull.end(came)

    def _scratch_for(self, size_bytes: int) -> memoryview:
        if self._scratch is None:
            self._scratch = torch.empty(Float32.size(CHUNK), dtype=torch.uint8)
            self._scratch_bytes = bytes_of(self._scratch)
        return self._scratch_bytes[:size_bytes]
