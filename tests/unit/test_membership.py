"""Beginning again: whose weights are taken, by how much the consensus jumps, and when healing is given up."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from antiphon.errors import LearnerError
from antiphon.learner.membership import HEALS, HEALS_STEPS, Healing, begin_again, jump_of, present
from antiphon.learner.notes import Notes, NotesReader
from antiphon.learner.replica import Replica
from antiphon.learner.weights import Weights
from antiphon.transport.block import Block, Col, Status

N = 4


@pytest.fixture
def block() -> Iterator[Block]:
    block = Block.create(4)
    buffers = block.allocate(N)
    block.board_LC[:, Col.PID], block.board_LC[:, Col.STATE] = os.getpid(), Status.JOINED
    for learner in range(4):
        buffers.weights_LN[learner] = float(learner)
    yield block
    block.remove()


def test_weights_come_from_the_nearest_neighbour_that_is_there_and_well(block: Block) -> None:
    weights = Weights(block.buffers, 1)
    block.board_LC[2, Col.STATE] = Status.FAILED
    block.buffers.weights_LN[3, 0] = float("inf")
    assert begin_again(block, 1, weights, shared=3) == 0
    assert weights.w_N.tolist() == [0.0] * N
    block.board_LC[2, Col.STATE] = Status.DRAINED
    assert begin_again(block, 1, weights, shared=3) == 2
    assert weights.w_N.tolist() == [2.0, 2.0, 2.0, 0.0], "moments begin at zero"


def test_without_anybody_who_is_well_there_is_nothing_to_begin_with(block: Block) -> None:
    block.board_LC[[0, 2], Col.STATE] = [Status.AWAY, Status.ABSENT]
    block.buffers.weights_LN[3] = float("nan")
    assert present(block) == [1, 3]
    with pytest.raises(LearnerError, match="learner 1: no other learner is there with finite weights"):
        begin_again(block, 1, Weights(block.buffers, 1), N)


def test_the_jump_is_that_of_the_mean(block: Block) -> None:
    with_all, without = block.buffers.consensus([0, 1, 2, 3])[0], block.buffers.consensus([0, 1, 2])[0]
    assert jump_of(block, 3) == pytest.approx(float((with_all - without).square().mean().sqrt())) == 0.5
    block.board_LC[3, Col.STATE] = Status.FAILED
    assert jump_of(block, 3) == pytest.approx(0.5), "whether it is still counted or not"
    block.board_LC[:3, Col.STATE] = Status.FAILED
    assert jump_of(block, 3) == 0.0


def test_weights_that_are_not_finite_do_not_count_in_the_consensus(block: Block) -> None:
    block.buffers.weights_LN[3] = float("nan")
    mean_N, distance = block.buffers.consensus([0, 1, 2, 3])
    assert mean_N.tolist() == [1.0] * N and distance == pytest.approx((2 / 3) ** 0.5)
    mean_N, distance = block.buffers.consensus([3])
    assert bool(mean_N.isnan().all()) and distance != distance


def test_healing_empties_the_optimizer_and_is_given_up_if_it_does_not_help(block: Block) -> None:
    model = nn.Linear(N, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    replica, weights = Replica(model, (optimizer,)), Weights(block.buffers, 1)
    replica.bind(weights.w_N)
    model(torch.ones(N)).backward()
    optimizer.step()
    healing = Healing(block, 1, replica, weights)
    for step in range(HEALS):
        weights.w_N.fill_(float("nan"))
        change = healing.heal(step)
        assert (change.change, change.source, change.step) == ("reseeded", 2, step)
        assert model.weight.tolist() == [[2.0] * N] and not optimizer.state
    with pytest.raises(LearnerError, match="training diverges; lower the learning rate"):
        healing.heal(HEALS_STEPS - 1)
    assert healing.heal(HEALS_STEPS).change == "reseeded" and healing.count == HEALS + 1


def test_half_a_note_of_one_that_was_killed_hides_no_other(tmp_path) -> None:
    reader, notes = NotesReader(tmp_path, 2), Notes(tmp_path, 0)
    assert reader.fresh() == []
    notes.write("metrics", steps=1)
    (tmp_path / "learner-0.jsonl").open("ab").write(b'{"event": "metr')
    assert [note["steps"] for note in reader.fresh()] == [1]
    notes.close()
    notes = Notes(tmp_path, 0)
    notes.write("metrics", steps=2)
    notes.write("metrics", steps=3)
    assert [note["steps"] for note in reader.fresh()] == [2, 3]
    notes.close()
    notes.write("metrics", steps=4)
    Notes(None, 0).write("metrics", steps=5)
    assert reader.fresh() == []
