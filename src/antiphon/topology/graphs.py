"""Rings of learners, fixed and permuted.

Learners are numbered from 0. Every function takes the learners that are present, so that a ring closes over the gap
that a missing learner leaves.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from antiphon.errors import ArgumentError


def ring_neighbours(ring: Sequence[int], learner: int) -> tuple[int, ...]:
    """Return the neighbours of ``learner`` in ``ring``, right one first: none, one or two of them.

    >>> ring_neighbours([0, 1, 2, 3], 3), ring_neighbours([0, 1], 0), ring_neighbours([0], 0)
    ((0, 2), (1,), ())
    """
    place = ring.index(learner)
    right, left = ring[(place + 1) % len(ring)], ring[place - 1]
    return tuple(dict.fromkeys(peer for peer in (right, left) if peer != learner))


def successor(ring: Sequence[int], learner: int) -> int | None:
    """Return the right neighbour of ``learner`` in ``ring``, or None where it is alone.

    >>> successor([2, 0, 1], 1), successor([1], 1)
    (2, None)
    """
    return next(iter(ring_neighbours(ring, learner)), None)


def permuted(learners: Sequence[int], seed: int, round: int) -> list[int]:
    """Return the learners in the order of the random ring of one round: a function of (seed, round) alone.

    >>> permuted(range(4), seed=0, round=7) == permuted([3, 2, 1, 0], seed=0, round=7)
    True
    """
    ring = sorted(learners)
    random.Random(f"{seed}/{round}").shuffle(ring)
    return ring


def ring_coefficient(learners: int) -> float:
    """Return the weight c of an edge of a ring: 1/2 for the one edge of two learners, 1/3 for more, 0 for one.

    Source: the matrix T_1 of arXiv 2110.11199, with the rings of 1, 2 and 3 learners as its limits.

    Raises:
        ArgumentError: ``learners`` is below 1.
    """
    if learners < 1:
        raise ArgumentError(f"learners must be at least 1, not {learners}")
    return (0.0, 1 / 2)[learners - 1] if learners < 3 else 1 / 3
