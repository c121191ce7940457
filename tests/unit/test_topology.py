"""Rings and their matrices: doubly stochastic, with the spectra that the papers give."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.errors import ArgumentError
from antiphon.topology import mixing
from antiphon.topology.graphs import permuted, ring_coefficient, ring_neighbours, successor

SIZES = [1, 2, 3, 4, 5, 7, 8, 16]


def assert_doubly_stochastic(T_LL):
    assert (T_LL >= -1e-15).all()
    np.testing.assert_allclose(T_LL.sum(0), 1.0, atol=1e-12)
    np.testing.assert_allclose(T_LL.sum(1), 1.0, atol=1e-12)


@pytest.mark.parametrize("learners", SIZES)
def test_rings_are_doubly_stochastic_and_symmetric(learners):
    for round in range(5):
        T_LL = mixing.ring(permuted(range(learners), seed=1, round=round))
        assert_doubly_stochastic(T_LL)
        np.testing.assert_array_equal(T_LL, T_LL.T)
    assert_doubly_stochastic(mixing.uniform(learners))


@given(learners=st.integers(2, 9), c=st.floats(0.0, 0.5), data=st.data())
@settings(derandomize=True, max_examples=50, deadline=None)
def test_an_exchange_is_doubly_stochastic_and_moves_two_learners_only(learners, c, data):
    first = data.draw(st.integers(0, learners - 1))
    second = data.draw(st.integers(0, learners - 1).filter(lambda other: other != first))
    T_LL = mixing.exchange(learners, first, second, c)
    assert_doubly_stochastic(T_LL)
    others = [learner for learner in range(learners) if learner not in (first, second)]
    np.testing.assert_array_equal(T_LL[:, others], np.eye(learners)[:, others])


def test_small_rings_are_the_limits_of_the_large_one():
    np.testing.assert_array_equal(mixing.ring([0]), [[1.0]])
    np.testing.assert_array_equal(mixing.ring([0, 1]), np.full((2, 2), 0.5))
    np.testing.assert_allclose(mixing.ring([2, 0, 1]), mixing.uniform(3), atol=1e-15)


@pytest.mark.parametrize("learners", [4, 5, 8, 16, 32])
def test_second_eigenvalue_of_the_ring(learners):
    expected = (1 + 2 * math.cos(2 * math.pi / learners)) / 3
    assert mixing.spectral_gap(mixing.ring(range(learners))) == pytest.approx(1 - expected, abs=1e-9)


@pytest.mark.parametrize(
    ("learners", "mean_square_gap"), [(8, 0.352), (16, 0.0989), (32, 0.0255), (64, 0.0064), (128, 0.0016)]
)
def test_published_figures_of_the_fixed_ring(learners, mean_square_gap):
    lambda_2 = 1 - mixing.spectral_gap(mixing.ring(range(learners)))
    assert 1 - lambda_2**2 == pytest.approx(mean_square_gap, abs=5e-4 if learners == 8 else 6e-5)


def test_spectral_gap_of_eight_one_and_the_uniform_matrix():
    assert mixing.spectral_gap(mixing.ring(range(8))) == pytest.approx(0.195, abs=5e-4)
    assert mixing.spectral_gap(mixing.uniform(1)) == 1.0
    assert mixing.spectral_gap(mixing.uniform(6)) == pytest.approx(1.0, abs=1e-9)


def lambda_2(mean_LL):
    return np.sort(np.linalg.eigvalsh(mean_LL))[-2]


@pytest.mark.parametrize("learners", [4, 5, 6, 7])
def test_random_ring_in_the_mean_exactly(learners):
    """E[T T'] over all permutations has lambda_2 = 1/3 - 2/(3(L-1))."""
    rings = (mixing.ring(order) for order in itertools.permutations(range(learners)))
    mean_LL = sum(T_LL @ T_LL.T for T_LL in rings) / math.factorial(learners)
    assert lambda_2(mean_LL) == pytest.approx(1 / 3 - 2 / (3 * (learners - 1)), abs=1e-9)


def test_random_ring_in_the_mean_by_its_own_permutations():
    learners, rounds = 8, 4000
    mean_LL = np.zeros((learners, learners))
    for round in range(rounds):
        T_LL = mixing.ring(permuted(range(learners), seed=0, round=round))
        mean_LL += T_LL @ T_LL.T / rounds
    assert lambda_2(mean_LL) == pytest.approx(1 / 3 - 2 / 21, abs=0.015)


def test_permutations_are_fresh_each_round_and_depend_on_the_seed():
    orders = {tuple(permuted(range(8), seed=0, round=round)) for round in range(100)}
    assert len(orders) == 100
    assert permuted(range(8), 0, 3) != permuted(range(8), 1, 3)
    assert permuted([5, 2, 7], 0, 3) == permuted([7, 5, 2], 0, 3)


@given(learners=st.lists(st.integers(0, 99), min_size=1, max_size=9, unique=True))
@settings(derandomize=True, max_examples=100, deadline=None)
def test_neighbours_and_successors_agree(learners):
    for learner in learners:
        neighbours = ring_neighbours(learners, learner)
        assert len(neighbours) == min(len(learners) - 1, 2)
        assert learner not in neighbours
        assert all(learner in ring_neighbours(learners, peer) for peer in neighbours)
        assert successor(learners, learner) == (neighbours[0] if neighbours else None)
    if len(learners) > 1:
        assert {successor(learners, learner) for learner in learners} == set(learners)


def test_coefficients():
    assert [ring_coefficient(learners) for learners in (1, 2, 3, 8)] == [0.0, 0.5, 1 / 3, 1 / 3]
    with pytest.raises(ArgumentError, match="at least 1, not 0"):
        ring_coefficient(0)
