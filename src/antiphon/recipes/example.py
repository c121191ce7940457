"""One utterance to look at: its log-mel frames with the alignment of phones and words."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from antiphon.recipes.acoustics import Acoustics
from antiphon.records import to_json, write_text
from antiphon.speech.manifest import Utterance

LOG_MEL = 40
SILENCE = "SIL"


def write_example(acoustics: Acoustics, run: Path) -> None:
    """Write ``example.json``: the aligned test utterance whose length is nearest to three seconds."""
    data, alignment = acoustics.data, acoustics.alignment
    aligned = [u for u in data.split("test") if (data.frames_of(u, alignment.phone_T) >= 0).all()]
    if not aligned:
        return
    chosen = min(aligned, key=lambda utterance: abs(utterance.duration_s - 3.0))
    phones = _phones(acoustics, chosen)
    spectrogram_TF = data.frames_of(chosen, data.fbank)[:, :LOG_MEL]
    example = {
        "id": chosen.id,
        "words": list(chosen.words),
        "frame_shift_s": data.frame_shift_s,
        "spectrogram": np.round(spectrogram_TF.astype(float), 3).tolist(),
        "phones": phones,
        "words_at": _words_at(chosen, phones, acoustics),
    }
    write_text(run / "example.json", to_json(example) + "\n")


def _phones(acoustics: Acoustics, utterance: Utterance) -> list[list[str | float]]:
    """Return [phone, start_s, end_s] of each phone; a phone begins where its first HMM position comes back."""
    data, alignment = acoustics.data, acoustics.alignment
    phone_T = data.frames_of(utterance, alignment.phone_T)
    position_T = alignment.state_position_S[data.frames_of(utterance, alignment.pdf_T)]
    begins = np.flatnonzero((np.diff(phone_T) != 0) | (np.diff(position_T) < 0)) + 1
    edges = [0, *begins.tolist(), len(phone_T)]
    shift_s = data.frame_shift_s
    return [
        [alignment.phones[int(phone_T[begin])], round(begin * shift_s, 4), round(end * shift_s, 4)]
        for begin, end in zip(edges, edges[1:], strict=False)
    ]


def _words_at(utterance: Utterance, phones: list[list[str | float]], acoustics: Acoustics) -> list[list[str | float]]:
    """Return [word, start_s, end_s]: the words' pronunciations, followed along the aligned phones."""
    spoken = [phone for phone in phones if phone[0] != SILENCE]
    labels = tuple(str(phone[0]) for phone in spoken)
    found: list[list[str | float]] = []

    def follow(word: int, at: int) -> bool:
        if word == len(utterance.words):
            return at == len(labels)
        for pronunciation in acoustics.data.lexicon[utterance.words[word]]:
            end = at + len(pronunciation)
            if labels[at:end] == tuple(pronunciation) and follow(word + 1, end):
                found.append([utterance.words[word], spoken[at][1], spoken[end - 1][2]])
                return True
        return False

    return found[::-1] if follow(0, 0) else []
