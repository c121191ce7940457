"""Learners of one strategy over each transport: one more line of `TRANSPORTS`, and the suite runs on it unasked.

In virtual time the simulator drives them. Over the real transports every learner has its exchange thread, and the test
drives all of them from one thread, so that a schedule says who steps when; what happens between is the threads' affair.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor
from virtual import first_weights, simulation

from antiphon.learner.weights import Weights
from antiphon.strategies import strategy_class
from antiphon.strategies.base import AverageGradients, Exchange, FinishMix, StartMix
from antiphon.transport.base import Carrier, Rounds
from antiphon.transport.block import Block, Col, Head, Link, Status
from antiphon.transport.collectives import GroupRounds, gloo_group
from antiphon.transport.exchange import ExchangeTransport
from antiphon.transport.faults import FaultyCarrier, noise
from antiphon.transport.network import Listener, NetworkCarrier
from antiphon.transport.protocol import Counts
from antiphon.transport.shared import SharedCarrier, SharedRounds

LIMIT_S = 60.0
"""Of whatever these tests wait for."""
DEADLINE_S = 0.1
TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Weather:
    """How messages fare (each likelihood by itself), and how learners keep pace."""

    drop: float = 0.0
    double: float = 0.0
    corrupt: float = 0.0
    delay: float = 0.0
    delay_s: float = 0.02
    slowest: int = 1
    """A learner takes part in every n-th pass only, n drawn from 1 to this."""
    seed: int = 0
    settled: bool = False
    """Over real transports, whether a pass waits until its exchanges are over: how many they are is then no chance."""

    def fates(self, learner: int):
        chances = {name: getattr(self, name) for name in ("drop", "double", "corrupt", "delay", "delay_s")}
        return noise(self.seed * 100 + learner, **chances)

    def paces(self, learners: int) -> list[int]:
        draw = random.Random(self.seed)
        return [draw.randint(1, self.slowest) for _ in range(learners)]


@dataclass(frozen=True)
class Outcome:
    """Weights before and after, with nothing under way any more, and what became of the exchanges."""

    first_LN: Tensor
    last_LN: Tensor
    counts: list[Counts]
    rounds: list[int] = field(default_factory=list)


Steps = Callable[[int, int], Tensor]
"""(learner, round) -> what is subtracted from the learner's weights, or averaged and then subtracted."""
Runner = Callable[[str, int, int, Steps, Weather], Outcome]
"""(strategy, learners, rounds, steps, weather)."""


def in_virtual_time(name: str, learners: int, rounds: int, steps: Steps, weather: Weather) -> Outcome:
    paces = weather.paces(learners)
    run = simulation(
        name, learners, rounds=rounds, gradient=lambda learner, round, w_N: steps(learner, round), lr=1.0,
        latency=lambda sender, receiver, now: 0.01, step_s=lambda learner, round: 0.1 * paces[learner],
    )  # fmt: skip
    for virtual in run.virtual:
        protocol, fates = virtual.transport.protocol, weather.fates(virtual.number)

        def send(peer, message, fates=fates, straight=protocol.send):
            for later_s, fated in fates(message):
                run.clock.at(run.clock.now + later_s, lambda fated=fated: straight(peer, fated))

        protocol.send = send
    last_LN = run.run()
    for virtual in run.virtual:
        assert not virtual.transport.protocol.open and not any(virtual.weights._pins)
    return Outcome(
        run.initial_LN, last_LN, [v.transport.counts for v in run.virtual], [v.round for v in run.virtual]
    )  # fmt: skip


@dataclass
class Company:
    """The ends of all learners, and their weights."""

    ends: list[ExchangeTransport]
    weights: list[Weights]

    def values(self) -> Tensor:
        return torch.stack([weights.snapshot() for weights in self.weights])

    def until(self, ready: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + LIMIT_S
        while not ready():
            for each in self.ends:
                each.check()
            assert time.monotonic() < end, f"waited {LIMIT_S:g} s for {what}: {[each.counts for each in self.ends]}"
            time.sleep(0.0005)


Builder = Callable[[int, bool, Weather], contextlib.AbstractContextManager[Company]]


def _blocks(learners: int, hosts: int) -> list[Block]:
    blocks = [Block.create(learners) for _ in range(hosts)]
    for host, block in enumerate(blocks):
        block.head[Head.HOST] = host
        block.links_LC[:, Link.HOST] = range(learners) if hosts > 1 else 0
        block.board_LC[:, Col.PID], block.board_LC[:, Col.STATE] = os.getpid(), Status.JOINED
        block.allocate(first_weights(1).shape[1])
    return blocks


def _company(learners: int, blocks: list[Block], carriers, rounds: list[Rounds], weights, weather) -> Company:
    for learner, row_N in enumerate(first_weights(learners)):
        weights[learner].w_N.copy_(row_N)
    ends = []
    for learner in range(learners):
        faulty: list[Carrier] = [FaultyCarrier(each, fates=weather.fates(learner)) for each in carriers[learner]]
        ends.append(ExchangeTransport(learner, weights[learner], faulty, rounds[learner], DEADLINE_S))
    for end in ends:
        end.start()
    return Company(ends, weights)


@contextlib.contextmanager
def shared(learners: int, waits: bool, weather: Weather) -> Iterator[Company]:
    """All on one host."""
    (block,) = blocks = _blocks(learners, 1)
    weights = [Weights(block.buffers, learner) for learner in range(learners)]
    others = [[peer for peer in range(learners) if peer != learner] for learner in range(learners)]
    carriers = [
        [SharedCarrier(block, learner, others[learner], weights[learner])] * (learners > 1)
        for learner in range(learners)
    ]
    rounds: list[Rounds] = [SharedRounds(block, learner, weights[learner], TIMEOUT_S) for learner in range(learners)]
    company = _company(learners, blocks, carriers, rounds, weights, weather)
    with _closing(company, blocks):
        yield company


@contextlib.contextmanager
def network(learners: int, waits: bool, weather: Weather) -> Iterator[Company]:
    """Each as if on a host of its own.

    What comes damaged over a network is found out and dropped on the way; and no message is late without the snapshot
    that belongs to it, which is why tests/unit/test_network.py holds up bytes instead.
    """
    weather = replace(weather, drop=1.0 - (1.0 - weather.drop) * (1.0 - weather.corrupt), corrupt=0.0, delay=0.0)
    blocks = _blocks(learners, learners)
    weights = [Weights(block.buffers, learner) for learner, block in enumerate(blocks)]
    rounds: list[Rounds] = [SharedRounds(blocks[n], n, weights[n], TIMEOUT_S) for n in range(learners)]
    if waits and learners > 1:
        store = dist.HashStore()
        with ThreadPoolExecutor(learners) as pool:
            groups = list(
                pool.map(lambda n: gloo_group(store, "run", n, learners, "127.0.0.1", TIMEOUT_S), range(learners))
            )
        rounds = [GroupRounds(blocks[n], n, weights[n], groups[n], TIMEOUT_S) for n in range(learners)]
    listeners = [Listener(["127.0.0.1"]) for _ in range(learners)]
    carriers: list[list[Carrier]] = []
    for n in range(learners):
        meeting = {peer: listeners[peer].addresses for peer in range(learners) if peer != n}
        carriers.append([NetworkCarrier(n, list(meeting), weights[n], listeners[n], meeting, b"secret", b"run")])
    if learners == 1:
        carriers[0].pop().close()
    company = _company(learners, blocks, carriers, rounds, weights, weather)
    with _closing(company, blocks):
        for learner, (carrier, *_) in enumerate(carriers if learners > 1 else []):
            company.until(lambda n=learner, c=carrier: all(c.connected(p) for p in c.peers if p != n), "connections")
        yield company


@contextlib.contextmanager
def _closing(company: Company, blocks: list[Block]) -> Iterator[None]:
    try:
        yield
    finally:
        for end in company.ends:
            end.close()
        for block in blocks:
            block.remove()


def over(build: Builder) -> Runner:
    def run(name: str, learners: int, rounds: int, steps: Steps, weather: Weather) -> Outcome:
        kind = strategy_class(name)
        strategies = [kind(learner, learners, 3) for learner in range(learners)]
        with build(learners, kind.waits, weather) as company:
            first_LN = company.values()
            made = _drive(company, strategies, rounds, steps, weather)
            for end in company.ends:
                assert end.drain(LIMIT_S), f"still open: {end.protocol.open}"
            for weights in company.weights:
                weights.settle()
                assert not any(weights._pins)
            return Outcome(first_LN, company.values(), [end.counts for end in company.ends], made)

    return run


def _drive(company: Company, strategies, rounds: int, steps: Steps, weather: Weather) -> list[int]:
    """Let all make their rounds, each at its pace; those of a strategy that waits go in step."""
    learners, made, asked = len(strategies), [0] * len(strategies), [0] * len(strategies)
    paces = [1] * learners if strategies[0].waits else weather.paces(learners)
    passes = 0
    while min(made) < rounds:
        turn = [n for n in range(learners) if passes % paces[n] == 0 and made[n] < rounds]
        passes += 1
        for n in turn:
            for action in strategies[n].computing(made[n], company.ends[n].present()):
                assert isinstance(action, StartMix)
                company.ends[n].start_mix(made[n], action.coefficients)
        waited = {n: strategies[n].gradient(made[n], company.ends[n].present()) for n in turn}
        gradients = {n: steps(n, made[n]).clone() for n in turn}
        for n in turn:
            if AverageGradients() in waited[n]:
                company.ends[n].start_average(made[n], gradients[n])
        for n in turn:
            for action in waited[n]:
                if action == FinishMix():
                    company.ends[n].finish_mix(made[n])
                else:
                    company.ends[n].finish_average(made[n], gradients[n])
        for n in turn:
            company.weights[n].begin_step()
            company.weights[n].w_N.sub_(gradients[n])
            company.weights[n].end_step()
            for action in strategies[n].stepped(made[n], company.ends[n].present()):
                assert isinstance(action, Exchange)
                company.ends[n].propose(action.peer, action.coefficient)
                asked[n] += 1
            made[n] += 1
        company.until(
            lambda: all(_taken_up(c.counts) >= a for c, a in zip(company.ends, asked, strict=True)), "threads"
        )
        if weather.settled:
            company.until(lambda: not any(end.protocol.open for end in company.ends), "exchanges")
    return made


def _taken_up(counts: Counts) -> int:
    return counts.proposed + counts.busy + counts.nonfinite + counts.full


TRANSPORTS: dict[str, Runner] = {"memory": in_virtual_time, "shared": over(shared), "network": over(network)}
BUILDERS: dict[str, Builder] = {"shared": shared, "network": network}
"""Those whose waits take real time, and so need a deadline."""
