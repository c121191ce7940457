"""The two ends that exchange.py measures, each a process; times are on the clock that all processes share."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import common  # noqa: F401 - one thread, said before torch is loaded
import torch
from driven import Driven, Took, obey
from torch import Tensor

from antiphon.errors import DeadlineError, LearnerError
from antiphon.learner.weights import Weights
from antiphon.transport.base import Carrier
from antiphon.transport.block import Col, wait_for
from antiphon.transport.exchange import ExchangeTransport
from antiphon.transport.network import Listener, NetworkCarrier
from antiphon.transport.place import Place
from antiphon.transport.shared import SharedCarrier, SharedRounds

SCRIPT = Path(__file__).with_name("exchange.py")
COEFFICIENT = 0.5
LIMIT_S = 60.0
"""For any exchange and any transfer: many times what it takes."""
CHUNK_BYTES = 1 << 22
NETWORK_WIRES = ("float32", "bfloat16")
SECRET = b"of a benchmark"


class WatchedWeights(Weights):
    """Weights that note when an exchange is in them, and how long their owner's own two passes took."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.added = threading.Event()
        self.snapshot_s = self.snapshot_ended_s = self.add_s = self.committed_s = 0.0

    def write(self, *args: Any) -> Any:
        """Take a snapshot."""
        began_s = time.perf_counter()
        handle = super().write(*args)
        self.snapshot_ended_s = time.perf_counter()
        self.snapshot_s = self.snapshot_ended_s - began_s
        return handle

    def add_differences(self, *args: Any) -> None:
        """Add the difference of two slots: this end has then committed."""
        began_s = time.perf_counter()
        super().add_differences(*args)
        self._committed(began_s)

    def add(self, *args: Any) -> None:
        """Add the difference that came over the network: this end has then committed."""
        began_s = time.perf_counter()
        super().add(*args)
        self._committed(began_s)

    def _committed(self, began_s: float) -> None:
        self.committed_s = time.perf_counter()
        self.add_s = self.committed_s - began_s
        self.added.set()


class End:
    """One end: its weights, its transport, and ordinary memory for what it is compared with."""

    def __init__(self, parameters: int) -> None:
        torch.set_num_threads(1)
        place = Place.find()
        self.learner, self.block = place.learner, place.open()
        self.block.board_LC[self.learner, Col.PID] = os.getpid()
        self.weights = WatchedWeights(self.block.allocate(parameters), self.learner)
        draw = torch.Generator().manual_seed(self.learner)
        self.weights.w_N.normal_(0.0, 0.1, generator=draw)
        # Memory that is written once before it is measured costs no page faults then.
        self.a_N, self.b_N, self.c_N = (self.weights.w_N.clone() for _ in range(3))
        self.peer = 1 - self.learner
        self.transports: dict[str, ExchangeTransport] = {}
        self.carriers: dict[str, NetworkCarrier] = {}

    def start(self) -> None:
        """Start exchanging over shared memory: both ends are there."""
        self._start("shared", SharedCarrier(self.block, self.learner, [self.peer], self.weights))

    def _start(self, name: str, carrier: Carrier) -> None:
        rounds = SharedRounds(self.block, self.learner, self.weights)
        transport = ExchangeTransport(self.learner, self.weights, [carrier], rounds, deadline_s=LIMIT_S)
        transport.start()
        self.transports[name] = transport

    def lerp(self) -> Took:
        """Do what all is held against: reads two arrays and writes one."""
        return _took(lambda: self.a_N.lerp_(self.b_N, COEFFICIENT))

    def floor(self) -> Took:
        """Do an exchange's passes and nothing else: copy, difference, add, each a whole array at once."""

        def passes() -> None:
            self.b_N.copy_(self.a_N)
            torch.sub(self.a_N, self.b_N, out=self.c_N)
            self.a_N.add_(self.c_N, alpha=COEFFICIENT)

        return _took(passes)

    def exchange(self, name: str) -> Took:
        """Take part in an exchange (``shared``, or by a wire format), which learner 0 starts, and fold it in."""
        weights, transport = self.weights, self.transports[name]
        began_s, cpu_s = time.perf_counter(), time.process_time()
        if self.learner == 0:
            transport.propose(1, COEFFICIENT)
        if not weights.added.wait(LIMIT_S):
            raise DeadlineError(f"end {self.learner} waited {LIMIT_S:g} s for an exchange")
        fold_s = time.perf_counter()
        weights.begin_step()
        weights.end_step()
        fold_s, cpu_s = time.perf_counter() - fold_s, time.process_time() - cpu_s
        weights.added.clear()
        while transport.protocol.open:
            time.sleep(0.001)
        took = {"began_s": began_s, "ended_s": weights.committed_s, "cpu_s": cpu_s, "fold_s": fold_s}
        return took | {name: getattr(weights, name) for name in ("snapshot_s", "snapshot_ended_s", "add_s")}

    def checksum(self) -> Took:
        """Give the sum of the weights, and that of their magnitudes."""
        self.weights.settle()
        sums = (self.weights.w_N.sum(dtype=torch.float64), self.weights.w_N.abs().sum(dtype=torch.float64))
        return {"sum": float(sums[0]), "magnitude": float(sums[1])}

    def listen(self, host: str) -> Took:
        """Open what the other end connects to; gives the port of plain sockets, and each wire format's addresses."""
        self._listener = socket.create_server((host, 0))
        self._listeners = {wire: Listener([host]) for wire in NETWORK_WIRES}
        addresses = {wire: listener.addresses for wire, listener in self._listeners.items()}
        return {"port": self._listener.getsockname()[1], "addresses": addresses}

    def connect(self, host: str, ends: list[Took]) -> None:
        """Connect plain sockets, and start exchanging over the network in each wire format."""
        if self.learner == 0:
            self._listener.settimeout(LIMIT_S)
            self.socket, _ = self._listener.accept()
        else:
            self.socket = socket.create_connection((host, ends[0]["port"]), timeout=LIMIT_S)
        self.socket.settimeout(LIMIT_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for wire, listener in self._listeners.items():
            where = {self.peer: [(address, port) for address, port in ends[self.peer]["addresses"][wire]]}
            self.carriers[wire] = NetworkCarrier(
                self.learner, [self.peer], self.weights, listener, where, SECRET, wire.encode(), wire=wire
            )
            self._start(wire, self.carriers[wire])
        for carrier in self.carriers.values():
            wait_for(lambda carrier=carrier: carrier.connected(self.peer), LIMIT_S, "the other end")

    def pull(self) -> Took:
        """Copy the other end's weights over the network, as it copies this one's."""
        over, came = threading.Event(), []

        def done(whole: bool) -> None:
            came.append(whole)
            over.set()

        def pulled() -> None:
            self.carriers["float32"].pull(self.peer, self.c_N, done)
            if not over.wait(LIMIT_S) or not came[0]:
                raise DeadlineError(f"end {self.learner} could not copy the other's weights in {LIMIT_S:g} s")

        return _took(pulled) | {"snapshot_ended_s": self.weights.snapshot_ended_s}

    def sockets(self) -> Took:
        """Send an array to the other end and receive one, at the same time, and do nothing with it."""

        def both_ways() -> None:
            sender = threading.Thread(target=self.socket.sendall, args=(_bytes(self.a_N),))
            sender.start()
            _receive(self.socket, _bytes(self.c_N))
            sender.join()

        return _took(both_ways)


def _took(do: Callable[[], object]) -> Took:
    began_s, cpu_s = time.perf_counter(), time.process_time()
    do()
    cpu_s = time.process_time() - cpu_s
    return {"began_s": began_s, "ended_s": time.perf_counter(), "cpu_s": cpu_s}


def _bytes(array_N: Tensor) -> memoryview:
    return memoryview(array_N.numpy()).cast("B")


def _receive(source: socket.socket, into: memoryview) -> None:
    done = 0
    while done < len(into):
        got = source.recv_into(into[done : done + CHUNK_BYTES])
        if not got:
            raise LearnerError("the other end closed its socket")
        done += got


def work(parameters: int) -> None:
    """Be one end, until standard input ends."""
    end = End(parameters)
    obey(end)
    for transport in end.transports.values():
        transport.close()


def pair(parameters: int, prefixes: Sequence[Sequence[str]] = ((), ())) -> Driven:
    """Return two ends, not yet started; ``prefixes`` put them elsewhere."""
    return Driven(SCRIPT, ["--end", "--parameters", str(parameters)], prefixes)


def connect(ends: Driven, addresses: Sequence[str]) -> None:
    """Connect two ends by plain sockets and over the network; ``addresses`` are theirs."""
    listening = [ends.one(learner, "listen", address) for learner, address in enumerate(addresses)]
    ends.all("connect", addresses[0], listening)


def wall_s(both: Sequence[Took]) -> float:
    """Return the seconds from the first end's beginning to the last end's end."""
    return max(took["ended_s"] for took in both) - min(took["began_s"] for took in both)
