"""Recordings and features: right values, right lengths, clear refusals."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import soundfile

from antiphon.errors import ArgumentError, DataError
from antiphon.speech import features


def tone(hertz: float, rate: int, seconds: float) -> features.Samples:
    return (0.3 * np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)).astype(np.float32)


@pytest.mark.parametrize("rate", [8000, 11025, 16000, 44100])
@pytest.mark.parametrize("extra", [0, 1, 37, 79, 80, 81])
def test_both_streams_have_the_counted_frames(rate: int, extra: int) -> None:
    samples_N = tone(440, rate, 0.1)
    samples_N = np.concatenate([samples_N, samples_N[:extra]])
    frames = features.frame_count(len(samples_N), rate)
    assert features.fbank(samples_N, rate).shape == (frames, 120)
    assert features.mfcc(samples_N, rate).shape == (frames, 39)


def test_a_tone_lights_the_bin_of_its_frequency() -> None:
    def mel(hertz: float) -> float:
        return 1127 * np.log(1 + hertz / 700)

    low, high = features.mel_range(16000)
    static_TF = features.fbank(tone(1000, 16000, 0.5), 16000)[:, :40]
    width = (mel(high) - mel(low)) / 41
    assert np.argmax(static_TF[20]) == round((mel(1000) - mel(low)) / width - 1)


def test_deltas_are_least_squares_slopes() -> None:
    rng = np.random.default_rng(3)
    features_TF = features.fbank(rng.normal(size=8000).astype(np.float32) * 0.1, 8000)
    static_TF, delta_TF = features_TF[:, :40].astype(np.float64), features_TF[:, 40:80]
    padded_TF = np.pad(static_TF, ((2, 2), (0, 0)), "edge")
    slope_TF = (2 * (padded_TF[4:] - padded_TF[:-4]) + padded_TF[3:-1] - padded_TF[1:-3]) / 10
    np.testing.assert_allclose(delta_TF, slope_TF, atol=1e-4)


def test_features_repeat_exactly() -> None:
    samples_N = tone(300, 8000, 0.3)
    np.testing.assert_array_equal(features.mfcc(samples_N, 8000), features.mfcc(samples_N, 8000))


def written(path: Path, normalise: str) -> features.Features:
    rng = np.random.default_rng(0)
    rows = [(rng.normal(size=(n, 3)) * 5 + shift).astype(np.float32) for n, shift in ((40, 2), (60, 9), (50, -4))]
    rows[2][:, 1] = 7.0
    features.write_features(path, iter(rows), [40, 60, 50], ["ann", "ann", "bob"], normalise)
    return np.asarray(np.load(path, mmap_mode="r"))


def test_speakers_have_mean_0_and_variance_1(tmp_path: Path) -> None:
    features_TF = written(tmp_path / "f.npy", "speaker")
    assert features_TF.dtype == np.float32
    for part in (features_TF[:100], features_TF[100:, [0, 2]]):
        np.testing.assert_allclose(part.mean(0), 0, atol=1e-5)
        np.testing.assert_allclose(part.std(0), 1, atol=1e-5)
    np.testing.assert_array_equal(features_TF[100:, 1], 0)


def test_utterances_have_mean_0_and_their_speakers_variance(tmp_path: Path) -> None:
    features_TF = written(tmp_path / "f.npy", "utterance")
    np.testing.assert_allclose(features_TF[:40].mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(features_TF[40:100].mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(features_TF[:100].std(0), 1, atol=1e-5)
    assert abs(features_TF[:40].std() - 1) > 1e-3


def test_a_recording_that_changed_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="gave 3 frames, expected 4"):
        features.write_features(tmp_path / "f.npy", [np.zeros((3, 2), np.float32)], [4], ["ann"], "speaker")


def test_normalisation_has_a_known_name() -> None:
    with pytest.raises(ArgumentError, match="normalise is 'corpus'"):
        features.Normaliser("corpus")


def test_a_part_is_read(tmp_path: Path) -> None:
    samples_N = tone(200, 8000, 1.0)
    soundfile.write(tmp_path / "a.flac", samples_N, 8000)
    part_N = features.read_samples(tmp_path / "a.flac", 0.25, 0.5)
    np.testing.assert_allclose(part_N, samples_N[2000:4000], atol=1e-4)
    assert len(features.read_samples(tmp_path / "a.flac", 0.5, 1.009)) == 4000


@pytest.mark.parametrize(
    ("start_s", "end_s", "message"),
    [(0.5, 1.2, "ends before its part"), (1.5, None, "has no part"), (1.0, 1.005, "has no part")],
)
def test_a_part_outside_is_refused(tmp_path: Path, start_s: float, end_s: float | None, message: str) -> None:
    soundfile.write(tmp_path / "a.wav", tone(200, 8000, 1.0), 8000)
    with pytest.raises(DataError, match=message):
        features.read_samples(tmp_path / "a.wav", start_s, end_s)


def test_resampling_keeps_the_tone_and_the_counted_length() -> None:
    samples_N = features.resample(tone(500, 44100, 0.5), 44100, 16000)
    assert len(samples_N) == 8000
    assert np.argmax(np.abs(np.fft.rfft(samples_N))) == 250


def truncated(path: Path) -> None:
    soundfile.write(path, tone(200, 8000, 1.0), 8000)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def test_bad_recordings_are_refused_with_their_path(tmp_path: Path) -> None:
    makers = {
        "missing.wav": (lambda path: None, "no such recording"),
        "nothing.wav": (lambda path: path.write_bytes(b""), "not a recording"),
        "noise.flac": (lambda path: path.write_bytes(b"fLaC but not really"), "not a recording"),
        "short.wav": (truncated, "cut short"),
        "short.flac": (truncated, "damaged|cut short"),
        "empty.wav": (lambda path: soundfile.write(path, np.zeros(0), 8000), "is empty"),
        "zero.wav": (lambda path: soundfile.write(path, np.zeros(800), 8000), "nothing but zeros"),
        "stereo.wav": (lambda path: soundfile.write(path, np.ones((800, 2)) / 2, 8000), "2 channels, expected 1"),
        "nan.wav": (lambda path: soundfile.write(path, np.full(800, np.nan), 8000, subtype="FLOAT"), "not finite"),
    }
    for name, (make, message) in makers.items():
        make(tmp_path / name)
        with pytest.raises(DataError, match=message) as caught:
            features.read_samples(tmp_path / name)
        assert name in str(caught.value)


def test_rates_have_bounds() -> None:
    with pytest.raises(ArgumentError, match="--rate is 4000 Hz, expected 8000 to 48000"):
        features.check_rate(4000, "--rate")
