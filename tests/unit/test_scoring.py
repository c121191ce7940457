"""Word error rates, their line and the trn files."""

from __future__ import annotations

from pathlib import Path

import pytest

from antiphon.errors import ArgumentError, DataError
from antiphon.speech.scoring import score, wer_line, write_trn


def test_counts_each_kind_of_error() -> None:
    result = score(
        [["a", "b", "c"], ["d", "e"], ["f"]],
        [["a", "x", "c"], ["d"], ["f", "g", "h"]],
    )
    assert (result.substitutions, result.deletions, result.insertions) == (1, 1, 2)
    assert (result.errors, result.words, result.rate) == (4, 6, 4 / 6)


def test_perfect_is_zero_with_a_zero_interval() -> None:
    result = score([["a"], ["b", "c"]], [["a"], ["b", "c"]])
    assert (result.rate, result.ci95) == (0, (0, 0))


def test_interval_is_that_of_a_binomial() -> None:
    # 400 utterances of one word, every fourth wrong: the standard error is sqrt(.25 x .75 / 400).
    references = [["a"]] * 400
    hypotheses = [["b"] if i % 4 == 0 else ["a"] for i in range(400)]
    low, high = score(references, hypotheses).ci95
    assert low == pytest.approx(0.25 - 1.96 * 0.02165, abs=0.004)
    assert high == pytest.approx(0.25 + 1.96 * 0.02165, abs=0.004)
    assert score(references, hypotheses).ci95 == (low, high)


def test_json_has_the_fields() -> None:
    row = score([["a", "b"]], [["a"]]).to_json()
    assert list(row) == ["rate", "errors", "words", "substitutions", "insertions", "deletions", "ci95"]
    assert isinstance(row["ci95"], list)
    assert wer_line(row).startswith("%WER 50.00 [ 1 / 2, 0 ins, 1 del, 0 sub ] ci95 [")


def test_an_utterance_without_words_counts_insertions() -> None:
    assert score([[], ["a"]], [["b"], ["a"]]).rate == 1


def test_nothing_to_score_is_an_error() -> None:
    with pytest.raises(DataError, match="no words"):
        score([[], []], [["a"], []])
    with pytest.raises(ArgumentError, match="0 references and 0"):
        score([], [])
    with pytest.raises(ArgumentError, match="1 references and 2"):
        score([["a"]], [["a"], ["b"]])


def test_trn_lines(tmp_path: Path) -> None:
    write_trn(tmp_path / "hyp.trn", ["ann-1", "bob-2"], [["yes", "no"], []])
    assert (tmp_path / "hyp.trn").read_text() == "yes no (ann-1)\n(bob-2)\n"
