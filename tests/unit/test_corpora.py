"""Readers of corpora: what they take, what they skip, what they refuse, and how they split."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from antiphon.errors import ArgumentError, DataError
from antiphon.speech.corpora import an4, kaldi, manifest, prompts, read_corpus
from antiphon.speech.corpora.base import Corpus, Recording, divide, share


def silent(text: str) -> None:
    raise AssertionError(f"nothing should be said, but: {text}")


def write_manifest(folder: Path, rows: list[dict[str, Any]]) -> Path:
    path = folder / "manifest.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def recordings(names: list[tuple[str, str, str]]) -> list[Recording]:
    return [Recording(name, Path(name), speaker, tuple(text.split()), "", name) for name, speaker, text in names]


def test_an_unknown_corpus_is_named() -> None:
    with pytest.raises(ArgumentError, match="did you mean 'prompts'"):
        read_corpus("prompt", None, silent)


# --- splits


def test_speakers_stay_whole_where_there_are_enough() -> None:
    rows, rule = divide(recordings([(f"u{i}", f"s{i % 6}", f"text {i}") for i in range(60)]), ("test", "dev"))
    splits = {speaker: {row.split for row in rows if row.speaker == speaker} for speaker in {r.speaker for r in rows}}
    assert all(len(found) == 1 for found in splits.values())
    order = sorted(splits, key=share)
    assert splits[order[0]] == {"test"}
    assert splits[order[1]] == {"dev"}
    assert sum(found == {"train"} for found in splits.values()) == 4
    assert "whole speakers" in rule


def test_equal_texts_stay_together_where_speakers_cannot() -> None:
    names = [(f"u{i}", "s1" if i < 70 else f"s{i}", f"text {i % 40}") for i in range(80)]
    rows, rule = divide(recordings(names), ("test", "dev"))
    by_text = {row.text: {other.split for other in rows if other.text == row.text} for row in rows}
    assert all(len(found) == 1 for found in by_text.values())
    counts = {split: sum(row.split == split for row in rows) for split in ("train", "dev", "test")}
    assert counts == {"train": 64, "dev": 8, "test": 8}
    assert "equal texts together" in rule


def test_few_texts_are_divided_by_utterance() -> None:
    rows, rule = divide(recordings([(f"u{i}", "s", "yes" if i % 2 else "no") for i in range(40)]), ("test", "dev"))
    assert {split: sum(row.split == split for row in rows) for split in ("dev", "test")} == {"dev": 4, "test": 4}
    assert "single utterances" in rule


def test_too_few_to_divide_is_refused() -> None:
    with pytest.raises(DataError, match="2 utterances are too few"):
        divide(recordings([("a", "s", "yes"), ("b", "s", "no")]), ("test", "dev"))


def test_a_missing_dev_split_is_taken_from_train_and_said() -> None:
    rows = [(f"u{i}", f"s{i % 8}", f"text {i}") for i in range(80)]
    corpus = Corpus("manifest", recordings(rows))
    corpus.recordings = [
        Recording(r.id, r.audio, r.speaker, r.words, "test" if r.speaker == "s0" else "train", r.where)
        for r in corpus.recordings
    ]
    corpus.split()
    assert {row.speaker for row in corpus.recordings if row.split == "test"} == {"s0"}
    assert sum(row.split == "dev" for row in corpus.recordings) == 10
    assert corpus.split_rule.startswith("the corpus's own; dev from its training part: whole speakers")
    assert corpus.warnings == []


# --- manifest


def test_manifest_rows_become_recordings(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"audio": "a/1.wav", "text": "Yes.", "speaker": "ann", "split": "train", "start_s": 0.5, "end_s": 2},
        {"audio": "a/1.wav", "text": "No 5", "speaker": "ann", "split": "dev", "id": "mine"},
        {"audio": "/abs/2.wav", "text": "go", "speaker": "ann", "split": "test"},
    ]
    corpus = manifest.read(write_manifest(tmp_path, rows), silent)
    first, second, third = corpus.recordings
    assert (first.id, first.audio, first.words) == ("a-1-0.500-2.000", tmp_path / "a/1.wav", ("yes",))
    assert (first.start_s, first.end_s) == (0.5, 2.0)
    assert (second.id, second.words, second.split) == ("mine", ("no", "five"), "dev")
    assert third.audio == Path("/abs/2.wav")
    assert "1 of 1 test speakers are also in train (ann)" in corpus.warnings[0]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"audio": "b.wav", "text": "yes"}, r'manifest.jsonl:2: "speaker" must be a text that is not empty, found no'),
        ({"text": "yes", "speaker": "ann"}, r'manifest.jsonl:2: "audio" must be a text'),
        ({"audio": "b.wav", "speaker": "ann"}, r'manifest.jsonl:2: "text" must be a text, found nothing'),
        ({"audio": "a.wav", "text": "yes", "speaker": "ann"}, r"manifest.jsonl:2: id 'a' already stands on line 1"),
        ({"audio": "b.wav", "text": "yes", "speaker": "ann", "split": "eval"}, r":2: split is 'eval', expected one of"),
        ({"audio": "b.wav", "text": "yes", "speaker": "ann", "end_s": "3"}, r':2: "end_s" must be a number of seconds'),
        ({"audio": "b.wav", "text": "yes", "speaker": "ann", "split": "test"}, r":1: no split, but .*:2 has one"),
    ],
)
def test_a_bad_manifest_line_is_refused(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    path = write_manifest(tmp_path, [{"audio": "a.wav", "text": "yes", "speaker": "ann"}, row])
    with pytest.raises(DataError, match=message):
        manifest.read(path, silent)


def test_a_manifest_that_is_no_manifest_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"audio": "a.wav"\n')
    (tmp_path / "empty.jsonl").write_text("\n")
    for source, message in (
        (None, "pass --source FILE"),
        (tmp_path, "is a folder"),
        (tmp_path / "none.jsonl", "No such file"),
        (tmp_path / "bad.jsonl", "bad.jsonl:1: not JSON"),
        (tmp_path / "empty.jsonl", "no utterances"),
    ):
        with pytest.raises(DataError, match=message):
            manifest.read(source, silent)


def test_single_bad_utterances_of_a_manifest_are_skipped(tmp_path: Path) -> None:
    good = [{"audio": f"{i}.wav", "text": f"{i % 50}", "speaker": "ann"} for i in range(50)]
    bad: list[dict[str, Any]] = [
        {"audio": "x.wav", "text": " ", "speaker": "ann"},
        {"audio": "y.wav", "text": "yes", "speaker": "ann", "start_s": -1},
        {"audio": "z.wav", "text": "yes", "speaker": "ann", "start_s": 2, "end_s": 1},
    ]
    corpus = manifest.read(write_manifest(tmp_path, good + bad), silent)
    assert len(corpus.recordings) == 50
    assert [skip.id for skip in corpus.skipped] == ["x", "y--1.000-end", "z-2.000-1.000"]
    assert ":51: no spoken words" in corpus.skipped[0].reason
    assert ":52: start_s is -1.0, expected 0 or more" in corpus.skipped[1].reason
    assert ":53: end_s 1.0 is not after start_s 2.0" in corpus.skipped[2].reason


# --- Kaldi


def kaldi_folder(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("wav_scp", "wav.scp")).write_text(text)
    return folder


def test_kaldi_segments_and_subfolders(tmp_path: Path) -> None:
    for split in ("train", "dev", "test"):
        kaldi_folder(
            tmp_path / split,
            wav_scp=f"rec-{split} {split}.wav\n",
            segments=f"{split}-1 rec-{split} 0.5 1.5\n{split}-2 rec-{split} 2 -1\n{split}-3 rec-{split} 3 2\n",
            text=f"{split}-1 YES\n{split}-2 GO ON\n{split}-3 NO\n{split}-4 NO\n",
            utt2spk=f"{split}-1 s-{split}\n{split}-2 s-{split}\n{split}-3 s-{split}\n",
        )
    (tmp_path / "train" / "train.wav").touch()
    corpus = kaldi.read(tmp_path, silent)
    assert [row.id for row in corpus.recordings if row.split == "train"] == ["train-1", "train-2"]
    first, second = corpus.recordings[:2]
    assert (first.audio, first.start_s, first.end_s, first.speaker) == (
        tmp_path / "train" / "train.wav",
        0.5,
        1.5,
        "s-train",
    )
    assert (second.words, second.end_s) == (("go", "on"), None)
    reasons = {skip.id: skip.reason for skip in corpus.skipped}
    assert "segments:3: end_s 2.0 is not after start_s 3.0" in reasons["train-3"]
    assert "text:4: not in segments" in reasons["train-4"]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"wav_scp": "a a.wav\nb sox b.wav -t wav - |\n"}, r"wav.scp:2: a piped command is not run"),
        ({"wav_scp": "a a.wav\na b.wav\n"}, r"wav.scp:2: 'a' already stands at .*wav.scp:1"),
        ({"wav_scp": "a\n"}, r"wav.scp:1: only one field"),
        ({"segments": "a a 1\n"}, r"segments:1: expected utterance, recording, start and end"),
    ],
)
def test_a_bad_kaldi_folder_is_refused(tmp_path: Path, files: dict[str, str], message: str) -> None:
    good = {"wav_scp": "a a.wav\n", "text": "a yes\n", "utt2spk": "a s\n"}
    with pytest.raises(DataError, match=message):
        kaldi.read(kaldi_folder(tmp_path, **{**good, **files}), silent)


def test_a_folder_without_wav_scp_or_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no wav.scp"):
        kaldi.read(tmp_path, silent)
    with pytest.raises(DataError, match="text: No such file"):
        kaldi.read(kaldi_folder(tmp_path, wav_scp="a a.wav\n"), silent)


# --- AN4


def test_an4_development_speakers_are_four_of_each_gender_in_hash_order() -> None:
    genders = {f"f{i}": "f" for i in range(9)} | {f"m{i}": "m" for i in range(30)}
    chosen = an4.dev_speakers(genders)
    women, men = {name for name in chosen if name[0] == "f"}, {name for name in chosen if name[0] == "m"}
    assert (len(women), len(men)) == (4, 4)
    assert max(map(share, women)) < min(share(f"f{i}") for i in range(9) if f"f{i}" not in women)


@pytest.mark.skipif("ANTIPHON_AN4" not in os.environ, reason="ANTIPHON_AN4 is not set")
def test_an4_as_it_is() -> None:
    corpus = an4.read(Path(os.environ["ANTIPHON_AN4"]), silent)
    speakers = {s: {row.speaker for row in corpus.recordings if row.split == s} for s in ("train", "dev", "test")}
    assert {split: len(names) for split, names in speakers.items()} == {"train": 66, "dev": 8, "test": 10}
    assert not speakers["train"] & (speakers["dev"] | speakers["test"])
    assert sum(row.split == "test" for row in corpus.recordings) == 130
    assert corpus.skipped == []


def test_an4_without_its_manifest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no manifest.jsonl"):
        an4.read(tmp_path, silent)


# --- prompts


def prompts_tree(folder: Path, text: str, audio: list[str]) -> Path:
    (folder / prompts.TEXT_FILE).parent.mkdir(parents=True)
    (folder / prompts.TEXT_FILE).with_suffix("").write_text(text)
    for name in audio:
        file = folder / prompts.AUDIO_FOLDER / f"{name}.wav"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    return folder


def test_prompts_are_read_from_their_text_file(tmp_path: Path) -> None:
    text = "; a comment\nbeep: [a beep]\ndigits/h-40: fourtieth\nvm-next: Press 6 or # now.\nspy-h323: H.323\n"
    corpus = prompts.read(prompts_tree(tmp_path, text, ["digits/h-40", "vm-next", "beep", "odd"]), silent)
    assert {row.id: row.text for row in corpus.recordings} == {
        "digits/h-40": "fortieth",
        "vm-next": "press six or pound now",
    }
    assert [skip.id for skip in corpus.skipped] == ["beep", "spy-h323", "odd"]
    assert "core-sounds-en.txt.gz:2: no spoken words" in corpus.skipped[0].reason


def test_prompts_split_by_text_alone() -> None:
    assert prompts.split_of(("one", "two")) == "train"
    texts = [tuple(f"say {i} again".split()) for i in range(1000)]
    splits = [prompts.split_of(words) for words in texts]
    assert splits == [
        "test" if share(" ".join(w)) < 0.22 else "dev" if share(" ".join(w)) < 0.36 else "train" for w in texts
    ]
    assert 180 < splits.count("test") < 260
    assert 110 < splits.count("dev") < 170


def test_prompts_need_a_source_that_holds_them(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds neither"):
        prompts.read(tmp_path, silent)


def test_a_failing_download_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = tmp_path / "bin" / "apt-get"
    command.parent.mkdir()
    command.write_text("#!/bin/sh\necho 'E: Unable to locate package' >&2\nexit 100\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(command.parent), prepend=os.pathsep)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    said: list[str] = []
    with pytest.raises(DataError, match=r"apt-get download failed \(E: Unable .*apt-get update"):
        prompts.read(None, said.append)
    assert "18.3 MB" in said[0]
    assert list((tmp_path / "cache" / "antiphon").iterdir()) == []


def test_without_apt_get_the_source_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(DataError, match="apt-get is not on this machine"):
        prompts.read(None, lambda text: None)
