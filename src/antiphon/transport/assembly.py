"""Puts a learner's end together: the carriers to its peers, near and far, and the rounds, as its place asks for."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any
from typing import Protocol as Interface

from antiphon.transport.base import Carrier, Rounds
from antiphon.transport.block import Block, Link
from antiphon.transport.collectives import GroupRounds, gloo_group
from antiphon.transport.endpoint import WIRE, Endpoint, listening_port, read_secret, where_to_listen
from antiphon.transport.exchange import ExchangeTransport
from antiphon.transport.faults import FaultyCarrier, Script
from antiphon.transport.listener import Listener
from antiphon.transport.meeting import Entry, Roster, attend
from antiphon.transport.mirror import Mirror
from antiphon.transport.network import NetworkCarrier
from antiphon.transport.place import Place
from antiphon.transport.remote import NetworkWeights
from antiphon.transport.shared import SharedCarrier, SharedRounds, SharedWeights
from antiphon.transport.wire import wire_class

GATHER_S = 300.0


class EndWeights(SharedWeights, NetworkWeights, Interface):
    """What is asked of a learner's weights."""


@dataclass
class Met:
    """What the learners of several hosts know of each other once they have met."""

    roster: Roster
    secret: bytes
    listener: Listener
    endpoint: Endpoint
    store: Any


@dataclass
class End:
    """A learner's end of everything."""

    transport: ExchangeTransport
    mirror: Mirror | None = None
    """Where there are other hosts."""
    met: Met | None = None

    def over(self) -> None:
        """All have joined: nobody needs the meeting's store any more, and learner 0, should it serve it, may stop."""
        if self.met:
            self.met.endpoint.release()
        self.met = None


def gather(place: Place, timeout_s: float = GATHER_S) -> None:
    """Wait until learner 0 is there, and all others, where there are several hosts: what it wrote can now be read.

    Raises:
        ArgumentError: something that is needed is not named.
        DeadlineError: somebody did not come.
        LearnerError: the meeting broke off.
    """
    if place.hosts > 1:
        entry = Entry(place.learners, place.host, 0, [])
        attend(Endpoint.find(), read_secret(), place.learner, entry, timeout_s, "gather")


def meet(place: Place, block: Block, parameters: int, timeout_s: float) -> Met | None:
    """Meet the learners of all hosts, and note in this host's block who runs where; None where there is one host.

    Args:
        place: which learner this is.
        block: this host's shared memory.
        parameters: how many elements its vector has; all must have as many.
        timeout_s: how long to wait for the others.

    Raises:
        ArgumentError: something that is needed is not named, or learners do not agree on what they are to run.
        DeadlineError: somebody did not come.
        LearnerError: the meeting broke off.
    """
    if place.hosts == 1:
        return None
    secret, endpoint, wire = read_secret(), Endpoint.find(), os.environ.get(WIRE, "float32")
    wire_class(wire)
    listener = Listener(where_to_listen(endpoint), listening_port(place.local_rank))
    entry = Entry(place.learners, place.host, parameters, listener.addresses, wire)
    try:
        roster, store = attend(endpoint, secret, place.learner, entry, timeout_s)
    except BaseException:
        listener.close()
        raise
    block.links_LC[:, Link.HOST] = [each.host for each in roster.entries]
    return Met(roster, secret, listener, endpoint, store)


def assemble(
    place: Place,
    block: Block,
    weights: EndWeights,
    met: Met | None = None,
    *,
    script: Script | None = None,
    waits: bool = False,
    deadline_s: float = 0.25,
    timeout_s: float = 300.0,
) -> End:
    """Return a learner's end, not yet started.

    Args:
        place: which learner it is, of how many.
        block: its host's shared memory, with room for the weights.
        weights: its weights, over the block's buffers.
        met: what the meeting came to, where there are several hosts.
        script: faults on purpose.
        waits: whether its strategy goes in rounds, which on several hosts take a process group.
        deadline_s: how long the answer to a message of an exchange is waited for.
        timeout_s: how long a synchronous round may take.
    """
    learner = place.learner
    near = [peer for peer in block.local if peer != learner]
    carriers: list[Carrier] = [SharedCarrier(block, learner, near, weights)] if near else []
    mirror: Mirror | None = None
    rounds: Rounds = SharedRounds(block, learner, weights, timeout_s)
    if met:
        network = _network(place, block, weights, met)
        mirror = Mirror(block, learner, network, place.incarnation)
        carriers.append(network)
        if waits:
            rounds = _rounds(place, block, weights, met, timeout_s)
    if script:
        carriers = [FaultyCarrier(carrier, script.at, script.fates) for carrier in carriers]
    # In this order: as it closes, the mirror has last words for the network to carry.
    everything = [mirror, *carriers] if mirror else carriers
    transport = ExchangeTransport(learner, weights, everything, rounds, deadline_s, place.incarnation)
    return End(transport, mirror, met)


def _network(place: Place, block: Block, weights: EndWeights, met: Met) -> NetworkCarrier:
    addresses = {peer: met.roster.entries[peer].addresses for peer in block.remote}
    run = bytes.fromhex(met.roster.run)
    return NetworkCarrier(
        place.learner,
        block.remote,
        weights,
        met.listener,
        addresses,
        met.secret,
        run,
        wire=met.roster.entries[place.learner].wire,
        incarnation=place.incarnation,
    )


def _rounds(place: Place, block: Block, weights: EndWeights, met: Met, timeout_s: float) -> Rounds:
    address = met.listener.addresses[0][0]
    group = gloo_group(met.store, met.roster.run, place.learner, place.learners, address, timeout_s)
    return GroupRounds(block, place.learner, weights, group, timeout_s)
