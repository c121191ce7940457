"""Frames: what goes over a connection once both ends have proven who they are. A header, and as many bytes as it says.

    header   what (1 byte), tag (1), length of the body in bytes (4), number (8), part (4); all little-endian

| what | tag | number | part | body |
|---|---|---|---|---|
| MESSAGE | 0 | 0 | 0 | a message of the exchange |
| PART | 1 from the initiator, else 0 | the exchange's sequence | which chunk | a chunk of a snapshot, encoded |
| NOTE | a channel | 0 | 0 | whatever the channel's two ends say, 64 KiB at most |
| PULL | 0 | the request | 0 | - |
| PULLED | 0 | the request | which chunk | a chunk of the weights, float32 |
| EMPTY | 0 | the request | 0 | - (no weights can be had now) |
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

NOTE_BYTES = 1 << 16
_HEADER = struct.Struct("<BBIQI")
HEADER_BYTES = _HEADER.size


class What(enum.IntEnum):
    """What a frame holds."""

    MESSAGE = 1
    PART = 2
    NOTE = 3
    PULL = 4
    PULLED = 5
    EMPTY = 6


class MalformedError(Exception):
    """Bytes that no learner of ours sends: the connection is closed."""


class Frame(NamedTuple):
    """A frame's header."""

    what: What
    tag: int = 0
    length: int = 0
    number: int = 0
    part: int = 0

    def pack(self) -> bytes:
        """Return its bytes."""
        return _HEADER.pack(*self)

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> Frame:
        """Read one.

        Raises:
            MalformedError: it is none; whether its length is right is for those to say who know what is in it.
        """
        what, *rest = _HEADER.unpack(data)
        if what not in What._value2member_map_:
            raise MalformedError(f"a frame of kind {what}")
        return cls(What(what), *rest)
