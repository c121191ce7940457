"""How two learners prove to each other that they know the run's secret, before a byte of theirs counts.

    dialer    HELLO_d = (magic, version, run, from, to, parameters, wire format, incarnation, 32 random bytes)
    listener  HELLO_l = the same, seen from its side, and MAC(secret, "listener", HELLO_d, HELLO_l)
    dialer    MAC(secret, "dialer", HELLO_d, HELLO_l)

MAC is HMAC-SHA256. The random bytes make a recorded handshake worthless, the two words keep one end's proof from being
the other's. What comes after is neither encrypted nor signed: who can change bytes on the way can change weights.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from collections.abc import Callable
from dataclasses import dataclass

MAGIC, VERSION = b"antiphon", 1
_HELLO = struct.Struct("<8sH32sHHQBQ32s")
HELLO_BYTES, MAC_BYTES = _HELLO.size, 32


class RefusedError(Exception):
    """The other end is a stranger, or of another run; its text is for this end's counters."""


@dataclass(frozen=True)
class Terms:
    """What both ends must agree upon."""

    run: bytes
    parameters: int
    wire: int
    """The number of the wire format."""

    def hello(self, sender: int, receiver: int, incarnation: int) -> bytes:
        """Return a hello with fresh random bytes."""
        run = hashlib.sha256(self.run).digest()
        fresh = secrets.token_bytes(32)
        return _HELLO.pack(MAGIC, VERSION, run, sender, receiver, self.parameters, self.wire, incarnation, fresh)

    def read(self, hello: bytes) -> tuple[int, int, int]:
        """Return the sender, the receiver and the incarnation of a hello on the same terms.

        Raises:
            RefusedError: it is not one.
        """
        magic, version, run, sender, receiver, parameters, wire, incarnation, _ = _HELLO.unpack(hello)
        if magic != MAGIC:
            raise RefusedError("not Antiphon")
        if version != VERSION:
            raise RefusedError("another version")
        if run != hashlib.sha256(self.run).digest():
            raise RefusedError("another run")
        if parameters != self.parameters:
            raise RefusedError("another number of parameters")
        if wire != self.wire:
            raise RefusedError("another wire format")
        return sender, receiver, incarnation


class Handshake:
    """One end's part, without I/O: `feed` takes exactly the ``wants`` bytes that it waits for.

    Args:
        terms: what both ends must agree upon.
        secret: the run's.
    """

    wants: int
    peer: int | None = None
    """Who is at the other end; not proven before ``done``."""
    incarnation: int = 0
    """The peer's."""
    done: bool = False

    def __init__(self, terms: Terms, secret: bytes) -> None:
        self.terms, self._secret = terms, secret

    def begin(self) -> bytes:
        """Return what is to be sent at first."""
        return b""

    def feed(self, data: bytes) -> bytes:
        """Take what has come, and return what is to be sent.

        Raises:
            RefusedError: the other end is to be hung up on.
        """
        raise NotImplementedError

    def _prove(self, word: bytes, *hellos: bytes) -> bytes:
        return hmac.new(self._secret, b"antiphon " + word + b"".join(hellos), hashlib.sha256).digest()


class Dialer(Handshake):
    """The end that called: learner ``own``, towards ``peer``."""

    wants = HELLO_BYTES + MAC_BYTES

    def __init__(self, terms: Terms, secret: bytes, own: int, peer: int, incarnation: int) -> None:
        super().__init__(terms, secret)
        self.own, self.peer = own, peer
        self._hello = terms.hello(own, peer, incarnation)

    def begin(self) -> bytes:
        """Say hello."""
        return self._hello

    def feed(self, data: bytes) -> bytes:
        """Check the listener's proof, and give one's own."""
        hello, proof = data[:HELLO_BYTES], data[HELLO_BYTES:]
        sender, receiver, self.incarnation = self.terms.read(hello)
        if (sender, receiver) != (self.peer, self.own):
            raise RefusedError("another learner")
        if not hmac.compare_digest(proof, self._prove(b"listener", self._hello, hello)):
            raise RefusedError("another secret")
        self.done, self.wants = True, 0
        return self._prove(b"dialer", self._hello, hello)


class Answerer(Handshake):
    """The end that was called: learner ``own``; ``expected(peer)`` says whether that peer may call it."""

    wants = HELLO_BYTES

    def __init__(
        self, terms: Terms, secret: bytes, own: int, incarnation: int, expected: Callable[[int], bool]
    ) -> None:
        super().__init__(terms, secret)
        self.own, self._incarnation, self._expected = own, incarnation, expected
        self._hellos = (b"", b"")

    def feed(self, data: bytes) -> bytes:
        """Answer the dialer's hello, then check its proof."""
        if self.peer is None:
            sender, receiver, self.incarnation = self.terms.read(data)
            if receiver != self.own or not self._expected(sender):
                raise RefusedError("another learner")
            self.peer, self.wants = sender, MAC_BYTES
            answer = self.terms.hello(self.own, sender, self._incarnation)
            self._hellos = (data, answer)
            return answer + self._prove(b"listener", *self._hellos)
        if not hmac.compare_digest(data, self._prove(b"dialer", *self._hellos)):
            raise RefusedError("another secret")
        self.done, self.wants = True, 0
        return b""
