"""A small corpus, prepared from end to end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from antiphon.cli.main import main
from antiphon.errors import ArgumentError, DataError, FolderError
from antiphon.recipes.prepare import prepare
from antiphon.records import Json, read_json, read_jsonl
from antiphon.speech import features
from antiphon.speech.manifest import PreparedData

WORDS = ("yes", "no", "go", "stop", "help", "enter")


def write_audio(path: Path, seed: int, rate: int = 8000, seconds: float = 0.3) -> None:
    rng = np.random.default_rng(seed)
    soundfile.write(path, rng.normal(size=round(rate * seconds)) * 0.1, rate)


def corpus(folder: Path, **changes: Any) -> Path:
    """Write a manifest of 4 speakers with 6 words each; ``changes`` replaces fields of line ``u0``."""
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[Json] = []
    for i in range(24):
        write_audio(folder / f"u{i}.wav", i, seconds=0.2 + 0.013 * i)
        split = ("train", "train", "dev", "test")[i // 6]
        rows.append({"audio": f"u{i}.wav", "text": WORDS[i % 6], "speaker": f"s{i // 6}", "split": split})
    rows[0] |= changes
    path = folder / "manifest.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def skipped(out: Path) -> dict[str, str]:
    return {row["id"]: row["reason"] for _, row in read_jsonl(out / "skipped.jsonl")}


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    source = corpus(tmp_path / "in")
    info = prepare("manifest", tmp_path / "out", source=source)
    data = PreparedData(tmp_path / "out")
    assert info["utterances"] == {"train": 12, "dev": 6, "test": 6}
    assert info["words"] == info["utterances"]
    assert (info["sample_rate"], info["skipped"], info["missing_words"]) == (8000, 0, [])
    assert data.info == {key: value for key, value in info.items() if key != "out"}
    assert data.sha256 == info["data_sha256"]
    assert sorted(data.lexicon) == sorted(WORDS)
    frames = [features.frame_count(round(8000 * (0.2 + 0.013 * i)), 8000) for i in range(24)]
    assert [one.frames for one in data.utterances] == frames
    assert data.fbank.shape == (sum(frames), 120)
    assert data.mfcc.shape == (sum(frames), 39)
    assert isinstance(data.fbank, np.memmap)
    one = data.split("dev")[2]
    assert (one.words, one.speaker, one.audio) == (("go",), "s2", str(tmp_path / "in" / "u14.wav"))
    assert data.frames_of(one, data.mfcc).shape == (one.frames, 39)
    raw_TF = features.mfcc(features.read_samples(tmp_path / "in" / "u14.wav"), 8000)
    correlation = np.corrcoef(raw_TF[:, 0], data.frames_of(one, data.mfcc)[:, 0])[0, 1]
    assert correlation == pytest.approx(1.0)


def test_the_same_corpus_elsewhere_has_the_same_fingerprint(tmp_path: Path) -> None:
    first = prepare("manifest", tmp_path / "out1", source=corpus(tmp_path / "in1"))
    second = prepare("manifest", tmp_path / "out2", source=corpus(tmp_path / "in2"))
    other = prepare("manifest", tmp_path / "out3", source=corpus(tmp_path / "in3"), normalise="utterance")
    assert first["data_sha256"] == second["data_sha256"] != other["data_sha256"]


def test_recordings_are_not_touched(tmp_path: Path) -> None:
    source = corpus(tmp_path / "in")
    before = {path.name: path.read_bytes() for path in source.parent.iterdir()}
    prepare("manifest", tmp_path / "out", source=source)
    assert {path.name: path.read_bytes() for path in source.parent.iterdir()} == before


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"text": "grmpf"}, "manifest.jsonl:1: no pronunciation for 'grmpf'"),
        ({"audio": "none.wav"}, "none.wav: no such recording"),
        ({"start_s": 0.1, "end_s": 5.0}, "ends before its part"),
        ({"start_s": 0.1, "end_s": 0.102}, "less than one frame"),
        ({"audio": "wide.wav"}, "wide.wav is at 16000 Hz, the corpus at 8000 Hz: pass --resample"),
        ({"audio": "stereo.wav"}, "2 channels, expected 1"),
    ],
)
def test_an_utterance_that_cannot_be_used_is_skipped_and_told(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    source = corpus(tmp_path / "in", id="u0", **changes)
    write_audio(source.parent / "wide.wav", 99, rate=16000)
    soundfile.write(source.parent / "stereo.wav", np.ones((800, 2)) / 2, 8000)
    info = prepare("manifest", tmp_path / "out", source=source)
    assert (info["skipped"], info["utterances"]["train"]) == (1, 11)
    assert reason in skipped(tmp_path / "out")["u0"]
    assert all(one.id != "u0" for one in PreparedData(tmp_path / "out").utterances)


def test_the_users_lexicon_and_the_rules_fill_gaps(tmp_path: Path) -> None:
    source = corpus(tmp_path / "in", text="grmpf")
    (tmp_path / "mine.txt").write_text("grmpf G ER M F\nyes Y AE\n")
    prepare("manifest", tmp_path / "out", source=source, lexicon=tmp_path / "mine.txt")
    lexicon = PreparedData(tmp_path / "out").lexicon
    assert lexicon["grmpf"] == [("G", "ER", "M", "F")]
    assert lexicon["yes"] == [("Y", "AE")]
    assert lexicon["no"] == [("N", "OW")]


def test_letter_to_sound_guesses_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {word: [("AH", "B")] for word in ("ab", "abab")}
    monkeypatch.setattr("antiphon.recipes.prepare.dictionary", lambda: small)
    info = prepare("manifest", tmp_path / "out", source=corpus(tmp_path / "in", text="abbabab"), letter_to_sound=True)
    assert info["guessed_words"] == ["abbabab"]
    assert info["missing_words"] == []
    assert len(PreparedData(tmp_path / "out").lexicon["abbabab"]) == 1


def test_another_rate_is_reached_by_resampling(tmp_path: Path) -> None:
    source = corpus(tmp_path / "in")
    with pytest.raises(DataError, match="no utterance is left in split 'train'.*pass --resample"):
        prepare("manifest", tmp_path / "out", source=source, rate=16000)
    info = prepare("manifest", tmp_path / "out", source=source, rate=16000, resample=True)
    assert (info["sample_rate"], info["skipped"]) == (16000, 0)


@pytest.mark.parametrize("rate", [8001, 11025, 15999, 44100])
def test_resampled_lengths_are_counted_right(tmp_path: Path, rate: int) -> None:
    source = corpus(tmp_path / "in")
    for i in range(24):
        write_audio(source.parent / f"u{i}.wav", i, seconds=0.1 + 0.0137 * i)
    info = prepare("manifest", tmp_path / "out", source=source, rate=rate, resample=True)
    assert info["utterances"] == {"train": 12, "dev": 6, "test": 6}


def test_a_split_with_nothing_left_is_an_error_that_says_why(tmp_path: Path) -> None:
    source = corpus(tmp_path / "in")
    for i in range(12, 18):
        (source.parent / f"u{i}.wav").unlink()
    with pytest.raises(DataError, match=r"'dev'.*6 were skipped: .*manifest.jsonl:13: .*no such recording"):
        prepare("manifest", tmp_path / "out", source=source)
    assert not (tmp_path / "out" / "data.json").exists()


def test_an_interrupt_leaves_nothing_whole_and_overwrite_mends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = corpus(tmp_path / "in"), tmp_path / "out"

    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(features, "write_features", interrupt)
        with pytest.raises(KeyboardInterrupt):
            prepare("manifest", out, source=source)
    with pytest.raises(FolderError, match="prepared only in part"):
        PreparedData(out)
    with pytest.raises(FolderError, match="is not empty"):
        prepare("manifest", out, source=source)
    prepare("manifest", out, source=source, overwrite=True)
    assert len(PreparedData(out).utterances) == 24


def test_a_bad_source_leaves_the_earlier_result_alone(tmp_path: Path) -> None:
    source, out = corpus(tmp_path / "in"), tmp_path / "out"
    prepare("manifest", out, source=source)
    source.write_text("{\n")
    with pytest.raises(DataError, match=r"manifest.jsonl:1: not JSON"):
        prepare("manifest", out, source=source, overwrite=True)
    assert len(PreparedData(out).utterances) == 24


def test_out_must_not_hold_the_source(tmp_path: Path) -> None:
    source = corpus(tmp_path / "in")
    with pytest.raises(ArgumentError, match="holds the source"):
        prepare("manifest", tmp_path / "in", source=source, overwrite=True)


def test_wrong_arguments_are_named(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="normalise is 'corpus', expected speaker or utterance"):
        prepare("manifest", tmp_path / "out", normalise="corpus")
    with pytest.raises(ArgumentError, match="--rate is 0 Hz"):
        prepare("manifest", tmp_path / "out", rate=0)


def test_a_folder_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FolderError, match="no such folder"):
        PreparedData(tmp_path / "none")
    with pytest.raises(FolderError, match="is not a prepared corpus"):
        PreparedData(tmp_path)
    out = tmp_path / "out"
    prepare("manifest", out, source=corpus(tmp_path / "in"))
    np.save(out / "mfcc.npy", np.zeros((3, 39), np.float32))
    with pytest.raises(FolderError, match=r"mfcc.npy is float32 \[3, 39\], expected"):
        _ = PreparedData(out).mfcc
    (out / "fbank.npy").write_bytes((out / "fbank.npy").read_bytes()[:5000])
    with pytest.raises(FolderError, match="fbank.npy cannot be read"):
        _ = PreparedData(out).fbank
    (out / "utterances.jsonl").write_text('{"id": "a"}\n')
    with pytest.raises(FolderError, match=r"utterances.jsonl:1: not an utterance"):
        PreparedData(out)


def test_the_command_prints_a_table_or_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = corpus(tmp_path / "in", text="grmpf")
    command = ["prepare", "manifest", "--source", str(source), "--out"]
    assert main([*command, str(tmp_path / "one")]) == 0
    shown = capsys.readouterr().out
    assert "train" in shown
    assert "without pronunciation (1): grmpf" in shown
    assert main([*command, str(tmp_path / "two"), "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["utterances"]["train"] == 11
    assert "without pronunciation" in captured.err
    assert read_json(tmp_path / "two" / "data.json")["command"] == "prepare"
    assert main([*command, str(tmp_path / "two")]) == 2
    assert "is not empty" in capsys.readouterr().err
