"""CMU AN4: spelled names, numbers, dates and commands; 74 speakers to train on and 10 others for the test, 16 kHz.

Read from a folder with `manifest.jsonl` (id, path, text, speaker, split, gender) and its recordings.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from antiphon.errors import DataError
from antiphon.speech.corpora.base import Corpus, Say, share
from antiphon.speech.corpora.manifest import read_rows

DEV_SPEAKERS_EACH = 4
SPLIT_RULE = (
    f"test is the corpus's own; dev is {DEV_SPEAKERS_EACH} female and {DEV_SPEAKERS_EACH} male training speakers,"
    " those whose names have the lowest SHA-256"
)


def read(source: Path | None, say: Say) -> Corpus:
    """Read AN4 from the folder ``source``.

    Raises:
        DataError: the folder or its manifest is missing or wrong.
    """
    if source is None:
        raise DataError("AN4 is not downloaded: pass --source DIR, the folder with its manifest.jsonl")
    path = source / "manifest.jsonl"
    if not path.is_file():
        raise DataError(
            f"{source} has no manifest.jsonl (id, path, text, speaker, split, gender on each line): name the"
            " folder that has it; for the files as CMU packs them, write one"
        )
    corpus = Corpus("an4", split_rule=SPLIT_RULE)
    rows = read_rows(path, corpus, audio_keys=("path", "audio"))
    genders = {
        recording.speaker: str(row.get("gender") or recording.speaker[:1])
        for recording, row in zip(corpus.recordings, rows, strict=True)
        if recording.split == "train"
    }
    if not genders:
        raise DataError(f"{path}: no utterances of split train")
    if not any(recording.split == "dev" for recording in corpus.recordings):
        dev = dev_speakers(genders)
        corpus.recordings = [
            replace(row, split="dev") if row.split == "train" and row.speaker in dev else row
            for row in corpus.recordings
        ]
    return corpus


def dev_speakers(genders: dict[str, str]) -> set[str]:
    """Choose the development speakers among ``{speaker: gender}``, by the rule of ``SPLIT_RULE``."""
    ordered = sorted(genders, key=share)
    return {
        speaker
        for gender in ("f", "m")
        for speaker in [name for name in ordered if genders[name] == gender][:DEV_SPEAKERS_EACH]
    }
