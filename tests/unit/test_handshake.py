"""The handshake: who gets in, and that nobody else does, whatever it sends."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.transport.handshake import HELLO_BYTES, MAC_BYTES, Answerer, Dialer, RefusedError, Terms

TERMS = Terms(b"run", 1000, 0)
SECRET = b"a secret of some length"


def dialer(terms=TERMS, secret=SECRET, own=0, peer=1, incarnation=3):
    return Dialer(terms, secret, own, peer, incarnation)


def answerer(terms=TERMS, secret=SECRET, own=1, incarnation=4, expected=(0,)):
    return Answerer(terms, secret, own, incarnation, lambda peer: peer in expected)


def shake(first, second):
    """Let the two talk; what each says is as long as the other waits for."""
    hello = first.begin()
    assert len(hello) == second.wants
    answer = second.feed(hello)
    assert len(answer) == first.wants
    proof = first.feed(answer)
    assert len(proof) == second.wants
    assert second.feed(proof) == b""
    return hello, answer, proof


def test_two_of_one_run_know_each_other_afterwards():
    first, second = dialer(), answerer()
    shake(first, second)
    assert first.done and second.done
    assert (first.peer, second.peer) == (1, 0)
    assert (first.incarnation, second.incarnation) == (4, 3)


@pytest.mark.parametrize("side", ["dialer", "answerer"])
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"terms": replace(TERMS, run=b"other")}, "another run"),
        ({"terms": replace(TERMS, parameters=1001)}, "another number of parameters"),
        ({"terms": replace(TERMS, wire=1)}, "another wire format"),
        ({"secret": b"another secret of some length"}, "another secret"),
    ],
)
def test_whoever_differs_is_refused(side, change, reason):
    first = dialer(**change if side == "dialer" else {})
    second = answerer(**change if side == "answerer" else {})
    with pytest.raises(RefusedError, match=reason):
        shake(first, second)
    assert not second.done


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (dialer(peer=2), answerer()),
        (dialer(own=2), answerer()),
        (dialer(), answerer(own=2)),
        (dialer(), answerer(expected=())),
    ],
)
def test_a_call_of_or_for_another_learner_is_refused(first, second):
    with pytest.raises(RefusedError, match="another learner"):
        shake(first, second)


def test_a_stranger_learns_nothing_but_that_it_is_hung_up_on():
    with pytest.raises(RefusedError):
        answerer().feed(b"\0" * HELLO_BYTES)


def test_a_recorded_handshake_is_worthless():
    hello, _, proof = shake(dialer(), answerer())
    second = answerer()
    second.feed(hello)
    with pytest.raises(RefusedError, match="another secret"):
        second.feed(proof)
    assert not second.done


def test_an_answerer_s_own_proof_sent_back_is_worthless():
    second = answerer()
    answer = second.feed(dialer().begin())
    with pytest.raises(RefusedError, match="another secret"):
        second.feed(answer[-MAC_BYTES:])


@settings(max_examples=200, deadline=None)
@given(step=st.integers(0, 2), place=st.integers(0, HELLO_BYTES + MAC_BYTES - 1), bit=st.integers(0, 7))
def test_a_single_wrong_bit_is_refused_by_one_end_or_the_other(step, place, bit):
    first, second = dialer(), answerer()

    def spoilt(data, now):
        at = place % len(data)
        return data[:at] + bytes([data[at] ^ (1 << bit)]) + data[at + 1 :] if now == step else data

    with pytest.raises(RefusedError):
        second.feed(spoilt(first.feed(spoilt(second.feed(spoilt(first.begin(), 0)), 1)), 2))
    assert not second.done


@settings(max_examples=200, deadline=None)
@given(hello=st.binary(min_size=HELLO_BYTES, max_size=HELLO_BYTES))
def test_random_bytes_are_refused(hello):
    with pytest.raises(RefusedError):
        answerer().feed(hello)
    with pytest.raises(RefusedError):
        dialer().feed(hello + b"\0" * MAC_BYTES)
