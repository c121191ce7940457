"""Learners on several hosts as processes forked from the test, each with the variables that srun would give it."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from forked import Forked, problem, until
from namespaces import Hosts

import antiphon
from antiphon.transport.block import Block, Col
from antiphon.transport.place import Place
from antiphon.transport.shared import SharedCarrier

END_S = 60.0
PORT = 29400


class Run:
    """L learners, so many a host; a context manager that ends them.

    Args:
        hosts: where.
        sizes: learners by host.
        body: what each is.
        folder: for logs and results.
        wire: meet, and exchange, over the wire with a delay.
        environment: variables besides.
    """

    def __init__(
        self,
        hosts: Hosts,
        sizes: Sequence[int],
        body: Callable[[], None],
        folder: Path,
        *,
        ipv6: bool = False,
        wire: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.hosts, self.body, self.folder = hosts, body, folder
        self.host = [host for host, size in enumerate(sizes) for _ in range(size)]
        self.learners = len(self.host)
        self._shared = {
            "ANTIPHON_SECRET": "a secret for the tests",
            "MASTER_ADDR": hosts.address(0, ipv6=ipv6, wire=wire),
            "ANTIPHON_MEETING_PORT": str(PORT),
            "SLURM_JOB_ID": str(os.getpid()),
            "SLURM_STEP_ID": folder.name,
            "SLURM_STEP_NUM_TASKS": str(self.learners),
            "SLURM_STEP_NUM_NODES": str(len(sizes)),
            **({"ANTIPHON_INTERFACE": "wire"} if wire else {}),
            **(environment or {}),
        }
        self.processes: list[Forked] = []
        self._blocks: dict[int, Block] = {}

    def __enter__(self) -> Run:
        for number, host in enumerate(self.host):
            self.processes.append(Forked(lambda number=number, host=host: self._be(number, host), self._log(number)))
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()
        for host in set(self.host):
            # A host that was killed could not remove its folder.
            if (folder := self._place(self.host.index(host)).folder).exists():
                Block(folder, os.memfd_create("nothing"), self.learners).remove()

    def _be(self, number: int, host: int) -> None:
        os.environ.update(self._environment(number))
        self.hosts.enter(host)
        self.body()

    def _environment(self, number: int) -> dict[str, str]:
        host = self.host[number]
        local = number - self.host.index(host)
        return {**self._shared, "SLURM_PROCID": str(number), "SLURM_NODEID": str(host), "SLURM_LOCALID": str(local)}

    def _place(self, number: int) -> Place:
        return Place.find(self._environment(number))

    def _log(self, number: int) -> Path:
        return self.folder / f"learner-{number}.log"

    def log(self, number: int) -> str:
        return self._log(number).read_text()

    def block(self, number: int) -> Block:
        """The block of a learner's host, once it is there."""
        host = self.host[number]
        if host not in self._blocks:
            self._blocks[host] = Block.attach(self._place(number).folder, self.learners, deadline_s=30.0)
        return self._blocks[host]

    def steps(self) -> list[int]:
        """How many steps each has made."""
        return [int(self.block(number).board_LC[number, Col.STEPS]) for number in range(self.learners)]

    def present(self, number: int) -> list[int]:
        """The learners that a learner's host does not take for dead."""
        block = self.block(number)
        return [other for other in range(self.learners) if not block.dead(other)]

    def stop(self) -> None:
        """Ask all to stop, as Ctrl-C does."""
        self.block(0).request_stop()

    def until_steps(self, more: int, learners: Sequence[int] | None = None) -> None:
        """Wait until each of these has made so many steps more."""
        among = range(self.learners) if learners is None else learners
        goal = [count + more for count in self.steps()]
        until(lambda: all(self._dead(n) or self.steps()[n] >= goal[n] for n in among), f"{more} steps of each", END_S)

    def _dead(self, number: int) -> bool:
        assert self.processes[number].poll() in (None, 0), f"learner {number} failed:\n{self.log(number)}"
        return self.processes[number].poll() is not None

    def kill(self, *numbers: int) -> None:
        for number in numbers:
            os.kill(self.processes[number].pid, signal.SIGKILL)
        for number in numbers:
            self.processes[number].wait()

    def freeze(self, number: int) -> None:
        os.kill(self.processes[number].pid, signal.SIGSTOP)

    def thaw(self, number: int) -> None:
        os.kill(self.processes[number].pid, signal.SIGCONT)

    def finish(self, killed: Sequence[int] = ()) -> None:
        """Wait for the end of all, which must be a good one but for those killed."""
        for number, process in enumerate(self.processes):
            status = process.wait(END_S)
            expected = -signal.SIGKILL if number in killed else 0
            assert status == expected, f"learner {number} ended with {status}:\n{self.log(number)}"

    def taken(self) -> Counter[int]:
        """How many times each sample was stepped on."""
        lines = (line.split() for number in range(self.learners) for line in self.log(number).splitlines())
        return Counter(int(sample) for words in lines if words[:1] == ["took"] for sample in words[1:])

    def results(self, numbers: Sequence[int] | None = None) -> list[dict]:
        """What `leave_results` has left."""
        among = range(self.learners) if numbers is None else numbers
        return [torch.load(self.folder / f"result-{number}.pt", weights_only=False) for number in among]


def leave_results(folder: Path) -> Callable[[antiphon.Learner], None]:
    """What a learner does at its end: leave its weights, the consensus, its numbers, what it has read by which way."""

    def at_end(learner: antiphon.Learner) -> None:
        own_N = torch.cat([parameter.detach().reshape(-1) for parameter in learner.model.parameters()])
        result = {
            "own_N": own_N,
            "consensus": learner.consensus(),
            "metrics": learner.metrics,
            "shared_bytes": bytes_read(learner, near=True),
            "network_bytes": bytes_read(learner, near=False),
        }
        torch.save(result, folder / f"result-{learner.number}.pt")

    return at_end


def bytes_read(learner: antiphon.Learner, *, near: bool) -> int:
    """Bytes of other learners' weights: of those on this host, or of those on others."""
    # One that scripts faults has the carrier proper within it.
    carriers = [getattr(carrier, "carrier", carrier) for carrier in learner.transport.carriers]
    return sum(carrier.bytes_read for carrier in carriers if isinstance(carrier, SharedCarrier) == near)


def apart(learner: antiphon.Learner) -> None:
    """Set the learners apart before their first step: with a rate of zero, exchanges alone move them from there."""
    if learner.round == 0:
        with torch.no_grad():
            learner.weights.w_N.add_(float(learner.number))


def assert_sum_conserved(results: Sequence[dict], learners: int) -> None:
    """The mean is where it was when the learners were set apart."""
    _, model = problem()
    start_N = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]).double()
    mean_N = torch.stack([result["own_N"] for result in results]).double().mean(0)
    torch.testing.assert_close(mean_N, start_N + (learners - 1) / 2, atol=1e-5, rtol=0)
    torn = sum(result["metrics"]["exchanges"]["torn"] for result in results)
    assert torn == 0, "nobody died, so no exchange may have been torn"


class Meter:
    """Numbers that learners write and the test reads while they run."""

    def __init__(self, folder: Path, learners: int) -> None:
        self.values_L = np.memmap(folder / "meter", np.int64, "w+", shape=(learners,))

    def network_bytes(self, learner: antiphon.Learner) -> None:
        """Write what a learner has read over the network so far."""
        self.values_L[learner.number] = bytes_read(learner, near=False)
