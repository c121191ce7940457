"""AN4, where it is: prepared by the command, as large as its makers say."""

from __future__ import annotations

from pathlib import Path

from commands import antiphon

from antiphon.records import read_jsonl


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
