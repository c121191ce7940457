"""What a corpus gives before anything is computed: recordings with their words, and a split of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from antiphon.errors import DataError
from antiphon.speech.lexicon import Lexicon
from antiphon.speech.text import spoken_words

HELD_OUT_SHARE = 0.1
# A corpus of fewer different texts is one of commands: holding texts out would hold whole words out.
FEWEST_TEXTS = 30

Say = Callable[[str], None]


@dataclass(frozen=True)
class Recording:
    """One utterance as its corpus describes it; ``split`` is empty until it is known."""

    id: str
    audio: Path
    speaker: str
    words: tuple[str, ...]
    split: str
    where: str
    start_s: float | None = None
    end_s: float | None = None

    @property
    def text(self) -> str:
        """The words, separated by blanks."""
        return " ".join(self.words)


@dataclass(frozen=True)
class Skip:
    """An utterance that was left out, and why (with file and line)."""

    id: str
    reason: str


@dataclass
class Corpus:
    """What a corpus's reader returns.

    ``longest_s`` is the length above which an utterance is skipped; ``lexicon`` holds words of the corpus that the
    dictionary lacks; ``warnings`` are for the user's eyes.
    """

    name: str
    recordings: list[Recording] = field(default_factory=list)
    skipped: list[Skip] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    split_rule: str = ""
    longest_s: float | None = None
    lexicon: Lexicon = field(default_factory=dict)

    def words_of(
        self,
        utterance: str,
        text: str,
        where: str,
        *,
        symbols: Mapping[str, str] | None = None,
        remarks: bool = False,
    ) -> tuple[str, ...] | None:
        """Return the words of a transcript; skip the utterance and return None where it cannot be read."""
        try:
            return spoken_words(text, symbols=symbols, remarks=remarks)
        except DataError as error:
            self.skipped.append(Skip(utterance, f"{where}: {error}"))
            return None

    def split(self) -> None:
        """Give every recording its split: its own, or one by the rule that is then stated in ``split_rule``.

        Raises:
            DataError: some recordings have a split and others none, or there are too few to divide.
        """
        named = [recording for recording in self.recordings if recording.split]
        if named and len(named) < len(self.recordings):
            unnamed = next(recording for recording in self.recordings if not recording.split)
            raise DataError(f"{unnamed.where}: no split, but {named[0].where} has one: give it to all or to none")
        if named:
            self._complete()
            self._warn_of_shared_speakers()
            return
        self.recordings, self.split_rule = divide(self.recordings, ("test", "dev"))

    def _complete(self) -> None:
        missing = tuple(split for split in ("test", "dev") if not any(row.split == split for row in self.recordings))
        self.split_rule = "the corpus's own"
        if missing:
            train = [recording for recording in self.recordings if recording.split == "train"]
            rest = [recording for recording in self.recordings if recording.split != "train"]
            divided, rule = divide(train, missing)
            self.recordings = divided + rest
            self.split_rule += f"; {' and '.join(missing)} from its training part: {rule}"

    def _warn_of_shared_speakers(self) -> None:
        speakers = {
            split: {row.speaker for row in self.recordings if row.split == split} for split in ("train", "test")
        }
        if shared := sorted(speakers["train"] & speakers["test"]):
            self.warnings.append(
                f"{len(shared)} of {len(speakers['test'])} test speakers are also in train"
                f" ({', '.join(shared[:3])}{', ...' if len(shared) > 3 else ''}): the error rate will flatter"
            )


def share(text: str) -> float:
    """Return a number in [0, 1) that depends on ``text`` alone, evenly spread: its SHA-256 as a fraction.

    >>> round(share("yes"), 3)
    0.541
    """
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big") / 2**56


def divide(recordings: Sequence[Recording], held_out: Sequence[str]) -> tuple[list[Recording], str]:
    """Hold out about a tenth of the recordings for each split of ``held_out``; the rest is ``train``.

    Speakers stay whole where at least three of them, none with more than a third of the utterances, allow it;
    else equal texts stay together; else, in a corpus of few texts, single utterances are drawn.

    Returns:
        the recordings with their splits, and the rule in words.

    Raises:
        DataError: there are too few recordings.
    """
    by_speaker = _assign([recording.speaker for recording in recordings], held_out, most=1 / 3)
    if by_speaker and len({recording.speaker for recording in recordings}) >= 3:
        keys, rule = by_speaker, "whole speakers"
        chosen = [keys[recording.speaker] for recording in recordings]
    else:
        texts = [recording.text for recording in recordings]
        if len(set(texts)) >= FEWEST_TEXTS:
            names, rule = texts, "equal texts together"
        else:
            names, rule = [recording.id for recording in recordings], "single utterances (few different texts)"
        keys = _assign(names, held_out, most=1.0)
        if not keys:
            raise DataError(
                f"{len(recordings)} utterances are too few to hold out {' and '.join(held_out)}: give each a split"
            )
        chosen = [keys[name] for name in names]
    rows = [replace(row, split=split) for row, split in zip(recordings, chosen, strict=True)]
    share_text = f"{HELD_OUT_SHARE:.0%} of the utterances or just above"
    return rows, f"{rule}, in the order of their SHA-256: {', then '.join(held_out)}, each {share_text}"


def _assign(names: Sequence[str], held_out: Sequence[str], most: float) -> dict[str, str]:
    """Fill the splits one after the other with names in hash order; empty where that leaves train too little."""
    counts: dict[str, int] = {}
    for name in names:
        counts[name] = counts.get(name, 0) + 1
    splits = dict.fromkeys(counts, "train")
    queue = iter(sorted((name for name in counts if counts[name] <= most * len(names)), key=share))
    for split in held_out:
        filled = 0
        while filled < HELD_OUT_SHARE * len(names):
            taken = next(queue, None)
            if taken is None:
                return {}
            splits[taken] = split
            filled += counts[taken]
    train = sum(counts[name] for name in counts if splits[name] == "train")
    return splits if train >= len(names) / 3 else {}
