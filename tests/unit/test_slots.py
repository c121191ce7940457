"""Peers that freeze amid an exchange pin a slot each, and isolate nobody."""

from __future__ import annotations

import pytest
import torch

from antiphon.learner.weights import Weights
from antiphon.transport import buffers as module
from antiphon.transport.block import Block
from antiphon.transport.buffers import SLOTS, Buffers, slots_of
from antiphon.transport.protocol import ExchangeProtocol, Kind, Message

N = 3


class Host:
    """Learners whose protocols the test drives, and their messages to each other."""

    def __init__(self, learners: int) -> None:
        buffers = Buffers.in_process(learners, N)
        buffers.weights_LN.copy_(torch.arange(learners)[:, None].expand(learners, N))
        self.weights = [Weights(buffers, learner) for learner in range(learners)]
        self.mail: dict[int, list[Message]] = {learner: [] for learner in range(learners)}
        self.ends = [
            ExchangeProtocol(learner, weights, lambda peer, message: self.mail[peer].append(message))
            for learner, weights in enumerate(self.weights)
        ]

    def hear(self, learner: int, now: float) -> list[Kind]:
        """Let a learner take in what it has been sent."""
        heard, self.mail[learner] = self.mail[learner], []
        for message in heard:
            self.ends[learner].receive(message, now)
        return [message.kind for message in heard]


def all_but_one_freeze(learners: int) -> tuple[Host, float]:
    """All but the last of learner 0's peers propose to it, one after the other, and freeze before it answers."""
    host, now = Host(learners), 0.0
    for peer in range(1, learners - 1):
        host.ends[peer].propose(0, 1 / 3, now)
        host.hear(0, now)
        now += 0.3
        host.ends[0].tick(now)
    return host, now


@pytest.mark.parametrize("learners", [5, 6, 9])
def test_peers_that_freeze_amid_an_exchange_do_not_isolate_a_learner(learners: int) -> None:
    host, now = all_but_one_freeze(learners)
    assert len(host.ends[0].open) == learners - 2
    last = learners - 1
    assert host.ends[0].propose(last, 0.5, now)
    for learner in (last, 0, last, 0):
        host.hear(learner, now)
    assert host.ends[0].counts.committed == 1 and host.ends[0].counts.full == 0
    torch.testing.assert_close(host.weights[0].snapshot(), torch.full((N,), last / 2))
    # Back again, the frozen ones end what they began, and the sum is what it was.
    for turn in range(8):
        for learner in range(learners):
            host.hear(learner, now)
        now += 0.3
        for end in host.ends if turn < 4 else []:
            end.tick(now)
    assert not any(end.open for end in host.ends)
    total_N = sum(weights.snapshot() for weights in host.weights)
    torch.testing.assert_close(total_N, torch.full((N,), float(sum(range(learners)))))


def test_with_three_slots_they_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "slots_of", lambda learners: SLOTS)
    host, now = all_but_one_freeze(5)
    assert not host.ends[0].propose(4, 0.5, now)
    assert host.ends[0].counts.full == 1 and host.ends[0].counts.nonfinite == 0


def test_slots_that_are_not_written_cost_no_memory() -> None:
    learners, parameters = 9, 1 << 20
    block = Block.create(learners)
    try:
        buffers = block.allocate(parameters)
        assert buffers.slots_LSN.shape == (learners, slots_of(learners), parameters) == (9, 8, parameters)
        weights = Weights(buffers, 4)
        for _ in range(5):
            weights.release(weights.take())
        used_bytes = (block.folder / "block").stat().st_blocks * 512
        assert 4 * parameters <= used_bytes < 2.5 * 4 * parameters
    finally:
        block.remove()
