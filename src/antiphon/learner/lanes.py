"""Work beside the computing thread's on a device: copies that run while the device computes a gradient.

A GPU does later what it was asked for, in order within a stream. A `Mark` stands for what had been asked for so far;
work of another stream can be made to wait for it without anybody waiting on the CPU. On the CPU all of this is trivial.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Protocol as Interface

import torch
from torch import Tensor

from antiphon.errors import LearnerError


class Mark(Interface):
    """A moment in a device's work."""

    def hold(self) -> None:
        """Let whatever the calling thread asks of the device from here on come after it."""

    def synchronize(self) -> None:
        """Wait until it is reached."""


class Lane(Interface):
    """A stream of a device's work of its own."""

    def here(self) -> Mark:
        """Return the mark of what the calling thread has asked for so far."""

    def run(self, work: Callable[[], None], after: Mark) -> Mark:
        """Ask for ``work`` in this lane, to come after a mark; return the mark of its end."""


class Now:
    """A mark that is always reached."""

    def hold(self) -> None:
        """Nothing is to be waited for."""

    def synchronize(self) -> None:
        """Nothing is to be waited for."""


class NoLane:
    """The CPU: work is done as it is asked for."""

    def here(self) -> Mark:
        """Return a mark that is reached."""
        return Now()

    def run(self, work: Callable[[], None], after: Mark) -> Mark:
        """Do the work."""
        work()
        return Now()


class CudaMark:
    """An event of a CUDA stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._device = stream.device
        self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._event.record(stream)

    def hold(self) -> None:
        """Let the calling thread's stream wait for the event."""
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def synchronize(self) -> None:
        """Sleep until the event has happened."""
        self._event.synchronize()


class CudaLane:
    """A CUDA stream."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def here(self) -> Mark:
        """Record an event in the calling thread's stream."""
        return CudaMark(torch.cuda.current_stream(self._device))

    def run(self, work: Callable[[], None], after: Mark) -> Mark:
        """Ask for the work in this lane's stream."""
        with torch.cuda.stream(self._stream):
            after.hold()
            work()
        return CudaMark(self._stream)


def lane_of(device: torch.device) -> Lane:
    """Return a lane of a device."""
    return CudaLane(device) if device.type == "cuda" else NoLane()


class Pinned:
    """Host memory that a GPU reads and writes by itself: whole pages that hold ``tensors``, until `release`.

    Raises:
        LearnerError: the driver refuses.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._begins: list[int] = []
        for begin, end in _pages(tensors):
            code = torch.cuda.cudart().cudaHostRegister(begin, end - begin, 0)  # type: ignore[no-untyped-call]
            if int(code) != 0:
                raise LearnerError(f"CUDA could not pin {end - begin} bytes of shared memory: error {int(code)}")
            self._begins.append(begin)

    def release(self) -> None:
        """Let the memory go."""
        while self._begins:
            torch.cuda.cudart().cudaHostUnregister(self._begins.pop())  # type: ignore[no-untyped-call]


def _pages(tensors: Iterable[Tensor]) -> list[tuple[int, int]]:
    """Return the ranges of whole pages that hold the tensors; what touches is one, for none may be pinned twice."""
    page = os.sysconf("SC_PAGE_SIZE")
    spans = sorted((t.data_ptr() // page * page, -(-(t.data_ptr() + t.nbytes) // page) * page) for t in tensors)
    merged: list[tuple[int, int]] = []
    for begin, end in spans:
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged
