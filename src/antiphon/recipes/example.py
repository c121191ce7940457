"""One utterance to look at: its log-mel frames with the alignment of phones and words."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from antiphon.recipes.acoustics import Acoustics
from antiphon.records import to_json, write_text
from antiphon.speech.alignment import Span, word_spans

LOG_MEL = 40
WANTED_S = 3.0


def write_example(acoustics: Acoustics, run: Path) -> None:
    """Write ``example.json``: the aligned test utterance whose length is nearest to three seconds."""
    data, alignment = acoustics.data, acoustics.alignment
    aligned = [u for u in data.utterances if u.split == "test" and (data.frames_of(u, alignment.pdf_T) >= 0).all()]
    if not aligned:
        return
    chosen = min(aligned, key=lambda utterance: abs(utterance.duration_s - WANTED_S))
    phones = alignment.phone_spans(data.frames_of(chosen, alignment.pdf_T))
    spectrogram_TF = data.frames_of(chosen, data.fbank)[:, :LOG_MEL]

    def in_seconds(spans: list[Span]) -> list[list[str | float]]:
        return [
            [label, *(round(frame * data.frame_shift_s, 4) for frame in (begin, end))] for label, begin, end in spans
        ]

    example = {
        "id": chosen.id,
        "words": list(chosen.words),
        "frame_shift_s": data.frame_shift_s,
        "spectrogram": np.round(spectrogram_TF.astype(float), 3).tolist(),
        "phones": in_seconds(phones),
        "words_at": in_seconds(word_spans(chosen.words, phones, data.lexicon)),
    }
    write_text(run / "example.json", to_json(example) + "\n")
