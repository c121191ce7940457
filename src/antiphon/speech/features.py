"""Log-mel and cepstral features of recordings, with deltas, normalised by speaker.

Shapes: N samples, T frames, F features. 25 ms windows every 10 ms, frame t centred on (t + 1/2) shifts.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import kaldi_native_fbank as knf
import numpy as np
import numpy.typing as npt
import soundfile
import soxr

from antiphon.errors import ArgumentError, DataError

FRAME_LENGTH_S = 0.025
FRAME_SHIFT_S = 0.010
FBANK_BINS = 40
CEPSTRA = 13
LOWEST_RATE = 8000
HIGHEST_RATE = 48000
# Below this standard deviation a feature counts as constant and is not stretched.
STD_FLOOR = 1e-2
NORMALISATIONS = ("speaker", "utterance")

Samples = npt.NDArray[np.float32]
Features = npt.NDArray[np.float32]


@dataclass(frozen=True)
class AudioHeader:
    """What a recording says of itself."""

    sample_rate: int
    channels: int
    samples: int


def read_header(path: Path) -> AudioHeader:
    """Read rate, channels and length of a recording.

    Raises:
        DataError: it is missing, is no recording, or was cut short.
    """
    with _open(path) as file:
        return AudioHeader(file.samplerate, file.channels, file.frames)


def read_samples(path: Path, start_s: float | None = None, end_s: float | None = None) -> Samples:
    """Read a recording of one channel, or its part from ``start_s`` to ``end_s``.

    Returns:
        float32 [N], full scale 1.

    Raises:
        DataError: the recording is missing, unreadable, cut short, empty, silent throughout, not finite or of
            several channels, or it does not hold that part.
    """
    with _open(path) as file:
        if file.channels != 1:
            raise DataError(f"{path} has {file.channels} channels, expected 1: extract or mix one channel first")
        first, last = _part(path, file.frames, file.samplerate, start_s, end_s)
        try:
            file.seek(first)
            samples_N: Samples = file.read(last - first, dtype="float32")
        except soundfile.LibsndfileError as error:
            raise DataError(f"{path} is damaged ({error.error_string})") from None
    if len(samples_N) < last - first:
        raise DataError(f"{path} is cut short: {len(samples_N)} of {last - first} samples")
    if not len(samples_N):
        raise DataError(f"{path} is empty: no samples")
    if not np.isfinite(samples_N).all():
        raise DataError(f"{path} holds samples that are not finite numbers")
    if not samples_N.any():
        raise DataError(f"{path} holds nothing but zeros")
    return samples_N


def resample(samples_N: Samples, rate: int, to_rate: int) -> Samples:
    """Return the samples at ``to_rate`` hertz."""
    return samples_N if rate == to_rate else np.asarray(soxr.resample(samples_N, rate, to_rate), np.float32)


def frame_count(samples: int, sample_rate: int) -> int:
    """Return how many frames ``samples`` give: one a shift, rounded to the nearest.

    >>> frame_count(16000, 16000)
    100
    """
    shift = shift_samples(sample_rate)
    return (samples + shift // 2) // shift


def shift_samples(sample_rate: int) -> int:
    """Return the whole samples in 10 ms; at a rate such as 11025 Hz, a frame is a little shorter.

    >>> shift_samples(11025)
    110
    """
    return sample_rate // 100


def fbank(samples_N: Samples, sample_rate: int) -> Features:
    """Return 40 log-mel energies with deltas and double deltas, float32 [T, 120], not normalised.

    Args:
        samples_N: float32 [N], full scale 1.
        sample_rate: hertz; the mel range follows it (`mel_range`).
    """
    options = knf.FbankOptions()
    options.mel_opts.num_bins = FBANK_BINS
    return _compute(knf.OnlineFbank, options, samples_N, sample_rate)


def mfcc(samples_N: Samples, sample_rate: int) -> Features:
    """Return 13 mel cepstra with deltas and double deltas, float32 [T, 39], not normalised.

    Arguments as for `fbank`; both have the same number of frames.
    """
    options = knf.MfccOptions()
    options.num_ceps = CEPSTRA
    options.use_energy = False
    options.mel_opts.num_bins = 23
    return _compute(knf.OnlineMfcc, options, samples_N, sample_rate)


def mel_range(sample_rate: int) -> tuple[float, float]:
    """Return the lowest and highest frequency in hertz: telephone speech holds nothing below 100 Hz.

    >>> mel_range(8000), mel_range(16000)
    ((100.0, 3800.0), (20.0, 7600.0))
    """
    return (20.0 if sample_rate >= 16000 else 100.0), min(0.475 * sample_rate, 7600.0)


def check_rate(sample_rate: int, argument: str) -> None:
    """Refuse a rate outside of 8 to 48 kHz.

    Raises:
        ArgumentError: ``argument`` is named.
    """
    if not LOWEST_RATE <= sample_rate <= HIGHEST_RATE:
        raise ArgumentError(
            f"{argument} is {sample_rate} Hz, expected {LOWEST_RATE} to {HIGHEST_RATE}:"
            f" pass --rate with --resample to bring the recordings to another rate"
        )


class Normaliser:
    r"""Brings features to mean 0 and variance 1 by speaker: :math:`(x - \mu) / \max(\sigma, floor)`.

    First `add` every utterance, then `apply` to each. With ``by="utterance"`` the mean is the utterance's own;
    the variance is the speaker's in any case, for one utterance is too short to estimate it.

    >>> rows = np.array([[1.0], [3.0]], np.float32)
    >>> normaliser = Normaliser("speaker")
    >>> normaliser.add("ann", rows)
    >>> normaliser.apply("ann", rows).ravel().tolist()
    [-1.0, 1.0]
    """

    def __init__(self, by: str) -> None:
        if by not in NORMALISATIONS:
            raise ArgumentError(f"normalise is '{by}', expected {' or '.join(NORMALISATIONS)}")
        self.by = by
        self._sums: dict[str, tuple[int, npt.NDArray[np.float64], npt.NDArray[np.float64]]] = {}

    def add(self, speaker: str, features_TF: Features) -> None:
        """Count an utterance into its speaker's statistics."""
        wide_TF = features_TF.astype(np.float64)
        if self.by == "utterance":
            wide_TF = wide_TF - wide_TF.mean(0)
        count, first_F, second_F = self._sums.get(speaker, (0, np.zeros(wide_TF.shape[1]), np.zeros(wide_TF.shape[1])))
        self._sums[speaker] = (
            count + len(wide_TF),
            first_F + wide_TF.sum(0),
            second_F + np.square(wide_TF).sum(0),
        )

    def apply(self, speaker: str, features_TF: Features) -> Features:
        """Return the normalised features of one utterance of ``speaker``."""
        count, first_F, second_F = self._sums[speaker]
        variance_F = np.maximum(second_F / count - np.square(first_F / count), 0.0)
        wide_TF = features_TF.astype(np.float64)
        mean_F = first_F / count if self.by == "speaker" else wide_TF.mean(0)
        return ((wide_TF - mean_F) / np.maximum(np.sqrt(variance_F), STD_FLOOR)).astype(np.float32)


def write_features(
    path: Path, rows: Iterable[Features], frames: Sequence[int], speakers: Sequence[str], normalise: str
) -> None:
    """Write the normalised features of all utterances into one array, an utterance in memory at a time.

    Args:
        path: the ``.npy`` file, float32 [sum of frames, F].
        rows: the raw features [T, F] of one utterance after the other.
        frames: T of each utterance.
        speakers: the speaker of each utterance.
        normalise: ``speaker`` or ``utterance``.

    Raises:
        DataError: an utterance has not the frames that were counted before: its recording has changed since.
    """
    normaliser = Normaliser(normalise)
    starts = np.cumsum([0, *frames])
    array_TF: Features | None = None
    for i, features_TF in enumerate(rows):
        if array_TF is None:
            shape = (int(starts[-1]), features_TF.shape[1])
            array_TF = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=shape)
            # A full disk shows here as an error; met while writing to the map, it would end the process.
            with path.open("r+b") as file:
                os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
        if len(features_TF) != frames[i]:
            raise DataError(
                f"utterance {i} gave {len(features_TF)} frames, expected {frames[i]}: its recording changed"
            )
        normaliser.add(speakers[i], features_TF)
        array_TF[starts[i] : starts[i + 1]] = features_TF
    if not isinstance(array_TF, np.memmap):
        raise DataError(f"{path}: no utterances to write")
    for i, speaker in enumerate(speakers):
        part = slice(starts[i], starts[i + 1])
        array_TF[part] = normaliser.apply(speaker, array_TF[part])
    array_TF.flush()


def _open(path: Path) -> soundfile.SoundFile:
    if not path.is_file():
        raise DataError(f"{path}: no such recording")
    try:
        file = soundfile.SoundFile(path)
    except (soundfile.LibsndfileError, OSError) as error:
        raise DataError(f"{path} is not a recording that can be read ({error})") from None
    # libsndfile takes a WAV file that ends early for a shorter one and says so only in its log.
    if "(should be " in file.extra_info:
        file.close()
        raise DataError(f"{path} is cut short: its header promises more than the file holds")
    return file


def _part(path: Path, samples: int, sample_rate: int, start_s: float | None, end_s: float | None) -> tuple[int, int]:
    length_s = samples / sample_rate
    start, end = start_s or 0.0, length_s if end_s is None else end_s
    if start > 0.0 and start >= min(end, length_s):
        raise DataError(f"{path} ({length_s:.3f} s) has no part from {start} to {end} s")
    # Times are written to two or three digits, so an end may lie just behind the last sample.
    if round(end * sample_rate) > samples + shift_samples(sample_rate):
        raise DataError(f"{path} ({length_s:.3f} s) ends before its part from {start} to {end} s")
    return round(start * sample_rate), min(round(end * sample_rate), samples)


def _compute(
    extractor: type[knf.OnlineFbank] | type[knf.OnlineMfcc],
    options: knf.FbankOptions | knf.MfccOptions,
    samples_N: Samples,
    sample_rate: int,
) -> Features:
    options.frame_opts.samp_freq = sample_rate
    options.frame_opts.dither = 0.0
    options.frame_opts.snip_edges = False
    options.frame_opts.frame_length_ms = 1000 * FRAME_LENGTH_S
    options.frame_opts.frame_shift_ms = 1000 * FRAME_SHIFT_S
    options.mel_opts.low_freq, options.mel_opts.high_freq = mel_range(sample_rate)
    online = extractor(options)
    # The library's floors suit 16-bit samples.
    online.accept_waveform(sample_rate, samples_N * 32768.0)
    online.input_finished()
    static_TF = np.stack([online.get_frame(t) for t in range(online.num_frames_ready)])
    deltas_TF: Features = knf.compute_deltas(knf.DeltaOptions(order=2, window=2), static_TF)
    return deltas_TF
