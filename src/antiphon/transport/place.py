"""Where a process stands: which learner it is, of how many, on which host, and where its host's shared memory is."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from antiphon.errors import ArgumentError
from antiphon.transport.block import Block, Head

RUN, LEARNER, LEARNERS = "ANTIPHON_RUN", "ANTIPHON_LEARNER", "ANTIPHON_LEARNERS"
HOST, HOSTS = "ANTIPHON_HOST", "ANTIPHON_HOSTS"
RANK, RANKS = "ANTIPHON_RANK", "ANTIPHON_RANKS_PER_LEARNER"
INCARNATION = "ANTIPHON_INCARNATION"


@dataclass(frozen=True)
class Place:
    """Learner ``learner`` of ``learners``, on host ``host`` of ``hosts``.

    ``folder`` is the private folder of the run on this host, None for a learner alone.
    """

    learner: int = 0
    learners: int = 1
    folder: Path | None = None
    creates: bool = True
    """Whether this process makes its host's shared memory; under Antiphon's own launch the launcher does."""
    host: int = 0
    hosts: int = 1
    local_rank: int = 0
    """Its number among the learners of its host, where there are several hosts."""
    rank: int = 0
    """Its rank within its learner, a super-learner of ``ranks`` processes; rank 0 leads."""
    ranks: int = 1
    incarnation: int = 0
    """How many processes were this learner before."""

    @classmethod
    def find(cls, environment: Mapping[str, str] = os.environ) -> Place:
        """Read the environment: Antiphon's own launch, else torchrun's, else srun's, else a learner alone.

        Raises:
            ArgumentError: the variables contradict each other, or some are missing.
        """
        if RUN in environment:
            place = _launched(environment)
        elif "RANK" in environment and "WORLD_SIZE" in environment:
            place = _grouped(_under_torchrun(environment), environment)
        elif "SLURM_PROCID" in environment and any(name in environment for name in STEP):
            place = _grouped(_under_srun(environment), environment)
        else:
            return cls()
        if not 0 <= place.learner < place.learners:
            raise ArgumentError(f"learner {place.learner} of {place.learners}: numbers run from 0 to learners - 1")
        if not 0 <= place.rank < place.ranks:
            raise ArgumentError(f"rank {place.rank} of {place.ranks} a learner: ranks run from 0 to ranks - 1")
        if not 0 <= place.host < place.hosts:
            raise ArgumentError(f"host {place.host} of {place.hosts}: numbers run from 0 to hosts - 1")
        return place

    @property
    def watches(self) -> bool:
        """Whether this process is the run's first: of those that torchrun or srun started, it watches the others."""
        return self.learner == 0 and self.rank == 0

    def within(self) -> Place:
        """Return the place of this rank among those of its learner."""
        assert self.folder is not None
        return Place(self.rank, self.ranks, self.folder / f"ranks-{self.learner}", creates=False)

    def environment(self) -> dict[str, str]:
        """Return the variables by which a process finds this place."""
        values = {RUN: self.folder, LEARNER: self.learner, LEARNERS: self.learners}
        if self.hosts > 1:
            values |= {HOST: self.host, HOSTS: self.hosts}
        if self.ranks > 1:
            values |= {RANK: self.rank, RANKS: self.ranks}
        if self.incarnation:
            values[INCARNATION] = self.incarnation
        return {name: str(value) for name, value in values.items()}

    def open(self) -> Block:
        """Make or find the shared memory of this host."""
        if not self.creates:
            assert self.folder is not None
            return Block.attach(self.folder, self.learners)
        if self.folder is not None:
            # A folder of this name is left over from a run that was killed: its memory is gone with its process.
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(mode=0o700)
        block = Block.create(self.learners, self.folder)
        block.head[Head.HOST] = self.host
        return block


def _launched(environment: Mapping[str, str]) -> Place:
    learner, learners = (_number(environment, name) for name in (LEARNER, LEARNERS))
    host, hosts = _number(environment, HOST, "0"), _number(environment, HOSTS, "1")
    rank, ranks = _number(environment, RANK, "0"), _number(environment, RANKS, "1")
    incarnation = _number(environment, INCARNATION, "0")
    folder = Path(environment[RUN])
    return Place(learner, learners, folder, False, host, hosts, rank=rank, ranks=ranks, incarnation=incarnation)


# --- torchrun


def _under_torchrun(environment: Mapping[str, str]) -> Place:
    """Read what torchrun sets for each worker; a group is a host."""
    learner, learners = (_number(environment, name) for name in ("RANK", "WORLD_SIZE"))
    if _number(environment, "LOCAL_WORLD_SIZE", str(learners)) == learners:
        return Place(learner, learners, torchrun_folder(environment), creates=learner == 0)
    host, hosts = (_number(environment, name) for name in ("GROUP_RANK", "GROUP_WORLD_SIZE"))
    rank = _number(environment, "LOCAL_RANK")
    return Place(learner, learners, torchrun_folder(environment, host), rank == 0, host, hosts, rank)


def torchrun_folder(environment: Mapping[str, str], host: int | None = None) -> Path:
    """Return the folder that all workers of one torchrun job on a host, and of one start of it, agree upon."""
    names = ("TORCHELASTIC_RUN_ID", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
    return _folder([environment.get(name, "0") for name in names], host)


# --- srun

STEP = ("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST")
"""srun sets these for the tasks that it starts, and nobody does for a batch script, which is no task of its own."""


def _under_srun(environment: Mapping[str, str]) -> Place:
    """Read what srun sets for each task; one task alone is a learner alone."""
    learner = _number(environment, "SLURM_PROCID")
    learners = _number(environment, "SLURM_STEP_NUM_TASKS", environment.get("SLURM_NTASKS"))
    if learners == 1:
        return Place()
    host, hosts = _number(environment, "SLURM_NODEID"), _nodes(environment)
    step = environment.get("SLURM_STEP_ID", environment.get("SLURM_STEPID", "0"))
    folder = _folder(["slurm", environment.get("SLURM_JOB_ID", "0"), step], host if hosts > 1 else None)
    rank = _number(environment, "SLURM_LOCALID")
    return Place(learner, learners, folder, rank == 0, host, hosts, rank)


def _nodes(environment: Mapping[str, str]) -> int:
    for name in ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"):
        if name in environment:
            return _number(environment, name)
    return len(node_names(environment.get("SLURM_STEP_NODELIST", ""))) or 1


def node_names(text: str) -> list[str]:
    """Return the names in one of Slurm's lists.

    >>> node_names("gpu[08-10,12],login")
    ['gpu08', 'gpu09', 'gpu10', 'gpu12', 'login']
    """
    names = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        head, bracket, tail = part.partition("[")
        if not bracket:
            names.append(head)
            continue
        ranges, _, rest = tail.partition("]")
        for each in ranges.split(","):
            first, _, last = each.partition("-")
            names += [f"{head}{number:0{len(first)}}{rest}" for number in range(int(first), int(last or first) + 1)]
    return names


# --- all of them


def _grouped(place: Place, environment: Mapping[str, str]) -> Place:
    """Let each K processes in a row be the ranks of one learner, where the environment asks for that."""
    ranks = _number(environment, RANKS, "1")
    if ranks < 1 or place.learners % ranks:
        raise ArgumentError(f"{RANKS} must divide the {place.learners} processes of the job, and {ranks} does not")
    learner, rank = divmod(place.learner, ranks)
    if place.hosts > 1 and place.local_rank % ranks != rank:
        raise ArgumentError(
            f"the {ranks} ranks of learner {learner} would lie on two hosts:"
            f" start a multiple of {ranks} processes on each"
        )
    learners, local_rank = place.learners // ranks, place.local_rank // ranks
    return replace(place, learner=learner, learners=learners, local_rank=local_rank, rank=rank, ranks=ranks)


def _folder(parts: list[str], host: int | None) -> Path:
    text = "-".join(parts if host is None else [*parts, f"host{host}"])
    safe = "".join(letter if letter.isalnum() or letter == "-" else "_" for letter in text)
    return Path(tempfile.gettempdir()) / f"antiphon-{os.getuid()}-{safe}"


def _number(environment: Mapping[str, str], name: str, default: str | None = None) -> int:
    text = environment.get(name, default)
    try:
        return int(text or "")
    except ValueError:
        raise ArgumentError(f"environment variable {name} must be a whole number, not {text!r}") from None
