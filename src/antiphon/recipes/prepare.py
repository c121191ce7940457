"""From a corpus to a prepared folder: words, pronunciations, features, splits (docs/formats.md, DATA)."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.progress import track

from antiphon.errors import ArgumentError, DataError
from antiphon.records import (
    FolderLock,
    Json,
    holds,
    output_folder,
    record,
    write_json,
    write_jsonl,
)
from antiphon.speech import features
from antiphon.speech.corpora import Corpus, Recording, Skip, read_corpus
from antiphon.speech.letter_to_sound import LetterToSound
from antiphon.speech.lexicon import Lexicon, dictionary, pronounce, read_user_lexicon, write_lexicon
from antiphon.speech.manifest import (
    DATA_NAME,
    FBANK_NAME,
    LEXICON_NAME,
    MFCC_NAME,
    SKIPPED_NAME,
    SPLITS,
    UTTERANCES_NAME,
    Utterance,
)

Item = TypeVar("Item")

_console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)


@dataclass(frozen=True)
class _Usable:
    """A recording that was decoded once and is known to be sound."""

    recording: Recording
    sample_rate: int
    samples: int


@dataclass(frozen=True)
class _Words:
    """The lexicon of a corpus and what is not in it."""

    lexicon: Lexicon
    missing: list[str]
    guessed: list[str]


def prepare(
    corpus: str,
    out: Path,
    *,
    source: Path | None = None,
    lexicon: Path | None = None,
    normalise: str = "speaker",
    letter_to_sound: bool = False,
    rate: int | None = None,
    resample: bool = False,
    overwrite: bool = False,
) -> Json:
    """Prepare a corpus for alignment and training; single utterances that cannot be used are skipped and counted.

    Args:
        corpus: ``prompts``, ``an4``, ``manifest`` or ``kaldi``.
        out: the folder to write; ``data.json`` in it is written last.
        source: the corpus's folder or file; ``prompts`` can do without.
        lexicon: a user's entries, a word and its phones on each line; they replace the dictionary's.
        normalise: ``speaker``, or ``utterance`` for means by utterance.
        letter_to_sound: guess words without pronunciation instead of skipping their utterances.
        rate: hertz; None takes the most frequent one of the recordings.
        resample: bring recordings of another rate to it instead of skipping them.
        overwrite: replace what an earlier run left in ``out``.

    Returns:
        what ``data.json`` holds, and ``out``.

    Raises:
        DataError: the source as a whole cannot be used, or nothing is left in a split.
        ArgumentError, FolderError: an argument or ``out`` is wrong.
    """
    if normalise not in features.NORMALISATIONS:
        raise ArgumentError(f"normalise is '{normalise}', expected {' or '.join(features.NORMALISATIONS)}")
    if rate is not None:
        features.check_rate(rate, "--rate")
    _keep_apart(source, out)
    user = read_user_lexicon(lexicon) if lexicon else {}
    if not overwrite:
        output_folder(out)
    read = read_corpus(corpus, source, _console.print)
    words = _look_up(read, {**read.lexicon, **user}, letter_to_sound)
    usable, sample_rate = _usable(read, rate, resample)
    _check_splits(read, usable)
    utterances = _utterances(usable, sample_rate)
    # Only now is what an earlier run left replaced: the source is known to be of use.
    output_folder(out, overwrite=overwrite)
    with FolderLock(out):
        write_jsonl(out / UTTERANCES_NAME, [utterance.to_json() for utterance in utterances])
        write_jsonl(out / SKIPPED_NAME, [{"id": skip.id, "reason": skip.reason} for skip in read.skipped])
        spoken = {word for utterance in utterances for word in utterance.words}
        kept = {word: entries for word, entries in words.lexicon.items() if word in spoken}
        write_lexicon(out / LEXICON_NAME, kept)
        _write_features(out, usable, sample_rate, normalise)
        info = record(
            "prepare",
            corpus=read.name,
            sample_rate=sample_rate,
            frame_shift_s=features.shift_samples(sample_rate) / sample_rate,
            **_by_split(utterances),
            lexicon_words=len(kept),
            missing_words=words.missing,
            guessed_words=[word for word in words.guessed if word in spoken],
            skipped=len(read.skipped),
            warnings=read.warnings,
            normalisation=normalise,
            split_rule=read.split_rule,
            recipe={"align": {}, "train": {}, "decode": {}},
            data_sha256=_fingerprint(out, utterances),
        )
        write_json(out / DATA_NAME, info)
    return {**info, "out": str(out)}


def _keep_apart(source: Path | None, out: Path) -> None:
    """Refuse an output folder that --overwrite would empty of the recordings themselves."""
    if source is not None and holds(out, source):
        raise ArgumentError(f"--out {out} holds the source {source}: name another folder")


def _look_up(corpus: Corpus, user: Lexicon, letter_to_sound: bool) -> _Words:
    """Find the pronunciations, and move utterances with a word that has none to the skipped."""
    words = [word for recording in corpus.recordings for word in recording.words]
    found = _Words(*pronounce(words, user=user))
    if found.missing and letter_to_sound:
        _console.print(f"learning letter-to-sound rules for {len(found.missing)} words")
        found = _Words(*pronounce(words, user=user, guess=LetterToSound.learn(dictionary())))
    missing = set(found.missing)
    kept: list[Recording] = []
    for recording in corpus.recordings:
        if lacking := [word for word in recording.words if word in missing]:
            corpus.skipped.append(Skip(recording.id, f"{recording.where}: no pronunciation for '{lacking[0]}'"))
        else:
            kept.append(recording)
    corpus.recordings = kept
    return found


def _usable(corpus: Corpus, rate: int | None, resample: bool) -> tuple[list[_Usable], int]:
    """Decode every recording once and return those that can be used, and the rate to use them at."""
    sound: list[_Usable] = []
    for recording in _progress(corpus.recordings, "reading recordings"):
        try:
            header = features.read_header(recording.audio)
            samples = len(features.read_samples(recording.audio, recording.start_s, recording.end_s))
        except DataError as error:
            corpus.skipped.append(Skip(recording.id, f"{recording.where}: {error}"))
            continue
        sound.append(_Usable(recording, header.sample_rate, samples))
    if not sound:
        raise DataError(f"no utterance of {corpus.name} can be used; {_reasons(corpus)}")
    common = Counter(one.sample_rate for one in sound).most_common(1)[0][0]
    sample_rate = rate or common
    features.check_rate(sample_rate, "the rate of the recordings")
    usable: list[_Usable] = []
    for one in sound:
        if reason := _misfit(one, sample_rate, resample, corpus.longest_s):
            corpus.skipped.append(Skip(one.recording.id, f"{one.recording.where}: {reason}"))
        else:
            usable.append(one)
    return usable, sample_rate


def _misfit(one: _Usable, sample_rate: int, resample: bool, longest_s: float | None) -> str | None:
    path, duration_s = one.recording.audio, one.samples / one.sample_rate
    if one.sample_rate != sample_rate and not resample:
        return f"{path} is at {one.sample_rate} Hz, the corpus at {sample_rate} Hz: pass --resample or --rate"
    if longest_s is not None and duration_s > longest_s:
        return f"{path} lasts {duration_s:.1f} s, more than {longest_s:g} s"
    if features.frame_count(int(duration_s * sample_rate), sample_rate) < 1:
        return f"{path} lasts {1000 * duration_s:.1f} ms, less than one frame"
    return None


def _check_splits(corpus: Corpus, usable: Sequence[_Usable]) -> None:
    for split in SPLITS:
        if not any(one.recording.split == split for one in usable):
            raise DataError(f"no utterance is left in split '{split}' of {corpus.name}; {_reasons(corpus)}")


def _reasons(corpus: Corpus) -> str:
    if not corpus.skipped:
        return "none was skipped"
    first = "; ".join(skip.reason for skip in corpus.skipped[:3])
    return f"{len(corpus.skipped)} were skipped: {first}{'; ...' if len(corpus.skipped) > 3 else ''}"


def _utterances(usable: Sequence[_Usable], sample_rate: int) -> list[Utterance]:
    utterances: list[Utterance] = []
    first_frame = 0
    for one in usable:
        recording = one.recording
        frames = features.frame_count(_samples_at(one, sample_rate), sample_rate)
        utterances.append(
            Utterance(
                id=recording.id,
                speaker=recording.speaker,
                split=recording.split,
                words=recording.words,
                duration_s=round(one.samples / one.sample_rate, 4),
                audio=str(recording.audio.resolve()),
                first_frame=first_frame,
                frames=frames,
                start_s=recording.start_s,
                end_s=recording.end_s,
            )
        )
        first_frame += frames
    return utterances


def _samples_at(one: _Usable, sample_rate: int) -> int:
    """Count the samples after resampling, as soxr does: rounded to the nearest."""
    return (2 * one.samples * sample_rate + one.sample_rate) // (2 * one.sample_rate)


def _write_features(out: Path, usable: Sequence[_Usable], sample_rate: int, normalise: str) -> None:
    frames = [features.frame_count(_samples_at(one, sample_rate), sample_rate) for one in usable]
    speakers = [one.recording.speaker for one in usable]

    def samples(i: int) -> features.Samples:
        one = usable[i].recording
        return features.resample(
            features.read_samples(one.audio, one.start_s, one.end_s), usable[i].sample_rate, sample_rate
        )

    for name, kind in ((FBANK_NAME, features.fbank), (MFCC_NAME, features.mfcc)):
        rows = (kind(samples(i), sample_rate) for i in _progress(range(len(usable)), f"writing {name}"))
        features.write_features(out / name, rows, frames, speakers, normalise)


def _by_split(utterances: Sequence[Utterance]) -> Json:
    parts = {split: [one for one in utterances if one.split == split] for split in SPLITS}
    return {
        "utterances": {split: len(part) for split, part in parts.items()},
        "seconds": {split: round(sum(one.duration_s for one in part), 2) for split, part in parts.items()},
        "words": {split: sum(len(one.words) for one in part) for split, part in parts.items()},
        "speakers": {split: len({one.speaker for one in part}) for split, part in parts.items()},
    }


def _fingerprint(out: Path, utterances: Sequence[Utterance]) -> str:
    """Hash what later stages compute from; where the recordings lie does not count."""
    digest = hashlib.sha256()
    for one in utterances:
        digest.update(repr((one.id, one.speaker, one.split, one.words, one.frames)).encode())
    for name in (LEXICON_NAME, FBANK_NAME, MFCC_NAME):
        with (out / name).open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def _progress(items: Sequence[Item], what: str) -> Iterable[Item]:
    return track(items, what, console=_console, transient=True, disable=not _console.is_terminal)
