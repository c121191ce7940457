"""Puts a learner's end together: the carriers to its peers, near and far, and the rounds, as its place asks for."""

from __future__ import annotations

from antiphon.transport.base import Carrier
from antiphon.transport.block import Block
from antiphon.transport.exchange import ExchangeTransport
from antiphon.transport.place import Place
from antiphon.transport.shared import SharedCarrier, SharedRounds, SharedWeights


def assemble(
    place: Place, block: Block, weights: SharedWeights, *, deadline_s: float = 0.25, timeout_s: float = 300.0
) -> ExchangeTransport:
    """Return a learner's end, not yet started.

    Args:
        place: which learner it is, of how many.
        block: its host's shared memory, with room for the weights.
        weights: its weights, over the block's buffers.
        deadline_s: how long the answer to a message of an exchange is waited for.
        timeout_s: how long a synchronous round may take.
    """
    peers = [peer for peer in range(place.learners) if peer != place.learner]
    carriers: list[Carrier] = [SharedCarrier(block, place.learner, peers, weights)] if peers else []
    rounds = SharedRounds(block, place.learner, weights, timeout_s)
    return ExchangeTransport(place.learner, weights, carriers, rounds, deadline_s)
