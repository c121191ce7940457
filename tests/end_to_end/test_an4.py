"""AN4, where it is: read and prepared, as large as its makers say."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from commands import antiphon

from antiphon.records import read_jsonl
from antiphon.speech.corpora import read_corpus


def test_an4_is_as_large_as_it_should_be(an4: Path) -> None:
    corpus = read_corpus("an4", an4, print)
    assert Counter(recording.split for recording in corpus.recordings) == {"train": 846, "dev": 102, "test": 130}
    assert sum(len(recording.words) for recording in corpus.recordings if recording.split == "test") == 773
    assert all(recording.audio.is_file() for recording in corpus.recordings)


@pytest.mark.long
def test_an4_is_prepared_whole(an4: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    info = antiphon("prepare", "an4", "--source", an4, "--out", data, "--json").object
    assert info["utterances"] == {"train": 846, "dev": 102, "test": 130}
    assert info["words"]["test"] == 773
    assert (info["sample_rate"], info["skipped"], info["missing_words"]) == (16000, 0, [])
    assert info["speakers"] == {"train": 66, "dev": 8, "test": 10}
    speakers: dict[str, set[str]] = {}
    for _, row in read_jsonl(data / "utterances.jsonl"):
        speakers.setdefault(row["split"], set()).add(row["speaker"])
    assert not speakers["train"] & speakers["dev"] and not speakers["train"] & speakers["test"]
