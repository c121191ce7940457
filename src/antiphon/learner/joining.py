"""How a learner joins its run: its weights move into shared memory, and all of them wait until all are there."""

from __future__ import annotations

import os

from antiphon.errors import ArgumentError
from antiphon.learner.replica import Replica
from antiphon.learner.staged import weights_on
from antiphon.learner.weights import Weights
from antiphon.transport.block import Block, Col, Head, Status, wait_for


def join(block: Block, learner: int, replica: Replica, waits: bool, timeout_s: float) -> Weights:
    """Lay a model into its learner's weights; all begin with the weights and averaged buffers of learner 0.

    Args:
        block: the run's memory on this host.
        learner: its number.
        replica: the model and its optimizers.
        waits: whether the strategy cannot do without the others.
        timeout_s: how long learner 0's weights are waited for.

    Raises:
        ArgumentError: this process has joined before, or the learners' models differ.
        DeadlineError: learner 0 did not come in time.
        LearnerError: a learner ended before the run began.
    """
    row_C, count = block.board_LC[learner], replica.layout.size
    if row_C[Col.STATE] != Status.ABSENT:
        raise ArgumentError("this process has had its Learner already: a run is made of one for each process")
    row_C[Col.PID], row_C[Col.WAITS] = os.getpid(), waits
    if learner == 0:
        block.head[Head.PARAMETERS] = count
    else:
        wait_for(lambda: bool(block.head[Head.READY]), timeout_s, "learner 0's weights", lambda: _missing(block))
        if block.head[Head.PARAMETERS] != count:
            raise ArgumentError(
                f"learner {learner} has {count} parameters, learner 0 has {block.head[Head.PARAMETERS]}:"
                " all must build the same model, and make its Learner alike"
            )
    buffers = block.allocate(count)
    weights = weights_on(replica.device, buffers, learner)
    if learner == 0:
        replica.fill(weights.w_N)
        weights.publish()
        block.head[Head.READY] = 1
    else:
        # First moments are each learner's own.
        shared = replica.layout.shared
        weights.w_N[:shared].copy_(buffers.weights_LN[0, :shared])
    replica.bind(weights.w_N)
    weights.publish()
    return weights


def wait_for_all(block: Block, learner: int, timeout_s: float) -> None:
    """Say that this learner is ready, and wait until all are.

    Raises:
        DeadlineError: one did not come in time.
        LearnerError: one ended before.
    """
    states_L = block.board_LC[:, Col.STATE]
    states_L[learner] = Status.JOINED
    wait_for(
        lambda: bool((states_L >= Status.JOINED).all()),
        timeout_s,
        f"all {block.learners} learners to be ready",
        lambda: _missing(block),
    )


def _missing(block: Block) -> str | None:
    gone = [learner for learner in range(block.learners) if block.dead(learner)]
    dead = [learner for learner in gone if block.board_LC[learner, Col.STATE] != Status.AWAY]
    return f"learners {dead} ended before the run began" if dead else None
