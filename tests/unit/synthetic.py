"""A prepared corpus without audio: features drawn around a mean for each phone and position."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from antiphon.records import write_json, write_jsonl
from antiphon.speech.lexicon import Lexicon, write_lexicon

LEXICON: Lexicon = {
    "go": [("G", "OW")],
    "stop": [("S", "T", "AA", "P")],
    "pots": [("P", "AA", "T", "S")],
    "gas": [("G", "AA", "S")],
    "toast": [("T", "OW", "S", "T")],
    "soap": [("S", "OW", "P")],
    "ooh": [("OW",)],
}
SILENCE = "SIL"
POSITIONS = 3
FEATURES = 39


@dataclass(frozen=True)
class Spoken:
    """One utterance: its words, features and the true phone of each frame."""

    words: tuple[str, ...]
    features_TF: npt.NDArray[np.float32]
    phones_T: list[str]


def speak(words: tuple[str, ...], rng: np.random.Generator) -> Spoken:
    """Draw an utterance with silence at both ends and 3 to 6 frames a position."""
    names = sorted({phone for entries in LEXICON.values() for phones in entries for phone in phones} | {SILENCE})
    means = np.random.default_rng(7).normal(0, 1, (len(names), POSITIONS, FEATURES))
    means[names.index(SILENCE), :] = means[names.index(SILENCE), 0]
    frames, phones_T = [], []
    for phone in [SILENCE, *(phone for word in words for phone in LEXICON[word][0]), SILENCE]:
        for position in range(POSITIONS):
            length = int(rng.integers(3, 7))
            frames.append(means[names.index(phone), position] + rng.normal(0, 0.5, (length, FEATURES)))
            phones_T += [phone] * length
    return Spoken(words, np.concatenate(frames).astype(np.float32), phones_T)


def sentences(count: int, rng: np.random.Generator) -> list[tuple[str, ...]]:
    """Draw sentences of 1 to 4 words."""
    return [tuple(str(word) for word in rng.choice(sorted(LEXICON), rng.integers(1, 5))) for _ in range(count)]


def write_prepared(folder: Path, *, short: int = 0, utterances: int = 60, seed: int = 0) -> list[Spoken]:
    """Write a prepared folder: two thirds train, a sixth dev, a sixth test.

    Args:
        folder: where.
        short: training utterances cut to four frames, so that they cannot be aligned.
        utterances: how many in all.
        seed: draws words and features.
    """
    rng = np.random.default_rng(seed)
    spoken = [speak(words, rng) for words in sentences(utterances, rng)]
    rows, first = [], 0
    for number, one in enumerate(spoken):
        split = ("train", "train", "train", "train", "dev", "test")[number % 6]
        if split == "train" and short > 0:
            short -= 1
            spoken[number] = one = Spoken(one.words, one.features_TF[:4], one.phones_T[:4])
        frames = len(one.features_TF)
        fields = {"id": f"u{number:03d}", "speaker": "ann", "split": split, "words": list(one.words), "audio": None}
        rows.append({**fields, "duration_s": frames / 100, "first_frame": first, "frames": frames})
        first += frames
    folder.mkdir(parents=True)
    write_jsonl(folder / "utterances.jsonl", rows)
    write_lexicon(folder / "lexicon.txt", LEXICON)
    np.save(folder / "mfcc.npy", np.concatenate([one.features_TF for one in spoken]))
    np.save(folder / "fbank.npy", np.zeros((first, 120), np.float32))
    info = {"corpus": "synthetic", "frame_shift_s": 0.01, "data_sha256": "0" * 64, "recipe": {}}
    write_json(folder / "data.json", info)
    return spoken


def write_trainable(folder: Path, utterances: int = 120) -> None:
    """Write a prepared folder whose log-mel features tell as much as its MFCC: a network can learn from it."""
    write_prepared(folder, utterances=utterances)
    mfcc_TF = np.load(folder / "mfcc.npy")
    np.save(folder / "fbank.npy", np.concatenate([mfcc_TF, mfcc_TF, mfcc_TF, mfcc_TF[:, :3]], axis=1))
