"""Where learners of several hosts meet for the first time, by which of this host's addresses, and with what secret."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Protocol as Interface
from typing import cast

import torch.distributed as dist

from antiphon.errors import ArgumentError, DeadlineError
from antiphon.transport.listener import addresses_of
from antiphon.transport.place import node_names

SECRET, SECRET_FILE = "ANTIPHON_SECRET", "ANTIPHON_SECRET_FILE"
INTERFACE, PORT, MEETING_PORT = "ANTIPHON_INTERFACE", "ANTIPHON_PORT", "ANTIPHON_MEETING_PORT"
WIRE = "ANTIPHON_WIRE"
SHORTEST_SECRET = 16
KNOCK_S = 0.2


class Store(Interface):
    """What is used of a store of torch.distributed."""

    def set(self, key: str, value: str) -> None:
        """Write a value."""

    def get(self, key: str) -> bytes:
        """Return a value, waiting for it."""

    def check(self, keys: list[str]) -> bool:
        """Say whether all keys have a value."""


@dataclass(frozen=True)
class Endpoint:
    """Where the meeting's store is."""

    host: str
    port: int
    served: bool
    """Whether somebody else serves it (torchrun's agent); otherwise learner 0 does."""

    @classmethod
    def find(cls, environment: Mapping[str, str] = os.environ) -> Endpoint:
        """Read MASTER_ADDR and MASTER_PORT, or what srun says of the step's hosts and of the job's number.

        Raises:
            ArgumentError: neither is there.
        """
        served = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        nodes = node_names(environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_NODELIST", "")))
        host = environment.get("MASTER_ADDR") or (nodes[0] if nodes else "")
        if not host:
            raise ArgumentError("learners on several hosts need MASTER_ADDR, the name of the first host, to meet there")
        text = environment.get("MASTER_PORT", "") if served else environment.get(MEETING_PORT, "")
        if not text:
            text = environment.get("MASTER_PORT", "") or str(20000 + int(environment.get("SLURM_JOB_ID", "0")) % 10000)
        if not text.isdecimal() or not 0 < int(text) < 65536:
            raise ArgumentError(f"the port of the meeting must be a number from 1 to 65535, not {text!r}")
        return cls(host, int(text), served)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def store(self, serve: bool, timeout_s: float) -> Store:
        """Return a connection to the store; the one who is to serve it serves it on the meeting's address alone.

        A process has one such connection: whoever serves goes on serving until `release` is called.

        Raises:
            DeadlineError: nothing answers there.
        """
        if self not in _stores:
            _stores[self] = self._connect(serve, timeout_s)
        return _stores[self]

    def release(self) -> None:
        """Close the connection; what this process serves is served no longer."""
        _stores.pop(self, None)

    def _connect(self, serve: bool, timeout_s: float) -> Store:
        served_here = serve and not self.served
        listening = self._listen() if served_here else None
        if not served_here:
            self._reach(timeout_s)
        try:
            store = dist.TCPStore(  # type: ignore[attr-defined]
                self.host,
                self.port,
                is_master=served_here,
                timeout=timedelta(seconds=timeout_s),
                wait_for_workers=False,
                master_listen_fd=listening.detach() if listening else None,
            )
            return cast(Store, store)
        except dist.DistError as error:
            raise DeadlineError(f"waited {timeout_s:g} s for the meeting at {self}: {error}") from error

    def _reach(self, timeout_s: float) -> None:
        """Wait until somebody listens there (torch would fill the terminal meanwhile)."""
        end = time.monotonic() + timeout_s
        while True:
            try:
                socket.create_connection((self.host, self.port), max(0.1, end - time.monotonic())).close()
                return
            except OSError as error:
                if time.monotonic() > end:
                    raise DeadlineError(
                        f"waited {timeout_s:g} s for the meeting at {self} ({error.strerror or error}): is learner 0"
                        " running there, and does this host reach that address?"
                    ) from error
            time.sleep(KNOCK_S)

    def _listen(self) -> socket.socket:
        (family, _, _, _, address) = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0]
        # A name may stand for 127.0.1.1 on its own host, where others would not find it.
        if is_loopback(str(address[0])) and not names_loopback(self.host):
            family, address = socket.AF_INET6, ("::", self.port)
        try:
            return socket.create_server(address[:2], family=family, dualstack_ipv6=address[0] == "::")
        except OSError as error:
            raise ArgumentError(
                f"cannot serve the meeting at {self} ({error.strerror}): name this host's address in MASTER_ADDR, or a"
                f" free port in {MEETING_PORT}"
            ) from error


def read_secret(environment: Mapping[str, str] = os.environ) -> bytes:
    """Return the run's secret, from ANTIPHON_SECRET or from the file that ANTIPHON_SECRET_FILE names.

    Raises:
        ArgumentError: there is none, it is too short, or others may read its file.
    """
    if text := environment.get(SECRET, ""):
        secret, where = text.encode(), SECRET
    elif name := environment.get(SECRET_FILE, ""):
        path = Path(name)
        try:
            mode, secret, where = stat.S_IMODE(path.stat().st_mode), path.read_bytes().strip(), name
        except OSError as error:
            raise ArgumentError(f"{SECRET_FILE} names {name}: {error.strerror}") from None
        if mode & 0o077:
            raise ArgumentError(f"{name} holds the run's secret and is open to others (mode {mode:04o}): chmod 600")
    else:
        raise ArgumentError(
            f"learners on several hosts need the run's secret: set {SECRET} on all of them, or {SECRET_FILE} to a file"
            " that only you can read, made by (umask 077; head -c 32 /dev/urandom | base64 > FILE)"
        )
    if len(secret) < SHORTEST_SECRET:
        raise ArgumentError(f"the secret in {where} must have {SHORTEST_SECRET} characters at least, not {len(secret)}")
    return secret


_stores: dict[Endpoint, Store] = {}


def where_to_listen(endpoint: Endpoint, environment: Mapping[str, str] = os.environ) -> str | list[str]:
    """Return the interface that is named, or else this machine's addresses on the way to the meeting.

    Raises:
        ArgumentError: no way leads there.
    """
    if name := environment.get(INTERFACE):
        return name
    address = own_address(endpoint.host)
    if is_loopback(address) and not names_loopback(endpoint.host):
        # Many a host knows its own name as 127.0.1.1, where the others would not find it.
        others = [name for _, name in socket.if_nameindex() if name != "lo"]
        return [address for name in others for address in _addresses(name)] or [address]
    return [address]


def listening_port(local_rank: int, environment: Mapping[str, str] = os.environ) -> int:
    """Return the port for a learner of this host: ANTIPHON_PORT and its rank on the host, or 0 for any.

    Raises:
        ArgumentError: it is no port.
    """
    text = environment.get(PORT, "0")
    if not text.isdecimal() or int(text) + local_rank > 65535:
        raise ArgumentError(f"{PORT} must be the first of this host's ports, one a learner up to 65535, not {text!r}")
    return int(text) + local_rank if int(text) else 0


def own_address(host: str) -> str:
    """Return this machine's address on the way to ``host``; nothing is sent."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as way:
            way.connect(address)
            return str(way.getsockname()[0])
    except OSError as error:
        raise ArgumentError(
            f"no way leads to {host}, where the learners are to meet ({error.strerror}): check MASTER_ADDR, or name"
            f" the interface in {INTERFACE}"
        ) from error


def _addresses(interface: str) -> list[str]:
    with contextlib.suppress(ArgumentError):
        return addresses_of(interface)
    return []


def is_loopback(address: str) -> bool:
    """Say whether an address never leaves its machine."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def names_loopback(host: str) -> bool:
    """Say whether the user meant this machine alone."""
    try:
        return host == "localhost" or is_loopback(host)
    except ValueError:
        return False
