"""Peers on other hosts: frames over TCP connections of our own, in the exchange thread's one poll.

    PROPOSE  the acceptor takes its snapshot at once, and both stream theirs at the same time, chunk by chunk
    ACCEPT   goes out behind the acceptor's snapshot, and only once the initiator's is whole and finite
    COMMIT   the initiator has the whole pair by now, and decides; nothing is ever sent again

A connection that breaks before ACCEPT was given ends the exchange; one that breaks later is made anew, and the protocol
asks again. The lower number calls the higher one, for ever. A peer whose host refuses calls twice is gone; one that is
silent is not. Secret and handshake: `handshake`; the bytes: `frames`; more: docs/network.md.
"""

from __future__ import annotations

import collections
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from antiphon.errors import ArgumentError
from antiphon.transport.base import Carrier, Mail, Poll
from antiphon.transport.calls import Call, Dialing, new_socket, tune
from antiphon.transport.frames import NOTE_BYTES
from antiphon.transport.handshake import Answerer, Dialer, Terms
from antiphon.transport.link import Link
from antiphon.transport.listener import Listener
from antiphon.transport.protocol import Handle, Message
from antiphon.transport.remote import NetworkWeights, Remote
from antiphon.transport.wire import wire_class

__all__ = ["Listener", "NetworkCarrier"]

CALLS = 64
"""Connections that may be at their handshake; the oldest makes room for one more."""
FLUSH_S = 1.0
"""How long last notes may take to leave."""
ACCEPTS = 16
"""Calls that are taken in one turn."""


class NetworkCarrier(Carrier):
    """Reaches the peers on other hosts.

    Args:
        learner: this learner's number.
        peers: the others on other hosts.
        weights: its weights.
        listener: where it listens; the carrier closes it.
        meeting_addresses: by peer, where that one listens.
        secret: the run's; whoever knows it may take part.
        run: the run's name, the same for all its learners and no other run's.
        wire: the wire format of snapshots, the same for all.
        incarnation: how many processes were this learner before.

    Raises:
        ArgumentError: an unknown wire format, a peer without an address, an empty secret.
    """

    streams = True

    def __init__(
        self,
        learner: int,
        peers: Sequence[int],
        weights: NetworkWeights,
        listener: Listener,
        meeting_addresses: Mapping[int, list[tuple[str, int]]],
        secret: bytes,
        run: bytes,
        *,
        wire: str = "float32",
        incarnation: int = 0,
    ) -> None:
        if not secret:
            raise ArgumentError("the secret must not be empty")
        if missing := [peer for peer in peers if not meeting_addresses.get(peer)]:
            raise ArgumentError(f"no address is known of learners {missing}")
        kind = wire_class(wire)
        self.learner, self.peers, self.incarnation = learner, tuple(peers), incarnation
        self.on_note: dict[int, Callable[[int, bytes], None]] = {}
        """By channel, what takes (peer, data) of a note; called in the exchange thread."""
        self.on_lost: Callable[[int], None] = lambda peer: None
        """Told of a peer whose process is gone; called in the exchange thread."""
        self.refused: collections.Counter[str] = collections.Counter()
        """Connections that came to nothing or to an end, by reason."""
        self._secret, self._listener = secret, listener
        self._terms = Terms(run, weights.buffers.weights_LN.shape[1], kind.number)
        self._remotes = {
            peer: Remote(learner, peer, weights, kind, self.on_note, self._went_down) for peer in self.peers
        }
        self._dialing = {peer: Dialing(meeting_addresses[peer], self._caller(peer)) for peer in self.peers}
        self._answered: dict[Call, None] = {}
        self._incarnations: dict[int, int] = {}
        self._gone: set[int] = set()
        self._asked: collections.deque[Callable[[], None]] = collections.deque()
        self._asked_fd = os.eventfd(0, os.EFD_NONBLOCK)

    # --- from any thread

    @property
    def bytes_read(self) -> int:  # type: ignore[override]
        """Bytes of snapshots that were taken in."""
        return sum(remote.bytes_read for remote in self._remotes.values())

    def connected(self, peer: int) -> bool:
        """Say whether a peer is connected now."""
        return self._remotes[peer].link is not None

    def note(self, peer: int, channel: int, data: bytes) -> None:
        """Send a note; it may be lost.

        Raises:
            ArgumentError: it is longer than 64 KiB, or the channel is not from 0 to 255.
        """
        if len(data) > NOTE_BYTES or not 0 <= channel < 256:
            raise ArgumentError(f"a note of {len(data)} bytes on channel {channel}: up to {NOTE_BYTES}, 0 to 255")
        self._ask(lambda: self._remotes[peer].note(channel, data))

    def pull(self, peer: int, into_N: Tensor, done: Callable[[bool], None]) -> None:
        """Copy the peer's weights w + D into ``into_N`` [N], exactly.

        Args:
            peer: whose.
            into_N: contiguous float32 memory; what is in it is of no use until ``done``, or if it fails.
            done: told in the exchange thread whether they have come, whole and finite; one pull a peer at a time.
        """
        self._ask(lambda: self._remotes[peer].pull(into_N, done))

    def _ask(self, work: Callable[[], None]) -> None:
        self._asked.append(work)
        os.eventfd_write(self._asked_fd, 1)

    # --- the exchange thread

    def open(self, poll: Poll, mail: Mail) -> None:
        """Listen, and call the higher numbers."""
        self._poll, self._mail = poll, mail
        poll.add(self._asked_fd, self._do_what_is_asked)
        for listening in self._listener.sockets:
            poll.add(listening.fileno(), lambda listening=listening: self._accept(listening))  # type: ignore[misc]
        for remote in self._remotes.values():
            remote.start(mail)
            if remote.peer > self.learner:
                self._dialing[remote.peer].begin()
        self.tick(time.monotonic())

    def send(self, peer: int, message: Message) -> None:
        """Send a message and what belongs to it, or lose it."""
        self._remotes[peer].send(message)

    def usable(self, peer: int, handle: Handle) -> bool:
        """Say whether the peer's snapshot is here, as far as it should be by now."""
        return self._remotes[peer].usable(handle)

    def apply(self, peer: int, theirs: Handle, own: Handle, coefficient: float) -> None:
        """Add the difference that the own snapshot has become."""
        self._remotes[peer].apply(coefficient)

    def released(self, own: Handle) -> None:
        """Stop streaming a snapshot."""
        for remote in self._remotes.values():
            remote.released(own)

    def tick(self, now: float) -> None:
        """Call those who are to be called, and give up what takes too long."""
        for remote in self._remotes.values():
            remote.tick(now)
        for dialing in self._dialing.values():
            dialing.tick(now)
            if dialing.current:
                dialing.current.tick(now)
        for call in list(self._answered):
            call.tick(now)

    def close(self) -> None:
        """Send what waits (the last notes), and close everything."""
        self._do_what_is_asked()
        for dialing in self._dialing.values():
            dialing.end()
        for call in list(self._answered):
            call.close()
        end_s = time.monotonic() + FLUSH_S
        for remote in self._remotes.values():
            if remote.link:
                remote.link.flush(max(0.01, end_s - time.monotonic()))
                remote.link.close()
        self._listener.close()
        os.close(self._asked_fd)

    def _do_what_is_asked(self) -> None:
        try:
            os.eventfd_read(self._asked_fd)
        except BlockingIOError:
            return
        while self._asked:
            self._asked.popleft()()

    # --- connections

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(ACCEPTS):
            try:
                connection, _ = listening.accept()
            except BlockingIOError:
                return
            except OSError as error:
                # Out of descriptors, or the caller is gone already.
                self.refused[str(error)] += 1
                self._make_room(0)
                return
            self._make_room(CALLS - 1)
            tune(connection)
            handshake = Answerer(self._terms, self._secret, self.learner, self.incarnation, self._expected)
            call = Call(connection, handshake, self._poll, self._answered_call)
            self._answered[call] = None
            call.answer()

    def _make_room(self, calls: int) -> None:
        while len(self._answered) > calls:
            oldest = next(iter(self._answered))
            del self._answered[oldest]
            oldest.close()
            self.refused["too many calls"] += 1

    def _expected(self, peer: int) -> bool:
        return peer in self._remotes and peer < self.learner

    def _answered_call(self, call: Call, error: Exception | None) -> None:
        del self._answered[call]
        if error is None:
            self._connect(call)
        else:
            self.refused[str(error)] += 1

    def _caller(self, peer: int) -> Callable[[tuple[str, int]], None]:
        """Return what starts a call to the peer: the lower number means to stay, the higher one only looks."""

        def call(address: tuple[str, int]) -> None:
            higher = peer > self.learner
            shake = Dialer(self._terms, self._secret, self.learner, peer, self.incarnation) if higher else None
            dialing = self._dialing[peer]
            dialing.current = Call(new_socket(address[0]), shake, self._poll, ended)
            dialing.current.dial(address)

        def ended(call: Call, error: Exception | None) -> None:
            dialing = self._dialing[peer]
            if error is not None:
                self.refused[str(error)] += 1
                if dialing.failed(error):
                    self._lose(peer)
            else:
                dialing.current = None
                if call.handshake:
                    self._connect(call)

        return call

    def _connect(self, call: Call) -> None:
        """Let a connection whose ends have proven themselves be the peer's link."""
        assert call.handshake is not None and call.handshake.peer is not None
        peer, incarnation = call.handshake.peer, call.handshake.incarnation
        remote, known = self._remotes[peer], self._incarnations.get(peer, incarnation)
        if incarnation < known:
            self.refused["an older process"] += 1
            call.socket.close()
            return
        if remote.link:
            old = remote.link
            old.close()
            remote.down(old, "replaced")
        self._dialing[peer].end()
        self._incarnations[peer] = incarnation
        if incarnation > known or peer in self._gone:
            self._gone.discard(peer)
            self._mail.returned(peer, incarnation > known)
        remote.link = Link(call.socket, self._poll, remote)

    def _went_down(self, remote: Remote, reason: str) -> None:
        """Call again, or, as the higher number, look whether the peer is still there."""
        self.refused[reason] += 1
        self._dialing[remote.peer].begin()

    def _lose(self, peer: int) -> None:
        """The peer's process is gone; a new one may come."""
        if peer in self._gone or peer not in self._incarnations:
            return
        self._gone.add(peer)
        if peer < self.learner:
            self._dialing[peer].end()
        self._mail.lost(peer)
        self.on_lost(peer)
