"""Hosts made of network namespaces: each with its own addresses, on a switch that limits, loses and cuts.

All of them, and the switch, are namespaces of their own: nothing is added to the machine's own network, and with the
namespaces all else goes. Their names carry the number of the process that made them, so that a later run finds what a
killed one has left.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

PREFIX = "antiphon-test"
CLONE_NEWNET = 0x40000000
WIRE = Path(__file__).with_name("wire.py")
_libc = ctypes.CDLL(None, use_errno=True)
_made: list[Hosts] = []


def reason_against() -> str | None:
    """Return why no namespaces can be made here, or None where they can."""
    for tool in ("ip", "tc", "nft"):
        if shutil.which(tool) is None:
            return f"needs the command {tool}"
    name = f"{PREFIX}-{os.getpid()}-try"
    tried = _call("ip", "netns", "add", name)
    if tried.returncode:
        return f"may not make network namespaces: {tried.stderr.strip()}"
    _call("ip", "netns", "del", name)
    return None


class Hosts:
    """So many hosts on one switch; use as a context manager, which removes all of it.

    Host h has the interface ``lan`` with the addresses 10.77.0.(h+1) and fd77::(h+1).
    """

    def __init__(self, count: int = 2) -> None:
        self.names = [f"{PREFIX}-{os.getpid()}-{number}" for number in range(count)]
        self.switch = f"{PREFIX}-{os.getpid()}-switch"
        self._wire: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Hosts:
        sweep()
        _made.append(self)
        try:
            self._build()
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _build(self) -> None:
        for name in (self.switch, *self.names):
            call("ip", "netns", "add", name)
            self._ip(name, "link set lo up")
        self._ip(self.switch, "link add bridge type bridge")
        self._ip(self.switch, "link set bridge up")
        for number, name in enumerate(self.names):
            self._ip(self.switch, f"link add port{number} type veth peer name lan netns {name}")
            self._ip(self.switch, f"link set port{number} master bridge up")
            # Without a wait for somebody else who might have the same address.
            self.run_in(number, "sysctl", "-qw", "net.ipv6.conf.lan.accept_dad=0")
            self._ip(name, "link set lan up")
            self._ip(name, f"addr add {self.address(number)}/24 dev lan")
            self._ip(name, f"-6 addr add {self.address(number, ipv6=True)}/64 dev lan nodad")

    @staticmethod
    def address(number: int, *, ipv6: bool = False, wire: bool = False) -> str:
        """Return a host's address on the switch, or on the wire with a delay."""
        net = 78 if wire else 77
        return f"fd{net}::{number + 1}" if ipv6 else f"10.{net}.0.{number + 1}"

    # --- what goes wrong

    def cut(self, number: int) -> None:
        """Let nothing pass between a host and the others any more; its addresses stay."""
        self._drop(number, "cut", "drop")

    def heal(self, number: int) -> None:
        """Undo `cut`."""
        self.run_in(number, "nft", "delete", "table", "inet", "cut")

    def lose(self, number: int, fraction: float) -> None:
        """Lose this part of all packets that reach a host."""
        self._drop(number, "loss", f"numgen random mod 10000 < {round(fraction * 1e4)} drop", hooks=("input",))

    def limit(self, number: int, rate: str) -> None:
        """Let a host send at this rate at most, such as 4gbit."""
        self.run_in(number, *f"tc qdisc replace dev lan root tbf rate {rate} burst 256kb latency 20ms".split())

    def delay(self, milliseconds: float, loss: float = 0.0) -> None:
        """Join hosts 0 and 1 by a wire of their own, the interface ``wire``, that takes so long each way."""
        assert self._wire is None
        argv = [sys.executable, str(WIRE), *self.names[:2], str(milliseconds), str(loss)]
        self._wire = subprocess.Popen(argv, stdout=subprocess.PIPE)
        assert self._wire.stdout is not None
        assert self._wire.stdout.readline() == b"ready\n", "the wire was not made"

    def _drop(self, number: int, table: str, what: str, hooks: Sequence[str] = ("input", "output")) -> None:
        rules = "".join(
            f"chain {hook} {{ type filter hook {hook} priority 0; {side} lo accept; {what}; }}\n"
            for hook, side in (("input", "iif"), ("output", "oif"))
            if hook in hooks
        )
        self.run_in(number, "nft", "-f", "-", text=f"table inet {table} {{\n{rules}}}\n")

    # --- processes

    def run_in(self, number: int, *argv: str, text: str | None = None) -> str:
        """Run a command on a host to its end and return what it prints."""
        return call("ip", "netns", "exec", self.names[number], *argv, text=text)

    def start(
        self, number: int, argv: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a command on a host; what it writes goes to ``log``."""
        with log.open("ab") as output:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.names[number], *argv],
                env={**os.environ, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def enter(self, number: int) -> None:
        """Move this process, which must have one thread only, to a host: for children that were forked."""
        fd = os.open(f"/run/netns/{self.names[number]}", os.O_RDONLY)
        try:
            if _libc.setns(fd, CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"setns to {self.names[number]}")
        finally:
            os.close(fd)

    def pids(self, number: int) -> list[int]:
        """Return the processes on a host."""
        return [int(pid) for pid in call("ip", "netns", "pids", self.names[number]).split()]

    def kill(self, number: int) -> None:
        """Kill all processes of a host at once; the host itself goes on to answer."""
        for pid in self.pids(number):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def remove(self) -> None:
        """End all processes on the hosts and remove the hosts."""
        if self._wire is not None:
            self._wire.kill()
            self._wire.wait()
            self._wire = None
        for name in (*self.names, self.switch):
            _remove(name)
        if self in _made:
            _made.remove(self)

    def _ip(self, name: str, command: str) -> None:
        call("ip", "-n", name, *command.split())


def call(*argv: str, text: str | None = None) -> str:
    """Run a command and return what it prints; an error tells its words."""
    done = _call(*argv, text=text)
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv)}: status {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def _call(*argv: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, input=text, capture_output=True, text=True, timeout=30)


def sweep() -> None:
    """Remove the hosts of test runs that were killed."""
    for name in existing():
        owner = re.fullmatch(rf"{PREFIX}-(\d+)-\w+", name)
        if owner and not Path(f"/proc/{owner[1]}").exists():
            _remove(name)


def existing() -> list[str]:
    """Return the namespaces of this harness, whoever made them."""
    names = (line.split()[0] for line in _call("ip", "netns", "list").stdout.splitlines() if line)
    return [name for name in names if name.startswith(f"{PREFIX}-")]


def _remove(name: str) -> None:
    if name not in existing():
        return
    end = time.monotonic() + 10.0
    while (pids := _call("ip", "netns", "pids", name).stdout.split()) and time.monotonic() < end:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.01)
    _call("ip", "netns", "del", name)


@atexit.register
def _remove_all() -> None:
    for hosts in list(_made):
        hosts.remove()


@contextlib.contextmanager
def hosts(count: int = 2) -> Iterator[Hosts]:
    """Make hosts, and remove them."""
    with Hosts(count) as made:
        yield made
