"""Exchanges over real TCP: conserved in every format, through cuts and stalls at any byte, whatever strangers send."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading

import network_ends
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from network_ends import RUN, SECRET, End, Relay, connected, exchange, listen, pair, settle, total, until

from antiphon.errors import ArgumentError
from antiphon.transport.frames import HEADER_BYTES, NOTE_BYTES, Frame, What
from antiphon.transport.handshake import HELLO_BYTES, MAC_BYTES, Dialer, Terms
from antiphon.transport.link import QUEUE
from antiphon.transport.listener import addresses_of
from antiphon.transport.network import CALLS, Listener, NetworkCarrier
from antiphon.transport.protocol import Handle, Kind, Message
from antiphon.transport.shared import pack
from antiphon.transport.wire import CHUNK, WIRES

ROUNDING = 1e-6
"""Of the sum, a parameter."""
HANDSHAKE = (HELLO_BYTES + MAC_BYTES, HELLO_BYTES + MAC_BYTES)
"""Bytes of a handshake, there and back."""
MESSAGE = HEADER_BYTES + len(pack(Message(Kind.PROPOSE, 0, 1)))


# --- exchanges


@pytest.mark.parametrize("parameters", [1, 1000, CHUNK, 2 * CHUNK + 5])
@pytest.mark.parametrize("wire", WIRES)
def test_exchanges_conserve_the_sum_and_bring_learners_together(wire, parameters):
    with pair(parameters, wire=wire) as ends:
        before = total(ends)
        apart = [end.weights.snapshot() for end in ends]
        for initiator in (0, 1, 0):
            exchange(ends, initiator)
        assert abs(total(ends) - before) < ROUNDING * parameters
        distance = float((ends[0].weights.snapshot() - ends[1].weights.snapshot()).abs().max())
        step = {"float32": 1e-6, "bfloat16": 2.0**-7, "int8": 1.0 / 127}[wire]
        assert distance <= step * max(float(values_N.abs().max()) for values_N in apart)
        assert [end.counts.torn for end in ends] == [0, 0]
        assert sum(end.counts.committed for end in ends) == sum(end.counts.applied for end in ends) == 3


def test_slots_are_free_after_an_exchange():
    with pair(CHUNK + 1) as ends:
        for _ in range(5):
            exchange(ends)
        for end in ends:
            handles = [end.weights.take() for _ in range(end.weights.buffers.slots_LSN.shape[1])]
            assert None not in handles


def test_crossing_proposals_come_to_one_exchange():
    with pair(3 * CHUNK) as ends:
        before = total(ends)
        for end in ends:
            end.transport.propose(1 - end.learner, 0.5)
        until(lambda: all(end.weights.additions for end in ends) or all(end.idle() for end in ends))
        settle(ends)
        assert abs(total(ends) - before) < ROUNDING * 3 * CHUNK
        assert ends[0].weights.additions == ends[1].weights.additions


def test_weights_that_are_not_finite_are_never_sent():
    with pair(100) as ends:
        ends[1].weights.w_N[3] = float("nan")
        ends[0].transport.propose(1, 0.5)
        until(lambda: ends[0].counts.refused == 1)
        assert ends[0].weights.additions == ends[1].weights.additions == 0


def test_four_learners_exchange_all_with_all():
    listeners = listen(4)
    ends = [End(learner, listeners, 1000).start() for learner in range(4)]
    try:
        until(lambda: all(end.carrier.connected(peer) for end in ends for peer in end.carrier.peers))
        before = total(ends)
        steps = {end.learner: 0 for end in ends}
        while min(end.counts.committed for end in ends) < 20:
            assert sum(steps.values()) < 1e6
            for end in ends:
                end.transport.check()
                end.transport.propose((end.learner + 1 + steps[end.learner] % 3) % 4, 1 / 3)
                steps[end.learner] += 1
            until(lambda: any(end.idle() for end in ends))
        settle(ends)
        assert abs(total(ends) - before) < ROUNDING * 4000
        assert max(float((end.weights.snapshot() - ends[0].weights.snapshot()).abs().max()) for end in ends) < 0.1
    finally:
        for end in ends:
            end.close()


# --- notes and pulls


def test_notes_arrive_in_order_and_long_ones_too():
    with pair(10) as ends:
        notes = [b"", b"one", bytes(NOTE_BYTES)]
        for data in notes:
            ends[0].carrier.note(1, 1, data)
        ends[0].carrier.note(1, 2, b"nobody listens to this channel")
        until(lambda: len(ends[1].notes) == 3)
        assert ends[1].notes == [(0, data) for data in notes]


@pytest.mark.parametrize(("channel", "size"), [(1, NOTE_BYTES + 1), (-1, 0), (256, 0)])
def test_a_note_outside_its_bounds_is_refused(channel, size):
    with pair(10, start=False) as ends, pytest.raises(ArgumentError, match="up to 65536, 0 to 255"):
        ends[0].carrier.note(1, channel, bytes(size))


def pulled(end, peer, parameters):
    into_N, came, ended = torch.full((parameters,), 7.0), [], threading.Event()
    end.carrier.pull(peer, into_N, lambda good: (came.append(good), ended.set()))
    assert ended.wait(network_ends.LIMIT_S)
    return came[0], into_N


@pytest.mark.parametrize("wire", WIRES)
def test_a_pull_copies_the_peers_weights_exactly_whatever_the_wire(wire):
    with pair(2 * CHUNK + 3, wire=wire) as ends:
        exchange(ends)
        for end in ends:
            came, copy_N = pulled(end, 1 - end.learner, 2 * CHUNK + 3)
            assert came
            assert torch.equal(copy_N, ends[1 - end.learner].weights.snapshot())


def test_a_pull_says_so_where_there_is_nothing_to_be_had():
    with pair(100) as ends:
        ends[1].weights.w_N[0] = float("inf")
        assert not pulled(ends[0], 1, 100)[0]
        ends[1].weights.w_N[0] = 0.0
        assert pulled(ends[0], 1, 100)[0]
        ends[1].close()
        until(lambda: not ends[0].carrier.connected(1))
        assert not pulled(ends[0], 1, 100)[0]


def test_a_second_pull_from_one_peer_is_not_begun_meanwhile():
    with pair(4 * CHUNK) as ends:
        came: list[bool] = []
        both_N = torch.empty(2, 4 * CHUNK)
        for into_N in both_N:
            ends[0].carrier.pull(1, into_N, came.append)
        until(lambda: len(came) == 2)
        assert came == [False, True]
        assert torch.equal(both_N[0], ends[1].weights.w_N)


# --- cuts and stalls

PARAMETERS = 2 * CHUNK + 1000
PAYLOAD = 4 * PARAMETERS + 3 * HEADER_BYTES
FORTH = [0, 50, HELLO_BYTES, HANDSHAKE[0] - 1, HANDSHAKE[0], HANDSHAKE[0] + 9, HANDSHAKE[0] + MESSAGE]
FORTH += [FORTH[-1] + size for size in (1, PAYLOAD // 2, PAYLOAD - 1, PAYLOAD, PAYLOAD + 1, PAYLOAD + MESSAGE)]
BACK = [1, HELLO_BYTES, HANDSHAKE[1] - 1, HANDSHAKE[1], HANDSHAKE[1] + 1]
BACK += [HANDSHAKE[1] + size for size in (PAYLOAD // 2, PAYLOAD - 1, PAYLOAD, PAYLOAD + 5, PAYLOAD + MESSAGE)]
BACK += [HANDSHAKE[1] + PAYLOAD + MESSAGE + 7, HANDSHAKE[1] + PAYLOAD + 2 * MESSAGE]


@contextlib.contextmanager
def relayed(forth=None, back=None, stall=False, parameters=PARAMETERS, **kwargs):
    relays = []

    def addresses(listeners):
        relays.append(Relay(listeners[1].addresses[0], forth, back, stall))
        return relays[0].addresses

    with pair(parameters, addresses, start=False, **kwargs) as ends:
        for end in ends:
            end.start()
        try:
            yield ends, relays[0]
        finally:
            relays[0].close()


@pytest.mark.parametrize(("forth", "back"), [(k, None) for k in FORTH] + [(None, k) for k in BACK])
def test_a_connection_cut_at_any_byte_heals_and_conserves_the_sum(forth, back):
    with relayed(forth, back, deadline_s=0.4) as (ends, relay):
        before = total(ends)
        exchange(ends)
        if not relay.acted.is_set():  # COMMIT and DONE of the first exchange were short of it
            exchange(ends)
        settle(ends)
        connected(ends)
        exchange(ends, 1)
        assert relay.acted.is_set()
        assert abs(total(ends) - before) < ROUNDING * PARAMETERS
        assert [end.counts.torn for end in ends] == [0, 0]


@pytest.mark.parametrize("wire", ["bfloat16", "int8"])
@pytest.mark.parametrize("share", [0.3, 1.0])
def test_a_cut_amid_coarse_snapshots_heals_and_conserves_the_sum(wire, share):
    forth = HANDSHAKE[0] + MESSAGE + int(share * WIRES[wire].size(PARAMETERS))
    with relayed(forth, deadline_s=0.4, wire=wire) as (ends, relay):
        before = total(ends)
        exchange(ends)
        assert relay.acted.is_set()
        assert abs(total(ends) - before) < ROUNDING * PARAMETERS


@pytest.mark.parametrize(
    ("forth", "back"), [(FORTH[-5], None), (FORTH[-3], None), (None, BACK[-7]), (None, BACK[-5]), (None, BACK[-3])]
)
def test_a_peer_that_stalls_amid_an_exchange_is_left_alone_until_it_goes_on(forth, back):
    with relayed(forth, back, stall=True, deadline_s=0.2) as (ends, relay):
        before = total(ends)
        connected(ends)
        ends[0].transport.propose(1, 0.5)
        assert relay.acted.wait(network_ends.LIMIT_S)
        # Whoever has not decided gives up; who has, or is in doubt, asks again and again.
        until(lambda: ends[0].counts.late or ends[0].counts.committed)
        relay.go_on()
        settle(ends)
        exchange(ends)
        assert abs(total(ends) - before) < ROUNDING * PARAMETERS
        assert ends[0].weights.additions == ends[1].weights.additions
        assert [end.counts.torn for end in ends] == [0, 0]


# --- who is gone, and who comes back


class Ears:
    """What the exchange threads are told of their peers."""

    def __init__(self, end):
        self.lost = []
        end.carrier.on_lost = self.lost.append


@pytest.mark.parametrize("leaver", [0, 1])
def test_a_peer_whose_process_is_gone_is_noticed_and_may_return_as_another(leaver):
    listeners = listen()
    ends = [End(learner, listeners, 100) for learner in range(2)]
    stays = ends[1 - leaver]
    ears = Ears(stays)
    with contextlib.ExitStack() as closing:
        closing.callback(stays.transport.close)
        for end in ends:
            end.start()
        connected(ends)
        exchange(ends)
        ends[leaver].close()
        until(lambda: ears.lost == [leaver])
        assert leaver in stays.transport.gone
        assert stays.transport.present() == (stays.learner,)
        # Another process listens at the same address, as a learner that is started again with ANTIPHON_PORT does.
        address, port = listeners[leaver].addresses[0]
        again = {leaver: Listener([address], port), stays.learner: listeners[stays.learner]}
        heir = End(leaver, again, 100, incarnation=1).start()
        closing.callback(heir.transport.close)
        connected([stays, heir])
        assert leaver not in stays.transport.gone
        exchange([heir, stays] if leaver == 0 else [stays, heir])


def test_an_older_process_is_refused_while_a_newer_one_is_there():
    listeners = listen()
    first = End(0, listeners, 100, incarnation=2).start()
    second = End(1, listeners, 100).start()
    try:
        connected([first, second])
        with client(second) as stranger:
            assert stranger.recv(1) == b""
        assert second.carrier.refused["an older process"] == 1
        connected([first, second])
        exchange([first, second])
    finally:
        first.close()
        second.close()


def test_a_link_that_breaks_without_anybody_gone_comes_back():
    with pair(100) as ends:
        ears = Ears(ends[0]), Ears(ends[1])
        remote = ends[1].carrier._remotes[0]
        for _ in range(5):
            broken = remote.link
            broken._socket.shutdown(socket.SHUT_RDWR)
            until(lambda broken=broken: remote.link not in (None, broken))
        connected(ends)
        exchange(ends)
        assert not ears[0].lost
        assert not ears[1].lost


# --- strangers


def client(end, secret=SECRET, own=0, run=RUN, parameters=100, wire=0):
    """Return a blocking connection to a learner that has gone through the handshake as another."""
    connection = socket.create_connection(end.carrier._listener.addresses[0], timeout=network_ends.LIMIT_S)
    shake = Dialer(Terms(run, parameters, wire), secret, own, end.learner, 0)
    connection.sendall(shake.begin())
    answer = b""
    while len(answer) < shake.wants:
        data = connection.recv(shake.wants - len(answer))
        if not data:
            return connection
        answer += data
    connection.sendall(shake.feed(answer))
    return connection


@contextlib.contextmanager
def lonely(parameters=100):
    """Learner 1, whose peer 0 is the test."""
    with pair(parameters, start=False) as ends:
        ends[1].start()
        yield ends[1]
        ends[1].transport.check()


@pytest.mark.parametrize("bad", [{"run": b"other"}, {"parameters": 101}, {"wire": 1}, {"own": 1}, {"own": 5}])
def test_a_peer_of_another_run_is_hung_up_on(bad):
    with lonely() as end:
        with client(end, **bad) as connection:
            assert connection.recv(1) == b""
        assert not end.carrier.connected(0)


def test_learners_with_different_secrets_do_not_meet():
    listeners = listen()
    ends = [End(0, listeners, 100).start(), End(1, listeners, 100, secret=b"another secret, as long").start()]
    until(lambda: ends[0].carrier.refused["another secret"])
    assert not any(end.carrier.connected(1 - end.learner) for end in ends)
    for end in ends:
        end.close()


def test_connections_by_the_hundred_that_say_nothing_keep_nobody_out():
    with pair(100, start=False) as ends, contextlib.ExitStack() as closing:
        ends[1].start()
        address = ends[1].carrier._listener.addresses[0]
        for _ in range(3 * CALLS):
            closing.enter_context(socket.create_connection(address))
        ends[0].start()
        connected(ends)
        exchange(ends)
        assert len(ends[1].carrier._answered) <= CALLS


def test_a_call_that_says_nothing_is_hung_up_on_in_time(monkeypatch):
    monkeypatch.setattr("antiphon.transport.calls.CALL_S", 0.05)
    with lonely() as end, socket.create_connection(end.carrier._listener.addresses[0]) as connection:
        connection.settimeout(network_ends.LIMIT_S)
        assert connection.recv(1) == b""
        until(lambda: end.carrier.refused["no handshake in time"] == 1)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.lists(st.binary(max_size=400), max_size=4))
def test_whatever_a_stranger_sends_real_peers_go_on(shared_pair, data):
    with contextlib.suppress(OSError), socket.create_connection(shared_pair[1].carrier._listener.addresses[0]) as raw:
        for piece in data:
            raw.sendall(piece)
    exchange(shared_pair)


@pytest.fixture(scope="module")
def shared_pair():
    with pair(100) as ends:
        yield ends


def hear_out(connection):
    """End one's own part, and read whatever comes until the other end has hung up."""
    with contextlib.suppress(ConnectionError):
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(4096):
            pass


def message(kind, sequence=1, sender=0, coefficient=0.5):
    body = pack(Message(kind, sender, sequence, Handle(1, 1), coefficient))
    return Frame(What.MESSAGE, length=len(body)).pack() + body


def part(values_N, sequence=1, part=0, tag=1):
    body = values_N.numpy().tobytes()
    return Frame(What.PART, tag, len(body), sequence, part).pack() + body


ONES = torch.ones(100)
NANS = torch.full((100,), float("nan"))
header = struct.Struct("<BBIQI")
MALFORMED = {
    "unknown kind": header.pack(99, 0, 0, 0, 0),
    "absurd length": header.pack(What.PART, 1, 1 << 31, 1, 0),
    "a chunk beyond the last": header.pack(What.PART, 1, 400, 1, 1),
    "a chunk too short": header.pack(What.PART, 1, 396, 1, 0),
    "a note too long": header.pack(What.NOTE, 1, NOTE_BYTES + 1, 0, 0),
    "a message too long": header.pack(What.MESSAGE, 0, 400, 0, 0),
    "a pull with a body": header.pack(What.PULL, 0, 5, 0, 0) + b"12345",
    "another sender": message(Kind.PROPOSE, sender=1),
    "no such message": Frame(What.MESSAGE, length=28).pack() + bytes(28),
    "a commit before the answer": message(Kind.PROPOSE) + message(Kind.COMMIT),
    "a commit amid the snapshot": message(Kind.PROPOSE) + part(ONES)[:50],
    "half a header": b"\1\0\0",
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED)
def test_malformed_frames_have_no_effect(data):
    with pair(100, start=False) as ends:
        ends[1].start()
        with client(ends[1]) as connection:
            connection.sendall(data)
            hear_out(connection)
        until(ends[1].idle)
        assert ends[1].weights.additions == 0
        ends[0].start()
        connected(ends)
        exchange(ends, 1)


STRAY = {
    "a snapshot that is not finite": message(Kind.PROPOSE) + part(NANS) + message(Kind.COMMIT),
    "a snapshot that nobody announced": part(ONES) + message(Kind.COMMIT),
    "the wrong chunk tag": message(Kind.PROPOSE) + part(ONES, tag=0) + message(Kind.ABORT),
    "chunks of another exchange": message(Kind.PROPOSE) + part(ONES, sequence=2) + message(Kind.ABORT),
    "the end of nothing": message(Kind.DONE) + message(Kind.ACCEPT) + message(Kind.REFUSE) + message(Kind.COMMIT),
    "a coefficient out of bounds": message(Kind.PROPOSE, coefficient=3.0) + part(ONES) + message(Kind.COMMIT),
    "a pull's chunk unasked": Frame(What.PULLED, 0, 400, 1, 0).pack() + bytes(400) + Frame(What.EMPTY).pack(),
}


@pytest.mark.parametrize("data", STRAY.values(), ids=STRAY)
def test_valid_frames_in_the_wrong_place_have_no_effect(data):
    with pair(100, start=False) as ends:
        ends[1].start()
        with client(ends[1]) as connection:
            connection.sendall(data)
            hear_out(connection)
        until(ends[1].idle)
        assert ends[1].weights.additions == 0
        ends[0].start()
        connected(ends)
        exchange(ends, 1)


def test_an_answer_without_a_snapshot_has_no_effect():
    with lonely() as end:
        end.transport.propose(0, 0.5)  # to nobody: it is not connected
        until(lambda: end.counts.proposed == 1)
        with client(end) as connection:
            connection.sendall(message(Kind.ACCEPT))
            until(end.idle)
        assert end.weights.additions == 0
        assert end.counts.committed == 0


FRAMES = st.one_of(
    st.builds(message, st.sampled_from([kind for kind in Kind if kind is not Kind.PUBLISHED]), st.integers(0, 3)),
    st.builds(part, st.just(ONES), st.integers(0, 3), st.just(0), st.integers(0, 1)),
    st.builds(
        lambda *fields: header.pack(*fields),
        st.integers(0, 8), st.integers(0, 255), st.integers(0, 500), st.integers(0, 3), st.integers(0, 3),
    ),
    st.binary(max_size=100),
)  # fmt: skip


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(frames=st.lists(FRAMES, max_size=8))
def test_whatever_an_authentic_peer_sends_the_weights_stay_finite_and_the_thread_runs(shared_lonely, frames):
    with contextlib.suppress(OSError), client(shared_lonely) as connection:
        for data in frames:
            connection.sendall(data)
        hear_out(connection)
    until(lambda: shared_lonely.idle() or not shared_lonely.carrier.connected(0))
    assert torch.isfinite(shared_lonely.weights.snapshot()).all()


@pytest.fixture(scope="module")
def shared_lonely():
    with lonely() as end:
        yield end


def test_control_frames_that_find_a_stuck_link_are_lost_and_no_more_than_so_many_wait():
    with lonely() as end, client(end) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        until(lambda: end.carrier.connected(0))
        for _ in range(10 * QUEUE):
            end.carrier.note(0, 1, bytes(NOTE_BYTES))
        until(lambda: not end.carrier._asked)
        assert len(end.carrier._remotes[0].link._queue) <= QUEUE


# --- listening


def test_a_listener_tells_where_it_can_be_reached():
    listener = Listener(["127.0.0.1", "::1"])
    assert [address for address, _ in listener.addresses] == ["127.0.0.1", "::1"]
    assert all(port > 0 for _, port in listener.addresses)
    listener.close()


def test_an_interface_stands_for_its_addresses():
    listener = Listener("lo")
    assert [address for address, _ in listener.addresses] == addresses_of("lo")
    listener.close()


def test_learners_meet_over_ipv6():
    listeners = {learner: Listener(["::1"]) for learner in range(2)}
    ends = [End(learner, listeners, 1000).start() for learner in range(2)]
    connected(ends)
    exchange(ends)
    for end in ends:
        end.close()


def test_an_address_that_does_not_answer_leaves_the_next_one():
    dead = Listener(["127.0.0.1"])
    dead.close()
    with pair(100, lambda listeners: [*dead.addresses, *listeners[1].addresses]) as ends:
        exchange(ends)


@pytest.mark.parametrize(
    ("where", "text"),
    [("nosuch0", "no interface 'nosuch0' on this host: it has lo"), (["192.0.2.1"], "name an interface of this host")],
)
def test_where_nobody_can_listen_is_told(where, text):
    with pytest.raises(ArgumentError, match=text):
        Listener(where)


def test_a_port_in_use_is_told():
    listener = Listener(["127.0.0.1"])
    with pytest.raises(ArgumentError, match="ANTIPHON_PORT"):
        Listener(["127.0.0.1"], listener.addresses[0][1])
    listener.close()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"secret": b""}, "secret must not be empty"),
        ({"meeting_addresses": {}}, r"no address is known of learners \[1\]"),
        ({"wire": "float16"}, "unknown wire format 'float16'"),
    ],
)
def test_a_carrier_that_cannot_work_is_refused(change, text):
    with pair(10, start=False) as ends:
        carrier = ends[0].carrier
        wire = change.pop("wire", "float32")
        given = {"secret": SECRET, "meeting_addresses": {1: [("127.0.0.1", 1)]}} | change
        with pytest.raises(ArgumentError, match=text):
            NetworkCarrier(0, [1], ends[0].weights, carrier._listener, run=RUN, wire=wire, **given)
