"""One connection to a peer that has proven who it is: frames out, frames in, never waiting."""

from __future__ import annotations

import collections
import contextlib
import socket
from typing import Protocol as Interface

from antiphon.transport.base import Poll
from antiphon.transport.frames import HEADER_BYTES, Frame, MalformedError, What
from antiphon.transport.streams import Outgoing

QUEUE = 64
"""Control frames that may wait; what comes on top is lost, as the protocol can bear."""
TURN_BYTES = 1 << 22
"""What one link may move before others get their turn."""


class Receiver(Interface):
    """What takes a link's frames, and is told of its progress."""

    def room(self, frame: Frame) -> memoryview:
        """Return where the body is to go, as long as it must be.

        Raises:
            MalformedError: no such frame can be right.
        """

    def arrived(self, frame: Frame, body: memoryview) -> bool:
        """Take a whole frame; false to be asked again once more has been sent, with nothing read in between.

        Raises:
            MalformedError: the frame is not right.
        """

    def moved(self) -> None:
        """Bytes went out or came in, this turn."""

    def down(self, link: Link, reason: str) -> None:
        """The connection is closed."""


class Link:
    """A connection: control frames go first, between the chunks of streams, which take turns.

    Args:
        connection: a connected socket.
        poll: where to wait for it.
        receiver: takes what comes.
    """

    def __init__(self, connection: socket.socket, poll: Poll, receiver: Receiver) -> None:
        self._socket, self._poll, self._receiver = connection, poll, receiver
        self._socket.setblocking(False)
        self._queue: collections.deque[bytes] = collections.deque()
        self._streams: collections.deque[Outgoing] = collections.deque()
        self._leaving: list[memoryview] = []
        self._leaving_of: Outgoing | None = None
        self._header = memoryview(bytearray(HEADER_BYTES))
        self._frame: Frame | None = None
        self._room, self._filled = self._header, 0
        self._held = self._closed = self._nudged = False
        self._watched = (True, False)
        self.part_bytes = 0
        """Bytes of vectors that have gone either way."""
        poll.add(self._socket.fileno(), self.pump)

    def push(self, frame: Frame, body: bytes = b"") -> None:
        """Queue a control frame; it is lost where too many wait."""
        if len(self._queue) < QUEUE and not self._closed:
            self._queue.append(frame._replace(length=len(body)).pack() + body)
            self._watch()

    def stream(self, outgoing: Outgoing) -> None:
        """Send a vector, between other things."""
        self._streams.append(outgoing)
        self._watch()

    def stop(self, outgoing: Outgoing) -> None:
        """Send no further chunk of a vector; the one on its way is completed, for the frames' sake."""
        if outgoing in self._streams:
            self._streams.remove(outgoing)
        # What was held for its sake need wait no more.
        self._nudged = True
        self._watch()

    def pump(self) -> None:
        """Send and receive what can be without waiting, up to a turn's share."""
        moved, self._nudged = 0, False
        try:
            while moved < TURN_BYTES and not self._closed:
                now = self._send() + self._receive()
                if not now:
                    break
                moved += now
            if moved:
                self._receiver.moved()
        except (OSError, MalformedError) as error:
            if not self._closed:
                self.close()
                self._receiver.down(self, str(error))
        self._watch()

    def urge(self) -> None:
        """Send what can be sent of the control frames that wait, now; what goes wrong shows at the next turn."""
        with contextlib.suppress(OSError):
            while self._queue and self._send():
                pass

    def close(self) -> None:
        """Close the connection; nobody is told."""
        if not self._closed:
            self._closed = True
            self._poll.remove(self._socket.fileno())
            self._socket.close()

    def flush(self, seconds: float) -> None:
        """Send the control frames that wait, for so long at most: the end of a run."""
        self._streams.clear()
        try:
            self._socket.settimeout(seconds)
            while self._choose():
                self._sendmsg()
            self._socket.shutdown(socket.SHUT_WR)
        except OSError:
            return

    # --- out

    def _send(self) -> int:
        if not self._choose():
            return 0
        try:
            return self._sendmsg()
        except BlockingIOError:
            return 0

    def _choose(self) -> bool:
        """See to it that something is on its way out; say whether it is."""
        if self._leaving:
            return True
        if self._queue:
            self._leaving = [memoryview(self._queue.popleft())]
            return True
        while self._streams:
            outgoing = self._streams[0]
            self._streams.rotate(-1)
            if (chunk := outgoing.next()) is not None:
                self._leaving, self._leaving_of = [memoryview(chunk[0]), chunk[1]], outgoing
                return True
            self._streams.remove(outgoing)
        return False

    def _sendmsg(self) -> int:
        sent = left = self._socket.sendmsg(self._leaving)
        self.part_bytes += sent * (self._leaving_of is not None)
        while self._leaving and left >= len(self._leaving[0]):
            left -= len(self._leaving.pop(0))
        if self._leaving:
            self._leaving[0] = self._leaving[0][left:]
        elif self._leaving_of is not None:
            self._leaving_of.sent += 1
            self._leaving_of = None
        return sent

    # --- in

    def _receive(self) -> int:
        if self._held:
            if not self._complete():
                return 0
            # It may have been the last of a pair: there may be nothing more to read that would tell.
            self._receiver.moved()
        try:
            got = self._socket.recv_into(self._room[self._filled :])
        except BlockingIOError:
            return 0
        if got == 0:
            raise ConnectionResetError("the peer has closed the connection")
        self.part_bytes += got * (self._frame is not None and self._frame.what is What.PART)
        self._filled += got
        if self._filled == len(self._room):
            self._complete()
        return got

    def _complete(self) -> bool:
        """Act on a whole header, or a whole frame; say whether reading may go on."""
        if self._frame is None:
            self._frame = Frame.unpack(self._header)
            self._room, self._filled = self._receiver.room(self._frame), 0
            if len(self._room) != self._frame.length:
                raise MalformedError(f"{self._frame.what.name} of a wrong length")
            if self._frame.length:
                return True
        self._held = not self._receiver.arrived(self._frame, self._room)
        if self._held:
            return False
        self._frame, self._room, self._filled = None, self._header, 0
        return True

    def _watch(self) -> None:
        """Wait for what this link could go on with."""
        if self._closed:
            return
        wanted = (not self._held, bool(self._leaving or self._queue or self._streams or self._nudged))
        if wanted != self._watched:
            self._watched = wanted
            self._poll.add(self._socket.fileno(), self.pump, readable=wanted[0], writable=wanted[1])
