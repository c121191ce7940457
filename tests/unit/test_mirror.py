"""What a host knows of learners on others: rows by numbered notes, weights on request; the network is a list."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.errors import DeadlineError, LearnerError
from antiphon.transport.block import Block, Col, Gauge, Head, Link, Status
from antiphon.transport.mirror import (
    FINAL,
    NOTE_BYTES,
    STATUS_CHANNEL,
    Mirror,
    collect,
    leave,
    pack_note,
    unpack_note,
)

LEARNERS, PARAMETERS = 4, 5
NOW = 1000.0


class Network:
    """What the mirror asks of a carrier: notes are kept, and pulls are answered by the test."""

    def __init__(self, peers):
        self.peers, self.on_note, self.on_lost = tuple(peers), {}, None
        self.sent, self.pulls, self.away = [], [], set()

    def note(self, peer, channel, data):
        assert channel == STATUS_CHANNEL
        self.sent.append((peer, data))

    def pull(self, peer, into_N, done):
        self.pulls.append((peer, into_N, done))

    def connected(self, peer):
        return peer not in self.away

    def answer(self, whole=True):
        for peer, into_N, done in self.pulls:
            into_N.fill_(float(peer))
            done(whole)
        self.pulls.clear()


class Host:
    """One host's block, and the mirror of one of its learners; two hosts, of learners 0, 1 and 2, 3."""

    def __init__(self, number, learner):
        self.block = Block.create(LEARNERS)
        self.block.head[Head.HOST] = number
        self.block.links_LC[:, Link.HOST] = [0, 0, 1, 1]
        self.block.board_LC[self.block.local, Col.PID] = os.getpid()
        self.block.board_LC[self.block.local, Col.STATE] = Status.JOINED
        self.block.allocate(PARAMETERS)
        self.network = Network(self.block.remote)
        self.mirror = Mirror(self.block, learner, self.network)
        self.block.links_LC[learner, Link.SERVES] = 1

    def tell(self, now=NOW):
        """Tick, and return the note that went to each peer."""
        self.network.sent.clear()
        self.mirror.tick(now)
        return dict(self.network.sent)


@pytest.fixture
def hosts():
    made = Host(0, 0), Host(1, 2)
    yield made
    for host in made:
        host.block.remove()


def test_a_row_is_seen_on_the_other_host(hosts):
    near, far = hosts
    near.block.board_LC[0, [Col.STEPS, Col.SAMPLES, Col.WAITS]] = 7, 70, 1
    near.block.gauges_LC[0] = [1.5, 2.5, 0.25]
    near.block.outstanding_LK[0, 3] = 12
    notes = near.tell()
    assert sorted(notes) == [2, 3]
    far.network.on_note[STATUS_CHANNEL](0, notes[2])
    np.testing.assert_array_equal(far.block.board_LC[0], near.block.board_LC[0])
    np.testing.assert_array_equal(far.block.gauges_LC[0], near.block.gauges_LC[0])
    np.testing.assert_array_equal(far.block.outstanding_LK[0], near.block.outstanding_LK[0])
    assert not far.block.board_LC[1].any(), "of learner 1 nothing was heard"
    assert not far.block.dead(0), "whatever process has its number here"


def test_it_is_told_several_times_a_second_and_at_once_where_the_state_changes(hosts):
    near, _ = hosts
    assert near.tell(NOW) and not near.tell(NOW + 0.05)
    assert near.mirror.next_due() == pytest.approx(NOW + 0.1)
    assert near.tell(NOW + 0.11)
    near.block.board_LC[0, Col.STATE] = Status.DRAINED
    assert near.tell(NOW + 0.12) and not near.tell(NOW + 0.13)
    near.block.head[Head.STOP] = 9
    assert near.tell(NOW + 0.14)


def test_an_old_note_changes_nothing_and_a_row_that_it_overwrote_is_mended(hosts):
    near, far = hosts
    near.block.board_LC[0, Col.STEPS] = 1
    old = near.tell(NOW)[2]
    near.block.board_LC[0, Col.STEPS] = 2
    new = near.tell(NOW + 1)[2]
    hear = far.network.on_note[STATUS_CHANNEL]
    hear(0, new)
    hear(0, old)
    assert far.block.board_LC[0, Col.STEPS] == 2
    # Another learner of this host was about to write the old one.
    far.block.board_LC[0, Col.STEPS], far.block.links_LC[0, Link.NOTED] = 1, 1
    far.tell(NOW + 2)
    assert far.block.board_LC[0, Col.STEPS] == 2


def test_all_hosts_stop_at_the_latest_round_that_anybody_asked_for(hosts):
    near, far = hosts
    near.block.head[Head.STOP], far.block.head[Head.STOP] = 20, 15
    far.network.on_note[STATUS_CHANNEL](0, near.tell()[2])
    near.network.on_note[STATUS_CHANNEL](2, far.tell()[0])
    assert near.block.head[Head.STOP] == far.block.head[Head.STOP] == 20


def test_a_peer_whose_process_is_gone_has_failed_unless_it_was_done(hosts):
    near, far = hosts
    far.network.on_note[STATUS_CHANNEL](0, near.tell()[2])
    far.network.on_lost(0)
    assert far.block.dead(0)
    near.block.board_LC[0, Col.STATE] = Status.DONE
    far.network.on_note[STATUS_CHANNEL](0, near.tell(NOW + 1)[2])
    far.network.on_lost(0)
    assert (far.block.board_LC[0, Col.STATE], far.block.board_LC[0, Col.LEFT]) == (Status.DONE, 1)


@given(st.binary(max_size=2 * NOTE_BYTES) | st.binary(min_size=NOTE_BYTES, max_size=NOTE_BYTES))
@settings(derandomize=True, max_examples=200, deadline=None)
def test_bytes_that_are_no_note_change_nothing(data):
    host = Host(0, 0)
    before_LC = host.block.board_LC.copy()
    numbers = unpack_note(data)
    host.network.on_note[STATUS_CHANNEL](2, data)
    host.network.on_note[STATUS_CHANNEL](1, pack_note(host.block, 0, 5))  # of this very host
    if numbers is None:
        np.testing.assert_array_equal(host.block.board_LC, before_LC)
    host.block.remove()


@pytest.mark.parametrize(("column", "value"), [(Col.STATE, 77), (Col.STEPS, -1)])
def test_a_row_that_cannot_be_is_no_note(hosts, column, value):
    near, _ = hosts
    near.block.board_LC[0, column] = value
    assert unpack_note(pack_note(near.block, 0, 1)) is None
    near.block.board_LC[0, column] = 1
    near.block.gauges_LC[0, Gauge.STEP_S] = float("nan")
    assert unpack_note(pack_note(near.block, 0, 1)) is None


# --- weights


def collected(host, answer, deadline_s=10.0):
    """Collect, with the exchange thread's ticks in between."""
    got = []
    thread = threading.Thread(target=lambda: got.append(collect(host.block, deadline_s)))
    thread.start()
    now = NOW
    while thread.is_alive():
        now += 1.0
        host.mirror.tick(now)
        answer()
        thread.join(0.005)
    return got[0]


def join_all(host):
    host.block.board_LC[:, Col.STATE] = Status.JOINED


def test_weights_come_on_request(hosts):
    near, _ = hosts
    join_all(near)
    assert collected(near, near.network.answer) == []
    assert near.block.buffers.weights_LN[:, 0].tolist() == [0.0, 0.0, 2.0, 3.0]
    near.block.buffers.weights_LN.zero_()
    assert collected(near, near.network.answer) == [], "and are fetched anew each time"
    assert near.block.buffers.weights_LN[3, 0] == 3.0


def test_who_does_not_answer_is_left_out(hosts):
    near, _ = hosts
    join_all(near)
    near.network.away = {3}
    assert collected(near, near.network.answer) == [3]
    assert collected(near, lambda: near.network.answer(whole=False)) == [2, 3]
    assert collected(near, lambda: None, deadline_s=0.1) == [2, 3]
    near.block.board_LC[2, Col.STATE] = Status.FAILED
    near.network.answer()
    near.network.away = set()
    assert collected(near, near.network.answer) == []


def test_what_was_fetched_after_the_last_exchange_stays(hosts):
    near, _ = hosts
    near.block.board_LC[:, Col.STATE] = Status.DRAINED
    assert collected(near, near.network.answer) == []
    assert (near.block.links_LC[2:, Link.PULLED] == FINAL).all()
    near.network.away = {2, 3}
    assert collected(near, near.network.answer) == []
    near.mirror.close()
    assert collect(near.block, 0.0) == [], "nobody serves any more"


def test_where_nobody_serves_nothing_is_waited_for(hosts):
    near, _ = hosts
    join_all(near)
    near.block.links_LC[0, Link.SERVES] = 0
    assert collect(near.block, 60.0) == [2, 3]


def test_the_learners_of_a_host_share_what_is_to_be_fetched(hosts):
    near, _ = hosts
    join_all(near)
    other = Network(near.block.remote)
    second = Mirror(near.block, 1, other)
    near.block.links_LC[1, Link.SERVES] = 1
    near.block.head[Head.ASKED] = 1
    near.mirror.tick(NOW)
    second.tick(NOW)
    assert [[peer for peer, *_ in network.pulls] for network in (near.network, other)] == [[2], [3]]
    second.close()


def test_the_first_weights(hosts):
    _, far = hosts
    tries = []

    def pull(peer, into_N, done):
        tries.append(peer)
        into_N.copy_(torch.arange(5.0))
        done(len(tries) > 1)

    far.network.pull = pull
    far.mirror.fetch(0, 10.0)
    assert tries == [0, 0] and far.block.buffers.weights_LN[0].tolist() == [0, 1, 2, 3, 4]
    far.network.away = {0}
    with pytest.raises(DeadlineError, match=r"waited 0.05 s for the weights of learner 0"):
        far.mirror.fetch(0, 0.05)
    far.block.board_LC[0, Col.STATE] = Status.FAILED
    with pytest.raises(LearnerError, match="learner 0 ended"):
        far.mirror.fetch(0, 10.0)


def test_leaving_waits_for_those_that_are_at_their_end_too(hosts):
    near, _ = hosts
    board_LC = near.block.board_LC
    join_all(near)
    leave(near.block, 0, 60.0)
    assert board_LC[0, Col.LEFT] == 1, "one that was not done leaves at once"
    board_LC[:, Col.STATE] = Status.DONE
    thread = threading.Thread(target=leave, args=(near.block, 0, 60.0))
    thread.start()
    board_LC[2, Col.LEFT] = 1
    thread.join(0.05)
    assert thread.is_alive()
    board_LC[3, Col.STATE] = Status.FAILED
    thread.join(10.0)
    assert not thread.is_alive()
