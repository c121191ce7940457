"""Where a process stands: which learner it is, of how many, and where their run's shared memory is."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from antiphon.errors import ArgumentError
from antiphon.transport.block import Block
from antiphon.transport.exchange import ExchangeTransport
from antiphon.transport.shared import SharedCarrier, SharedRounds, SharedWeights

RUN, LEARNER, LEARNERS = "ANTIPHON_RUN", "ANTIPHON_LEARNER", "ANTIPHON_LEARNERS"


@dataclass(frozen=True)
class Place:
    """Learner ``learner`` of ``learners``; ``folder`` is the run's private folder, None for a learner alone."""

    learner: int = 0
    learners: int = 1
    folder: Path | None = None
    creates: bool = True
    """Whether this process makes the shared memory; under Antiphon's own launch the launcher does."""

    @classmethod
    def find(cls, environment: Mapping[str, str] = os.environ) -> Place:
        """Read the environment: Antiphon's own launch, else torchrun's (one host), else a learner alone.

        Raises:
            ArgumentError: the variables contradict each other, or torchrun spans several hosts.
        """
        if RUN in environment:
            learner, learners = (_number(environment, name) for name in (LEARNER, LEARNERS))
            place = cls(learner, learners, Path(environment[RUN]), creates=False)
        elif "RANK" in environment and "WORLD_SIZE" in environment:
            learner, learners = (_number(environment, name) for name in ("RANK", "WORLD_SIZE"))
            if _number(environment, "LOCAL_WORLD_SIZE", str(learners)) != learners:
                raise ArgumentError(
                    "torchrun spans several hosts, and this version exchanges over shared memory only:"
                    " start all learners on one host (--nnodes 1)"
                )
            place = cls(learner, learners, torchrun_folder(environment), creates=learner == 0)
        else:
            return cls()
        if not 0 <= place.learner < place.learners:
            raise ArgumentError(f"learner {place.learner} of {place.learners}: numbers run from 0 to learners - 1")
        return place

    def environment(self) -> dict[str, str]:
        """Return the variables by which a process finds this place."""
        return {RUN: str(self.folder), LEARNER: str(self.learner), LEARNERS: str(self.learners)}

    def open(self) -> Block:
        """Make or find the run's shared memory."""
        if not self.creates:
            assert self.folder is not None
            return Block.attach(self.folder, self.learners)
        if self.folder is not None:
            # A folder of this name is left over from a run that was killed: its memory is gone with its process.
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(mode=0o700)
        return Block.create(self.learners, self.folder)

    def transport(
        self, block: Block, weights: SharedWeights, deadline_s: float = 0.25, timeout_s: float = 300.0
    ) -> ExchangeTransport:
        """Return this learner's end, not yet started."""
        peers = [peer for peer in range(self.learners) if peer != self.learner]
        carriers = [SharedCarrier(block, self.learner, peers, weights)] if peers else []
        rounds = SharedRounds(block, self.learner, weights, timeout_s)
        return ExchangeTransport(self.learner, weights, carriers, rounds, deadline_s)


def torchrun_folder(environment: Mapping[str, str]) -> Path:
    """Return the folder that all workers of one torchrun job, and of one start of it, agree upon."""
    names = ("TORCHELASTIC_RUN_ID", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
    parts = "-".join(environment.get(name, "0") for name in names)
    safe = "".join(letter if letter.isalnum() or letter == "-" else "_" for letter in parts)
    return Path(tempfile.gettempdir()) / f"antiphon-{os.getuid()}-{safe}"


def _number(environment: Mapping[str, str], name: str, default: str | None = None) -> int:
    text = environment.get(name, default)
    try:
        return int(text or "")
    except ValueError:
        raise ArgumentError(f"environment variable {name} must be a whole number, not {text!r}") from None
