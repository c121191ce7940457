"""How often an asynchronous learner starts an exchange: after every K-th of its steps."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable

from antiphon.errors import ArgumentError

LONGEST = 64
SHARE = 0.05
"""The share of a learner's time that exchanging may cost where K is chosen automatically."""
FIRST_LOOK, LOOK = 20, 100
"""Steps before K is first chosen, and between two choices."""
CROWDED = 0.9
"""From this share of all cores on, what an exchange thread computes is taken from a computing thread."""


class Pace:
    """Says after which steps to ask the strategy for exchanges.

    Exchanges cost a step what is folded into its weights by the computing thread, and what the exchange thread
    computes, unless a core is free for that. Automatically K = ceil(cost of an exchange / (share x time of a step)),
    within 1..64, from times measured over some hundred steps, smoothed by halves.

    The strategy is asked by the number of the exchange, not of the step: the sequence of peers, and what each
    exchange contracts, are the same for any K.

    Args:
        every: K, or ``"auto"``.
        learners: how many share this host's cores; they are taken to be alike.
        waits: whether the strategy goes in rounds, which cannot be left out.
        share: what exchanges may cost, of the time.
        clock: wall seconds.
        cpu_clock: CPU seconds of this process.

    Raises:
        ArgumentError: K outside 1..64, or more than 1 for a strategy that waits.

    >>> pace = Pace(3, learners=2)
    >>> [pace.due(0.0, 0.0) for _ in range(7)]
    [0, None, None, 1, None, None, 2]
    """

    def __init__(
        self,
        every: int | str,
        learners: int,
        waits: bool = False,
        share: float = SHARE,
        clock: Callable[[], float] = time.perf_counter,
        cpu_clock: Callable[[], float] = time.process_time,
    ) -> None:
        self._auto = every == "auto"
        if not self._auto and not (isinstance(every, int) and 1 <= every <= LONGEST):
            raise ArgumentError(f"exchange_every must be 'auto', or a whole number from 1 to {LONGEST}, not {every!r}")
        if waits and every not in ("auto", 1):
            raise ArgumentError(
                f"exchange_every must be 1, not {every}, for a strategy whose learners meet in every round:"
                " choose an asynchronous one, such as random-ring"
            )
        self.every = every if isinstance(every, int) else 1
        """K, at present."""
        self._auto = self._auto and not waits
        self._learners, self._share, self._clock, self._cpu_clock = learners, share, clock, cpu_clock
        self._cores = len(os.sched_getaffinity(0))
        self._asked, self._to_go = 0, 1
        self._steps, self._look_at = 0, FIRST_LOOK
        self._cost_s: float | None = None
        self._mark = (clock(), cpu_clock(), 0.0, 0.0, 0, 0)

    def due(self, fold_s: float, exchange_s: float) -> int | None:
        """Take note of a step; return the number of the exchange to be started after it, or None.

        Args:
            fold_s: seconds that folding has taken in all.
            exchange_s: CPU seconds that the exchange thread has taken in all.
        """
        self._steps += 1
        if self._auto and self._steps >= self._look_at:
            self._choose(fold_s, exchange_s)
        self._to_go -= 1
        if self._to_go > 0:
            return None
        self._to_go, self._asked = self.every, self._asked + 1
        return self._asked - 1

    def _choose(self, fold_s: float, exchange_s: float) -> None:
        now = (self._clock(), self._cpu_clock(), fold_s, exchange_s, self._steps, self._asked)
        wall_s, cpu_s, fold_s, exchange_s, steps, asked = (a - b for a, b in zip(now, self._mark, strict=True))
        self._mark, self._look_at = now, self._steps + LOOK
        crowded = self._learners * cpu_s >= CROWDED * self._cores * wall_s
        cost_s = (fold_s + (exchange_s if crowded else 0.0)) / max(1, asked)
        self._cost_s = cost_s if self._cost_s is None else (self._cost_s + cost_s) / 2
        self.every = min(LONGEST, max(1, math.ceil(self._cost_s * steps / (self._share * wall_s))))
        self._to_go = min(self._to_go, self.every)
