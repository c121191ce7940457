"""What a snapshot becomes on its way: chunks of bytes, and a difference where a snapshot was.

Both ends compute the difference from what went over the wire, a = decode(encode(s_a)) and b likewise: one gets b - a,
the other a - b, equal in magnitude to the bit. So the sum of the weights is conserved to rounding, however coarse the
format.

| format | bytes a parameter | decoded |
|---|---|---|
| float32 | 4 | exact |
| bfloat16 | 2 | 8 bits of mantissa |
| int8 | 1 + 4/1024 | 1/127 of the largest magnitude among 1,024 neighbours, rounded to the nearest |

A coarse format sets a floor: learners come no closer to each other than its steps.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from antiphon.errors import unknown_name

CHUNK = 1 << 19
"""Parameters that travel together: 2 MB in float32. Half of it took a fifth longer over loopback, twice it no less."""
SCALED = 1024
"""Parameters that share a scale in int8."""
STEPS = 127.0


class Wire(ABC):
    """A format; an object of it serves one end of one exchange, for it holds the chunk that it has encoded last."""

    name: str
    number: int
    """What the handshake calls it."""
    borrows = False
    """Whether the bytes to send are the snapshot's own memory."""

    @staticmethod
    @abstractmethod
    def size(elements: int) -> int:
        """Return the bytes that so many parameters take."""

    @abstractmethod
    def encode(self, own_C: Tensor) -> memoryview:
        """Return a chunk's bytes, good until the next call; ``own_C`` becomes what the other end will decode."""

    @abstractmethod
    def subtract(self, data: Tensor, own_C: Tensor) -> bool:
        """Turn ``own_C`` into the difference decode(``data``) - ``own_C``, and say whether it is finite.

        ``data`` are bytes (uint8).
        """


class Float32(Wire):
    """The parameters themselves: what is sent is the snapshot's own memory."""

    name, number, borrows = "float32", 0, True

    @staticmethod
    def size(elements: int) -> int:
        """Four bytes each."""
        return 4 * elements

    def encode(self, own_C: Tensor) -> memoryview:
        """Return a view of the chunk."""
        return bytes_of(own_C)

    def subtract(self, data: Tensor, own_C: Tensor) -> bool:
        """Subtract."""
        return finite(torch.sub(data.view(torch.float32), own_C, out=own_C))


class BFloat16(Wire):
    """The upper half of each parameter, rounded to the nearest."""

    name, number = "bfloat16", 1

    def __init__(self) -> None:
        self._encoded_C = torch.empty(CHUNK, dtype=torch.bfloat16)

    @staticmethod
    def size(elements: int) -> int:
        """Two bytes each."""
        return 2 * elements

    def encode(self, own_C: Tensor) -> memoryview:
        """Round."""
        encoded_C = self._encoded_C[: own_C.numel()].copy_(own_C)
        own_C.copy_(encoded_C)
        return bytes_of(encoded_C)

    def subtract(self, data: Tensor, own_C: Tensor) -> bool:
        """Subtract, in float32."""
        return finite(torch.sub(data.view(torch.bfloat16), own_C, out=own_C))


class Int8(Wire):
    """A whole number of steps each; the steps of 1,024 neighbours are as wide as the largest of them needs."""

    name, number = "int8", 2

    def __init__(self) -> None:
        self._encoded = torch.empty(self.size(CHUNK), dtype=torch.uint8)
        self._work_C = torch.empty(CHUNK)

    @staticmethod
    def size(elements: int) -> int:
        """Return one byte each, and four for each scale."""
        return elements + 4 * -(-elements // SCALED)

    def encode(self, own_C: Tensor) -> memoryview:
        """Scale and round."""
        data = self._encoded[: self.size(own_C.numel())]
        scales_S, steps_C = self._parts(data, own_C.numel())
        for place, block in self._blocks(own_C):
            scale = block.abs().amax(1, keepdim=True) / STEPS
            # A scale of 0, and one too small to divide by, stands for zeros.
            scale[scale < torch.finfo(torch.float32).tiny] = 0.0
            steps = torch.where(scale > 0.0, block / scale, 0.0).round_()
            scales_S[place : place + len(scale)] = scale.squeeze(1)
            begin = place * SCALED
            steps_C[begin : begin + block.numel()] = steps.view(-1).to(torch.int8)
            torch.mul(steps, scale, out=block)
        return bytes_of(data)

    def subtract(self, data: Tensor, own_C: Tensor) -> bool:
        """Scale back and subtract."""
        scales_S, steps_C = self._parts(data, own_C.numel())
        sound = True
        for place, block in self._blocks(own_C):
            begin = place * SCALED
            steps = steps_C[begin : begin + block.numel()].view(block.shape)
            theirs = self._work_C[: block.numel()].view(block.shape).copy_(steps)
            theirs.mul_(scales_S[place : place + len(block)].unsqueeze(1))
            sound &= finite(torch.sub(theirs, block, out=block))
        return sound

    @staticmethod
    def _parts(data: Tensor, elements: int) -> tuple[Tensor, Tensor]:
        head = 4 * -(-elements // SCALED)
        return data[:head].view(torch.float32), data[head:].view(torch.int8)

    @staticmethod
    def _blocks(values_C: Tensor) -> list[tuple[int, Tensor]]:
        """Return the whole blocks as a matrix, and what is left as one row; each with the place of its first scale."""
        whole = values_C.numel() // SCALED
        parts = [(0, values_C[: whole * SCALED].view(whole, SCALED)), (whole, values_C[whole * SCALED :].view(1, -1))]
        return [(place, block) for place, block in parts if block.numel()]


WIRES: dict[str, type[Wire]] = {kind.name: kind for kind in (Float32, BFloat16, Int8)}


def wire_class(name: str) -> type[Wire]:
    """Return the format of a name.

    Raises:
        ArgumentError: there is none.
    """
    if name not in WIRES:
        raise unknown_name("wire format", name, WIRES)
    return WIRES[name]


def bytes_of(tensor: Tensor) -> memoryview:
    """Return a view of a tensor's memory."""
    return tensor.detach().view(torch.uint8).numpy().data


def finite(values_C: Tensor) -> bool:
    """Say whether all values are finite (and their sum, as in a snapshot's own check)."""
    return math.isfinite(values_C.sum().item())
