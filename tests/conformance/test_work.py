"""Work shared by hosts on a virtual clock: every ticket is ended, whatever is lost, doubled, late, and whoever dies."""

from __future__ import annotations

import os
import random
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.learner import sharing as module
from antiphon.learner.pool import HostState, Pool
from antiphon.learner.progress import Tickets
from antiphon.learner.sharing import Note, pack, unpack
from antiphon.training.checkpoint import tickets_done
from antiphon.transport.block import Block, Col, Gauge, Head, Link, Status
from antiphon.transport.memory import VirtualClock

NOBODY = 2**22 + 1
TICK_S, SEEK_S, NOTICED_S = 0.05, 0.05, 0.3
MIRRORED = [Col.STATE, Col.STEPS, Col.FLOOR]


@dataclass
class Faults:
    """What goes wrong."""

    lost: float = 0.0
    doubled: float = 0.0
    latency_s: float = 0.01
    killed: dict[int, float] = field(default_factory=dict)
    returned: dict[int, float] = field(default_factory=dict)
    """When a new process is a learner that was killed."""
    frozen: dict[int, tuple[float, float]] = field(default_factory=dict)
    cut_s: tuple[float, float] = (0.0, 0.0)
    """No host reaches another from then to then."""


class Worker:
    """One learner: it takes tickets and ends each after a step's time, while its exchange thread ticks."""

    def __init__(self, world: World, number: int, step_s: float) -> None:
        self.world, self.number, self.step_s = world, number, step_s
        self.host = world.host[number]
        self.block = world.blocks[self.host]
        self.tickets = Tickets(self.block, number, world.first, clock=lambda: world.clock.now)
        self.sharing = self.tickets.share(self.send)
        self.epoch, self.ended, self.over, self.dead = 1, [], False, False
        self.idle_s = 0.0
        self.block.board_LC[number, [Col.PID, Col.STATE]] = os.getpid(), Status.JOINED
        self.block.gauges_LC[number, Gauge.STEP_S] = step_s
        world.clock.at(0.0, self.work)
        self.after(world.draw.uniform(0.0, TICK_S), self.tick)

    def when_awake(self, action: Callable[[], None]) -> None:
        """Act now, or on waking; never, if dead."""
        begin, end = self.world.faults.frozen.get(self.number, (0.0, 0.0))
        if self.dead:
            return
        if begin <= self.world.clock.now < end:
            self.world.clock.at(end, lambda: self.when_awake(action))
        else:
            action()

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        self.world.clock.at(self.world.clock.now + seconds, lambda: self.when_awake(action))

    def work(self) -> None:
        """Take a ticket."""
        world = self.world
        ticket, over = self.tickets.take(world.bound(self.epoch)), False
        if ticket is None and self.epoch < world.epochs:
            self.epoch += 1
            self.after(0.0, self.work)
            return
        if ticket is None:
            ticket, over = self.tickets.seek(world.bound(self.epoch))
        if over:
            self.over = True
            self.block.board_LC[self.number, Col.STATE] = Status.DRAINED
        elif ticket is None:
            self.idle_s += SEEK_S
            self.after(SEEK_S, self.work)
        else:
            self.after(self.step_s, lambda: self.end(ticket))

    def end(self, ticket: int) -> None:
        self.tickets.end_oldest()
        self.ended.append(ticket)
        self.block.board_LC[self.number, Col.STEPS] += 1
        self.work()

    def tick(self) -> None:
        """Do what the exchange thread does in each of its turns, at the latest after so long."""
        self.sharing.tick(self.world.clock.now)
        for peer in self.sharing.peers:
            self.send_status(peer)
        self.after(TICK_S, self.tick)

    def send(self, peer: int, data: bytes) -> None:
        assert unpack(data) is not None and len(data) < 1 << 16

        def arrive() -> None:
            to = self.world.workers[peer]
            to.sharing.receive(self.number, data)
            to.sharing.tick(self.world.clock.now)

        self.world.carry(peer, arrive)

    def send_status(self, peer: int) -> None:
        """Do what the mirror does: let another host know this learner's row."""
        row_C = self.block.board_LC[self.number, MIRRORED].copy()

        def arrive() -> None:
            to = self.world.workers[peer]
            if to.block.board_LC[self.number, Col.STATE] != Status.FAILED:
                to.block.board_LC[self.number, MIRRORED] = row_C

        self.world.carry(peer, arrive, again=False)

    def die(self) -> None:
        self.dead = True
        self.block.board_LC[self.number, Col.PID] = NOBODY
        self.world.clock.at(self.world.clock.now + NOTICED_S, self.noticed)

    def noticed(self) -> None:
        for block in self._elsewhere():
            block.board_LC[self.number, Col.STATE] = Status.FAILED

    def come_back(self) -> None:
        """Be a new process of a learner that has died."""
        self.tickets.pool.reclaim()
        self.block.board_LC[self.number, Col.INCARNATION] += 1
        for block in self._elsewhere():
            block.board_LC[self.number, Col.STATE] = Status.JOINED

    def _elsewhere(self) -> list[Block]:
        return [block for host, block in enumerate(self.world.blocks) if host != self.host]


class World:
    """Hosts with so many learners each, all of whose steps, notes and faults lie on one clock."""

    def __init__(
        self, folder: Path, sizes: list[int], steps_s: list[float], batches: int, epochs: int, faults: Faults,
        seed: int = 0, first: int = 0,
    ) -> None:  # fmt: skip
        self.faults, self.batches, self.epochs, self.first = faults, batches, epochs, first
        self.draw, self.clock = random.Random(seed), VirtualClock()
        self.host = [host for host, size in enumerate(sizes) for _ in range(size)]
        self.blocks = []
        for host in range(len(sizes)):
            (folder / f"host-{host}").mkdir(mode=0o700)
            block = Block.create(len(self.host), folder / f"host-{host}")
            block.links_LC[:, Link.HOST], block.head[Head.HOST] = self.host, host
            block.board_LC[:, Col.STATE] = Status.JOINED
            self.blocks.append(block)
        self.workers: list[Worker] = []
        for number, step_s in enumerate(steps_s):
            self.workers.append(Worker(self, number, step_s))
        for number, at in faults.killed.items():
            self.clock.at(at, self.workers[number].die)
        for number, at in faults.returned.items():
            self.clock.at(at, lambda number=number: self.revive(number))

    def revive(self, number: int) -> None:
        before = self.workers[number]
        self.workers[number] = worker = Worker(self, number, before.step_s)
        worker.ended, worker.epoch = before.ended, before.epoch
        worker.come_back()

    def bound(self, epoch: int) -> int:
        return epoch * self.batches

    def carry(self, peer: int, arrive: Callable[[], None], again: bool = True) -> None:
        begin, end = self.faults.cut_s
        if begin <= self.clock.now < end or self.draw.random() < self.faults.lost:
            return
        for _ in range(1 + (again and self.draw.random() < self.faults.doubled)):
            self.workers[peer].after(self.draw.uniform(0.0, self.faults.latency_s), arrive)

    def run(self, limit_s: float) -> None:
        """Go on until all that live are over."""
        self.run_to(limit_s)
        assert self.over, "it does not end"

    def run_to(self, moment_s: float) -> None:
        self.clock.run(until=lambda: self.over, deadline=moment_s)

    @property
    def over(self) -> bool:
        return all(worker.over or worker.dead for worker in self.workers)

    @property
    def ended(self) -> Counter[int]:
        return Counter(ticket for worker in self.workers for ticket in worker.ended)

    @property
    def all_tickets(self) -> range:
        return range(self.first, self.bound(self.epochs))


@pytest.fixture(scope="module")
def make_world():
    """Make worlds in folders that go with the test."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        made = iter(range(1 << 30))

        def make(*args, **more) -> World:
            place = Path(folder) / str(next(made))
            place.mkdir()
            return World(place, *args, **more)

        yield make


SIZES = st.sampled_from([[1, 1], [2, 2], [1, 3], [3, 1], [1, 1, 1], [2, 1, 2]])
PACES = st.lists(st.sampled_from([0.03, 0.05, 0.2]), min_size=5, max_size=5)
SETTINGS = settings(derandomize=True, max_examples=30, deadline=None)


@given(sizes=SIZES, paces=PACES, lost=st.sampled_from([0.0, 0.1, 0.3]), latency_s=st.sampled_from([0.001, 0.05, 0.3]),
       seed=st.integers(0, 2**20), first=st.sampled_from([0, 7]))  # fmt: skip
@SETTINGS
def test_exactly_once_where_nobody_dies(make_world, sizes, paces, lost, latency_s, seed, first):
    """Notes may be lost, doubled and late."""
    faults = Faults(lost=lost, doubled=0.2, latency_s=latency_s)
    batches = 12 * sum(sizes)
    world = make_world(sizes, paces[: sum(sizes)], batches, 2, faults, seed, first)
    world.run(limit_s=60.0)
    assert world.ended == Counter(world.all_tickets)
    for worker in world.workers:
        assert not worker.tickets.again
        assert not any(peer.reserve or peer.taken for peer in worker.sharing.peers.values())
    assert tickets_done(world.blocks[0], first, waits=False) >= 0


@st.composite
def disasters(draw):
    sizes = draw(SIZES)
    learners = range(sum(sizes))
    mortal = draw(st.sets(st.sampled_from(learners), max_size=len(learners) - 1))
    whole = draw(st.booleans())
    if whole:  # a host at once
        host = draw(st.integers(0, len(sizes) - 1))
        mortal = {number for number in learners if sum(sizes[:host]) <= number < sum(sizes[: host + 1])}
    at = draw(st.floats(0.0, 3.0))
    killed = {number: at if whole else draw(st.floats(0.0, 3.0)) for number in mortal}
    alive = sorted(set(learners) - mortal)
    frozen = {}
    if draw(st.booleans()):
        begin = draw(st.floats(0.0, 3.0))
        frozen = {draw(st.sampled_from(alive)): (begin, begin + draw(st.floats(0.1, 8.0)))}
    begin = draw(st.floats(0.0, 3.0))
    cut_s = (begin, begin + draw(st.floats(0.0, 6.0)))
    back = draw(st.sets(st.sampled_from(sorted(killed)))) if killed else set()
    returned = {number: killed[number] + draw(st.floats(0.5, 2.0)) for number in back}
    lost, latency_s = draw(st.sampled_from([0.0, 0.2])), draw(st.sampled_from([0.001, 0.2]))
    return sizes, Faults(lost, 0.2, latency_s, killed, returned, frozen, cut_s)


@given(case=disasters(), paces=PACES, seed=st.integers(0, 2**20))
@settings(SETTINGS, max_examples=40)
def test_at_least_once_whoever_dies(make_world, case, paces, seed):
    sizes, faults = case
    world = make_world(sizes, paces[: sum(sizes)], 12 * sum(sizes), 2, faults, seed)
    world.run(limit_s=200.0)
    assert set(world.ended) >= set(world.all_tickets)


@given(case=disasters(), paces=PACES, seed=st.integers(0, 2**20), at=st.floats(0.1, 5.0))
@settings(SETTINGS, max_examples=25)
def test_all_before_where_a_resumed_run_begins_is_ended(make_world, case, paces, seed, at):
    """Whoever looks from whichever host, at any moment."""
    sizes, faults = case
    world = make_world(sizes, paces[: sum(sizes)], 12 * sum(sizes), 2, faults, seed)
    floors = [0] * len(sizes)
    for moment in (at, 2 * at, 4 * at):
        world.run_to(moment)
        ended = set(world.ended)
        for host, block in enumerate(world.blocks):
            if any(not worker.dead for worker in world.workers if worker.host == host):
                floors[host] = tickets_done(block, 0, waits=False)
                assert set(range(floors[host])).intersection(world.all_tickets) <= ended


def test_a_resumed_run_begins_where_the_hosts_had_come_to(make_world):
    world = make_world([2, 2], [0.05] * 4, 100, 1, Faults())
    world.run_to(1.0)
    steps = sum(len(worker.ended) for worker in world.workers)
    for block in world.blocks:
        assert steps - 20 <= tickets_done(block, 0, waits=False) <= steps
    world.run(60.0)
    world.clock.run(until=lambda: False, deadline=10.0)
    assert [tickets_done(block, 0, waits=False) for block in world.blocks] == [100, 100]


UNEQUAL = [([1, 1], [0.02, 0.2]), ([2, 2], [0.02, 0.02, 0.2, 0.2]), ([3, 1], [0.1, 0.1, 0.1, 0.01])]


@pytest.mark.parametrize("sizes, paces", UNEQUAL)
@pytest.mark.parametrize("latency_s", [0.001, 0.04])
def test_a_fast_host_takes_more_and_hardly_waits(make_world, sizes, paces, latency_s):
    """Each takes work in proportion to its speed, and no learner is idle but for the last steps of the slowest."""
    world = make_world(sizes, paces, 200 * sum(sizes), 1, Faults(latency_s=latency_s))
    world.run(limit_s=200.0)
    assert world.ended == Counter(world.all_tickets)
    speed = sum(1 / pace for pace in paces)
    ideal_s = 200 * sum(sizes) / speed
    assert world.clock.now < 1.03 * ideal_s + 3 * max(paces) + 2 * SEEK_S + 2 * latency_s
    for worker in world.workers:
        assert len(worker.ended) * worker.step_s == pytest.approx(ideal_s, abs=0.03 * ideal_s + 3 * max(paces))
        assert worker.idle_s <= 4 * max(paces) + 4 * SEEK_S + 2 * latency_s


def test_on_equal_hosts_hardly_anything_moves(make_world, monkeypatch):
    world = make_world([2, 2], [0.05] * 4, 400, 2, Faults())
    granted = Counter()
    as_victim = module.Sharing._as_victim

    def count(self, peer, note):
        before = set(peer.granted)
        as_victim(self, peer, note)
        granted[self.pool.host] += len(peer.granted - before)

    monkeypatch.setattr(module.Sharing, "_as_victim", count)
    world.run(limit_s=100.0)
    assert world.ended == Counter(world.all_tickets)
    assert granted.total() < 0.1 * 800


def test_both_sides_of_a_cut_go_on_and_the_work_is_whole(make_world):
    """Cut for good: each side ends its own share, then, out of patience, that of the other."""
    world = make_world([1, 1], [0.05, 0.05], 40, 1, Faults(cut_s=(0.5, 1e9)))
    world.run(limit_s=100.0)
    for worker in world.workers:
        assert 20 <= len(worker.ended) <= 40
    assert set(world.ended) == set(world.all_tickets)
    assert world.clock.now > 15.0


def test_after_a_cut_that_heals_work_is_shared_again(make_world):
    world = make_world([1, 1], [0.02, 0.2], 220, 1, Faults(cut_s=(0.5, 4.0)))
    world.run(limit_s=60.0)
    assert world.ended == Counter(world.all_tickets)
    assert len(world.workers[0].ended) > 150


def test_a_host_that_dies_whole_is_replaced_by_the_next_and_that_by_the_one_after(make_world):
    faults = Faults(killed={0: 1.0, 1: 1.0, 2: 2.5})
    world = make_world([2, 1, 1], [0.05] * 4, 200, 1, faults)
    world.run(limit_s=100.0)
    assert set(world.ended) == set(world.all_tickets)
    repeated = sum(world.ended.values()) - 200
    assert repeated <= 20, "only what was ended after the last note is done again"
    last = world.workers[3]
    assert last.tickets.pool.adopted == {0, 1}


def test_a_host_that_comes_back_takes_from_the_one_that_took_over(make_world):
    """All of its learners died, and return: what was taken over stays with the other, which grants of it."""
    faults = Faults(killed={1: 1.0, 2: 1.0}, returned={1: 3.0, 2: 3.5})
    world = make_world([1, 2], [0.05, 0.05, 0.05], 300, 1, faults)
    world.run(limit_s=60.0)
    assert set(world.ended) == set(world.all_tickets)
    assert world.ended.total() - 300 <= 20, "hardly anything is done twice"
    assert world.workers[0].tickets.pool.adopted == {1}
    # One worked alone for two seconds: the others, once back, for the rest.
    assert 3.0 + 180 / 60 < world.clock.now < 3.0 + 240 / 60


def test_two_sides_that_took_over_from_each_other_do_the_rest_once(make_world):
    """A cut that outlasts their patience, before the end of a long last batch."""
    world = make_world([1, 1], [0.05, 0.05], 40, 1, Faults(cut_s=(0.5, 17.0)))
    world.run(limit_s=60.0)
    assert set(world.ended) == set(world.all_tickets)


@given(data=st.binary(max_size=400) | st.lists(st.integers(-(2**63), 2**63 - 1), max_size=40).map(
    lambda numbers: b"".join(number.to_bytes(8, "little", signed=True) for number in numbers)))  # fmt: skip
@settings(derandomize=True, max_examples=200, deadline=None)
def test_bytes_that_are_no_note_are_refused(data):
    note = unpack(data)
    if note is not None:
        assert pack(note) == data


NOTE = Note(5, 3, 100, [1, 2], [], [7], HostState({0: 4, 2: 9}, [6, 8]))


def test_a_note_survives_its_packing():
    assert unpack(pack(NOTE)) == NOTE
    assert unpack(pack(NOTE)[:-8]) is None and unpack(pack(NOTE) + bytes(8)) is None


def test_notes_of_strangers_and_of_unknown_hosts_change_nothing(make_world):
    world = make_world([1, 1], [0.05, 0.05], 40, 1, Faults())
    sharing = world.workers[0].sharing
    for number, note in [(7, NOTE), (0, NOTE), (1, NOTE), (1, NOTE._replace(state=HostState({0: 1}, [])))]:
        sharing.receive(number, pack(note))
    assert sharing.states == {} and sharing.peers[1].stamp == -1


def test_a_pool_that_only_looks_sees_what_was_adopted(make_world):
    world = make_world([1, 1], [0.05, 0.05], 40, 1, Faults(killed={1: 0.5}))
    world.run(limit_s=60.0)
    assert Pool(world.blocks[0], 0).adopted == {1}
