"""The block of shared memory, and the datagrams between learners: what strangers send has no effect."""

from __future__ import annotations

import gc
import os
import socket
import stat
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from antiphon.errors import ArgumentError, DeadlineError, LearnerError
from antiphon.learner.weights import Weights
from antiphon.transport.assembly import assemble
from antiphon.transport.block import Block, Col, Head, Link, Status, process_runs, wait_for
from antiphon.transport.place import Place
from antiphon.transport.protocol import Handle, Kind, Message
from antiphon.transport.shared import WIRE, pack, unpack

LEARNERS = 3


@pytest.fixture
def block():
    made = Block.create(LEARNERS)
    yield made
    made.remove()


def until(ready, deadline_s=10.0):
    wait_for(ready, deadline_s, "a test's event")


# --- the memory


def test_two_that_attach_see_the_same_memory(block):
    other = Block.attach(block.folder, LEARNERS)
    ours, theirs = block.allocate(7), other.allocate(7)
    other.board_LC[2, Col.STEPS], other.gauges_LC[1, 0], other.head[Head.STOP] = 5, 0.5, 9
    theirs.weights_LN[2, 6] = 3.0
    theirs.slots_LSN[1, 2, 0] = 4.0
    theirs.versions_LS[0, 1], theirs.clock_L3[1, 2] = 8, 6
    assert (block.board_LC[2, Col.STEPS], block.gauges_LC[1, 0], block.head[Head.STOP]) == (5, 0.5, 9)
    assert (ours.weights_LN[2, 6], ours.slots_LSN[1, 2, 0]) == (3.0, 4.0)
    assert (ours.versions_LS[0, 1], ours.clock_L3[1, 2]) == (8, 6)
    assert ours.weights_LN.shape == (LEARNERS, 7)


def test_the_rows_do_not_overlap(block):
    buffers = block.allocate(3)
    parts = [
        block.head,
        block.board_LC,
        block.links_LC,
        block.gauges_LC,
        block.outstanding_LK,
        buffers.versions_LS,
        buffers.clock_L3,
    ]
    tensors = [buffers.weights_LN, buffers.pending_LN, buffers.slots_LSN]
    block.head[Head.MAGIC] = 0
    for number, part in enumerate([*parts, *(tensor.numpy() for tensor in tensors)]):
        assert not part[part != block.head[Head.LEARNERS]].any() or part is block.head
        part[...] = number + 1
    for number, part in enumerate([*parts, *(tensor.numpy() for tensor in tensors)]):
        np.testing.assert_array_equal(part, number + 1)


def test_the_folder_is_ones_own_and_goes_with_the_run(block):
    assert stat.S_IMODE(block.folder.stat().st_mode) == 0o700
    assert block.folder.name.startswith("antiphon-")
    other = Block.attach(block.folder, LEARNERS)
    block.remove()
    block.remove()
    assert not block.folder.exists()
    other.board_LC[0, Col.STEPS] = 1
    assert block.board_LC[0, Col.STEPS] == 1


def test_what_killed_runs_left_is_swept_away(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    living, beginning, other = Block.create(2), tmp_path / "antiphon-beginning", tmp_path / "other"
    for folder in (beginning, other, tmp_path / "antiphon-killed"):
        folder.mkdir()
    for folder in (other, tmp_path / "antiphon-killed"):
        (folder / "block").symlink_to(f"/proc/{2**22 + 1}/fd/3")
    Block.create(2).remove()
    assert set(tmp_path.iterdir()) == {living.folder, beginning, other}
    living.remove()


def test_a_folder_open_to_others_is_refused(block):
    block.folder.chmod(0o755)
    with pytest.raises(ArgumentError, match="mode 0700"):
        Block.attach(block.folder, LEARNERS)


def test_another_number_of_learners_is_refused(block):
    with pytest.raises(ArgumentError, match="has 3 learners, this process was told 4"):
        Block.attach(block.folder, 4)
    with pytest.raises(ArgumentError, match="at least 1, not 0"):
        Block.create(0)


def test_a_run_that_never_comes_is_waited_for_until_the_deadline(tmp_path):
    with pytest.raises(DeadlineError, match="waited 0.01 s for the run's shared memory"):
        Block.attach(tmp_path, 2, deadline_s=0.01)


def test_who_is_dead(block):
    nobody = 2**22 + 1
    rows = [(os.getpid(), Status.JOINED), (nobody, Status.JOINED), (nobody, Status.DRAINED), (nobody, Status.DONE),
            (os.getpid(), Status.FAILED), (0, Status.ABSENT)]  # fmt: skip
    seen = []
    for row in rows:
        block.board_LC[0, [Col.PID, Col.STATE]] = row
        seen.append(block.dead(0))
    assert seen == [False, True, True, False, True, False]


def test_who_runs_on_another_host_is_dead_once_it_is_known_to_have_failed(block):
    block.head[Head.HOST] = 1
    block.links_LC[:, Link.HOST] = [0, 1, 1]
    assert (block.local, block.remote) == ([1, 2], [0])
    nobody = 2**22 + 1
    block.board_LC[:2, Col.PID] = nobody
    block.board_LC[:2, Col.STATE] = Status.JOINED
    assert [block.dead(0), block.dead(1)] == [False, True]
    block.board_LC[0, Col.STATE] = Status.FAILED
    assert block.dead(0)


def test_the_first_request_to_stop_holds(block):
    block.board_LC[:, Col.STEPS] = [4, 7, 5]
    block.request_stop()
    asked = int(block.head[Head.STOP])
    assert asked > 7
    block.board_LC[:, Col.STEPS] = 100
    block.request_stop()
    assert block.head[Head.STOP] == asked


def test_a_zombie_runs_no_more():
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    until(lambda: not process_runs(pid))
    os.waitpid(pid, 0)
    assert not process_runs(pid)
    assert process_runs(os.getpid())


def test_waiting_ends_with_the_reason_why_it_is_vain():
    with pytest.raises(LearnerError, match="gone"):
        wait_for(lambda: False, 10.0, "nothing", lambda: "gone")
    wait_for(lambda: True, 0.0, "nothing", lambda: "gone")


def test_a_ticket_is_claimed_once(block):
    assert block.claim_again(3, dead=1)
    assert not Block.attach(block.folder, LEARNERS).claim_again(3, dead=1)
    assert block.claim_again(3, dead=2)


# --- the wire


messages = st.builds(
    Message,
    kind=st.sampled_from(Kind),
    sender=st.integers(0, LEARNERS - 1),
    sequence=st.integers(0, 2**63 - 1),
    handle=st.builds(Handle, st.integers(0, 255), st.integers(0, 2**63 - 1)),
    coefficient=st.floats(allow_nan=False),
)


@given(messages)
@settings(derandomize=True, deadline=None)
def test_a_message_survives_the_wire(message):
    assert unpack(pack(message), LEARNERS) == message


@given(st.binary(max_size=2 * WIRE.size) | st.binary(min_size=WIRE.size, max_size=WIRE.size))
@example(b"")
@example(bytes(WIRE.size))
@example(b"\xff" * WIRE.size)
@settings(derandomize=True, max_examples=500, deadline=None)
def test_bytes_of_a_stranger_are_never_an_error(data):
    message = unpack(data, LEARNERS)
    if len(data) != WIRE.size:
        assert message is None
    if message is not None:
        assert message.kind in Kind and 0 <= message.sender < LEARNERS
        assert 0 <= message.sequence < 2**63 and 0 <= message.handle.version < 2**63


@given(messages, st.integers(0, WIRE.size - 1), st.integers(1, 255))
@settings(derandomize=True, max_examples=200, deadline=None)
def test_a_message_too_short_or_too_long_is_none(message, length, more):
    data = pack(message)
    assert unpack(data[:length], LEARNERS) is None
    assert unpack(data + bytes(more), LEARNERS) is None


def test_senders_and_kinds_that_there_are_not():
    whole = pack(Message(Kind.DONE, 0, 1))
    assert unpack(pack(Message(Kind.DONE, LEARNERS, 1)), LEARNERS) is None
    assert unpack(b"\x00" + whole[1:], LEARNERS) is None
    assert unpack(b"\x08" + whole[1:], LEARNERS) is None


# --- live ends, in one process


def end_of(block, learner, weights, timeout_s=300.0):
    end = assemble(
        Place(learner, block.learners, block.folder, creates=False), block, weights, timeout_s=timeout_s
    ).transport
    end.weights, end.block = weights, block
    return end


@pytest.fixture
def ends():
    """Two live ends; the third learner is this test, which may send what it likes."""
    block = Block.create(LEARNERS)
    blocks = [block, Block.attach(block.folder, LEARNERS)]
    made = []
    for learner, each in enumerate(blocks):
        weights = Weights(each.allocate(6), learner)
        weights.w_N.copy_(torch.arange(6.0) * (learner + 1))
        each.board_LC[learner, [Col.PID, Col.STATE]] = os.getpid(), Status.JOINED
        made.append(end_of(each, learner, weights, timeout_s=10.0))
    block.board_LC[2, [Col.PID, Col.STATE]] = os.getpid(), Status.JOINED
    for end in made:
        end.start()
    yield made
    for end in made:
        end.close()
    block.remove()


def send(end, *datagrams):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        for data in datagrams:
            stranger.sendto(data, str(end.block.folder / f"{end.learner}.sock"))


def exchanged(end, peer):
    """Make one exchange, and wait for its end on both sides."""
    before = end.counts.committed
    end.propose(peer.learner, 0.5)
    until(lambda: end.counts.committed > before and not end.protocol.open and not peer.protocol.open)


def test_two_ends_exchange(ends):
    exchanged(*ends)
    for end in ends:
        end.weights.settle()
        torch.testing.assert_close(end.weights.w_N, torch.arange(6.0) * 1.5)
    assert ends[0].bytes_read == ends[1].bytes_read == 24
    assert all(end.drain(5.0) for end in ends)


def test_garbage_has_no_effect_on_a_live_end(ends):
    generator = np.random.default_rng(0)
    garbage = [generator.bytes(int(size)) for size in generator.integers(0, 4 * WIRE.size, 300)]
    garbage += [generator.bytes(WIRE.size) for _ in range(300)]
    before_N = ends[0].weights.snapshot()
    send(ends[0], *garbage)
    exchanged(ends[1], ends[0])
    ends[0].check()
    ends[0].weights.settle()
    torch.testing.assert_close(ends[0].weights.w_N, before_N * 1.5)


def test_well_formed_lies_change_no_weights(ends):
    """Messages in the name of learner 2 about exchanges and slots that are not there."""
    before_N = ends[0].weights.snapshot()
    for kind in Kind:
        for handle in (Handle(0, 0), Handle(1, 7), Handle(255, 2**60)):
            for coefficient in (0.5, float("nan"), -1.0):
                send(ends[0], pack(Message(kind, 2, 77, handle, coefficient)))
    send(ends[0], pack(Message(Kind.COMMIT, 0, 1)))  # in its own name
    exchanged(ends[1], ends[0])
    ends[0].weights.settle()
    torch.testing.assert_close(ends[0].weights.w_N, before_N * 1.5)
    assert ends[0].counts.applied == 1


def test_a_round_of_a_ring_of_two_live_ends(ends):
    for end, peer in (ends, reversed(ends)):
        end.start_mix(0, [(peer.learner, 0.5)])
    for end in ends:
        end.finish_mix(0)
        end.weights.settle()
        torch.testing.assert_close(end.weights.w_N, torch.arange(6.0) * 1.5)


def test_a_round_that_one_misses_ends_at_the_deadline(ends):
    ends[0].rounds.timeout_s = 0.05
    ends[0].start_mix(0, [(2, 0.5)])
    with pytest.raises(DeadlineError, match=r"round 0 for learners \[2\]"):
        ends[0].finish_mix(0)


def test_a_round_ends_at_once_where_a_peer_has_failed(ends):
    ends[0].start_mix(0, [(2, 0.5)])
    ends[0].block.board_LC[2, Col.STATE] = Status.FAILED
    with pytest.raises(LearnerError, match=r"learners \[2\] are gone"):
        ends[0].finish_mix(0)
    assert ends[0].block.board_LC[0, Col.BEREFT] == 3


def test_weights_that_are_not_finite_end_a_round(ends):
    ends[0].weights.w_N[0] = float("nan")
    ends[0].start_mix(0, [(1, 0.5)])
    with pytest.raises(LearnerError, match="learner 0: the weights are not finite in round 0"):
        ends[0].finish_mix(0)


def test_a_failing_exchange_thread_is_told_to_the_computing_thread(ends, monkeypatch):
    def fail(*_):
        raise OSError("no more memory")

    monkeypatch.setattr(ends[0].carriers[0], "tick", fail)
    until(lambda: ends[0]._failure is not None)
    with pytest.raises(LearnerError, match="the exchange thread failed.*no more memory"):
        ends[0].propose(1, 0.5)
    with pytest.raises(LearnerError):
        ends[0].start_mix(3, [(1, 0.5)])


def test_a_wait_begun_as_the_thread_fails_does_not_last(ends, monkeypatch):
    """The thread fails after the round was begun, at whatever moment: the wait ends with it."""
    monkeypatch.setattr(ends[0].rounds, "advance", lambda gone: (_ for _ in ()).throw(OSError("torn")))
    ends[0].start_mix(0, [(1, 0.5)])
    began = time.monotonic()
    with pytest.raises(LearnerError, match="torn"):
        ends[0].finish_mix(0)
    assert time.monotonic() - began < 5.0


def test_closing_with_an_exchange_that_only_this_end_has_applied_counts_it_torn(ends):
    """Learner 2, which is this test, accepts and is never heard again."""
    heard = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    heard.bind(str(ends[0].block.folder / "2.sock"))
    heard.settimeout(10.0)
    ends[0].block.board_LC[2, Col.PID] = os.getpid()
    slots = Weights(ends[1].weights.buffers, 2)
    ends[0].propose(2, 0.5)
    proposal = unpack(heard.recv(100), LEARNERS)
    assert proposal.kind is Kind.PROPOSE
    send(ends[0], pack(Message(Kind.ACCEPT, 2, proposal.sequence, slots.take())))
    until(lambda: ends[0].counts.committed == 1)
    assert not ends[0].drain(0.2)
    ends[0].close()
    assert ends[0].counts.torn == 1
    heard.close()


def test_a_folder_with_a_long_path(tmp_path):
    folder = tmp_path / ("deep" * 30)
    folder.mkdir(mode=0o700)
    block = Block.create(2, folder)
    weights = [Weights(block.allocate(4), learner) for learner in range(2)]
    block.board_LC[:, Col.PID] = os.getpid()
    two = [end_of(block, learner, weights[learner]) for learner in range(2)]
    for end in two:
        end.start()
    exchanged(*two)
    for end in two:
        end.close()


def test_the_exchange_thread_leaves_the_computing_thread_its_threads(block):
    """A thread that has not computed yet takes the number that was set last, wherever that was."""
    block.allocate(4)
    block.board_LC[:, Col.PID] = os.getpid()
    ends = [end_of(block, learner, Weights(block.buffers, learner)) for learner in range(2)]
    threads, seen = torch.get_num_threads(), []

    def compute():
        for end in ends:
            end.start()
        exchanged(*ends)
        seen.append(torch.get_num_threads())

    torch.set_num_threads(2)
    try:
        computing = threading.Thread(target=compute)
        computing.start()
        computing.join(10.0)
    finally:
        torch.set_num_threads(threads)
        for end in ends:
            end.close()
    assert seen == [2]


def test_what_comes_to_pass_just_before_waiting_becomes_vain_has_come_to_pass():
    happened = []

    def alive():
        happened.append("its last deed, and then its end")
        return "it has ended"

    wait_for(lambda: bool(happened), 5.0, "its last deed", alive)
    with pytest.raises(LearnerError, match="it has ended"):
        wait_for(lambda: False, 5.0, "more", alive)


def test_a_block_that_nobody_holds_leaves_no_descriptor_open(tmp_path):
    def make():
        block = Block.create(2)
        block.allocate(10)
        Block.attach(block.folder, 2).draws()
        block.remove()

    make()
    gc.collect()
    before = len(list(Path("/proc/self/fd").iterdir()))
    make()
    gc.collect()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
