"""The first meeting across hosts: all get one roster, strangers and old entries none, and errors name the cure."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace

import pytest
import torch.distributed as dist

from antiphon.errors import ArgumentError, DeadlineError
from antiphon.transport import meeting
from antiphon.transport.endpoint import (
    Endpoint,
    is_loopback,
    listening_port,
    own_address,
    read_secret,
    where_to_listen,
)
from antiphon.transport.meeting import Entry, SignedStore, attend, confer

SECRET, OTHER = b"a secret of the run", b"another one entirely"


def entry(number, learners=3, **more):
    return Entry(learners, number // 2, 10, [("10.0.0.1", 1000 + number)], **more)


def all_confer(store, entries, deadline_s=20.0, secrets=None):
    """Let all learners meet, each in a thread; return what each got, an error included."""

    def one(number):
        try:
            return confer(SignedStore(store, (secrets or {}).get(number, SECRET)), number, entries[number], deadline_s)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(entries)) as pool:
        return list(pool.map(one, range(len(entries))))


@pytest.fixture
def store():
    return dist.HashStore()


def test_all_get_the_same_roster(store):
    entries = [entry(number) for number in range(3)]
    rosters = all_confer(store, entries)
    assert rosters == [rosters[0]] * 3
    assert rosters[0].entries == entries and len(rosters[0].run) == 32


def test_what_an_earlier_start_left_in_the_store_is_not_taken(store):
    first = all_confer(store, [entry(number) for number in range(3)])[0]
    again = [entry(number) for number in range(3)]
    second = all_confer(store, again)
    assert second == [second[0]] * 3 and second[0].entries == again
    assert second[0].run != first.run


def test_a_late_learner_replaces_its_old_entry(store):
    """Learner 0 first sees the entry of an earlier start of learner 1, which then comes with a new one."""
    old, new = entry(1, 2), entry(1, 2)
    SignedStore(store, SECRET).write("learner-1", asdict(old))
    got = []
    host = threading.Thread(target=lambda: got.append(confer(SignedStore(store, SECRET), 0, entry(0, 2), 20.0)))
    host.start()
    while SignedStore(store, SECRET).read("roster") is None:
        assert host.is_alive()
    roster = confer(SignedStore(store, SECRET), 1, new, 20.0)
    host.join()
    assert got == [roster] and roster.entries[1] == new


def test_nobody_believes_what_is_not_signed(store):
    signed = SignedStore(store, SECRET)
    signed.write("key", [1])
    assert signed.read("key") == [1]
    assert SignedStore(store, OTHER).read("key") is None
    key = "antiphon/run/key"
    for forged in ("", "x", "0" * 64 + "[1]", store.get(key).decode().replace("[1]", "[2]")):
        store.set(key, forged)
        assert signed.read("key") is None and signed.forged == {"key"}
    signed.write("key", [1])
    store.set("antiphon/run/other", store.get(key).decode())
    assert signed.read("other") is None, "a value belongs to its key"
    store.set("antiphon/gather/key", store.get(key).decode())
    assert SignedStore(store, SECRET, "gather").read("key") is None, "and to its purpose"


def test_who_does_not_come_is_named(store):
    (error,) = all_confer(store, [entry(0)], deadline_s=0.2)
    assert isinstance(error, DeadlineError) and str(error) == "waited 0.2 s for learners [1, 2] to meet"
    error = pytest.raises(DeadlineError, confer, SignedStore(dist.HashStore(), SECRET), 1, entry(1), 0.1)
    assert "waited 0.1 s for learner 0, and all others, to meet" in str(error.value)


def test_another_secret_is_named_long_before_the_deadline(store, monkeypatch):
    monkeypatch.setattr(meeting._Host, "patience_s", 0.1)
    first, second = all_confer(store, [entry(0, 2), entry(1, 2)], deadline_s=30.0, secrets={1: OTHER})
    assert isinstance(first, ArgumentError) and isinstance(second, ArgumentError)
    assert "it signs with another secret than this host's: give all hosts the same secret" in str(second)
    assert "what [1] wrote is signed with another secret than this host's" in str(first)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"learners": 4}, "learner 1 on host 0 has 4 learners, learner 0 has 2"),
        ({"parameters": 11}, "learner 1 on host 0 has 11 parameters, learner 0 has 10"),
        ({"wire": "int8"}, "learner 1 on host 0 has int8 as its wire format, learner 0 has float32"),
        ({"protocol": 2}, "learner 1 on host 0 has 2 as its protocol, learner 0 has 1"),
    ],
)
def test_learners_that_disagree_are_all_told(store, change, text):
    errors = all_confer(store, [entry(0, 2), replace(entry(1, 2), **change)])
    assert all(isinstance(error, ArgumentError) and text in str(error) for error in errors)


# --- over TCP, as it is


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_learner_0_serves_the_meeting_on_its_address_alone():
    endpoint = Endpoint("127.0.0.1", free_port(), served=False)
    entries = [entry(number) for number in range(3)]
    assert endpoint.store(serve=True, timeout_s=5.0) is endpoint.store(serve=False, timeout_s=5.0)
    with ThreadPoolExecutor(3) as pool:
        for purpose in ("gather", "run"):
            met = list(pool.map(lambda n: attend(endpoint, SECRET, n, entries[n], 20.0, purpose), range(3)))  # noqa: B023
            assert [roster for roster, _ in met] == [met[0][0]] * 3
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", endpoint.port), 1.0)
    del met
    endpoint.release()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", endpoint.port), 1.0)


def test_a_meeting_that_nobody_serves_is_named():
    endpoint = Endpoint("127.0.0.1", free_port(), served=True)
    with pytest.raises(DeadlineError, match=rf"waited 0.3 s for the meeting at {endpoint} \(Connection refused\)"):
        attend(endpoint, SECRET, 0, entry(0), 0.3)


def test_a_meeting_whose_port_is_taken_is_named():
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = Endpoint("127.0.0.1", server.getsockname()[1], served=False)
        with pytest.raises(ArgumentError, match=r"cannot serve the meeting at .*ANTIPHON_MEETING_PORT"):
            attend(endpoint, SECRET, 0, entry(0), 5.0)


def test_a_store_that_answers_nothing_is_waited_for_until_the_deadline(monkeypatch):
    monkeypatch.setattr("antiphon.transport.meeting.REFUSAL_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = Endpoint("127.0.0.1", server.getsockname()[1], served=True)
        with pytest.raises(DeadlineError, match=r"waited 0.2 s for the meeting at"):
            attend(endpoint, SECRET, 1, entry(1), 0.2)


# --- what the environment says


@pytest.mark.parametrize(
    ("environment", "endpoint"),
    [
        ({"MASTER_ADDR": "n1", "MASTER_PORT": "29500", "TORCHELASTIC_USE_AGENT_STORE": "True"}, ("n1", 29500, True)),
        ({"MASTER_ADDR": "n1", "MASTER_PORT": "29500"}, ("n1", 29500, False)),
        ({"SLURM_STEP_NODELIST": "n[03-07],m", "SLURM_JOB_ID": "1234567"}, ("n03", 24567, False)),
        ({"SLURM_NODELIST": "n1", "MASTER_ADDR": "fd00::1", "ANTIPHON_MEETING_PORT": "7"}, ("fd00::1", 7, False)),
    ],
)
def test_where_to_meet(environment, endpoint):
    assert Endpoint.find(environment) == Endpoint(*endpoint)


def test_an_endpoint_that_cannot_be_is_named():
    with pytest.raises(ArgumentError, match="need MASTER_ADDR"):
        Endpoint.find({})
    with pytest.raises(ArgumentError, match="from 1 to 65535, not '70000'"):
        Endpoint.find({"MASTER_ADDR": "a", "ANTIPHON_MEETING_PORT": "70000"})
    assert str(Endpoint("fd00::1", 7, served=False)) == "[fd00::1]:7"


def test_the_secret(tmp_path):
    path = tmp_path / "secret"
    path.write_text("0123456789abcdef\n")
    path.chmod(0o600)
    assert read_secret({"ANTIPHON_SECRET_FILE": str(path)}) == b"0123456789abcdef"
    assert read_secret({"ANTIPHON_SECRET_FILE": str(path), "ANTIPHON_SECRET": "x" * 16}) == b"x" * 16
    path.chmod(0o640)
    for environment, text in [
        ({}, "set ANTIPHON_SECRET on all of them"),
        ({"ANTIPHON_SECRET": "short"}, "must have 16 characters at least, not 5"),
        ({"ANTIPHON_SECRET_FILE": str(path)}, r"open to others \(mode 0640\): chmod 600"),
        ({"ANTIPHON_SECRET_FILE": str(tmp_path / "none")}, "No such file"),
    ]:
        with pytest.raises(ArgumentError, match=text):
            read_secret(environment)


def test_where_a_learner_listens(monkeypatch):
    endpoint = Endpoint("127.0.0.1", 7, served=True)
    assert where_to_listen(endpoint, {}) == ["127.0.0.1"]
    assert where_to_listen(endpoint, {"ANTIPHON_INTERFACE": "eth7"}) == "eth7"
    # A host that knows the meeting's name, its own, as 127.0.1.1.
    monkeypatch.setattr("antiphon.transport.endpoint.own_address", lambda host: "127.0.1.1")
    monkeypatch.setattr("antiphon.transport.endpoint.socket.if_nameindex", lambda: [(1, "lo"), (2, "a"), (3, "b")])
    monkeypatch.setattr("antiphon.transport.endpoint._addresses", lambda name: [f"address of {name}"])
    assert where_to_listen(Endpoint("first-host", 7, served=True), {}) == ["address of a", "address of b"]
    assert where_to_listen(endpoint, {}) == ["127.0.1.1"], "the user means this machine alone"


def test_the_port():
    assert listening_port(3, {}) == 0 and listening_port(3, {"ANTIPHON_PORT": "7000"}) == 7003
    for text in ("a", "65534", "-1"):
        with pytest.raises(ArgumentError, match=f"ANTIPHON_PORT must be the first .*, not '{text}'"):
            listening_port(3, {"ANTIPHON_PORT": text})


def test_ones_own_address():
    assert own_address("127.0.0.1") == "127.0.0.1"
    assert is_loopback("127.0.1.1") and is_loopback("::1%lo") and not is_loopback("10.0.0.1")
    with pytest.raises(ArgumentError, match=r"no way leads to no\.such\.host\.invalid"):
        own_address("no.such.host.invalid")
