"""Words, pronunciations and letter-to-sound rules."""

from __future__ import annotations

from pathlib import Path

import pytest

from antiphon.errors import DataError
from antiphon.speech.letter_to_sound import LetterToSound, divide
from antiphon.speech.lexicon import (
    dictionary,
    dictionary_phones,
    pronounce,
    read_lexicon,
    read_user_lexicon,
    write_lexicon,
)
from antiphon.speech.text import spoken_words


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Un-mute, please!", "un mute please"),
        ("dial 2 now.  If you can", "dial two now if you can"),
        ("10 A.M. or 42 p.m.", "ten a m or forty two p m"),
        ("07 and 3D", "zero seven and three d"),
        ("That’s 'quoted', the callers' choice", "that's quoted the callers choice"),
        ("either/or ... both", "either or both"),
        ("UMLAUT: Über straße", "umlaut über straße"),
    ],
)
def test_text_is_read(text: str, words: str) -> None:
    assert " ".join(spoken_words(text)) == words


@pytest.mark.parametrize("text", ["1,000 men", "at 10:30", "H.323", "www.a.org", "[noise] yes", "50%", "7th", "a_b"])
def test_text_without_a_single_reading_is_refused(text: str) -> None:
    with pytest.raises(DataError, match="no single reading"):
        spoken_words(text)


@pytest.mark.parametrize("text", ["", " \t", "...", "?!"])
def test_text_without_words_is_refused(text: str) -> None:
    with pytest.raises(DataError, match="no spoken words"):
        spoken_words(text)


def test_remarks_and_symbols_are_read_where_a_corpus_has_them() -> None:
    assert spoken_words("press # [a tone] (long)", symbols={"#": "pound"}, remarks=True) == ("press", "pound")


def test_dictionary_has_39_phones_and_every_letter() -> None:
    assert len(dictionary_phones()) == 39
    assert dictionary()["b"] == [("B", "IY")]
    assert dictionary()["a"] == [("AH",), ("EY",)]
    assert all(letter in dictionary() for letter in "abcdefghijklmnopqrstuvwxyz")


def test_lexicon_survives_writing_and_reading(tmp_path: Path) -> None:
    lexicon = {"read": [("R", "EH", "D"), ("R", "IY", "D")], "a": [("AH",)]}
    write_lexicon(tmp_path / "lexicon.txt", lexicon)
    assert (tmp_path / "lexicon.txt").read_text() == "a\tAH\nread\tR EH D\nread\tR IY D\n"
    assert read_lexicon(tmp_path / "lexicon.txt") == lexicon


def test_user_entries_come_in_the_dictionarys_form_and_replace_its_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("Tomato T ah0 M AA1 T OW2\ntomato(2)\tT AH M EY T OW\nyes QX\n")
    user = read_user_lexicon(path)
    assert user == {
        "tomato": [("T", "AH", "M", "AA", "T", "OW"), ("T", "AH", "M", "EY", "T", "OW")],
        "yes": [("QX",)],
    }
    found, missing, guessed = pronounce(["yes", "no", "yes", "grmpf"], user=user)
    assert found == {"yes": [("QX",)], "no": [("N", "OW")]}
    assert (missing, guessed) == (["grmpf"], [])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("yes Y EH S\nno\n", r"mine.txt:2: expected a word and its phones"),
        ("e-mail IY M EY L\n", r"mine.txt:1: 'e-mail' never stands"),
        ("hm SIL\n", r"mine.txt:1: 'SIL' is not"),
        ("hm #1 HH\n", r"mine.txt:1: '#1' is not"),
        ("\n", "no entries"),
    ],
)
def test_bad_user_lexicon_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "mine.txt").write_text(text)
    with pytest.raises(DataError, match=message):
        read_user_lexicon(tmp_path / "mine.txt")


def test_missing_user_lexicon_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none.txt: No such file"):
        read_user_lexicon(tmp_path / "none.txt")


def test_division_follows_the_scores() -> None:
    scores = {("x", ("K", "S")): -0.1, ("x", ("K",)): -3.0, ("e", ("EH",)): -0.1, ("i", ("S",)): -9.0}
    assert divide("exi", ("EH", "K", "S"), {**scores, ("i", ()): -1.0}) == [("EH",), ("K", "S"), ()]


def test_rules_generalise_from_context() -> None:
    spelled = {
        "cat": "K AE T",
        "cot": "K AA T",
        "city": "S IH T IY",
        "cite": "S AY T",
        "mat": "M AE T",
        "cent": "S EH N T",
    }
    rules = LetterToSound.learn({word: [tuple(phones.split())] for word, phones in spelled.items()})
    assert rules("cam") == ("K", "AE", "M")
    assert rules("cit")[0] == "S"
    assert rules("dog") == ()


def test_guesses_are_reported() -> None:
    found, missing, guessed = pronounce(["yes", "zzyx", "ñ"], guess=lambda word: ("Z",) if word == "zzyx" else ())
    assert found["zzyx"] == [("Z",)]
    assert (missing, guessed) == (["ñ"], ["zzyx"])
