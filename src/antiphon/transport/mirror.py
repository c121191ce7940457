"""Learners on other hosts, as this host sees them: their rows of the board by notes, their weights on request.

Each learner tells its own row to every learner of another host, whenever its state changes and several times a second.
Whoever gets a note writes it into the row of its sender; notes are numbered, so the newest one stays. What reads the
board need not know where a learner runs.

Weights are fetched when somebody on this host asks for them (`collect`): the request is a count in the block's head,
and the exchange threads of this host's learners share what there is to fetch.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol as Interface

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from antiphon.errors import DeadlineError, LearnerError
from antiphon.transport.base import Carrier, Mail, Poll
from antiphon.transport.block import OUTSTANDING, Block, Col, Gauge, Head, Link, Status, process_runs, stopped
from antiphon.transport.buffers import GENERATION
from antiphon.transport.protocol import INCARNATION_BITS, Handle, Message

STATUS_CHANNEL = 1
TELL_S = 0.1
"""How often a learner tells its row, whatever has changed; with many peers, as long as telling ten of them takes."""
FINAL = 1 << 60
"""Stands for all later requests in Link.PULLED: the weights were fetched after everybody's last exchange."""
FETCH_S = 30.0
AGAIN_S = 0.02
LINGER_S = 30.0
NUMBERS = 2 + len(Col) + OUTSTANDING
NOTE_BYTES = 8 * (NUMBERS + len(Gauge))


class Notes(Interface):
    """What is asked of the carrier to the other hosts."""

    peers: tuple[int, ...]
    on_note: dict[int, Callable[[int, bytes], None]]
    on_lost: Callable[[int], None]

    def note(self, peer: int, channel: int, data: bytes) -> None:
        """Send a note, which may get lost."""

    def pull(self, peer: int, into_N: Tensor, done: Callable[[bool], None]) -> None:
        """Fetch a peer's weights."""

    def connected(self, peer: int) -> bool:
        """Say whether there is a connection to the peer now."""


class Mirror(Carrier):
    """Tells this learner's row to other hosts, writes theirs, and fetches their weights; it carries no exchange.

    Args:
        block: this host's shared memory, with room for the weights.
        learner: this learner's number.
        notes: the carrier to the other hosts.
        incarnation: how many processes were this learner before.
    """

    peers: tuple[int, ...] = ()

    def __init__(self, block: Block, learner: int, notes: Notes, incarnation: int = 0) -> None:
        self.block, self.learner, self.notes = block, learner, notes
        self._number = incarnation << INCARNATION_BITS
        self._heard: dict[int, tuple[int, NDArray[np.int64]]] = {}
        self._told: tuple[int, ...] = ()
        self._tell_at_s = self._look_at_s = 0.0
        self._kick = os.eventfd(0, os.EFD_NONBLOCK)
        self._every_s = TELL_S * max(1.0, len(notes.peers) / 10)
        self._fetching: set[int] = set()
        notes.on_note[STATUS_CHANNEL], notes.on_lost = self._hear, self._lost

    # --- any thread

    def wake(self) -> None:
        """Let the exchange thread look at what has changed."""
        os.eventfd_write(self._kick, 1)

    def fetch(self, peer: int, timeout_s: float) -> None:
        """Fetch a peer's weights into its row, and wait for them.

        Raises:
            DeadlineError: they did not come in time.
            LearnerError: the peer has ended.
        """
        assert self.block.buffers is not None
        over, whole = threading.Event(), False

        def done(came: bool) -> None:
            nonlocal whole
            whole = came
            over.set()

        end = time.monotonic() + timeout_s
        while not whole:
            if self.block.dead(peer):
                raise LearnerError(f"learner {peer} ended before its weights were fetched")
            if time.monotonic() > end:
                raise DeadlineError(f"waited {timeout_s:g} s for the weights of learner {peer}")
            if self.notes.connected(peer):
                over.clear()
                self.notes.pull(peer, self.block.buffers.weights_LN[peer], done)
                over.wait(max(0.0, end - time.monotonic()))
            time.sleep(AGAIN_S)

    # --- the exchange thread

    def open(self, poll: Poll, mail: Mail) -> None:
        """Begin to serve."""
        poll.add(self._kick, self._woken)
        self.block.links_LC[self.learner, Link.SERVES] = 1

    def tick(self, now: float) -> None:
        """Tell what is due, write what was heard, and fetch what was asked for."""
        row_C = self.block.board_LC[self.learner]
        state = int(row_C[Col.STATE]), int(row_C[Col.LEFT]), int(row_C[Col.BEREFT]), int(self.block.head[Head.STOP])
        if now >= self._tell_at_s or state != self._told:
            self._told, self._tell_at_s = state, now + self._every_s
            self._tell()
        if now >= self._look_at_s:
            self._look_at_s = now + TELL_S
            for peer in self.notes.peers:
                self._write(peer)
            self._fetch()

    def next_due(self) -> float | None:
        """Return when the row is to be told again."""
        return self._tell_at_s

    def close(self) -> None:
        """Tell where this learner stands for the last time, and serve no longer."""
        self._tell()
        self.block.links_LC[self.learner, Link.SERVES] = 0
        os.close(self._kick)

    def _woken(self) -> None:
        os.eventfd_read(self._kick)

    def _tell(self) -> None:
        self._number += 1
        data = pack_note(self.block, self.learner, self._number)
        for peer in self.notes.peers:
            self.notes.note(peer, STATUS_CHANNEL, data)

    def _hear(self, peer: int, data: bytes) -> None:
        numbers = unpack_note(data)
        if numbers is None or peer not in self.notes.peers:
            return
        heard = self._heard.get(peer)
        if heard is None or numbers[0] > heard[0]:
            self._heard[peer] = int(numbers[0]), numbers
            self._write(peer)

    def _write(self, peer: int) -> None:
        """Write the newest note of a peer, unless the row is of that note or a newer one."""
        block, row_C = self.block, self.block.board_LC[peer]
        heard = self._heard.get(peer)
        if heard and heard[0] > block.links_LC[peer, Link.NOTED]:
            number, numbers = heard
            stop = int(numbers[1])
            row_C[:] = numbers[2 : 2 + len(Col)]
            block.outstanding_LK[peer] = numbers[2 + len(Col) : NUMBERS]
            block.gauges_LC[peer] = numbers[NUMBERS:].view(np.float64)
            block.links_LC[peer, Link.NOTED] = number
            # All hosts come to the same round: the latest that anybody asked for.
            if stop > block.head[Head.STOP]:
                block.head[Head.STOP] = stop

    def _lost(self, peer: int) -> None:
        """A peer's process is gone: at its end, or before its time."""
        row_C = self.block.board_LC[peer]
        if row_C[Col.STATE] == Status.DONE:
            row_C[Col.LEFT] = 1
        else:
            row_C[Col.STATE] = Status.FAILED

    # --- weights

    def _fetch(self) -> None:
        asked = int(self.block.head[Head.ASKED])
        pulled_L = self.block.links_LC[:, Link.PULLED]
        wanted = [peer for peer in self.notes.peers if abs(int(pulled_L[peer])) < asked and peer not in self._fetching]
        if not wanted:
            return
        serving = serving_learners(self.block)
        for peer in wanted:
            if not serving or serving[peer % len(serving)] != self.learner:
                continue
            if self.notes.connected(peer):
                self._pull(peer, asked)
            else:
                pulled_L[peer] = -asked

    def _pull(self, peer: int, asked: int) -> None:
        assert self.block.buffers is not None
        buffers, links_C = self.block.buffers, self.block.links_LC[peer]
        mark = FINAL if _still(self.block) else asked

        def done(whole: bool) -> None:
            buffers.clock_L3[peer, GENERATION] += 1
            self._fetching.discard(peer)
            links_C[Link.PULLED] = mark if whole else -asked

        self._fetching.add(peer)
        buffers.clock_L3[peer, GENERATION] += 1
        self.notes.pull(peer, buffers.weights_LN[peer], done)

    # --- a carrier without exchanges

    def send(self, peer: int, message: Message) -> None:
        """Never called: it carries to nobody."""
        raise AssertionError("the mirror carries no exchange")

    def usable(self, peer: int, handle: Handle) -> bool:
        """Never called."""
        raise AssertionError("the mirror carries no exchange")

    def apply(self, peer: int, theirs: Handle, own: Handle, coefficient: float) -> None:
        """Never called."""
        raise AssertionError("the mirror carries no exchange")


def pack_note(block: Block, learner: int, number: int) -> bytes:
    """Return a learner's row as a note: its number, the round to stop at, the words, the tickets, the gauges."""
    head = np.array([number, block.head[Head.STOP]], np.int64)
    gauges = block.gauges_LC[learner].view(np.int64)
    data: bytes = np.concatenate([head, block.board_LC[learner], block.outstanding_LK[learner], gauges]).tobytes()
    return data


def unpack_note(data: bytes) -> NDArray[np.int64] | None:
    """Return a note's numbers, the gauges' bits among them; None where it is no note."""
    if len(data) != NOTE_BYTES:
        return None
    numbers: NDArray[np.int64] = np.frombuffer(data, np.int64)
    row_C, gauges = numbers[2 : 2 + len(Col)], numbers[NUMBERS:].view(np.float64)
    sound = (
        (numbers[:NUMBERS] >= 0).all()
        and row_C[Col.STATE] in Status._value2member_map_
        and 0 <= gauges[Gauge.STEP_S] < float("inf")
    )
    return numbers if sound else None


def serving_learners(block: Block) -> list[int]:
    """Return the learners of this host whose exchange threads run and are not frozen."""
    return [
        learner
        for learner in block.local
        if block.links_LC[learner, Link.SERVES]
        and process_runs(pid := int(block.board_LC[learner, Col.PID]))
        and not stopped(pid)
    ]


def collect(block: Block, deadline_s: float = FETCH_S) -> list[int]:
    """Have the weights of learners on other hosts fetched into this host's block; call it from any process.

    Args:
        block: this host's block.
        deadline_s: how long to wait without any of them coming.

    Returns:
        The learners whose weights could not be fetched; what lies in their rows is older.
    """
    wanted = [learner for learner in block.remote if not block.dead(learner)]
    if not wanted:
        return []
    pulled_L = block.links_LC[:, Link.PULLED]
    if serving_learners(block):
        block.head[Head.ASKED] += 1
    asked, answered, end = max(1, int(block.head[Head.ASKED])), -1, 0.0
    while True:
        count = int((np.abs(pulled_L[wanted]) >= asked).sum())
        now = time.monotonic()
        if count > answered:
            answered, end = count, now + deadline_s
        if count == len(wanted) or now > end or not serving_learners(block):
            return [learner for learner in wanted if pulled_L[learner] < asked]
        time.sleep(0.01)


def leave(block: Block, learner: int, deadline_s: float = LINGER_S) -> None:
    """Tell that a learner has left, and, if it has come to its end, stay until those of other hosts have left too.

    Until then they may need this one's weights, or this host their last words.
    """
    row_C = block.board_LC[learner]
    row_C[Col.LEFT] = 1
    end = time.monotonic() + deadline_s
    while row_C[Col.STATE] == Status.DONE and any(_stays(block, other) for other in block.remote):
        if time.monotonic() > end:
            return
        time.sleep(0.005)


def _stays(block: Block, learner: int) -> bool:
    row_C = block.board_LC[learner]
    return not row_C[Col.LEFT] and row_C[Col.STATE] not in (Status.FAILED, Status.AWAY)


def _still(block: Block) -> bool:
    """Say whether nobody's weights change any more."""
    return all(block.board_LC[n, Col.STATE] >= Status.DRAINED or block.dead(n) for n in range(block.learners))


def missing_text(missing: Sequence[int]) -> str:
    """Return what is to be said of learners that `collect` could not reach."""
    return f"the weights of learners {list(missing)} could not be fetched: the consensus is the mean of the others"
