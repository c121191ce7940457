"""N-gram language models over a closed vocabulary: Kneser-Ney by kaldingram, ARPA to G by kaldilm."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterable, Sequence
from pathlib import Path

import kaldilm
from kaldingram.train import NgramCounts

from antiphon.errors import ArgumentError
from antiphon.records import write_text
from antiphon.speech.kaldi import Fst, kaldifst, quiet

MAX_ORDER = 5


def train_language_model(
    sentences: Iterable[Sequence[str]], vocabulary: Iterable[str], *, order: int, path: Path
) -> None:
    """Estimate a Kneser-Ney n-gram model and write it in ARPA form.

    Sentences with a word that the vocabulary lacks are left out. A word of the vocabulary that the sentences lack
    counts as one unigram seen after one other word, so that every word can be recognised.

    Args:
        sentences: the training text.
        vocabulary: every word that may be recognised.
        order: words in the longest n-gram, 1 to 5.
        path: the ARPA file.

    Raises:
        ArgumentError: ``order`` is out of its bounds.
    """
    if not 1 <= order <= MAX_ORDER:
        raise ArgumentError(f"lm_order must be from 1 to {MAX_ORDER}, got {order}")
    counts = NgramCounts(order)
    known, seen = set(vocabulary), set[str]()
    for sentence in sentences:
        if not known.issuperset(sentence):
            continue
        counts.add_raw_counts_from_line(" ".join(sentence))
        seen.update(sentence)
    for word in sorted(known - seen):
        counts.add_count((), word, None if order == 1 else "<unseen>", 1)
    text = io.StringIO()
    with contextlib.redirect_stderr(io.StringIO()):  # the library draws a dozen progress bars
        counts.cal_discounting_constants()
        counts.cal_f()
        counts.cal_bow()
        counts.print_as_arpa(text)
    write_text(path, text.getvalue())


def grammar_fst(arpa: Path, words: Path) -> Fst:
    """Return G of an ARPA model, its arcs sorted by input; back-off arcs read ``#0``.

    Args:
        arpa: the model.
        words: the symbol table, with ``#0``, ``<s>`` and ``</s>`` in it.
    """
    with quiet():
        text = kaldilm.arpa2fst(input_arpa=str(arpa), disambig_symbol="#0", read_symbol_table=str(words))
    grammar = kaldifst.compile(s=text, acceptor=False)
    kaldifst.arcsort(grammar, sort_type="ilabel")
    return grammar
