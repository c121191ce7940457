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
from antiphon.transport.block import Col
from antiphon.transport.exchange import ExchangeTransport
from antiphon.transport.place import Place
from antiphon.transport.shared import SharedCarrier, SharedRounds

SCRIPT = Path(__file__).with_name("exchange.py")
COEFFICIENT = 0.5
LIMIT_S = 60.0
"""For any exchange and any transfer: many times what it takes."""
CHUNK_BYTES = 1 << 22


class WatchedWeights(Weights):
    """Weights that note when an exchange is in them, and how long their owner's own two passes took."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.added = threading.Event()
        self.snapshot_s = self.add_s = self.committed_s = 0.0

    def write(self, *args: Any) -> Any:
        """Take a snapshot."""
        began_s = time.perf_counter()
        handle = super().write(*args)
        self.snapshot_s = time.perf_counter() - began_s
        return handle

    def add_differences(self, *args: Any) -> None:
        """Add the difference: this end has then committed."""
        began_s = time.perf_counter()
        super().add_differences(*args)
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
        carrier = SharedCarrier(self.block, self.learner, [1 - self.learner], self.weights)
        rounds = SharedRounds(self.block, self.learner, self.weights)
        self.transport = ExchangeTransport(self.learner, self.weights, [carrier], rounds, deadline_s=LIMIT_S)

    def start(self) -> None:
        """Start the exchange thread: both ends are there."""
        self.transport.start()

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

    def exchange(self) -> Took:
        """Take part in one exchange, which learner 0 starts, and fold it into the weights."""
        weights = self.weights
        began_s, cpu_s = time.perf_counter(), time.process_time()
        if self.learner == 0:
            self.transport.propose(1, COEFFICIENT)
        if not weights.added.wait(LIMIT_S):
            raise DeadlineError(f"end {self.learner} waited {LIMIT_S:g} s for an exchange")
        fold_s = time.perf_counter()
        weights.begin_step()
        weights.end_step()
        fold_s, cpu_s = time.perf_counter() - fold_s, time.process_time() - cpu_s
        weights.added.clear()
        while self.transport.protocol.open:
            time.sleep(0.001)
        took = {"began_s": began_s, "ended_s": weights.committed_s, "cpu_s": cpu_s, "fold_s": fold_s}
        return took | {"snapshot_s": weights.snapshot_s, "add_s": weights.add_s}

    def checksum(self) -> Took:
        """Give the sum of the weights, and that of their magnitudes."""
        self.weights.settle()
        sums = (self.weights.w_N.sum(dtype=torch.float64), self.weights.w_N.abs().sum(dtype=torch.float64))
        return {"sum": float(sums[0]), "magnitude": float(sums[1])}

    def listen(self, host: str) -> Took:
        """Wait for the other end's connection, by and by; gives the port."""
        self._listener = socket.create_server((host, 0))
        return {"port": self._listener.getsockname()[1]}

    def connect(self, host: str, port: int) -> None:
        """Connect plain sockets."""
        if self.learner == 0:
            self._listener.settimeout(LIMIT_S)
            self.socket, _ = self._listener.accept()
        else:
            self.socket = socket.create_connection((host, port), timeout=LIMIT_S)
        self.socket.settimeout(LIMIT_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

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
    end.transport.close()


def pair(parameters: int, prefixes: Sequence[Sequence[str]] = ((), ())) -> Driven:
    """Return two ends, not yet started; ``prefixes`` put them elsewhere."""
    return Driven(SCRIPT, ["--end", "--parameters", str(parameters)], prefixes)


def connect(ends: Driven, host: str) -> None:
    """Connect two ends by plain sockets; ``host`` is the address of learner 0."""
    port = ends.one(0, "listen", host)["port"]
    ends.all("connect", host, port)


def wall_s(both: Sequence[Took]) -> float:
    """Return the seconds from the first end's beginning to the last end's end."""
    return max(took["ended_s"] for took in both) - min(took["began_s"] for took in both)
