"""A wire between two network namespaces that takes its time, for kernels without netem: wire.py NS0 NS1 MS LOSS.

In each namespace it is the interface ``wire``, a TUN device whose other side this process holds: it reads a packet from
one, keeps it for so long, and writes it to the other. Prints "ready" once both are up; ends with its parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import random
import select
import signal
import struct
import subprocess
import sys
import time
from collections import deque

TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
PR_SET_PDEATHSIG = 1
MTU, PACKETS_A_TURN, LONGEST_QUEUE = 60_000, 64, 4096


def end_of_wire(namespace: str, number: int) -> int:
    """Return the descriptor of a TUN device that lies in the namespace, up and with its addresses."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    # Under a name of its own until it is in the namespace.
    name = f"wire{os.getpid()}-{number}"
    fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    for command in (
        f"ip link set {name} netns {namespace} name wire",
        f"ip -n {namespace} link set wire mtu {MTU} up",
        f"ip -n {namespace} addr add 10.78.0.{number + 1}/24 dev wire",
        f"ip -n {namespace} -6 addr add fd78::{number + 1}/64 dev wire nodad",
    ):
        subprocess.run(command.split(), check=True)
    return fd


def carry(ends: tuple[int, int], delay_s: float, loss: float) -> None:
    """Carry packets both ways for ever."""
    waiting: deque[tuple[float, int, bytes]] = deque()
    while True:
        patience_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        ready, _, _ = select.select(ends, [], [], patience_s)
        for end in ready:
            other = ends[1] if end == ends[0] else ends[0]
            for _ in range(PACKETS_A_TURN):
                try:
                    packet = os.read(end, 65_536)
                except BlockingIOError:
                    break
                if random.random() >= loss and len(waiting) < LONGEST_QUEUE:
                    waiting.append((time.monotonic() + delay_s, other, packet))
        while waiting and waiting[0][0] <= time.monotonic():
            _, end, packet = waiting.popleft()
            # A full queue at the other side loses it, as on any wire.
            with contextlib.suppress(OSError):
                os.write(end, packet)


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    first, second, milliseconds, loss = sys.argv[1:]
    ends = end_of_wire(first, 0), end_of_wire(second, 1)
    print("ready", flush=True)
    carry(ends, float(milliseconds) / 1e3, float(loss))


if __name__ == "__main__":
    main()
