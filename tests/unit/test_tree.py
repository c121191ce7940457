"""The phonetic decision tree: statistics, questions, splits, and its hand-over to the library."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from antiphon.speech.tree import (
    TriphoneStats,
    build_tree,
    collect_stats,
    context_dependency,
    gaussian_log_likelihood,
    monophone_tree,
    phone_questions,
)

POSITIONS = 3
IMPORT_LIMIT_S = 60


def stats_of(means: dict[tuple[int, int, int, int], float], frames: int = 200) -> TriphoneStats:
    """Statistics of one-dimensional frames with variance 1 around the given means."""
    keys = np.array(list(means), np.int64)
    mean = np.array(list(means.values()))[:, None]
    count = np.full(len(keys), float(frames))
    return TriphoneStats(keys, count, frames * mean, frames * (mean**2 + 1))


def test_libraries_load_in_a_fresh_process() -> None:
    code = "import antiphon.speech.kaldi as k; print(k.kaldifst.StdVectorFst().num_states)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=IMPORT_LIMIT_S)
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr


def test_collects_neighbours_within_each_utterance() -> None:
    # Utterance 0: phones 1 2 2; utterance 1: phone 3. Two phones 2 in a row are told apart by their positions.
    phone = np.array([1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 3, 3, 3])
    position = np.array([0, 1, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2])
    utterance = np.array([0] * 10 + [1] * 3)
    features = np.arange(13, dtype=np.float32)[:, None]
    stats = collect_stats(features, phone, position, utterance)
    rows = {tuple(key): i for i, key in enumerate(stats.keys_N4.tolist())}
    assert set(rows) == {(*n, k) for n in [(0, 1, 2), (1, 2, 2), (2, 2, 0), (0, 3, 0)] for k in range(POSITIONS)}
    middle = rows[0, 1, 2, 1]
    assert (stats.count_N[middle], stats.sum_NF[middle, 0], stats.square_NF[middle, 0]) == (2, 1 + 2, 1 + 4)
    assert stats.count_N.sum() == 13


def test_equal_triphones_are_added_up() -> None:
    phone, position = np.tile([1, 1, 1], 2), np.tile([0, 1, 2], 2)
    features = np.array([[1], [2], [3], [10], [20], [30]], np.float32)
    stats = collect_stats(features, phone, position, np.repeat([0, 1], 3))
    assert stats.keys_N4.tolist() == [[0, 1, 0, k] for k in range(3)]
    assert stats.sum_NF[:, 0].tolist() == [11, 22, 33]


def test_log_likelihood_is_that_of_the_fitted_gaussian() -> None:
    x = np.random.default_rng(0).normal(3, 2, 500)
    expected = -0.5 * (np.log(2 * np.pi * x.var()) + (x - x.mean()) ** 2 / x.var()).sum()
    got = gaussian_log_likelihood(np.array(500.0), np.array([x.sum()]), np.array([(x**2).sum()]))
    assert got == pytest.approx(expected)


def test_questions_join_the_nearest_phones() -> None:
    stats = stats_of({(0, 1, 0, 1): 0.0, (0, 2, 0, 1): 10.0, (0, 3, 0, 1): 0.1, (0, 4, 0, 1): 10.2})
    questions = phone_questions(stats, 4)
    assert frozenset([1, 3]) in questions
    assert frozenset([2, 4]) in questions
    assert frozenset([1, 2]) not in questions
    assert all(frozenset([phone]) in questions for phone in range(5))


def triphones() -> TriphoneStats:
    """Phone 1's middle depends on whether phone 3 is on its left; phone 2 does not depend on anything."""
    means = {}
    for left in range(5):
        for right in range(5):
            means[left, 1, right, 1] = 5.0 if left == 3 else 0.0
            means[left, 2, right, 1] = -3.0
    means |= {(1, 3, 1, 1): 8.0, (1, 4, 1, 1): 9.0}
    return stats_of(means)


def test_the_split_that_matters_is_found() -> None:
    tree = build_tree(triphones(), monophone_tree(4, POSITIONS), states=20)
    assert tree.states == 4 * POSITIONS + 1
    assert tree.state(3, 1, 2, 1) != tree.state(4, 1, 2, 1)
    assert tree.state(2, 1, 3, 1) == tree.state(4, 1, 2, 1)
    root = tree.roots[1, 1]
    assert root.side == 0
    assert root.question == {3}


@pytest.mark.parametrize("limit", [{"states": 12}, {"min_gain": 1e9}, {"min_frames": 1e6}, {"whole": frozenset([1])}])
def test_limits_stop_splitting(limit: dict[str, object]) -> None:
    arguments = {"states": 20, **limit}
    assert build_tree(triphones(), monophone_tree(4, POSITIONS), **arguments).states == 12


def test_states_know_their_phone_and_position() -> None:
    tree = build_tree(triphones(), monophone_tree(4, POSITIONS), states=20)
    for left in range(5):
        for centre in range(1, 5):
            for position in range(POSITIONS):
                state = tree.state(left, centre, 2, position)
                assert (tree.phone_S[state], tree.position_S[state]) == (centre, position)


@pytest.mark.parametrize("states", [12, 20])
def test_the_library_reads_the_same_tree(states: int) -> None:
    tree = build_tree(triphones(), monophone_tree(4, POSITIONS), states=states)
    context = context_dependency(tree)
    assert context.num_pdfs == tree.states
    assert (context.context_width, context.central_position) == ((3, 1) if states == 20 else (1, 0))
    for left in range(5):
        for centre in range(1, 5):
            for right in range(5):
                for position in range(POSITIONS):
                    window = [left, centre, right] if states == 20 else [centre]
                    found, state = context.compute(window, position)
                    assert found
                    assert state == tree.state(left, centre, right, position)


def test_state_counts_add_up() -> None:
    stats = triphones()
    tree = build_tree(stats, monophone_tree(4, POSITIONS), states=20)
    count_S, sum_SF, _ = tree.state_counts(stats)
    assert count_S.sum() == stats.count_N.sum()
    special = tree.state(3, 1, 0, 1)
    assert sum_SF[special, 0] / count_S[special] == pytest.approx(5)
