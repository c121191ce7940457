"""The two ends that exchange.py measures, each a process of its own, and the pair of them as the script sees it.

An end reads one command a line from standard input, does it at once, and answers with one line: what it took. Wall
times are on the clock that all processes of a host share.
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import common  # noqa: F401 - one thread, said before torch is loaded
import torch
from torch import Tensor

from antiphon.errors import DeadlineError, LearnerError
from antiphon.learner.weights import Weights
from antiphon.transport.block import Block, Col
from antiphon.transport.place import Place

SCRIPT = Path(__file__).with_name("exchange.py")
COEFFICIENT = 0.5
LIMIT_S = 60.0
"""For anything that an end is told to do: many times what it takes."""
CHUNK_BYTES = 1 << 22

Took = dict[str, Any]


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

    def __init__(self) -> None:
        torch.set_num_threads(1)
        place = Place.find()
        self.learner, self.block = place.learner, place.open()
        self.block.board_LC[self.learner, Col.PID] = os.getpid()
        parameters = int(os.environ["EXCHANGE_PARAMETERS"])
        self.weights = WatchedWeights(self.block.allocate(parameters), self.learner)
        draw = torch.Generator().manual_seed(self.learner)
        self.weights.w_N.normal_(0.0, 0.1, generator=draw)
        # Memory that is written once before it is measured costs no page faults then.
        self.a_N, self.b_N, self.c_N = (self.weights.w_N.clone() for _ in range(3))
        self.transport = place.transport(self.block, self.weights, deadline_s=LIMIT_S)

    def start(self) -> Took:
        """Start the exchange thread: both ends are there."""
        self.transport.start()
        return {}

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

    def connect(self, host: str, port: int) -> Took:
        """Connect plain sockets."""
        if self.learner == 0:
            self._listener.settimeout(LIMIT_S)
            self.socket, _ = self._listener.accept()
        else:
            self.socket = socket.create_connection((host, port), timeout=LIMIT_S)
        self.socket.settimeout(LIMIT_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return {}

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


def work() -> None:
    """Be one end, until standard input ends."""
    end = End()
    print(json.dumps({}), flush=True)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(getattr(end, name)(*arguments)), flush=True)
    end.transport.close()


class Pair:
    """Both ends; ``prefixes`` are words before each one's command, which put it elsewhere."""

    def __init__(self, parameters: int, prefixes: Sequence[Sequence[str]] = ((), ())) -> None:
        self.block = Block.create(2)
        self.ends = []
        for learner, prefix in enumerate(prefixes):
            place = Place(learner, 2, self.block.folder, creates=False).environment()
            environment = {**os.environ, **place, "EXCHANGE_PARAMETERS": str(parameters)}
            command = [*prefix, sys.executable, str(SCRIPT), "--end"]
            pipe = subprocess.PIPE
            self.ends.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, bufsize=0, env=environment))

    def __enter__(self) -> Self:
        self._answers()
        self.both("start")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for end in self.ends:
            assert end.stdin is not None
            end.stdin.close()
        for end in self.ends:
            try:
                end.wait(5.0 if error is None else 0.1)
            except subprocess.TimeoutExpired:
                end.kill()
                end.wait()
        self.block.remove()

    def both(self, name: str, *arguments: object) -> list[Took]:
        """Let both ends do the same at the same time, and return what it took each."""
        # Learner 0 starts exchanges: the other one is told first, to be ready.
        for end in reversed(self.ends):
            _tell(end, name, arguments)
        return self._answers()

    def connect(self, host: str) -> None:
        """Connect the two by plain sockets; ``host`` is the address of learner 0."""
        _tell(self.ends[0], "listen", [host])
        port = self._answer(0)["port"]
        self.both("connect", host, port)

    def _answers(self) -> list[Took]:
        return [self._answer(learner) for learner in range(len(self.ends))]

    def _answer(self, learner: int) -> Took:
        output = self.ends[learner].stdout
        assert output is not None
        if not select.select([output], [], [], 2 * LIMIT_S)[0]:
            raise DeadlineError(f"waited {2 * LIMIT_S:g} s for end {learner}")
        line = output.readline()
        if not line:
            raise LearnerError(f"end {learner} ended; its last words are above")
        answer: Took = json.loads(line)
        return answer


def _tell(end: subprocess.Popen[bytes], name: str, arguments: Sequence[object]) -> None:
    assert end.stdin is not None
    end.stdin.write(json.dumps([name, *arguments]).encode() + b"\n")


def wall_s(both: Sequence[Took]) -> float:
    """Return the seconds from the first end's beginning to the last end's end."""
    return max(took["ended_s"] for took in both) - min(took["began_s"] for took in both)
