"""A learner that is killed or frozen at each step of an exchange, as a process; the survivors' sum, and their going on.

Learner 1 is a forked process that strikes itself at a named point; 0 and 2 run in this one, each with its exchange
thread, so that what they have done can be read. Nobody steps: all that moves weights is exchanges, so it is known to
rounding what every row must be.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass

import pytest
import torch
from forked import Forked, until

from antiphon.learner.weights import Weights
from antiphon.transport.block import Block, Col, Status, stopped
from antiphon.transport.exchange import ExchangeTransport
from antiphon.transport.faults import FaultyCarrier
from antiphon.transport.protocol import Kind
from antiphon.transport.shared import SharedCarrier, SharedRounds

LEARNERS, PARAMETERS, C = 3, 257, 1 / 3
VICTIM, PARTNER, WITNESS = 1, 0, 2
DEADLINE_S = 0.1


@dataclass(frozen=True)
class Step:
    """A point of an exchange at which the victim is struck, and what leads there."""

    point: str
    initiates: bool
    """Whether the victim starts the exchange."""
    how: str = "in order"
    """Or "refused" (c is out of bounds), or "unanswered" (every ACCEPT is lost)."""

    def __str__(self) -> str:
        return f"{'initiator' if self.initiates else 'acceptor'} {self.point}"


def steps(initiates: bool, how: str, *acts: str) -> list[Step]:
    return [Step(f"{side}-{act}", initiates, how) for act in acts for side in ("before", "after")]


STEPS = [
    *steps(True, "in order", "send-propose", "receive-accept", "apply", "send-commit", "receive-done"),
    *steps(True, "refused", "receive-refuse"),
    *steps(True, "unanswered", "send-abort"),
    *steps(False, "in order", "receive-propose", "send-accept", "receive-commit", "apply", "send-done"),
    *steps(False, "refused", "send-refuse"),
    *steps(False, "unanswered", "receive-abort"),
]


class Company:
    """The three of them over one block."""

    def __init__(self, step: Step, blow: signal.Signals, folder) -> None:
        self.step, self.folder = step, folder
        self.block = Block.create(LEARNERS)
        self.buffers = self.block.allocate(PARAMETERS)
        self.first_LN = torch.randn(LEARNERS, PARAMETERS, generator=torch.Generator().manual_seed(0))
        self.buffers.weights_LN.copy_(self.first_LN)
        self.block.board_LC[:, Col.PID], self.block.board_LC[:, Col.STATE] = os.getpid(), Status.JOINED
        self.go = os.eventfd(0, os.EFD_NONBLOCK)
        """Written once all are ready; the victim proposes, where it is to, as it reads it."""
        parent = threading.main_thread().native_id

        def at(point: str) -> None:
            if point == step.point and os.getpid() != parent and not self.struck:
                self.struck = True
                os.kill(os.getpid(), blow)

        self.struck = False
        self.victim = Forked(lambda: self._be_the_victim(at), folder / "victim")
        until(lambda: self.block.board_LC[VICTIM, Col.PID] == self.victim.pid, "the victim")
        self.ends = {learner: self._end(learner) for learner in (PARTNER, WITNESS)}
        self.asked = dict.fromkeys(self.ends, 0)
        for end in self.ends.values():
            end.start()

    def _end(self, learner: int, at=lambda point: None, incarnation: int = 0) -> ExchangeTransport:
        weights = Weights(self.buffers, learner)
        others = [peer for peer in range(LEARNERS) if peer != learner]
        carrier = FaultyCarrier(SharedCarrier(self.block, learner, others, weights), at, self._fates)
        rounds = SharedRounds(self.block, learner, weights)
        end = ExchangeTransport(learner, weights, [carrier], rounds, DEADLINE_S, incarnation)
        end.weights = weights
        return end

    def _fates(self, message):
        lost = message.kind is Kind.ACCEPT and self.step.how == "unanswered"
        # It is never asked for again in the calm afterwards.
        return [] if lost and self.block.board_LC[VICTIM, Col.REPEATED] == 0 else [(0.0, message)]

    def calm(self) -> None:
        """From here on every message arrives."""
        self.block.board_LC[VICTIM, Col.REPEATED] = 1

    def _be_the_victim(self, at, incarnation: int = 0) -> None:
        end = self._end(VICTIM, at, incarnation)
        end.start()
        self.block.board_LC[VICTIM, Col.PID] = os.getpid()
        if self.step.initiates and not incarnation:
            until(lambda: self._told(), "the start")
            end.propose(PARTNER, self.coefficient)
        asked = 0
        while True:
            # It proposes whenever it is asked to, to the learner that is named.
            wanted = int(self.block.board_LC[VICTIM, Col.MIXED])
            if wanted > asked:
                asked = wanted
                end.propose(PARTNER if wanted % 2 else WITNESS, C)
            end.check()
            time.sleep(0.002)

    def _told(self) -> bool:
        try:
            return bool(os.eventfd_read(self.go))
        except BlockingIOError:
            return False

    @property
    def coefficient(self) -> float:
        return 0.75 if self.step.how == "refused" else C

    def begin(self) -> None:
        """Start the exchange in which the victim is struck."""
        if self.step.initiates:
            os.eventfd_write(self.go, 1)
        else:
            self.propose(PARTNER, VICTIM, self.coefficient)

    def propose(self, learner: int, peer: int, coefficient: float = C) -> None:
        self.asked[learner] += 1
        self.ends[learner].propose(peer, coefficient)

    def begun(self, learner: int) -> bool:
        """Say whether the exchange thread has taken up all that it was asked for, so that nothing begins any more."""
        counts = self.ends[learner].counts
        return counts.proposed + counts.busy + counts.nonfinite + counts.full >= self.asked[learner]

    def rows(self) -> torch.Tensor:
        rows_LN = torch.empty(LEARNERS, PARAMETERS)
        assert all(self.buffers.read(learner, rows_LN[learner]) for learner in range(LEARNERS))
        return rows_LN

    def exchange(self, first: int, second: int) -> None:
        """Let one of this process exchange with another, however often it has to ask."""
        end, before = self.ends[first], self.ends[first].counts.committed

        def try_again() -> bool:
            end.check()
            if self.begun(first) and second not in end.protocol.open and end.counts.committed == before:
                self.propose(first, second)
            return end.counts.committed > before

        until(try_again, f"an exchange of {first} with {second}")

    def exchange_from_victim(self) -> None:
        """Let the victim start one with each of the others."""
        for learner, odd in ((PARTNER, 1), (WITNESS, 0)):
            before, end = self.ends[learner].counts.applied, self.ends[learner]

            def try_again(end=end, before=before, odd=odd) -> bool:
                end.check()
                wanted = int(self.block.board_LC[VICTIM, Col.MIXED])
                if not end.protocol.open:
                    self.block.board_LC[VICTIM, Col.MIXED] = wanted + 1 + (wanted % 2 == odd)
                    time.sleep(DEADLINE_S)
                return end.counts.applied > before

            until(try_again, f"an exchange of the victim with {learner}")

    def settle(self) -> None:
        until(lambda: all(map(self.begun, self.ends)), "what was asked for to begin")
        until(lambda: not any(end.protocol.open for end in self.ends.values()), "the end of what is open")
        for end in self.ends.values():
            end.check()

    def close(self) -> None:
        if self.victim.poll() is None:
            self.victim.kill()
            self.victim.wait()
        for end in self.ends.values():
            end.close()
        self.block.remove()
        os.close(self.go)

    def assert_slots_free(self) -> None:
        assert not any(pinned for end in self.ends.values() for pinned in end.weights._pins)


@pytest.fixture
def company(tmp_path):
    made = []

    def make(step: Step, blow: signal.Signals) -> Company:
        made.append(Company(step, blow, tmp_path))
        return made[-1]

    yield make
    for each in made:
        each.close()


def assert_close(actual_N, expected_N):
    torch.testing.assert_close(actual_N.double(), expected_N.double(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("step", STEPS, ids=str)
def test_a_learner_killed_at_any_step_takes_at_most_one_counted_exchange_with_it(step, company):
    made = company(step, signal.SIGKILL)
    made.begin()
    until(lambda: made.victim.poll() is not None, "the kill")
    assert made.victim.returncode == -signal.SIGKILL
    made.calm()
    partner, witness = made.ends[PARTNER], made.ends[WITNESS]
    until(lambda: partner.present() == witness.present() == (PARTNER, WITNESS), "word of the death")
    made.settle()
    made.assert_slots_free()

    rows_LN, first_LN = made.rows(), made.first_LN
    moved_N = rows_LN[PARTNER] - first_LN[PARTNER]
    difference_N = C * (first_LN[VICTIM] - first_LN[PARTNER])
    counts = partner.counts
    assert counts.committed + counts.applied <= 1 and counts.torn <= counts.committed
    # The survivor has added its whole difference or nothing; so has the victim.
    assert_close(moved_N, (counts.committed + counts.applied) * difference_N)
    victim_moved = bool((rows_LN[VICTIM] != first_LN[VICTIM]).any())
    if counts.applied:
        assert victim_moved, "an acceptor adds only what its initiator has added"
    if victim_moved and (counts.committed or counts.applied):
        assert_close(rows_LN.sum(0), first_LN.sum(0))
    elif counts.committed:
        # Torn: the one case in which the survivors' sum moves by itself, by c (s_other - s_own), and it is counted.
        assert counts.torn == 1
        assert_close(rows_LN.sum(0) - first_LN.sum(0), difference_N)
    assert torch.equal(rows_LN[WITNESS], first_LN[WITNESS])

    for first, second in ((PARTNER, WITNESS), (WITNESS, PARTNER)):
        made.exchange(first, second)
    made.settle()
    assert_close(made.rows()[[PARTNER, WITNESS]].sum(0), rows_LN[[PARTNER, WITNESS]].sum(0))


@pytest.mark.parametrize("step", STEPS, ids=str)
def test_a_learner_frozen_at_any_step_holds_nobody_up_and_loses_nothing(step, company):
    made = company(step, signal.SIGSTOP)
    made.begin()
    until(lambda: stopped(made.victim.pid), "the freeze")
    made.calm()
    for first, second in ((PARTNER, WITNESS), (WITNESS, PARTNER)):
        made.exchange(first, second)
    assert stopped(made.victim.pid)
    os.kill(made.victim.pid, signal.SIGCONT)
    for learner in (PARTNER, WITNESS):
        made.exchange(learner, VICTIM)
    made.exchange_from_victim()
    made.settle()
    counts = [end.counts for end in made.ends.values()]
    assert [each.torn for each in counts] == [0, 0]

    # The victim's own end may still wait for DONE, its last addition is in its row by then.
    def sum_is_kept() -> bool:
        return bool((made.rows().sum(0) - made.first_LN.sum(0)).abs().max() < 1e-5)

    until(sum_is_kept, "the victim's last addition")
    made.assert_slots_free()


@pytest.mark.parametrize("step", STEPS[1::4], ids=str)
def test_one_that_returns_in_its_place_exchanges_again(step, company):
    made = company(step, signal.SIGKILL)
    made.begin()
    until(lambda: made.victim.poll() is not None, "the kill")
    made.calm()
    partner, witness = made.ends[PARTNER], made.ends[WITNESS]
    until(lambda: partner.present() == witness.present() == (PARTNER, WITNESS), "word of the death")
    Weights(made.buffers, VICTIM).replace(made.first_LN[VICTIM])
    before_N = made.rows().sum(0)
    made.victim = Forked(lambda: made._be_the_victim(lambda point: None, incarnation=1), made.folder / "again")
    until(lambda: VICTIM in partner.present() and VICTIM in witness.present(), "its return")
    for learner in (PARTNER, WITNESS):
        made.exchange(learner, VICTIM)
    made.exchange_from_victim()
    made.settle()
    until(lambda: bool((made.rows().sum(0) - before_N).abs().max() < 1e-5), "the victim's last addition")
    made.assert_slots_free()
