"""The finished alignment of a prepared corpus, read back for training and decoding.

Shapes: T frames of all utterances in the order of ``utterances.jsonl``, S states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from antiphon.errors import DataError, FolderError
from antiphon.records import Json, read_json
from antiphon.speech.lexicon import Lexicon

ALIGN_FOLDER = "align"
ALIGN_NAME = "align.json"
PDF_NAME, PHONE_NAME, PRIORS_NAME = "pdf.npy", "phone.npy", "priors.npy"
PHONES_NAME, WORDS_NAME, STATES_NAME = "phones.txt", "words.txt", "states.txt"
GRAPH_NAME, LM_NAME = "HCLG.fst", "lm.arpa"

SILENCE = "SIL"
NOT_ALIGNED = -1
NEEDED = ("data_sha256", "gmm_wer")

Span = tuple[str, int, int]
"""A label, its first frame, and the frame after its last."""


@dataclass(frozen=True)
class Alignment:
    """States of all frames, and what decoding needs.

    Attributes:
        folder: where it lies.
        pdf_T: state of each frame, int32, a memory map; -1 where its utterance could not be aligned.
        phone_T: phone of each frame, int16, a memory map; -1 likewise.
        phones: phone of each number; number 0 is ``<eps>``.
        state_phone_S: phone number of each state, int16.
        state_position_S: HMM position of each state, int16.
        log_priors_S: log-prior of each state on the training frames, float32.
        info: what ``align.json`` holds.
    """

    folder: Path
    pdf_T: npt.NDArray[np.int32]
    phone_T: npt.NDArray[np.int16]
    phones: tuple[str, ...]
    state_phone_S: npt.NDArray[np.int16]
    state_position_S: npt.NDArray[np.int16]
    log_priors_S: npt.NDArray[np.float32]
    info: Json

    @property
    def states(self) -> int:
        """The number of context-dependent states."""
        return len(self.log_priors_S)

    @property
    def graph(self) -> Path:
        """The decoding graph's file."""
        return self.folder / GRAPH_NAME

    @property
    def words(self) -> Path:
        """The word symbols' file."""
        return self.folder / WORDS_NAME

    def phone_spans(self, states_T: npt.NDArray[np.int32]) -> list[Span]:
        """Return the phones of one utterance with their frames; frames that are not aligned are left out.

        Args:
            states_T: state of each frame of the utterance.
        """
        spans: list[Span] = []
        last_state = NOT_ALIGNED
        for frame, state in enumerate(states_T.tolist()):
            if state != NOT_ALIGNED:
                phone = self.phones[self.state_phone_S[state]]
                enters = self.state_position_S[state] == 0 and state != last_state
                if enters or last_state == NOT_ALIGNED:
                    spans.append((phone, frame, frame + 1))
                else:
                    spans[-1] = (spans[-1][0], spans[-1][1], frame + 1)
            last_state = state
        return spans


def word_spans(words: Sequence[str], phones: Sequence[Span], lexicon: Lexicon) -> list[Span]:
    """Return the words of one utterance with their frames, from its phones.

    Args:
        words: the words, in order.
        phones: their phones, with silence anywhere between words; the last word may be cut short.
        lexicon: pronunciations.

    Returns:
        A span for each word; none at all where words and phones do not belong together.

    >>> phones = [("SIL", 0, 9), ("G", 9, 12), ("OW", 12, 30), ("SIL", 30, 40)]
    >>> word_spans(["go"], phones, {"go": [("G", "OW")]})
    [('go', 9, 30)]
    """
    labels = tuple(label for label, _, _ in phones)
    # Each entry: words done, phones done, and the phone ranges of the words so far.
    open_paths: list[tuple[int, int, tuple[tuple[int, int], ...]]] = [(0, 0, ())]
    seen: set[tuple[int, int]] = set()
    while open_paths:
        done, at, ranges = open_paths.pop()
        if (done, at) in seen:
            continue
        seen.add((done, at))
        if done == len(words) and at == len(labels):
            return [(word, phones[a][1], phones[b - 1][2]) for word, (a, b) in zip(words, ranges, strict=True)]
        if done < len(words):
            for pronunciation in lexicon.get(words[done], []):
                heard = labels[at : at + len(pronunciation)]
                cut_short = done == len(words) - 1 and at + len(heard) == len(labels)
                if heard and (heard == pronunciation or (cut_short and heard == pronunciation[: len(heard)])):
                    open_paths.append((done + 1, at + len(heard), (*ranges, (at, at + len(heard)))))
        if at < len(labels) and labels[at] == SILENCE:
            open_paths.append((done, at + 1, ranges))
    return []


def load_alignment(data: Path, folder: Path | None = None) -> Alignment:
    """Read the alignment of a prepared corpus.

    Args:
        data: the prepared folder.
        folder: the alignment's folder; ``data/align`` if not given.

    Raises:
        FolderError: it is missing, only half-written or broken; the text says how to make it.
    """
    folder = data / ALIGN_FOLDER if folder is None else folder
    cure = f"`antiphon align {data}`"
    if not (folder / ALIGN_NAME).is_file():
        if folder.is_dir() and any(folder.iterdir()):
            raise FolderError(f"{folder} is not whole (no {ALIGN_NAME}): run {cure} --overwrite")
        raise FolderError(f"{data} is not aligned (no {folder / ALIGN_NAME}): run {cure} first")
    try:
        info = read_json(folder / ALIGN_NAME)
        rows = [line.split() for line in (folder / STATES_NAME).read_text(encoding="utf-8").splitlines()]
        phones = tuple((folder / PHONES_NAME).read_text(encoding="utf-8").split())
        number = {phone: index for index, phone in enumerate(phones)}
        alignment = Alignment(
            folder=folder,
            pdf_T=_load(folder / PDF_NAME, np.int32),
            phone_T=_load(folder / PHONE_NAME, np.int16),
            phones=phones,
            state_phone_S=np.array([number[phone] for phone, _ in rows], np.int16),
            state_position_S=np.array([int(position) for _, position in rows], np.int16),
            log_priors_S=np.load(folder / PRIORS_NAME),
            info=info,
        )
    except (DataError, OSError, ValueError, KeyError, EOFError) as error:
        raise FolderError(f"{folder} cannot be read ({error}): run {cure} --overwrite") from None
    if len(alignment.pdf_T) != len(alignment.phone_T) or len(alignment.state_phone_S) != alignment.states:
        raise FolderError(f"{folder}: its files do not belong together: run {cure} --overwrite")
    if lacking := [name for name in NEEDED if name not in info]:
        raise FolderError(f"{folder / ALIGN_NAME} lacks {', '.join(lacking)}: run {cure} --overwrite")
    return alignment


def _load(path: Path, kind: type[Any]) -> npt.NDArray[Any]:
    array_T: npt.NDArray[Any] = np.load(path, mmap_mode="r")
    if array_T.dtype != kind or array_T.ndim != 1:
        raise ValueError(f"{path} is {array_T.dtype} {list(array_T.shape)}")
    return array_T
