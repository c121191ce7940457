"""Word error rates with intervals, and the files that scoring tools read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import kaldialign

from antiphon.errors import ArgumentError, DataError
from antiphon.records import Json, write_text

BOOTSTRAP_DRAWS = 10_000
BOOTSTRAP_SEED = 0


@dataclass(frozen=True)
class WordErrors:
    """Errors against the reference words; ``ci95`` bounds the rate."""

    rate: float
    errors: int
    words: int
    substitutions: int
    insertions: int
    deletions: int
    ci95: tuple[float, float]

    def to_json(self) -> Json:
        """Return the object of docs/formats.md."""
        return {**asdict(self), "ci95": list(self.ci95)}


def score(references: Sequence[Sequence[str]], hypotheses: Sequence[Sequence[str]]) -> WordErrors:
    r"""Count word errors: rate = (substitutions + insertions + deletions) / reference words.

    The 95 % interval draws utterances with replacement, 10,000 times, from a fixed seed (M. Bisani and H. Ney,
    "Bootstrap estimates for confidence intervals in ASR performance evaluation", 2004).

    Args:
        references: words of each utterance.
        hypotheses: recognised words, in the same order.

    Raises:
        ArgumentError: the numbers of utterances differ, or there are none.
        DataError: the references have no words.

    >>> result = score([["go", "left"], ["stop"]], [["go"], ["stop", "now"]])
    >>> result.rate, result.substitutions, result.insertions, result.deletions
    (0.6666666666666666, 0, 1, 1)
    """
    if len(references) != len(hypotheses) or not references:
        raise ArgumentError(
            f"{len(references)} references and {len(hypotheses)} hypotheses: expected one of each for every utterance"
        )
    counts = kaldialign.batch_error_rate(references, hypotheses)
    words = int(counts["ref_len"])
    if words == 0:
        raise DataError("the references have no words, so there is no error rate: score utterances with transcripts")
    interval = kaldialign.bootstrap_wer_ci(references, hypotheses, replications=BOOTSTRAP_DRAWS, seed=BOOTSTRAP_SEED)
    return WordErrors(
        rate=counts["total"] / words,
        errors=int(counts["total"]),
        words=words,
        substitutions=int(counts["sub"]),
        insertions=int(counts["ins"]),
        deletions=int(counts["del"]),
        ci95=(max(0.0, float(interval["ci95min"])), float(interval["ci95max"])),
    )


def wer_line(errors: WordErrors | Json) -> str:
    """Return the line that Kaldi's scoring prints, with the interval after it.

    >>> wer_line(WordErrors(70 / 393, 70, 393, 41, 9, 20, (0.141, 0.219)))
    '%WER 17.81 [ 70 / 393, 9 ins, 20 del, 41 sub ] ci95 [14.1, 21.9]'
    """
    row = errors.to_json() if isinstance(errors, WordErrors) else errors
    low, high = row["ci95"]
    return (
        f"%WER {100 * row['rate']:.2f} [ {row['errors']} / {row['words']}, {row['insertions']} ins,"
        f" {row['deletions']} del, {row['substitutions']} sub ] ci95 [{100 * low:.1f}, {100 * high:.1f}]"
    )


def write_trn(path: Path, ids: Sequence[str], texts: Sequence[Sequence[str]]) -> None:
    """Write the words of each utterance and its id in brackets, as sclite reads them."""
    rows = zip(ids, texts, strict=True)
    write_text(path, "".join(" ".join([*words, f"({name})"]) + "\n" for name, words in rows))
