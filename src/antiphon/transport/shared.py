"""Peers on one host: snapshots in shared memory, messages by datagrams between local sockets; no TCP port is opened."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol as Interface

from torch import Tensor

from antiphon.errors import DeadlineError, LearnerError
from antiphon.transport.base import Carrier, Coefficients, Mail, Poll
from antiphon.transport.block import Block, Col, Status
from antiphon.transport.buffers import Buffers
from antiphon.transport.exchange import PolledRounds
from antiphon.transport.protocol import Handle, Kind, Message, Snapshots

WIRE = struct.Struct("<BBHQQd")
"""kind, slot, sender, sequence, version, coefficient."""

GRADIENT_SLOT = 2
LOOK_S = 0.2
"""How often it is looked whether a peer that had ended is there again."""


def pack(message: Message) -> bytes:
    """Return the bytes of a message."""
    return WIRE.pack(
        message.kind,
        message.handle.slot,
        message.sender,
        message.sequence,
        message.handle.version,
        message.coefficient,
    )


def unpack(data: bytes, learners: int) -> Message | None:
    """Return the message that ``data`` holds, or None where it holds none of ours."""
    if len(data) != WIRE.size:
        return None
    kind, slot, sender, sequence, version, coefficient = WIRE.unpack(data)
    if kind not in Kind._value2member_map_ or sender >= learners or version >= 1 << 63 or sequence >= 1 << 63:
        return None
    return Message(Kind(kind), sender, sequence, Handle(slot, version), coefficient)


class SharedWeights(Snapshots, Interface):
    """What is asked of a learner's weights."""

    buffers: Buffers

    def write(self, slot: int) -> Handle | None:
        """Copy the weights into a slot; None where they are not finite."""

    def add_differences(self, others: list[tuple[Tensor, float]], own_N: Tensor) -> None:
        """Add sum_j c_j (s_j - s_own)."""


class SharedCarrier(Carrier):
    """Reaches the peers on this host.

    Args:
        block: the host's shared memory, with room for the weights.
        learner: this learner's number.
        peers: the others on this host.
        weights: its weights, over the block's buffers.
    """

    def __init__(self, block: Block, learner: int, peers: Sequence[int], weights: SharedWeights) -> None:
        self.block, self.learner, self.peers, self.weights = block, learner, tuple(peers), weights
        self._bytes = 4 * weights.buffers.weights_LN.shape[1]
        self._pids: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        self._look_at_s = 0.0
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        # By way of a descriptor, for the path of a socket may have 107 characters only.
        self._folder_fd = os.open(block.folder, os.O_PATH | os.O_DIRECTORY)
        self._paths = [f"/proc/self/fd/{self._folder_fd}/{number}.sock" for number in range(block.learners)]
        Path(self._paths[learner]).unlink(missing_ok=True)
        self._socket.bind(self._paths[learner])

    def open(self, poll: Poll, mail: Mail) -> None:
        """Watch the socket, and the peers' processes."""
        self._poll, self._mail = poll, mail
        for peer in self.peers:
            self._watch(peer)
        poll.add(self._socket.fileno(), self._receive_all)

    def send(self, peer: int, message: Message) -> None:
        """Send a datagram: a full queue (a frozen peer) or a missing socket (a dead one) loses it."""
        with contextlib.suppress(BlockingIOError, ConnectionRefusedError, FileNotFoundError):
            self._socket.sendto(pack(message), self._paths[peer])

    def usable(self, peer: int, handle: Handle) -> bool:
        """Say whether the peer's slot still holds that version."""
        return self.weights.usable(peer, handle)

    def apply(self, peer: int, theirs: Handle, own: Handle, coefficient: float) -> None:
        """Add the difference of two slots of the shared memory."""
        self.weights.apply(peer, theirs, own, coefficient)
        self.bytes_read += self._bytes

    def tick(self, now: float) -> None:
        """See whether a peer that had ended is there again, or one has left."""
        if now < self._look_at_s:
            return
        self._look_at_s = now + LOOK_S
        for peer in self.peers:
            row_C = self.block.board_LC[peer]
            if peer in self._ends:
                if row_C[Col.STATE] == Status.AWAY:
                    self._ended(peer)
            elif row_C[Col.PID] != self._pids[peer]:
                self._watch(peer)
                if peer in self._ends:
                    self._mail.returned(peer)

    def close(self) -> None:
        """Close the socket."""
        for fd in self._ends.values():
            os.close(fd)
        self._socket.close()
        os.close(self._folder_fd)

    def _watch(self, peer: int) -> None:
        """Watch a peer's process by a descriptor that becomes readable once it has ended."""
        self._pids[peer] = int(self.block.board_LC[peer, Col.PID])
        try:
            # One that comes in late has no number yet.
            self._ends[peer] = os.pidfd_open(self._pids[peer] or -1)
        except OSError as error:
            if error.errno not in (errno.ESRCH, errno.EINVAL):
                raise
            self._mail.lost(peer)
            return
        self._poll.add(self._ends[peer], lambda: self._ended(peer))
        # Behind the ends: what is read after one has ended and come back must not be its last words.
        self._poll.remove(self._socket.fileno())
        self._poll.add(self._socket.fileno(), self._receive_all)

    def _ended(self, peer: int) -> None:
        fd = self._ends.pop(peer)
        self._poll.remove(fd)
        os.close(fd)
        self._mail.lost(peer)

    def _receive_all(self) -> None:
        while True:
            try:
                data = self._socket.recv(WIRE.size + 1)
            except (BlockingIOError, ConnectionRefusedError):
                return
            message = unpack(data, self.block.learners)
            if message and message.sender in self.peers:
                self._mail.receive(message)


@dataclass
class _Round:
    """The synchronous round in hand."""

    number: int
    peers: list[int]
    coefficients: Coefficients | None
    published: bool = False


class SharedRounds(PolledRounds):
    """Synchronous rounds of learners that are all on this host: everyone's vector lies in a slot of its own.

    Args:
        block: the host's shared memory.
        learner: this learner's number.
        weights: its weights.
        timeout_s: how long a round is waited for.
    """

    def __init__(self, block: Block, learner: int, weights: SharedWeights, timeout_s: float = 300.0) -> None:
        super().__init__()
        self.block, self.learner, self.weights, self.timeout_s = block, learner, weights, timeout_s
        self._peers = [peer for peer in range(block.learners) if peer != learner]
        self._round: _Round | None = None

    def start_mix(self, round: int, coefficients: Coefficients) -> None:
        """Let the exchange thread publish the weights and add the differences once they are there."""
        self._begin(_Round(round, [peer for peer, _ in coefficients], coefficients))

    def finish_mix(self, round: int) -> None:
        """Wait until the differences of the round have been added."""
        self._wait(round)

    def start_average(self, round: int, vector_N: Tensor) -> None:
        """Publish ``vector_N``."""
        self.weights.buffers.slots_LSN[self.learner, self._slot(round, gradient=True)].copy_(vector_N)
        self._begin(_Round(round, self._peers, None))

    def finish_average(self, round: int, mean_N: Tensor) -> None:
        """Wait for all, and write the mean: every learner adds in the same order, so all get the same bits."""
        self._wait(round)
        slots_LN = self.weights.buffers.slots_LSN[:, self._slot(round, gradient=True)]
        mean_N.copy_(slots_LN[0])
        for vector_N in slots_LN[1:]:
            mean_N.add_(vector_N)
        mean_N.div_(self.block.learners)
        self.bytes_read += 4 * mean_N.numel() * len(self._peers)

    def advance(self, gone: set[int]) -> None:
        """Publish, see whether all have, and add the differences."""
        round = self._round
        if round is None:
            return
        if not round.published:
            self._publish(round)
        missing = self._missing(round)
        if lost := [peer for peer in missing if peer in gone or self.block.failed(peer)]:
            self.block.board_LC[self.learner, Col.BEREFT] = lost[0] + 1
            raise LearnerError(f"learners {lost} are gone, and this strategy needs them in every round")
        if missing:
            return
        if round.coefficients:
            slots_LSN, slot = self.weights.buffers.slots_LSN, self._slot(round.number)
            others = [(slots_LSN[peer, slot], coefficient) for peer, coefficient in round.coefficients]
            self.weights.add_differences(others, slots_LSN[self.learner, slot])
            self.bytes_read += 4 * len(others) * slots_LSN.shape[2]
        self._round, self.busy = None, False
        self.over.set()

    def _begin(self, round: _Round) -> None:
        # In this order: should the exchange thread fail from here on, the wait for the round ends with it.
        self.over.clear()
        self.check()
        self._round = self._current = round
        self.busy = True
        if self._peers:
            self.wake()

    def _wait(self, round: int) -> None:
        if not self._peers:
            return
        if not self.over.wait(self.timeout_s):
            missing = self._missing(self._current)
            raise DeadlineError(
                f"learner {self.learner} waited {self.timeout_s:g} s in round {round} for learners {missing}:"
                " raise timeout_s, or use an asynchronous strategy, which waits for nobody"
            )
        self.check()

    def _publish(self, round: _Round) -> None:
        if round.coefficients and self.weights.write(self._slot(round.number)) is None:
            raise LearnerError(f"learner {self.learner}: the weights are not finite in round {round.number}")
        round.published = True
        self.block.board_LC[self.learner, Col.PUBLISHED] = round.number + 1
        for peer in self._peers:
            self.tell(peer, Message(Kind.PUBLISHED, self.learner, round.number))

    def _missing(self, round: _Round) -> list[int]:
        return [peer for peer in round.peers if self.block.board_LC[peer, Col.PUBLISHED] <= round.number]

    def _slot(self, round: int, gradient: bool = False) -> int:
        # A peer may still read round k while k+1 is written, never while k+2 is: two slots alternate.
        return (GRADIENT_SLOT, 1)[round % 2] if gradient else round % 2
