"""Where a learner listens for the others: addresses, by themselves or by the name of an interface."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Sequence
from pathlib import Path

from antiphon.errors import ArgumentError

SIOCGIFADDR = 0x8915
BACKLOG = 128


def addresses_of(interface: str) -> list[str]:
    """Return an interface's addresses, IPv4 first; those of IPv6 that are valid on one link only are left out.

    Raises:
        ArgumentError: there is no such interface, or it has no address.

    >>> addresses_of("lo")[0]
    '127.0.0.1'
    """
    names = [name for _, name in socket.if_nameindex()]
    if interface not in names:
        raise ArgumentError(f"no interface {interface!r} on this host: it has {', '.join(names)}")
    found: list[str] = []
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        answer = fcntl.ioctl(asking.fileno(), SIOCGIFADDR, struct.pack("256s", interface.encode()))
        found.append(socket.inet_ntop(socket.AF_INET, answer[20:24]))
    with contextlib.suppress(FileNotFoundError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, name = line.split()
            address = ipaddress.IPv6Address(int(digits, 16))
            if name == interface and not address.is_link_local:
                found.append(str(address))
    if not found:
        raise ArgumentError(f"interface {interface!r} has no address")
    return found


class Listener:
    """Listening sockets, bound before anybody is told of them.

    Args:
        where: the name of an interface, or addresses (IPv4, IPv6) of this host.
        port: the port on each of them; 0 lets the system choose.

    Raises:
        ArgumentError: no such interface, an address that is not this host's, a port in use.
    """

    def __init__(self, where: str | Sequence[str], port: int = 0) -> None:
        self.sockets: list[socket.socket] = []
        try:
            for address in addresses_of(where) if isinstance(where, str) else where:
                self.sockets.append(_listen(address, port))
        except ArgumentError:
            self.close()
            raise
        self.addresses: list[tuple[str, int]] = [listening.getsockname()[:2] for listening in self.sockets]
        """Where it can be reached."""

    def close(self) -> None:
        """Stop listening."""
        for listening in self.sockets:
            listening.close()


def _listen(address: str, port: int) -> socket.socket:
    listening = socket.socket(family_of(address), socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if listening.family == socket.AF_INET6:
            # Else "::" would take the port of "0.0.0.0" too.
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listening.bind((address, port))
        listening.listen(BACKLOG)
        listening.setblocking(False)
    except OSError as error:
        listening.close()
        cure = {
            errno.EADDRINUSE: "choose another port (ANTIPHON_PORT), or none",
            errno.EADDRNOTAVAIL: "name an interface of this host (ANTIPHON_INTERFACE)",
        }.get(error.errno or 0, "name another interface or port (ANTIPHON_INTERFACE, ANTIPHON_PORT)")
        raise ArgumentError(f"cannot listen at {address} port {port}: {error.strerror}: {cure}") from None
    return listening


def family_of(address: str) -> socket.AddressFamily:
    """Return the family of a numeric address."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET
