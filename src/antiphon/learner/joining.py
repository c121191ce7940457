"""How a learner joins its run: its weights move into shared memory, and all of them wait until all are there."""

from __future__ import annotations

import os

from antiphon.errors import ArgumentError
from antiphon.learner.replica import Replica
from antiphon.learner.staged import weights_on
from antiphon.learner.weights import Weights
from antiphon.transport.assembly import End
from antiphon.transport.block import Block, Col, Head, Status, wait_for


def join(block: Block, learner: int, replica: Replica, waits: bool, timeout_s: float) -> Weights:
    """Make a learner known on its host, and make room for its weights; those of learner 0 are those of its model.

    Args:
        block: the run's memory on this host.
        learner: its number.
        replica: the model and its optimizers.
        waits: whether the strategy cannot do without the others.
        timeout_s: how long the others on this host are waited for.

    Raises:
        ArgumentError: this process has joined before, or the learners' models differ.
        DeadlineError: the first learner of this host did not come in time.
        LearnerError: a learner ended before the run began.
    """
    row_C, count = block.board_LC[learner], replica.layout.size
    if row_C[Col.STATE] != Status.ABSENT:
        raise ArgumentError("this process has had its Learner already: a run is made of one for each process")
    row_C[Col.PID], row_C[Col.WAITS] = os.getpid(), waits
    first = block.local[0]
    if learner == first:
        block.head[Head.PARAMETERS] = count
    else:
        wait_for(
            lambda: bool(block.head[Head.PARAMETERS]), timeout_s, f"learner {first}'s model", lambda: _missing(block)
        )
        if block.head[Head.PARAMETERS] != count:
            raise ArgumentError(
                f"learner {learner} has {count} parameters, learner {first} has {block.head[Head.PARAMETERS]}:"
                " all must build the same model, and make its Learner alike"
            )
    weights = weights_on(replica.device, block.allocate(count), learner)
    if learner == 0:
        replica.fill(weights.w_N)
        weights.publish()
        block.head[Head.READY] = 1
    return weights


def begin(
    block: Block, learner: int, replica: Replica, weights: Weights, end: End, timeout_s: float, late: bool = False
) -> None:
    """Take over learner 0's weights and averaged buffers, wait until all are ready, and let exchanges begin.

    On several hosts the first learner of each fetches the weights, so its end has to be at work before.

    Args:
        block: the run's memory on this host.
        learner: its number.
        replica: the model and its optimizers.
        weights: what `join` returned.
        end: the learner's end of everything.
        timeout_s: how long the others are waited for.
        late: whether the run has begun already, and this learner has its weights.

    Raises:
        DeadlineError: one did not come in time.
        LearnerError: one ended before.
    """
    mirror, alive = end.mirror, lambda: _missing(block)
    if mirror:
        near = block.local
        wait_for(lambda: bool(block.board_LC[near, Col.PID].all()), timeout_s, f"learners {near} of this host", alive)
        end.transport.start()
        if learner == near[0] and not block.head[Head.READY]:
            mirror.fetch(0, timeout_s)
            block.head[Head.READY] = 1
    if not late:
        _take_first(block, learner, replica, weights, timeout_s)
    block.board_LC[learner, Col.STATE] = Status.JOINED
    states_L = block.board_LC[:, Col.STATE]
    everybody = f"all {block.learners} learners to be ready"
    wait_for(lambda: bool((states_L >= Status.JOINED).all()), timeout_s, everybody, alive)
    if not mirror:
        end.transport.start()
    end.over()


def _take_first(block: Block, learner: int, replica: Replica, weights: Weights, timeout_s: float) -> None:
    if learner > 0:
        wait_for(lambda: bool(block.head[Head.READY]), timeout_s, "learner 0's weights", lambda: _missing(block))
        assert block.buffers is not None
        # First moments are each learner's own.
        shared = replica.layout.shared
        weights.w_N[:shared].copy_(block.buffers.weights_LN[0, :shared])
    replica.bind(weights.w_N)
    weights.publish()


def _missing(block: Block) -> str | None:
    gone = [learner for learner in range(block.learners) if block.dead(learner)]
    dead = [learner for learner in gone if block.board_LC[learner, Col.STATE] != Status.AWAY]
    return f"learners {dead} ended before the run began" if dead else None
