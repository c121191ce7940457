"""Corpora by name: each file beside this one reads one kind and offers ``read(source, say) -> Corpus``."""

from __future__ import annotations

from pathlib import Path

from antiphon.errors import unknown_name
from antiphon.speech.corpora import an4, kaldi, manifest, prompts
from antiphon.speech.corpora.base import Corpus, Recording, Say, Skip

__all__ = ["CORPORA", "Corpus", "Recording", "Say", "Skip", "read_corpus"]

CORPORA = {"prompts": prompts.read, "an4": an4.read, "manifest": manifest.read, "kaldi": kaldi.read}


def read_corpus(name: str, source: Path | None, say: Say) -> Corpus:
    """Read the corpus ``name`` from ``source``.

    Args:
        name: one of ``CORPORA``.
        source: its folder or file; None where the corpus can be fetched.
        say: is told what takes a while or costs something, before it does.

    Raises:
        ArgumentError: there is no such corpus.
        DataError: ``source`` cannot be used as a whole.
    """
    if name not in CORPORA:
        raise unknown_name("corpus", name, CORPORA)
    return CORPORA[name](source, say)
