"""Two hosts made of network namespaces, with a link of limited rate between them: for benchmarks of the wire."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

from antiphon.errors import ArgumentError

BURST_BYTES = 1 << 20
LATENCY_MS = 50


class LinkUnavailableError(ArgumentError):
    """This machine does not let us make namespaces or limit a rate."""


@dataclass(frozen=True)
class Host:
    """One end of the link."""

    namespace: str
    interface: str
    address: str

    @property
    def prefix(self) -> list[str]:
        """Words before a command that put it on this host."""
        return ["ip", "netns", "exec", self.namespace]


@contextlib.contextmanager
def limited_link(gbit_per_s: float) -> Iterator[tuple[Host, Host]]:
    """Make two hosts whose link carries so much each way (a token bucket, tbf), and remove them at the end.

    Raises:
        LinkUnavailableError: it needs root, iproute2, and a kernel with namespaces, veth and tbf.
    """
    name = f"antiphon-{os.getpid()}"
    hosts = tuple(Host(f"{name}-{end}", f"link{end}", f"10.77.7.{end + 1}") for end in range(2))
    limit = f"rate {round(gbit_per_s * 1e3)}mbit burst {BURST_BYTES} latency {LATENCY_MS}ms"
    with contextlib.ExitStack() as cleanup:
        for host in hosts:
            _command(f"ip netns add {host.namespace}")
            cleanup.callback(_command, f"ip netns delete {host.namespace}")
        first, second = hosts
        _command(
            f"ip -n {first.namespace} link add {first.interface} type veth"
            f" peer name {second.interface} netns {second.namespace}"
        )
        for host in hosts:
            _command(f"ip -n {host.namespace} address add {host.address}/24 dev {host.interface}")
            _command(f"ip -n {host.namespace} link set lo up")
            _command(f"ip -n {host.namespace} link set {host.interface} up")
            _command(f"tc -n {host.namespace} qdisc add dev {host.interface} root tbf {limit}")
        yield first, second


def _command(words: str) -> None:
    try:
        subprocess.run(words.split(), check=True, capture_output=True, text=True)
    except FileNotFoundError:
        raise LinkUnavailableError(f"no limited link: {words.split()[0]} is not installed (iproute2)") from None
    except subprocess.CalledProcessError as error:
        raise LinkUnavailableError(f"no limited link: `{words}` says: {error.stderr.strip()}") from None
