"""One file a strategy: events in, actions out. No I/O, threads or clocks.

To add one: write its file, and name its class in ``STRATEGIES``; the conformance suite then runs on it unasked.
"""

from __future__ import annotations

from antiphon.errors import unknown_name
from antiphon.strategies.allreduce import Allreduce
from antiphon.strategies.base import Strategy
from antiphon.strategies.delay_by_one import DelayByOne
from antiphon.strategies.fixed_ring import FixedRing
from antiphon.strategies.random_ring import RandomRing
from antiphon.strategies.sync_ring import SyncRing

STRATEGIES: dict[str, type[Strategy]] = {
    kind.name: kind for kind in (Allreduce, SyncRing, FixedRing, RandomRing, DelayByOne)
}


def strategy_class(name: str) -> type[Strategy]:
    """Return the strategy registered under ``name``.

    Raises:
        ArgumentError: there is none; the nearest name is offered.
    """
    if name not in STRATEGIES:
        raise unknown_name("strategy", name, STRATEGIES)
    return STRATEGIES[name]
