"""The utterance that the report shows: which one, and where its phones and words begin and end."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from synthetic import LEXICON

from antiphon.config import TrainConfig
from antiphon.recipes.acoustics import Acoustics
from antiphon.recipes.example import write_example


def test_the_aligned_test_utterance_nearest_to_three_seconds(aligned: Path, tmp_path: Path) -> None:
    acoustics = Acoustics.of_data(TrainConfig(), aligned)
    write_example(acoustics, tmp_path)
    example = json.loads((tmp_path / "example.json").read_text())
    tests = acoustics.data.split("test")
    chosen = next(utterance for utterance in tests if utterance.id == example["id"])
    assert abs(chosen.duration_s - 3) == min(abs(utterance.duration_s - 3) for utterance in tests)
    assert tuple(example["words"]) == chosen.words
    features_TF = acoustics.data.frames_of(chosen, acoustics.data.fbank)
    assert np.array(example["spectrogram"]) == pytest.approx(features_TF[:, :40], abs=6e-4)
    assert example["frame_shift_s"] == 0.01


def test_phones_and_words_stand_where_the_alignment_has_them(aligned: Path, tmp_path: Path) -> None:
    acoustics = Acoustics.of_data(TrainConfig(), aligned)
    write_example(acoustics, tmp_path)
    example = json.loads((tmp_path / "example.json").read_text())
    phones, words = example["phones"], example["words_at"]
    assert phones[0][1] == 0 and phones[-1][2] == pytest.approx(len(example["spectrogram"]) / 100)
    for (_, _, end), (_, begin, _) in zip(phones, phones[1:], strict=False):
        assert begin == end
    assert [word for word, _, _ in words] == example["words"]
    spoken = [phone for phone in phones if phone[0] != "SIL"]
    assert [phone for phone, _, _ in spoken] == [p for word in example["words"] for p in LEXICON[word][0]]
    at = 0
    for word, begin, end in words:
        last = at + len(LEXICON[word][0])
        assert (begin, end) == (spoken[at][1], spoken[last - 1][2])
        at = last


def test_an_utterance_that_is_not_aligned_is_not_shown(aligned: Path, tmp_path: Path) -> None:
    data, run = tmp_path / "data", tmp_path / "run"
    shutil.copytree(aligned, data)
    run.mkdir()
    pdf_T = np.load(data / "align" / "pdf.npy")
    acoustics = Acoustics.of_data(TrainConfig(), data)
    kept, *others = acoustics.data.split("test")
    for utterance in others:
        acoustics.data.frames_of(utterance, pdf_T)[3:] = -1
    np.save(data / "align" / "pdf.npy", pdf_T)
    write_example(Acoustics.of_data(TrainConfig(), data), run)
    assert json.loads((run / "example.json").read_text())["id"] == kept.id
    acoustics.data.frames_of(kept, pdf_T)[0] = -1
    np.save(data / "align" / "pdf.npy", pdf_T)
    (run / "example.json").unlink()
    write_example(Acoustics.of_data(TrainConfig(), data), run)
    assert not (run / "example.json").exists()
