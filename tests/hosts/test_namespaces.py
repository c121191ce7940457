"""The hosts that the other tests of this folder stand on: they reach each other, are cut, slow and lossy as asked."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from namespaces import PREFIX, Hosts, existing, sweep


def reached(hosts: Hosts, host: str, count: int = 1, every_s: float = 0.2) -> tuple[int, float]:
    """Return how many of so many pings from host 0 are answered, and their mean time in ms."""
    argv = ["ip", "netns", "exec", hosts.names[0], "ping", "-c", str(count), "-i", str(every_s), "-W", "1", host]
    text = subprocess.run(argv, capture_output=True, text=True, timeout=60).stdout
    (received,) = re.findall(r"(\d+) received", text)
    return int(received), float((re.findall(r"= [\d.]+/([\d.]+)/", text) or ["inf"])[0])


@pytest.fixture
def hosts():
    with Hosts(2) as made:
        yield made


def test_they_reach_each_other_unless_cut(hosts):
    both = [hosts.address(1), hosts.address(1, ipv6=True)]
    assert [reached(hosts, address)[0] for address in both] == [1, 1]
    hosts.cut(1)
    assert [reached(hosts, address)[0] for address in both] == [0, 0]
    hosts.heal(1)
    assert [reached(hosts, address)[0] for address in both] == [1, 1]


def test_a_wire_takes_its_time_both_ways(hosts):
    hosts.delay(20)
    for ipv6 in (False, True):
        received, milliseconds = reached(hosts, hosts.address(1, ipv6=ipv6, wire=True), count=3)
        assert received == 3 and 40.0 <= milliseconds < 200.0
    assert reached(hosts, hosts.address(1))[1] < 20.0


def test_loss_loses_about_as_much_as_asked(hosts):
    hosts.lose(1, 0.5)
    received, _ = reached(hosts, hosts.address(1), count=100, every_s=0.002)
    assert 15 < received < 85


LOAD = """
import socket, sys, time
server = socket.create_server((sys.argv[1], 7000)) if sys.argv[2] == "take" else None
if server:
    print("ready", flush=True)
    taken = server.accept()[0]
    count, began = 0, 0.0
    while data := taken.recv(1 << 20):
        began = began or time.monotonic()
        count += len(data)
    print(8 * count / (time.monotonic() - began))
else:
    with socket.create_connection((sys.argv[1], 7000)) as sender:
        for _ in range(60):
            sender.sendall(bytes(1 << 18))
"""


def test_a_limit_limits(hosts):
    hosts.limit(0, "100mbit")
    address = hosts.address(1)
    inside = ["ip", "netns", "exec"]
    argv = [sys.executable, "-c", LOAD, address]
    taker = subprocess.Popen([*inside, hosts.names[1], *argv, "take"], stdout=subprocess.PIPE, text=True)
    assert taker.stdout.readline() == "ready\n"
    subprocess.run([*inside, hosts.names[0], *argv, "give"], check=True, timeout=30)
    rate = float(taker.communicate(timeout=30)[0])
    assert 10e6 < rate < 115e6


MAKER = """
import os, sys, time
sys.path[:0] = [{here!r}]
from namespaces import Hosts
with Hosts(2) as hosts:
    hosts.start(0, ["sleep", "600"], {log})
    hosts.delay(1)
    print(os.getpid(), flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_of_them_however_it_ends(end, tmp_path):
    code = MAKER.format(here=str(Path(__file__).parent), log=f"__import__('pathlib').Path({str(tmp_path / 'log')!r})")
    maker = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    pid = int(maker.stdout.readline())
    own = f"{PREFIX}-{pid}-"
    assert len([name for name in existing() if name.startswith(own)]) == 3
    maker.send_signal(end)
    maker.communicate(timeout=30)
    if end == signal.SIGKILL:  # whoever comes next cleans up
        sweep()
    assert not [name for name in existing() if name.startswith(own)]
