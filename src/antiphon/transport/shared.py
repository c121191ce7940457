"""Learners on one host: snapshots in shared memory, control by datagrams between local sockets; no TCP port is opened.

One thread a learner answers proposals, makes the copies and adds the differences while the learner computes. It waits
in one poll for its socket, for the computing thread and for the end of any peer's process.
"""

from __future__ import annotations

import collections
import contextlib
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol as Interface

import torch
from torch import Tensor

from antiphon.errors import DeadlineError, LearnerError
from antiphon.transport.base import Coefficients, Transport
from antiphon.transport.block import Block, Col
from antiphon.transport.buffers import Buffers
from antiphon.transport.protocol import ExchangeProtocol, Handle, Kind, Message, Snapshots

WIRE = struct.Struct("<BBHQQd")
"""kind, slot, sender, sequence, version, coefficient."""

GRADIENT_SLOT = 2


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
    """What this transport asks of a learner's weights."""

    buffers: Buffers

    def write(self, slot: int) -> Handle | None:
        """Copy the weights into a slot; None where they are not finite."""

    def add_differences(self, others: list[tuple[Tensor, float]], own_N: Tensor) -> None:
        """Add sum_j c_j (s_j - s_own)."""


@dataclass
class _Round:
    """The synchronous round in hand."""

    number: int
    peers: list[int]
    coefficients: Coefficients | None
    published: bool = False


class SharedTransport(Transport):
    """One learner's end over a `Block`.

    Args:
        block: the run's shared memory, with room for the weights.
        learner: its number.
        weights: its weights, over the block's buffers.
        deadline_s: how long the answer to a message is waited for.
        timeout_s: how long a synchronous round is waited for.
    """

    def __init__(
        self, block: Block, learner: int, weights: SharedWeights, deadline_s: float = 0.25, timeout_s: float = 300.0
    ) -> None:
        self.block, self.learner, self.weights, self.timeout_s = block, learner, weights, timeout_s
        self.protocol = ExchangeProtocol(learner, weights, self._send, deadline_s)
        self.counts, self.bytes_read = self.protocol.counts, 0
        self.exchange_s = 0.0
        """CPU seconds of the exchange thread."""
        self._peers = [peer for peer in range(block.learners) if peer != learner]
        self._present: tuple[int, ...] = tuple(range(block.learners))
        self._gone: set[int] = set()
        self._wanted: collections.deque[tuple[int, float]] = collections.deque(maxlen=1)
        self._round: _Round | None = None
        self._round_over = threading.Event()
        self._idle = threading.Event()
        self._stopping = False
        self._closed = False
        self._failure: BaseException | None = None
        if not self._peers:
            return
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        # By way of a descriptor, for the path of a socket may have 107 characters only.
        self._folder_fd = os.open(block.folder, os.O_PATH | os.O_DIRECTORY)
        self._paths = [f"/proc/self/fd/{self._folder_fd}/{number}.sock" for number in range(block.learners)]
        Path(self._paths[learner]).unlink(missing_ok=True)
        self._socket.bind(self._paths[learner])
        self._kick = os.eventfd(0, os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name=f"exchange-{learner}", daemon=True)

    def start(self) -> None:
        """Start answering; all peers have joined by now."""
        if self._peers:
            # A thread's first question fixes its number of computing threads; the exchange thread's 1 would become it.
            torch.get_num_threads()
            self._thread.start()

    # --- the computing thread

    def present(self) -> tuple[int, ...]:
        """Return the learners that answer now."""
        return self._present

    def propose(self, peer: int, coefficient: float) -> None:
        """Start an exchange as soon as the exchange thread gets to it; one not yet begun is replaced."""
        self.check()
        if self._wanted:
            self.counts.busy += 1
        self._wanted.append((peer, coefficient))
        os.eventfd_write(self._kick, 1)

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

    def check(self) -> None:
        """Raise what ended the exchange thread, if anything did."""
        if isinstance(self._failure, LearnerError):
            raise self._failure
        if self._failure is not None:
            raise LearnerError(f"learner {self.learner}: the exchange thread failed: {self._failure!r}") from (
                self._failure
            )

    def drain(self, deadline_s: float) -> bool:
        """Start nothing more and wait for what is in flight; say whether all of it came to an end."""
        if not self._peers or self._closed:
            return True
        self._stopping = True
        end = time.monotonic() + deadline_s
        while self._failure is None and time.monotonic() < end:
            self._idle.clear()
            os.eventfd_write(self._kick, 1)
            if self._idle.wait(max(0.0, min(0.05, end - time.monotonic()))):
                return True
        self.check()
        return False

    def close(self) -> None:
        """End the thread and close the socket; an exchange that only this end has applied is torn."""
        if self._closed or not self._peers:
            return
        self._closed = True
        if self._thread.is_alive():
            os.eventfd_write(self._kick, 1)
            self._thread.join(timeout=10.0)
        for peer in list(self.protocol.open):
            self.protocol.lost(peer)
        self._socket.close()
        os.close(self._kick)
        os.close(self._folder_fd)

    def _begin(self, round: _Round) -> None:
        # In this order: should the exchange thread fail from here on, the wait for the round ends with it.
        self._round_over.clear()
        self.check()
        self._round = self._current = round
        if self._peers:
            os.eventfd_write(self._kick, 1)

    def _wait(self, round: int) -> None:
        if not self._peers:
            return
        if not self._round_over.wait(self.timeout_s):
            missing = self._missing(self._current)
            raise DeadlineError(
                f"learner {self.learner} waited {self.timeout_s:g} s in round {round} for learners {missing}:"
                " raise timeout_s, or use an asynchronous strategy, which waits for nobody"
            )
        self.check()

    def _missing(self, round: _Round) -> list[int]:
        return [peer for peer in round.peers if self.block.board_LC[peer, Col.PUBLISHED] <= round.number]

    def _slot(self, round: int, gradient: bool = False) -> int:
        # A peer may still read round k while k+1 is written, never while k+2 is: two slots alternate.
        return (GRADIENT_SLOT, 1)[round % 2] if gradient else round % 2

    # --- the exchange thread

    def _run(self) -> None:
        try:
            torch.set_num_threads(1)
            with self._ends_of_peers() as ends:
                poll = select.poll()
                for fd in (self._socket.fileno(), self._kick, *ends):
                    poll.register(fd, select.POLLIN)
                while not self._closed:
                    ready = poll.poll(self._poll_ms())
                    began = time.thread_time()
                    self._turn([fd for fd, _ in ready], ends, poll)
                    self.exchange_s += time.thread_time() - began
        except BaseException as error:
            self._failure = error
        finally:
            self._round_over.set()
            self._idle.set()

    @contextlib.contextmanager
    def _ends_of_peers(self):  # type: ignore[no-untyped-def]
        """Give a descriptor for each peer's process, readable once it has ended."""
        ends: dict[int, int] = {}
        try:
            for peer in self._peers:
                try:
                    ends[os.pidfd_open(int(self.block.board_LC[peer, Col.PID]))] = peer
                except ProcessLookupError:
                    self._lose(peer)
            yield ends
        finally:
            for fd in ends:
                os.close(fd)

    def _poll_ms(self) -> float:
        """Until the next deadline; a round in hand is looked at every 5 ms, for a full queue loses its messages."""
        due = self.protocol.next_due()
        limit = 5.0 if self._round else 500.0
        return limit if due is None else max(0.0, min(limit, (due - time.monotonic()) * 1e3))

    def _turn(self, ready: Sequence[int], ends: dict[int, int], poll: select.poll) -> None:
        now = time.monotonic()
        for fd in ready:
            if fd in ends:
                poll.unregister(fd)
                os.close(fd)
                self._lose(ends.pop(fd))
            elif fd == self._kick:
                os.eventfd_read(fd)
        self._receive_all(now)
        self.protocol.tick(now)
        if self._wanted and not self._stopping:
            self.protocol.propose(*self._wanted.popleft(), now)
        if self._round:
            self._advance(self._round)
        self._present = tuple(
            learner
            for learner in range(self.block.learners)
            if learner == self.learner or not (learner in self._gone or self.protocol.silent(learner, now))
        )
        if self._stopping and not self.protocol.open:
            self._idle.set()

    def _receive_all(self, now: float) -> None:
        while True:
            try:
                data = self._socket.recv(WIRE.size + 1)
            except (BlockingIOError, ConnectionRefusedError):
                return
            message = unpack(data, self.block.learners)
            if message and message.sender != self.learner and message.sender not in self._gone:
                before = self.counts.committed + self.counts.applied
                self.protocol.receive(message, now)
                self.bytes_read += (self.counts.committed + self.counts.applied - before) * self._weights_bytes

    @property
    def _weights_bytes(self) -> int:
        return 4 * self.weights.buffers.weights_LN.shape[1]

    def _advance(self, round: _Round) -> None:
        """Publish, and see whether all have."""
        if not round.published:
            slot = self._slot(round.number)
            if round.coefficients and self.weights.write(slot) is None:
                raise LearnerError(f"learner {self.learner}: the weights are not finite in round {round.number}")
            round.published = True
            self.block.board_LC[self.learner, Col.PUBLISHED] = round.number + 1
            for peer in self._peers:
                self._send(peer, Message(Kind.PUBLISHED, self.learner, round.number))
        missing = self._missing(round)
        if lost := [peer for peer in missing if peer in self._gone or self.block.failed(peer)]:
            self.block.board_LC[self.learner, Col.BEREFT] = lost[0] + 1
            raise LearnerError(f"learners {lost} are gone, and this strategy needs them in every round")
        if missing:
            return
        if round.coefficients:
            slots_LSN, slot = self.weights.buffers.slots_LSN, self._slot(round.number)
            others = [(slots_LSN[peer, slot], coefficient) for peer, coefficient in round.coefficients]
            self.weights.add_differences(others, slots_LSN[self.learner, slot])
            self.bytes_read += len(others) * self._weights_bytes
        self._round = None
        self._round_over.set()

    def _lose(self, peer: int) -> None:
        self._gone.add(peer)
        self.protocol.lost(peer)

    def _send(self, peer: int, message: Message) -> None:
        # A full queue (a frozen peer) or a missing socket (a dead one) loses the message, which the protocol expects.
        with contextlib.suppress(BlockingIOError, ConnectionRefusedError, FileNotFoundError):
            self._socket.sendto(pack(message), self._paths[peer])
