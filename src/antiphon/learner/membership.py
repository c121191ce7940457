"""Beginning again with a neighbour's weights: a learner that comes late, returns after its process died, or heals.

    w <- w_j + D_j,   D <- 0,   optimizer state <- empty            j: the nearest learner whose weights can be had

The consensus model is the mean of those present, so it jumps by (w - mean of the others) / L' when a learner with the
weights w comes to be one of L', or goes; that is noted.
"""

from __future__ import annotations

import math
import os
from collections import deque
from dataclasses import dataclass

import torch

from antiphon.errors import ArgumentError, LearnerError
from antiphon.learner.replica import Replica
from antiphon.learner.staged import weights_on
from antiphon.learner.weights import Weights
from antiphon.transport.block import Block, Col, Head, Status, wait_for
from antiphon.transport.mirror import collect

DAY_S = 24 * 3600.0
HEALS, HEALS_STEPS = 3, 100
"""A learner that heals so many times within so many steps does not get well."""


@dataclass(frozen=True)
class Change:
    """Something that happened to who is present: fields of the ``membership`` event in docs/formats.md."""

    learner: int
    change: str
    """``joined``, ``returned``, ``reseeded`` or ``left``."""
    step: int
    source: int | None
    """The learner whose weights it has taken."""
    jump: float
    """RMS over parameters by which the mean of those present has moved."""


def present(block: Block) -> list[int]:
    """Return the learners whose weights count."""
    return [n for n in range(block.learners) if block.board_LC[n, Col.STATE] != Status.ABSENT and not block.dead(n)]


def jump_of(block: Block, learner: int) -> float:
    """Return by how much the mean of those present moves (RMS) when a learner comes to be one of them, or goes."""
    assert block.buffers is not None
    others = [n for n in present(block) if n != learner]
    if not others:
        return 0.0
    mean_N, _ = block.buffers.consensus(others)
    own_N = torch.empty_like(mean_N)
    block.buffers.read(learner, own_N)
    distance = torch.linalg.vector_norm(own_N.sub_(mean_N), dtype=torch.float64)
    return float(distance) / (math.sqrt(len(own_N)) * (len(others) + 1))


def begin_again(block: Block, learner: int, weights: Weights, shared: int) -> int:
    """Take over a neighbour's weights, and return whose.

    Args:
        block: the run's memory on this host.
        learner: this one.
        weights: its weights, whatever they are.
        shared: how many elements of the vector are taken; those behind, first moments, begin at zero.

    Raises:
        LearnerError: no other learner has finite weights.
    """
    assert block.buffers is not None
    vector_N = torch.empty(weights.w_N.numel())
    ring = [(learner + k) % block.learners for k in range(1, block.learners)]
    for near in (True, False):
        there = [other for other in ring if other in present(block) and block.is_local(other) == near]
        missing = collect(block) if there and not near else []
        for other in there:
            if other in missing or not block.buffers.read(other, vector_N) or not bool(vector_N.sum().isfinite()):
                continue
            vector_N[shared:] = 0.0
            weights.replace(vector_N)
            return other
    raise LearnerError(f"learner {learner}: no other learner is there with finite weights to begin again with")


def come_later(
    block: Block, learner: int, replica: Replica, incarnation: int, at_step: int, timeout_s: float
) -> tuple[Weights, Change]:
    """Join a run that has begun, with a neighbour's weights.

    Args:
        block: the run's memory on this host.
        learner: its number.
        replica: the model and its optimizers.
        incarnation: how many processes were this learner before; 0 for one that comes in late.
        at_step: the number of steps of all learners to wait for; 0 to come at once.
        timeout_s: how long to wait for the run to begin.

    Raises:
        ArgumentError: this process has joined before, or the learners' models differ.
        LearnerError: there is nobody to begin with.
    """
    row_C, board_LC = block.board_LC[learner], block.board_LC
    if row_C[Col.STATE] != (Status.FAILED if incarnation else Status.ABSENT):
        raise ArgumentError("this process has had its Learner already: a run is made of one for each process")
    if not incarnation:
        row_C[Col.STATE] = Status.AWAY
    wait_for(lambda: bool(block.head[Head.READY]), timeout_s, "learner 0's weights")
    if block.head[Head.PARAMETERS] != replica.layout.size:
        raise ArgumentError(
            f"learner {learner} has {replica.layout.size} parameters, learner 0 has {block.head[Head.PARAMETERS]}:"
            " all must build the same model, and make its Learner alike"
        )
    wait_for(
        lambda: int(board_LC[:, Col.STEPS].sum()) >= at_step or not _working(block),
        DAY_S,
        f"the others to make {at_step} steps",
    )
    weights = weights_on(replica.device, block.allocate(replica.layout.size), learner)
    source = begin_again(block, learner, weights, replica.layout.shared)
    replica.bind(weights.w_N)
    row_C[Col.PID] = os.getpid()
    change = "returned" if incarnation else "joined"
    return weights, Change(learner, change, int(row_C[Col.STEPS]), source, jump_of(block, learner))


def _working(block: Block) -> bool:
    """Say whether anybody has work to do, or is still to join."""
    states_L = block.board_LC[:, Col.STATE]
    return any(states_L[n] in (Status.ABSENT, Status.JOINED) and not block.dead(n) for n in range(block.learners))


class Healing:
    """Gives a learner whose weights are not finite those of a neighbour; until then it sends nothing."""

    def __init__(self, block: Block, learner: int, replica: Replica, weights: Weights) -> None:
        self.block, self.learner, self.replica, self.weights = block, learner, replica, weights
        self.count = 0
        self._at: deque[int] = deque(maxlen=HEALS)

    def heal(self, step: int) -> Change:
        """Begin again, before the gradient of ``step``.

        Raises:
            LearnerError: it has healed too often of late, or nobody else is well.
        """
        if len(self._at) == HEALS and step - self._at[0] < HEALS_STEPS:
            raise LearnerError(
                f"learner {self.learner}: its weights were not finite, and {HEALS} times before within the last"
                f" {HEALS_STEPS} steps: training diverges; lower the learning rate, or clip gradients more"
            )
        self._at.append(step)
        self.count += 1
        source = begin_again(self.block, self.learner, self.weights, self.replica.layout.shared)
        self.replica.restart()
        return Change(self.learner, "reseeded", step, source, jump_of(self.block, self.learner))
