"""Wire formats: what is decoded, and that both ends get the very same difference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.errors import ArgumentError
from antiphon.transport.wire import CHUNK, SCALED, WIRES, finite, wire_class

SIZES = (1, 5, SCALED - 1, SCALED, SCALED + 1, 3 * SCALED + 7, CHUNK)
BOUNDS = {"float32": 0.0, "bfloat16": 2.0**-8, "int8": 0.5 / 127}
"""Largest error over the largest magnitude."""


def received(wire, own_C):
    """Encode in place, and return the bytes as the other end holds them."""
    return torch.frombuffer(bytearray(wire.encode(own_C)), dtype=torch.uint8)


def both_ways(name, a_C, b_C):
    """Return both ends' differences, and what each decodes of a and b."""
    first, second = WIRES[name](), WIRES[name]()
    data_a, data_b = received(first, a_C), received(second, b_C)
    decoded = a_C.clone(), b_C.clone()
    first.subtract(data_b, a_C)
    second.subtract(data_a, b_C)
    return a_C, b_C, decoded


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", WIRES)
def test_both_ends_compute_the_same_difference_to_the_bit(name, size):
    torch.manual_seed(size)
    a_C, b_C = torch.randn(size), 3.0 * torch.randn(size)
    first_C, second_C, (decoded_a_C, decoded_b_C) = both_ways(name, a_C.clone(), b_C.clone())
    assert torch.equal(first_C, -second_C)
    assert torch.equal(first_C, decoded_b_C - decoded_a_C)
    for decoded_C, original_C in ((decoded_a_C, a_C), (decoded_b_C, b_C)):
        assert float((decoded_C - original_C).abs().max()) <= BOUNDS[name] * float(original_C.abs().max())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", WIRES)
def test_size_says_how_many_bytes_there_are(name, size):
    wire = wire_class(name)()
    assert len(wire.encode(torch.randn(size))) == wire.size(size)


@pytest.mark.parametrize("name", WIRES)
def test_zeros_and_the_smallest_and_largest_numbers_stay_finite(name):
    values_C = torch.tensor([0.0, 1e-45, -1e-40, 1.2e-38, 1e30, -1e30, 0.0])
    for part_C in (values_C, values_C[:3], torch.zeros(SCALED + 3)):
        first_C, second_C, _ = both_ways(name, part_C.clone(), torch.zeros_like(part_C))
        assert finite(first_C)
        assert torch.equal(first_C, -second_C)


@pytest.mark.parametrize("name", WIRES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_seen_in_the_difference(name, bad):
    theirs_C = torch.ones(2 * SCALED + 5)
    theirs_C[-2] = bad
    wire, own_C = WIRES[name](), torch.ones_like(theirs_C)
    wire.encode(own_C)
    assert not wire.subtract(received(WIRES[name](), theirs_C), own_C)
    assert not finite(own_C)


@settings(max_examples=100, deadline=None)
@given(data=st.binary(min_size=20, max_size=20), name=st.sampled_from(sorted(WIRES)))
def test_of_any_bytes_it_can_be_said_whether_they_are_finite(data, name):
    wire, own_C = WIRES[name](), torch.zeros(5)
    sound = wire.subtract(torch.frombuffer(bytearray(data[: wire.size(5)]), dtype=torch.uint8), own_C)
    assert sound == bool(torch.isfinite(own_C).all() and torch.isfinite(own_C.sum()))


def test_an_unknown_format_is_refused():
    with pytest.raises(ArgumentError, match="did you mean 'bfloat16'"):
        wire_class("bfloat")
