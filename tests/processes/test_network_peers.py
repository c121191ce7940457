"""A peer across the network that is frozen or killed, as a process, amid a transfer or between two."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import pytest
import torch
from forked import Forked, until

from antiphon.learner.weights import Weights
from antiphon.transport.base import Rounds
from antiphon.transport.block import Block
from antiphon.transport.exchange import ExchangeTransport
from antiphon.transport.network import Listener, NetworkCarrier

PARAMETERS = 8_000_000
WHEN = ("between exchanges", "amid a transfer")


class NoRounds(Rounds):
    """For learners that exchange only."""

    def start_mix(self, round, coefficients):
        raise AssertionError("no rounds here")

    finish_mix = start_average = finish_average = start_mix


class Here:
    """Learner 0, in this process; learner 1 runs in a fork, over the same memory, so that the sum can be read."""

    def __init__(self, tmp_path):
        self.block = Block.create(2)
        self.buffers = self.block.allocate(PARAMETERS)
        self.buffers.weights_LN[1] = 1.0
        listeners = [Listener(["127.0.0.1"]) for _ in range(2)]

        def be_the_other():
            listeners[0].close()
            self._end(1, listeners).start()
            while True:
                time.sleep(1.0)

        self.other = Forked(be_the_other, tmp_path / "log")
        listeners[1].close()
        self.transport = self._end(0, listeners)
        self.carrier, self.lost = self.transport.carriers[0], []
        self.carrier.on_lost = self.lost.append
        self.transport.start()
        until(lambda: self.carrier.connected(1), "the other learner")

    def _end(self, learner, listeners):
        self.weights = Weights(self.buffers, learner)
        addresses = {1 - learner: listeners[1 - learner].addresses}
        carrier = NetworkCarrier(
            learner, [1 - learner], self.weights, listeners[learner], addresses, b"a secret of some length", b"run"
        )
        return ExchangeTransport(learner, self.weights, [carrier], NoRounds(), deadline_s=1.0)

    def sum(self):
        row_N = torch.empty(PARAMETERS)
        assert self.buffers.read(1, row_N)
        return float(self.weights.snapshot().double().sum() + row_N.double().sum())

    def over(self):
        self.transport.check()
        return not self.transport.protocol.open

    def exchange(self):
        before = self.weights.additions

        def try_again():
            if self.over():
                self.transport.propose(1, 0.5)
            return self.weights.additions > before

        until(try_again, "an exchange")
        until(self.over, "the end of the exchange")

    def strike(self, when, blow):
        """Let a signal hit the other, in an exchange or out of one."""
        self.exchange()
        if when == "amid a transfer":
            read = self.carrier.bytes_read
            self.transport.propose(1, 0.5)
            until(lambda: self.carrier.bytes_read > read, "a part of the other's snapshot")
        os.kill(self.other.pid, blow)


@pytest.fixture
def here(tmp_path):
    here = Here(tmp_path)
    yield here
    with contextlib.suppress(ProcessLookupError):
        here.other.kill()
    here.transport.close()
    here.block.remove()


@pytest.mark.parametrize("when", WHEN)
def test_a_frozen_peer_is_not_gone_and_goes_on_when_it_thaws(here, when):
    before = here.sum()
    here.strike(when, signal.SIGSTOP)
    # It lets a deadline pass: left out of the ring, yet not gone. One that had decided leaves this end in doubt.
    if here.over():
        here.transport.propose(1, 0.5)
    until(lambda: here.transport.counts.late or here.transport.counts.committed > 1, "the deadline")
    assert not here.lost
    os.kill(here.other.pid, signal.SIGCONT)
    until(here.over, "the end of what was in flight")
    here.exchange()
    assert not here.lost
    assert here.transport.counts.torn == 0
    assert abs(here.sum() - before) < 1e-7 * PARAMETERS


@pytest.mark.parametrize("when", WHEN)
def test_a_killed_peer_is_gone_at_once_and_leaves_nothing_open(here, when):
    here.strike(when, signal.SIGKILL)
    until(lambda: here.lost == [1], "word of the other's end")
    until(here.over, "the end of what was in flight")
    assert here.transport.present() == (0,)
    assert torch.isfinite(here.weights.snapshot()).all()
    # Nothing of the dead peer's exchange is pinned any more.
    slots = here.buffers.slots_LSN.shape[1]
    assert None not in [here.weights.take() for _ in range(slots)]
