"""Symbols, the lexicon, the language model and the decoding graph."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest

from antiphon.errors import ArgumentError, DataError, FolderError
from antiphon.speech.graph import (
    Symbols,
    decoding_graph,
    lexicon_fst,
    read_graph,
    read_words,
    write_graph,
)
from antiphon.speech.hmm import POSITIONS, Hmm
from antiphon.speech.kaldi import kaldifst, relabel_inputs
from antiphon.speech.language_model import grammar_fst, train_language_model
from antiphon.speech.tree import monophone_tree

LEXICON = {"ab": [("A", "B")], "a": [("A",)], "ay": [("A",)], "b": [("B",), ("B", "B")]}


def arcs(fst: object) -> list[tuple[int, int, int, int]]:
    return [
        (state, arc.ilabel, arc.olabel, arc.nextstate)
        for state in range(fst.num_states)  # type: ignore[attr-defined]
        for arc in kaldifst.ArcIterator(fst, state)
    ]


def test_symbols_are_sorted_with_silence_first(tmp_path: Path) -> None:
    symbols = Symbols.of_lexicon(LEXICON)
    assert symbols.phones == ("<eps>", "SIL", "A", "B")
    assert symbols.words == ("<eps>", "a", "ab", "ay", "b", "#0", "<s>", "</s>")
    symbols.write_words(tmp_path / "words.txt")
    assert read_words(tmp_path / "words.txt") == symbols.words
    assert (tmp_path / "words.txt").read_text().splitlines()[1] == "a 1"


def test_symbols_refuse_what_they_need_themselves() -> None:
    with pytest.raises(DataError, match="'#0'"):
        Symbols.of_lexicon({"#0": [("A",)]})
    with pytest.raises(DataError, match="empty"):
        Symbols.of_lexicon({})


def test_broken_words_name_the_line(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("<eps> 0\na 2\n")
    with pytest.raises(FolderError, match=r"words.txt:2: .* number 1"):
        read_words(tmp_path / "words.txt")
    with pytest.raises(FolderError, match="antiphon align"):
        read_words(tmp_path / "none.txt")


def accepted(fst: object, labels: list[int]) -> list[int] | None:
    """Words of the cheapest path that reads ``labels``; None if there is none."""
    line = kaldifst.make_linear_acceptor(labels)
    both = kaldifst.compose(line, fst)
    if both.num_states == 0:
        return None
    _, _, words, _ = kaldifst.get_linear_symbol_sequence(kaldifst.shortest_path(both))
    return list(words)


def test_lexicon_reads_words_with_optional_silence() -> None:
    symbols = Symbols.of_lexicon(LEXICON)
    fst, marks = lexicon_fst(LEXICON, symbols, disambiguate=False)
    kaldifst.arcsort(fst, sort_type="ilabel")
    sil, a, b = 1, 2, 3
    number = symbols.word_numbers
    assert marks == []
    assert accepted(fst, [sil, b, b, sil, a, b, sil]) in (
        [number["b"], number["ab"]],
        [number["b"], number["a"], number["b"]],
    )
    assert accepted(fst, [sil]) == []
    assert accepted(fst, [sil, sil, b]) is None


def test_homophones_and_prefixes_get_marks() -> None:
    symbols = Symbols.of_lexicon(LEXICON)
    fst, marks = lexicon_fst(LEXICON, symbols, disambiguate=True)
    # "A" is a homophone and a prefix (two marks), "B" a prefix (one); then #0 and the mark of silence.
    first = len(symbols.phones)
    assert marks == [first, first + 1, first + 2, first + 3]
    assert {label for _, label, _, _ in arcs(fst)} >= set(marks)


def test_relabelling_keeps_all_else() -> None:
    fst = kaldifst.compile("0 1 1 5 0.25\n0 1 2 6 0.5\n1 0.75\n", acceptor=False)
    relabel_inputs(fst, np.array([0, 7, 0], np.int32))
    assert arcs(fst) == [(0, 7, 5, 1), (0, 0, 6, 1)]
    assert [arc.weight.value for arc in kaldifst.ArcIterator(fst, 0)] == [0.25, 0.5]


SENTENCES = [["a", "b"], ["a", "b"], ["a", "ab"], ["b"]]


def read_arpa(path: Path) -> dict[tuple[str, ...], float]:
    rows = {}
    for line in path.read_text().splitlines():
        fields = line.split("\t")
        if len(fields) >= 2 and re.match(r"-?\d", fields[0]):
            rows[tuple(fields[1].split())] = float(fields[0])
    return rows


@pytest.mark.parametrize("order", [1, 2, 3])
def test_every_word_has_mass_and_unigrams_add_up(tmp_path: Path, order: int) -> None:
    train_language_model(SENTENCES, LEXICON, order=order, path=tmp_path / "lm.arpa")
    rows = read_arpa(tmp_path / "lm.arpa")
    for word in LEXICON:
        assert rows[word,] > -5
    assert max(map(len, rows)) == order
    total = sum(10**value for words, value in rows.items() if len(words) == 1 and words != ("<s>",))
    assert total == pytest.approx(1 if order > 1 else 12 / 16, abs=1e-4)


def test_language_model_bounds(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="from 1 to 5, got 6"):
        train_language_model(SENTENCES, LEXICON, order=6, path=tmp_path / "lm.arpa")


def test_sentences_outside_the_vocabulary_are_left_out(tmp_path: Path) -> None:
    train_language_model([*SENTENCES, ["a", "zebra"]], LEXICON, order=2, path=tmp_path / "lm.arpa")
    assert "zebra" not in (tmp_path / "lm.arpa").read_text()


def build(tmp_path: Path) -> tuple[object, Symbols, Hmm]:
    symbols = Symbols.of_lexicon(LEXICON)
    symbols.write_words(tmp_path / "words.txt")
    train_language_model(SENTENCES, LEXICON, order=2, path=tmp_path / "lm.arpa")
    hmm = Hmm(monophone_tree(len(symbols.phones) - 1, POSITIONS))
    grammar = grammar_fst(tmp_path / "lm.arpa", tmp_path / "words.txt")
    return decoding_graph(hmm, LEXICON, symbols, grammar), symbols, hmm


def test_graph_reads_states_and_writes_words(tmp_path: Path) -> None:
    graph, symbols, hmm = build(tmp_path)
    used = {label for _, label, _, _ in arcs(graph)}
    assert used <= set(range(hmm.tree.states + 1))
    assert used >= set(range(1, hmm.tree.states + 1))
    words = {word for _, _, word, _ in arcs(graph)}
    assert words == {0, *(symbols.word_numbers[word] for word in LEXICON)}


def test_graph_loops_on_each_state(tmp_path: Path) -> None:
    graph, _, hmm = build(tmp_path)
    loops = {label for state, label, _, target in arcs(graph) if state == target and label}
    assert loops == set(range(1, hmm.tree.states + 1))


def test_graph_comes_back_from_its_file(tmp_path: Path) -> None:
    graph, _, _ = build(tmp_path)
    write_graph(graph, tmp_path / "HCLG.fst")
    again = read_graph(tmp_path / "HCLG.fst")
    assert arcs(again) == arcs(graph)
    with pytest.raises(FolderError, match="antiphon align"):
        read_graph(tmp_path / "absent.fst")


def test_likely_word_pairs_cost_less(tmp_path: Path) -> None:
    _, symbols, _ = build(tmp_path)
    grammar = grammar_fst(tmp_path / "lm.arpa", tmp_path / "words.txt")

    backoff = symbols.word_numbers["#0"]

    def cost(words: list[str]) -> float:
        numbers = [symbols.word_numbers[word] for word in words]
        rows = [f"{state} {state + 1} {number}" for state, number in enumerate(numbers)]
        rows += [f"{state} {state} {backoff}" for state in range(len(words) + 1)]  # back off anywhere
        line = kaldifst.compile("\n".join([*rows, str(len(words))]) + "\n", acceptor=True)
        kaldifst.arcsort(line, sort_type="olabel")
        best = kaldifst.shortest_path(kaldifst.compose(line, grammar))
        return float(kaldifst.get_linear_symbol_sequence(best)[3].value)

    assert math.isfinite(cost(["ay", "ay"]))
    assert cost(["a", "b"]) < cost(["a", "ab"]) < cost(["ay", "ay"])
