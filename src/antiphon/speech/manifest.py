"""A prepared corpus on disk: its utterances, lexicon and features, read back by every later stage.

Shapes: T frames of all utterances in the order of ``utterances.jsonl``, F features.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from antiphon.errors import DataError, FolderError
from antiphon.records import Json, read_json, read_jsonl
from antiphon.speech.lexicon import Lexicon, read_lexicon

DATA_NAME = "data.json"
UTTERANCES_NAME = "utterances.jsonl"
LEXICON_NAME = "lexicon.txt"
FBANK_NAME = "fbank.npy"
MFCC_NAME = "mfcc.npy"
SKIPPED_NAME = "skipped.jsonl"
SPLITS = ("train", "dev", "test")
NEEDED = ("corpus", "frame_shift_s", "recipe", "data_sha256")
FBANK_DIM = 120
MFCC_DIM = 39

Result = TypeVar("Result")


@dataclass(frozen=True)
class Utterance:
    """One utterance of a prepared corpus: a line of ``utterances.jsonl``.

    ``start_s`` and ``end_s`` tell which part of ``audio`` it is; None for the whole recording.
    """

    id: str
    speaker: str
    split: str
    words: tuple[str, ...]
    duration_s: float
    audio: str | None
    first_frame: int
    frames: int
    start_s: float | None = None
    end_s: float | None = None

    @property
    def text(self) -> str:
        """The words, separated by blanks."""
        return " ".join(self.words)

    def to_json(self) -> Json:
        """Return the object of its line."""
        return {**asdict(self), "words": list(self.words)}

    @classmethod
    def from_json(cls, row: Json) -> Utterance:
        """Build it from the object of its line.

        Raises:
            KeyError, TypeError, ValueError: a field is missing or has the wrong type.
        """
        if row["split"] not in SPLITS:
            raise ValueError(f"split is {row['split']!r}, expected one of {', '.join(SPLITS)}")
        return cls(
            id=str(row["id"]),
            speaker=str(row["speaker"]),
            split=row["split"],
            words=tuple(str(word) for word in row["words"]),
            duration_s=float(row["duration_s"]),
            audio=None if row["audio"] is None else str(row["audio"]),
            first_frame=int(row["first_frame"]),
            frames=int(row["frames"]),
            start_s=None if row.get("start_s") is None else float(row["start_s"]),
            end_s=None if row.get("end_s") is None else float(row["end_s"]),
        )


def frames_of(utterance: Utterance, array_T: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the rows of ``utterance`` in an array with one row for each frame of the corpus (a view).

    >>> one = Utterance("a", "ann", "train", ("yes",), 0.02, None, first_frame=3, frames=2)
    >>> frames_of(one, np.arange(10)).tolist()
    [3, 4]
    """
    return array_T[utterance.first_frame : utterance.first_frame + utterance.frames]


class PreparedData:
    """A folder that `antiphon prepare` wrote: ``PreparedData(Path("DATA")).split("train")``.

    Features are memory maps, opened when first asked for.

    Args:
        folder: the prepared folder.

    Raises:
        FolderError: the folder is missing, was not prepared, or is not whole.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not folder.is_dir():
            raise FolderError(f"{folder}: no such folder; `antiphon prepare` makes one")
        if not (folder / DATA_NAME).is_file():
            half = (folder / UTTERANCES_NAME).exists() or (folder / FBANK_NAME).exists()
            what = "was prepared only in part" if half else "is not a prepared corpus"
            cure = "run `antiphon prepare` with --overwrite" if half else "name what `antiphon prepare` wrote"
            raise FolderError(f"{folder} {what} (no {DATA_NAME}): {cure}")
        self.info: Json = _or_folder_error(lambda: read_json(folder / DATA_NAME))
        if lacking := [name for name in NEEDED if name not in self.info]:
            raise FolderError(f"{folder / DATA_NAME} lacks {', '.join(lacking)}: prepare the corpus again")
        self.utterances: list[Utterance] = _or_folder_error(lambda: _read_utterances(folder))
        self.frames = sum(utterance.frames for utterance in self.utterances)

    @property
    def corpus(self) -> str:
        """The corpus's name."""
        return str(self.info["corpus"])

    @property
    def sha256(self) -> str:
        """Fingerprint of the utterances, the lexicon and the features."""
        return str(self.info["data_sha256"])

    @property
    def frame_shift_s(self) -> float:
        """Seconds from one frame to the next."""
        return float(self.info["frame_shift_s"])

    def split(self, name: str) -> list[Utterance]:
        """Return the utterances of ``train``, ``dev`` or ``test``, in order.

        Raises:
            FolderError: there is no such split, or it is empty.
        """
        chosen = [utterance for utterance in self.utterances if utterance.split == name]
        if not chosen:
            raise FolderError(f"{self.folder} has no utterances in split '{name}' (of {', '.join(SPLITS)})")
        return chosen

    @functools.cached_property
    def lexicon(self) -> Lexicon:
        """Each word's pronunciations, each a tuple of phones."""
        return _or_folder_error(lambda: read_lexicon(self.folder / LEXICON_NAME))

    @functools.cached_property
    def fbank(self) -> npt.NDArray[np.float32]:
        """Normalised log-mel features with deltas, float32 [T, 120], a memory map."""
        return self._features(FBANK_NAME, FBANK_DIM)

    @functools.cached_property
    def mfcc(self) -> npt.NDArray[np.float32]:
        """Normalised cepstra with deltas, float32 [T, 39], a memory map."""
        return self._features(MFCC_NAME, MFCC_DIM)

    def frames_of(self, utterance: Utterance, array_T: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the rows of ``utterance`` in an array with one row for each frame of the corpus."""
        return frames_of(utterance, array_T)

    def _features(self, name: str, dim: int) -> npt.NDArray[np.float32]:
        path = self.folder / name
        try:
            features_TF: npt.NDArray[np.float32] = np.load(path, mmap_mode="r")
        except (OSError, ValueError, EOFError) as error:
            raise FolderError(f"{path} cannot be read ({error}): prepare the corpus again") from None
        if features_TF.shape != (self.frames, dim) or features_TF.dtype != np.float32:
            raise FolderError(
                f"{path} is {features_TF.dtype} {list(features_TF.shape)}, expected float32"
                f" {[self.frames, dim]}: prepare the corpus again with --overwrite"
            )
        return features_TF


def _read_utterances(folder: Path) -> list[Utterance]:
    path = folder / UTTERANCES_NAME
    utterances: list[Utterance] = []
    first_frame = 0
    for number, row in read_jsonl(path):
        try:
            utterance = Utterance.from_json(row)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise DataError(f"{path}:{number}: not an utterance ({error!r})") from None
        if utterance.first_frame != first_frame or utterance.frames < 1:
            raise DataError(f"{path}:{number}: frames do not follow on (expected {first_frame})")
        first_frame += utterance.frames
        utterances.append(utterance)
    if not utterances:
        raise DataError(f"{path}: no utterances")
    return utterances


def _or_folder_error(read: Callable[[], Result]) -> Result:
    """Run ``read``; a file of the folder that cannot be used is the folder's fault."""
    try:
        return read()
    except DataError as error:
        raise FolderError(f"{error}: prepare the corpus again with --overwrite") from None
