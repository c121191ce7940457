"""The decoder on a small graph, and the choice of the scale."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from antiphon.errors import ArgumentError, DataError
from antiphon.speech.decoding import Decoder, choose_scale, scaled
from antiphon.speech.graph import Symbols, decoding_graph, write_graph
from antiphon.speech.hmm import POSITIONS, Hmm
from antiphon.speech.language_model import grammar_fst, train_language_model
from antiphon.speech.tree import monophone_tree

LEXICON = {"go": [("G", "OW")], "no": [("N", "OW")], "on": [("AO", "N")]}
SENTENCES = [["go", "on"], ["no", "no"], ["no", "go"], ["on"]]
FRAMES_A_STATE = 3


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("graph")
    symbols = Symbols.of_lexicon(LEXICON)
    symbols.write_words(folder / "words.txt")
    train_language_model(SENTENCES, LEXICON, order=2, path=folder / "lm.arpa")
    grammar = grammar_fst(folder / "lm.arpa", folder / "words.txt")
    hmm = Hmm(monophone_tree(len(symbols.phones) - 1, POSITIONS))
    write_graph(decoding_graph(hmm, LEXICON, symbols, grammar), folder / "HCLG.fst")
    return folder


@pytest.fixture
def decoder(files: Path) -> Decoder:
    return Decoder.open(files / "HCLG.fst", files / "words.txt")


def states_of(words: list[str]) -> list[int]:
    tree = monophone_tree(5, POSITIONS)
    symbols = Symbols.of_lexicon(LEXICON)
    phones = ["SIL", *(phone for word in words for phone in LEXICON[word][0]), "SIL"]
    row = [tree.state(0, symbols.phone_numbers[phone], 0, k) for phone in phones for k in range(POSITIONS)]
    return [state for state in row for _ in range(FRAMES_A_STATE)]


def scores_of(words: list[str], margin: float = 10.0) -> np.ndarray:
    states = states_of(words)
    scores_TS = np.full((len(states), 5 * POSITIONS), -margin, np.float32)
    scores_TS[np.arange(len(states)), states] = 0
    return scores_TS


@pytest.mark.parametrize("words", [["go", "on"], ["no", "no", "go"], ["on"], ["on", "on", "on"]])
def test_clear_scores_give_the_words_and_the_states(decoder: Decoder, words: list[str]) -> None:
    path = decoder.search(scores_of(words))
    assert path.found
    assert path.words == words
    assert path.states_T.tolist() == states_of(words)
    assert decoder.decode(scores_of(words)) == words


def test_language_model_decides_between_equal_scores(decoder: Decoder) -> None:
    # "go" and "no" differ in their first phone: make both as good. Only "no no" was seen.
    scores_TS = scores_of(["no", "no"])
    tree, symbols = monophone_tree(5, POSITIONS), Symbols.of_lexicon(LEXICON)
    for k in range(POSITIONS):
        g, n = (tree.state(0, symbols.phone_numbers[phone], 0, k) for phone in ("G", "N"))
        scores_TS[:, g] = scores_TS[:, n] = np.maximum(scores_TS[:, g], scores_TS[:, n])
    assert decoder.decode(scores_TS) == ["no", "no"]


def test_too_few_frames_end_early_and_none_give_nothing(decoder: Decoder) -> None:
    assert decoder.decode(scores_of(["go", "on"])[:20]) == ["go"]
    assert decoder.failures == 0
    assert decoder.decode(np.zeros((0, 15), np.float32)) == []
    assert decoder.failures == 1


def test_bad_scores_are_refused(decoder: Decoder) -> None:
    with pytest.raises(DataError, match=r"\[4, 3\], the graph reads 15 states"):
        decoder.decode(np.zeros((4, 3), np.float32))
    with pytest.raises(DataError, match="not finite"):
        decoder.decode(np.full((4, 15), np.nan, np.float32))


@pytest.mark.parametrize(("name", "value"), [("beam", 0.0), ("max_active", 0)])
def test_bounds(files: Path, name: str, value: float) -> None:
    with pytest.raises(ArgumentError, match=f"{name} must be"):
        Decoder.open(files / "HCLG.fst", files / "words.txt", **{name: value})


def test_scaled_takes_the_prior_off() -> None:
    posteriors = np.log(np.array([[0.5, 0.5]], np.float32))
    priors = np.log(np.array([0.9, 0.1], np.float32))
    assert scaled(posteriors, priors, 0.5, 1.0) == pytest.approx(0.5 * np.log(np.array([[0.5 / 0.9, 0.5 / 0.1]])))


def test_choice_takes_fewest_errors_and_tries_each_pair_once(decoder: Decoder) -> None:
    # Scores so small that only a large scale hears more than the language model.
    texts = {"a": ["on", "go"], "b": ["go", "go"], "c": ["no", "on"]}
    posteriors = {name: scores_of(words, margin=0.5) for name, words in texts.items()}
    priors = np.zeros(15, np.float32)
    lines: list[str] = []
    choice = choose_scale(
        decoder, posteriors, texts, priors, scales=(0.01, 10.0), prior_weights=(1.0, 0.5), progress=lines.append
    )
    assert choice.scale == 10.0
    assert choice.prior_weight == 1.0  # equal to 0.5 here, and named first
    assert [(row["scale"], row["prior_weight"]) for row in choice.table] == [(0.01, 1.0), (10.0, 1.0), (10.0, 0.5)]
    assert choice.table[0]["errors"] > choice.table[1]["errors"] == 0
    assert len(lines) == 3


def test_nothing_to_choose_from_is_an_error(decoder: Decoder) -> None:
    with pytest.raises(ArgumentError, match="at least one"):
        choose_scale(decoder, {}, {}, np.zeros(15, np.float32), scales=())
