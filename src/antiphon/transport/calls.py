"""Connections in the making: until both ends have proven themselves, within a deadline, and no more than so many."""

from __future__ import annotations

import contextlib
import errno
import socket
import time
from collections.abc import Callable

from antiphon.transport.base import Poll
from antiphon.transport.handshake import Handshake, RefusedError
from antiphon.transport.listener import family_of

CALL_S = 5.0
"""How long a connection may take to prove itself."""
AGAIN_S, LONGEST_AGAIN_S = 0.1, 2.0
"""How soon a peer that is not there is called again, at first and at last."""
REFUSALS, REFUSALS_S = 2, 2.0
"""A peer whose host refuses so many calls within so long has no process any more."""
CUT_MS = 5000
"""How long bytes may stay unacknowledged before a link counts as cut."""


class Call:
    """A connection whose handshake is going on; without a handshake, a mere look whether anybody listens.

    Args:
        connection: a socket, connected or connecting.
        handshake: this end's part.
        poll: where to wait for it.
        ended: takes this call and what became of it: nothing once it is done, else the error or the reason.
    """

    def __init__(
        self,
        connection: socket.socket,
        handshake: Handshake | None,
        poll: Poll,
        ended: Callable[[Call, Exception | None], None],
    ) -> None:
        self.socket, self.handshake, self._poll, self._ended = connection, handshake, poll, ended
        self.due_s = time.monotonic() + CALL_S
        self._data = b""
        self._connected = False

    def answer(self) -> None:
        """Begin as the end that was called."""
        self._connected = True
        self._poll.add(self.socket.fileno(), self._ready)

    def dial(self, address: tuple[str, int]) -> None:
        """Begin as the end that calls."""
        error = self.socket.connect_ex(address)
        if error not in (0, errno.EINPROGRESS):
            self._fail(OSError(error, "connect"))
            return
        self._poll.add(self.socket.fileno(), self._ready, writable=True)

    def tick(self, now: float) -> None:
        """Give up once it takes too long."""
        if now > self.due_s:
            self._fail(TimeoutError("no handshake in time"))

    def close(self) -> None:
        """Hang up."""
        self._poll.remove(self.socket.fileno())
        self.socket.close()

    def _ready(self) -> None:
        try:
            if not self._connected:
                self._connect()
            if self.handshake is None:
                self._end(None)
                self.socket.close()
                return
            while not self.handshake.done:
                data = self.socket.recv(self.handshake.wants - len(self._data))
                if not data:
                    raise ConnectionResetError("hung up")
                self._data += data
                if len(self._data) == self.handshake.wants:
                    whole, self._data = self._data, b""
                    self._say(self.handshake.feed(whole))
            self._end(None)
        except BlockingIOError:
            return
        except (OSError, RefusedError) as error:
            self._fail(error)

    def _connect(self) -> None:
        if error := self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(error, "connect")
        try:
            self.socket.getpeername()
        except OSError:
            # Woken for nothing: this descriptor's number belonged to another connection a moment ago.
            raise BlockingIOError from None
        self._connected = True
        self._poll.add(self.socket.fileno(), self._ready)
        if self.handshake is not None:
            self._say(self.handshake.begin())

    def _say(self, data: bytes) -> None:
        # A fresh connection has room for so little; one that has not is not worth waiting for.
        if data and self.socket.send(data) != len(data):
            raise ConnectionResetError("no room for a handshake")

    def _fail(self, error: Exception) -> None:
        self._end(error)
        self.socket.close()

    def _end(self, error: Exception | None) -> None:
        self._poll.remove(self.socket.fileno())
        self._ended(self, error)


def new_socket(address: str) -> socket.socket:
    """Return a socket that is ready to connect to an address, and never waits."""
    connection = socket.socket(family_of(address), socket.SOCK_STREAM)
    tune(connection)
    return connection


def tune(connection: socket.socket) -> None:
    """Let a connection send at once, notice a cut, and never wait."""
    connection.setblocking(False)
    tcp = socket.IPPROTO_TCP
    with contextlib.suppress(OSError):  # one that is closed already will say so when it is read
        connection.setsockopt(tcp, socket.TCP_NODELAY, 1)
        connection.setsockopt(tcp, socket.TCP_USER_TIMEOUT, CUT_MS)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3)):
            connection.setsockopt(tcp, option, value)


class Dialing:
    """Calls to one peer, again and again until one succeeds: when, and at which of its addresses.

    Args:
        addresses: where the peer may be reached.
        call: starts a call to an address as ``current``; `failed` is told if it fails.
    """

    def __init__(self, addresses: list[tuple[str, int]], call: Callable[[tuple[str, int]], None]) -> None:
        self._addresses, self._call = addresses, call
        self.wanted = False
        self.current: Call | None = None
        self._turn = self._refusals = 0
        self._wait_s, self._next_s, self._refused_s = AGAIN_S, 0.0, 0.0

    def begin(self) -> None:
        """Call from now on, at once."""
        self.wanted, self._wait_s, self._next_s, self._refusals = True, AGAIN_S, 0.0, 0

    def end(self) -> None:
        """Call no more."""
        self.wanted = False
        if self.current:
            current, self.current = self.current, None
            current.close()

    def tick(self, now: float) -> None:
        """Start the next call when it is time."""
        if self.wanted and self.current is None and now >= self._next_s:
            address = self._addresses[self._turn % len(self._addresses)]
            self._turn += 1
            self._next_s, self._wait_s = now + self._wait_s, min(2 * self._wait_s, LONGEST_AGAIN_S)
            self._call(address)

    def failed(self, error: Exception) -> bool:
        """Take note of a call that failed; say whether by now the peer's process must be gone."""
        self.current = None
        now = time.monotonic()
        refused = isinstance(error, OSError) and error.errno == errno.ECONNREFUSED
        if not refused or now - self._refused_s > REFUSALS_S:
            self._refusals = 0
        self._refusals += refused
        self._refused_s = now
        return self._refusals >= max(REFUSALS, len(self._addresses))
