"""Scripted faults as a learner's own steps meet them (`transport.faults` says which there are)."""

from __future__ import annotations

import random
from collections.abc import Callable

from antiphon.learner.replica import Replica
from antiphon.learner.weights import Weights
from antiphon.transport.block import Block, Col
from antiphon.transport.faults import Script, script_of
from antiphon.transport.place import Place


class Injected:
    """One learner's script, bound to its weights.

    Args:
        script: its faults.
        seed: of random times.
    """

    def __init__(self, script: Script, seed: int) -> None:
        self.script = script
        self.leaving = False
        """Whether it is to leave before the end."""
        self._jitter_s = 0.0
        self._draw = random.Random(seed)

    @classmethod
    def find(cls, place: Place, block: Block, waits: bool, step: Callable[[], int], seed: int) -> Injected:
        """Read the environment; of a learner of several ranks, the first has the faults."""
        if place.rank:
            return cls(Script([], place.learner, step), seed)
        returned_at = int(block.board_LC[place.learner, Col.STEPS]) if place.incarnation else None
        return cls(script_of(place.learner, place.learners, waits, step, returned_at), seed + place.learner)

    def begin_step(self, weights: Weights, replica: Replica) -> None:
        """Let happen what is due as a step begins."""
        self.script.at("")
        if self.script.take("nan"):
            weights.begin_step()
            weights.w_N.fill_(float("nan"))
            weights.end_step(fold=False)
            replica.scatter()
        if fault := self.script.take("jitter"):
            self._jitter_s = fault.seconds

    def end_step(self) -> None:
        """Let happen what is due as a step has ended."""
        self.leaving = self.leaving or self.script.take("leave") is not None

    def delay_s(self) -> float:
        """Return how much longer the step in hand takes."""
        return self._draw.expovariate(1.0 / self._jitter_s) if self._jitter_s else 0.0
