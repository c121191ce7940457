"""Mixtures, EM from a flat start, and the whole `align` stage on speech whose phones are known."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from synthetic import LEXICON, write_prepared

from antiphon.cli.main import main
from antiphon.errors import ArgumentError, DataError, FolderError
from antiphon.recipes.align import align
from antiphon.records import LOCK_NAME
from antiphon.speech.alignment import Alignment, load_alignment, word_spans
from antiphon.speech.gmm import Mixtures, gather, split, update
from antiphon.speech.manifest import PreparedData

# Mixtures


def one_state(x_TF: np.ndarray, means: list[float]) -> Mixtures:
    count = len(means)
    return Mixtures(np.full(count, 1 / count), np.array(means)[:, None], np.ones((count, 1)), np.array([0]))


def test_log_likelihood_is_that_of_the_mixture() -> None:
    mixtures = Mixtures(
        np.array([0.25, 0.75, 1.0]), np.array([[0.0], [2.0], [5.0]]), np.array([[1.0], [4.0], [0.5]]), np.array([0, 2])
    )
    x = np.array([[0.5], [3.0]], np.float32)

    def density(value: float, mean: float, variance: float) -> float:
        return float(np.exp(-((value - mean) ** 2) / (2 * variance)) / np.sqrt(2 * np.pi * variance))

    expected = [
        [np.log(0.25 * density(v, 0, 1) + 0.75 * density(v, 2, 4)), np.log(density(v, 5, 0.5))] for v in (0.5, 3.0)
    ]
    assert mixtures.log_likelihood(x) == pytest.approx(np.array(expected), rel=1e-5)


def test_library_scores_the_same() -> None:
    rng = np.random.default_rng(0)
    mixtures = Mixtures(
        np.array([0.3, 0.7, 1.0]), rng.normal(size=(3, 4)), rng.uniform(0.5, 2, size=(3, 4)), np.array([0, 2])
    )
    x = rng.normal(size=(5, 4)).astype(np.float32)
    library = mixtures.to_kaldi()
    expected = [[library.log_likelihood(state, frame) for state in range(2)] for frame in x]
    assert mixtures.log_likelihood(x) == pytest.approx(np.array(expected), rel=1e-4)


def test_em_finds_two_clusters() -> None:
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.normal(-3, 1, 300), rng.normal(3, 0.5, 100)]).astype(np.float32)[:, None]
    states = np.zeros(len(x), np.int64)
    mixtures = one_state(x, [-0.1, 0.1])
    scores = []
    for _ in range(30):
        sums = gather(mixtures, x, states)
        scores.append(sums.log_likelihood)
        mixtures = update(mixtures, sums)
    assert np.all(np.diff(scores) > -1e-6)
    assert mixtures.mean_GF[:, 0] == pytest.approx([-3, 3], abs=0.15)
    assert mixtures.weight_G == pytest.approx([0.75, 0.25], abs=0.02)
    assert mixtures.variance_GF[:, 0] == pytest.approx([1, 0.25], abs=0.2)


def test_gaussians_without_frames_are_dropped_but_one_stays() -> None:
    x = np.zeros((20, 1), np.float32) + np.linspace(-1, 1, 20, dtype=np.float32)[:, None]
    mixtures = Mixtures(np.array([0.5, 0.5, 1.0]), np.array([[0.0], [99.0], [7.0]]), np.ones((3, 1)), np.array([0, 2]))
    after = update(mixtures, gather(mixtures, x, np.zeros(20, np.int64)))
    assert after.first_S.tolist() == [0, 1]
    assert after.mean_GF[:, 0] == pytest.approx([0, 7], abs=1e-6)


def test_split_grows_states_with_frames() -> None:
    mixtures = Mixtures(np.ones(2), np.zeros((2, 3)), np.ones((2, 3)), np.arange(2))
    after = split(mixtures, np.array([1000.0, 30.0]), 5, np.random.default_rng(0))
    assert after.first_S.tolist() == [0, 4]
    assert after.weight_G[:4].sum() == pytest.approx(1)
    assert len(np.unique(after.mean_GF[:4], axis=0)) == 4
    # No state has frames for more than these.
    assert split(mixtures, np.array([50.0, 30.0]), 50, np.random.default_rng(0)).gaussians == 3


# The stage


@pytest.fixture(scope="module")
def aligned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list, dict]:
    data = tmp_path_factory.mktemp("align") / "data"
    spoken = write_prepared(data, short=1, utterances=90)
    lines: list[str] = []
    result = align(data, states=35, gaussians=60, progress=lines.append)
    assert any(line.startswith("triphones pass") for line in lines)
    return data, spoken, result


def test_phones_are_found(aligned: tuple[Path, list, dict]) -> None:
    data, spoken, _ = aligned
    alignment = load_alignment(data)
    truth = [phone for one in spoken for phone in one.phones_T]
    found = [alignment.phones[phone] if phone >= 0 else "" for phone in alignment.phone_T]
    assert len(found) == len(truth)
    assert np.mean(np.array(found) == np.array(truth)) > 0.9


def test_states_are_those_of_the_phones(aligned: tuple[Path, list, dict]) -> None:
    alignment = load_alignment(aligned[0])
    known = alignment.pdf_T >= 0
    assert np.array_equal(alignment.state_phone_S[alignment.pdf_T[known]], alignment.phone_T[known])
    assert np.array_equal(known, alignment.phone_T >= 0)
    assert np.exp(alignment.log_priors_S).sum() == pytest.approx(1, abs=1e-5)
    assert alignment.states == aligned[2]["states"] <= 35


def test_what_cannot_be_aligned_is_named(aligned: tuple[Path, list, dict]) -> None:
    data, _, result = aligned
    assert result["failed"] == ["u000"]
    assert result["aligned"] == 89
    alignment = load_alignment(data)
    assert alignment.pdf_T[:4].tolist() == [-1] * 4


def test_words_of_the_test_split_are_recognised(aligned: tuple[Path, list, dict]) -> None:
    assert aligned[2]["gmm_wer"]["rate"] < 0.1
    assert aligned[2]["gmm_wer"]["words"] > 10


def test_record_and_files(aligned: tuple[Path, list, dict]) -> None:
    data, _, result = aligned
    on_disk = json.loads((data / "align/align.json").read_text())
    assert on_disk["gmm_wer"] == result["gmm_wer"]
    assert set(result["seconds"]) >= {"monophones", "triphones", "graph", "decoding"}
    names = {path.name for path in (data / "align").iterdir()} - {LOCK_NAME}
    assert names == {
        *("pdf.npy", "phone.npy", "phones.txt", "words.txt", "states.txt", "priors.npy"),
        *("HCLG.fst", "lm.arpa", "align.json"),
    }


def test_word_spans_follow_the_states(aligned: tuple[Path, list, dict]) -> None:
    data, spoken, _ = aligned
    alignment, prepared = load_alignment(data), PreparedData(data)
    utterance, one = prepared.utterances[5], spoken[5]
    phones = alignment.phone_spans(prepared.frames_of(utterance, alignment.pdf_T))
    expected = [phone for word in one.words for phone in LEXICON[word][0]]
    assert [phone for phone, *_ in phones if phone != "SIL"] == expected
    spans = word_spans(utterance.words, phones, prepared.lexicon)
    assert [word for word, *_ in spans] == list(one.words)
    assert all(one.phones_T[(start + end) // 2] != "SIL" for _, start, end in spans)


def test_same_seed_same_states(tmp_path: Path) -> None:
    write_prepared(tmp_path / "data", utterances=24)
    quiet = {"progress": lambda line: None, "states": 30, "gaussians": 40}
    first = align(tmp_path / "data", out=tmp_path / "one", **quiet)
    second = align(tmp_path / "data", out=tmp_path / "two", **quiet)
    for name in ("pdf.npy", "priors.npy", "HCLG.fst", "lm.arpa"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name
    assert first["gmm_wer"] == second["gmm_wer"]


def test_too_many_failures_are_an_error_and_leave_no_closing_file(tmp_path: Path) -> None:
    data = tmp_path / "data"
    write_prepared(data, short=8, utterances=48)
    with pytest.raises(DataError, match=r"8 of 48 utterances cannot be aligned \(u000, .*10%"):
        align(data, states=30, gaussians=40, progress=lambda line: None)
    with pytest.raises(FolderError, match=r"not whole .* --overwrite"):
        load_alignment(data)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"states": 0}, "states must be at least 1, got 0"),
        ({"gaussians": -1}, "gaussians must be at least 1, got -1"),
        ({"lm_order": 6}, "lm_order must be from 1 to 5, got 6"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
    ],
)
def test_bounds(tmp_path: Path, arguments: dict[str, int], text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        align(tmp_path, **arguments)


def test_no_alignment_names_the_cure(tmp_path: Path) -> None:
    with pytest.raises(FolderError, match=f"`antiphon align {tmp_path}` first"):
        load_alignment(tmp_path)


def test_a_broken_file_names_the_cure(aligned: tuple[Path, list, dict], tmp_path: Path) -> None:
    source = aligned[0] / "align"
    for path in source.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    np.save(tmp_path / "pdf.npy", np.zeros(3, np.int64))
    with pytest.raises(FolderError, match=r"pdf.npy is int64 .* --overwrite"):
        load_alignment(aligned[0], tmp_path)


def test_command_refuses_and_explains(
    aligned: tuple[Path, list, dict], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["align", str(aligned[0])]) == 2
    assert "not empty" in capsys.readouterr().err
    assert main(["align", str(tmp_path / "none")]) == 2
    assert "antiphon prepare" in capsys.readouterr().err


def test_command_prints_json_last(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_prepared(tmp_path / "data", utterances=24)
    assert main(["align", str(tmp_path / "data"), "--states", "30", "--gaussians", "40", "--json"]) == 0
    out, err = capsys.readouterr()
    row = json.loads(out)
    assert row["command"] == "align"
    assert "%WER" in err
    assert isinstance(load_alignment(tmp_path / "data"), Alignment)


# Words from phones


def test_word_spans_split_equal_neighbours_and_skip_silence() -> None:
    phones = [("OW", 0, 3), ("OW", 3, 7), ("SIL", 7, 9), ("G", 9, 12), ("OW", 12, 20)]
    assert word_spans(["ooh", "ooh", "go"], phones, LEXICON) == [("ooh", 0, 3), ("ooh", 3, 7), ("go", 9, 20)]


def test_word_spans_take_the_pronunciation_that_fits() -> None:
    lexicon = {"a": [("AH",), ("EY",)], "b": [("B", "IY")]}
    phones = [("EY", 0, 2), ("B", 2, 3), ("IY", 3, 5)]
    assert word_spans(["a", "b"], phones, lexicon) == [("a", 0, 2), ("b", 2, 5)]


def test_word_spans_allow_a_last_word_cut_short() -> None:
    assert word_spans(["go", "soap"], [("G", 0, 1), ("OW", 1, 2), ("S", 2, 4)], LEXICON)[-1] == ("soap", 2, 4)


def test_word_spans_of_other_words_are_empty() -> None:
    assert word_spans(["stop"], [("G", 0, 1), ("OW", 1, 2)], LEXICON) == []
