"""A part of the recorded prompts, prepared and aligned once for all tests of this folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import soundfile
from commands import Result, antiphon

from antiphon.errors import DataError
from antiphon.speech.corpora import prompts as recorded

LONGEST_S = 2.5
BEGINNINGS = ("vm-", "conf-", "confbridge-")
"""Prompts of voicemail and conferences: enough words in common for a few minutes of speech to teach them."""


@dataclass(frozen=True)
class Prepared:
    """Prepared and aligned data, and what the commands that made them printed."""

    data: Path
    prepare: Result
    align: Result


@pytest.fixture(scope="session")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """About a hundred prompts (of 549), under three minutes, prepared and aligned by the commands."""
    folder = tmp_path_factory.mktemp("prompts")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorded, "DOWNLOAD_DEADLINE_S", 90)
        try:
            corpus = recorded.read(None, print)
        except DataError as error:
            pytest.skip(f"needs the recorded prompts: {error}")
    lines = []
    for recording in corpus.recordings:
        if not recording.id.startswith(BEGINNINGS) or not recording.audio.exists():
            continue
        if soundfile.info(recording.audio).duration > LONGEST_S:
            continue
        copy = folder / "source" / recorded.AUDIO_FOLDER / f"{recording.id}.wav"
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.symlink_to(recording.audio)
        lines.append(f"{recording.id}: {recording.text}\n")
    texts = folder / "source" / recorded.TEXT_FILE.with_suffix("")
    texts.parent.mkdir(parents=True)
    texts.write_text("".join(lines))
    data = folder / "data"
    prepared = antiphon("prepare", "prompts", "--source", folder / "source", "--out", data, "--json")
    assert prepared.status == 0, prepared.err
    aligned = antiphon("align", data, "--json")
    assert aligned.status == 0, aligned.err
    return Prepared(data, prepared, aligned)
