"""Recognition: the best words for a matrix of state scores, and the choice of the scale of those scores.

Shapes: T frames, S states.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from antiphon.errors import ArgumentError, DataError
from antiphon.records import Json
from antiphon.speech.graph import read_graph, read_words
from antiphon.speech.kaldi import Fst, kaldi_decoder, kaldifst
from antiphon.speech.scoring import score

Scores = npt.NDArray[np.float32]

BEAM = 13.0
MAX_ACTIVE = 5000
SCALES = (0.1, 0.07, 0.15, 0.2, 0.3)
PRIOR_WEIGHTS = (1.0, 0.8, 0.6)


@dataclass(frozen=True)
class BestPath:
    """The best path of an utterance.

    Attributes:
        words: recognised words; empty where no path was found.
        states_T: state of each frame, int32; empty where no path was found.
        found: whether there is a path.
    """

    words: list[str]
    states_T: npt.NDArray[np.int32]
    found: bool


class Decoder:
    """Finds the best words by a beam search over a graph whose input labels are state + 1.

    Args:
        graph: HCLG, in memory.
        words: word of each output label.
        beam: costs above the best by which a path may be kept.
        max_active: paths kept a frame.

    Attributes:
        failures: utterances so far for which no path was found.

    Raises:
        ArgumentError: ``beam`` or ``max_active`` is not positive.
    """

    def __init__(self, graph: Fst, words: Sequence[str], *, beam: float = BEAM, max_active: int = MAX_ACTIVE) -> None:
        if not beam > 0:
            raise ArgumentError(f"beam must be above 0, got {beam}")
        if max_active < 1:
            raise ArgumentError(f"max_active must be at least 1, got {max_active}")
        self.failures = 0
        self._graph = kaldifst.StdConstFst(graph)
        self._words = words
        self._options = kaldi_decoder.FasterDecoderOptions(beam=beam, max_active=max_active)
        self._states = max(
            (arc.ilabel for state in range(graph.num_states) for arc in kaldifst.ArcIterator(graph, state)), default=0
        )

    @classmethod
    def open(cls, graph: Path, words: Path, *, beam: float = BEAM, max_active: int = MAX_ACTIVE) -> Decoder:
        """Read graph and words from the files of an alignment.

        Raises:
            FolderError: a file is missing or broken.
        """
        return cls(read_graph(graph), read_words(words), beam=beam, max_active=max_active)

    def search(self, scores_TS: Scores) -> BestPath:
        """Return the best path.

        A path that ends where a sentence may end is preferred; where none does, the best of all is taken.

        Args:
            scores_TS: scaled log-likelihoods, float32 [T, S].

        Raises:
            DataError: there are fewer states than the graph reads, or a score is not finite.
        """
        if scores_TS.ndim != 2 or scores_TS.shape[1] < self._states:
            raise DataError(f"scores have the shape {list(scores_TS.shape)}, the graph reads {self._states} states")
        if not np.isfinite(scores_TS).all():
            raise DataError("scores are not finite: has the model diverged?")
        found = False
        if len(scores_TS):
            decoder = kaldi_decoder.FasterDecoder(self._graph, self._options)
            decoder.decode(kaldi_decoder.DecodableCtc(np.ascontiguousarray(scores_TS, dtype=np.float32)))
            found, best = decoder.get_best_path()
        if not found:
            self.failures += 1
            return BestPath([], np.zeros(0, np.int32), found=False)
        _, labels, outputs, _ = kaldifst.get_linear_symbol_sequence(best)
        return BestPath([self._words[word] for word in outputs], np.array(labels, np.int32) - 1, found=True)

    def decode(self, scores_TS: Scores) -> list[str]:
        """Return the recognised words; none where the search finds no path."""
        return self.search(scores_TS).words


@dataclass(frozen=True)
class ScaleChoice:
    """The best of a grid: ``table`` has a row for each pair tried (`scale`, `prior_weight`, `errors`, `rate`)."""

    scale: float
    prior_weight: float
    table: list[Json]


def scaled(
    log_posteriors_TS: Scores, log_priors_S: npt.NDArray[np.float32], scale: float, prior_weight: float
) -> Scores:
    """Return scale x (log posterior - prior_weight x log prior), the scores that a decoder takes."""
    return np.asarray(scale * (log_posteriors_TS - prior_weight * log_priors_S), dtype=np.float32)


def choose_scale(
    decoder: Decoder,
    log_posteriors: Mapping[str, Scores],
    references: Mapping[str, Sequence[str]],
    log_priors_S: npt.NDArray[np.float32],
    *,
    scales: Sequence[float] = SCALES,
    prior_weights: Sequence[float] = PRIOR_WEIGHTS,
    progress: Callable[[str], None] | None = None,
) -> ScaleChoice:
    """Choose the acoustic scale, then the weight of the priors, with fewest word errors (on a dev split).

    The scale is chosen under the first prior weight and the weight under that scale, so scales + weights - 1 decodes
    stand for the whole grid. Of equals the one named first is taken.

    Args:
        decoder: the decoder.
        log_posteriors: log-posteriors of the states of each utterance, float32 [T, S].
        references: words of each of those utterances.
        log_priors_S: log-prior of each state; zeros if the scores are likelihoods.
        scales: scales to try.
        prior_weights: weights to try.
        progress: takes a line a decode.

    Raises:
        ArgumentError: nothing to try.
    """
    if not scales or not prior_weights:
        raise ArgumentError("choose_scale needs at least one scale and one prior weight")
    names = sorted(log_posteriors)
    table: list[Json] = []

    def errors(scale: float, weight: float) -> int:
        for row in table:
            if (row["scale"], row["prior_weight"]) == (scale, weight):
                return int(row["errors"])
        found = [decoder.decode(scaled(log_posteriors[name], log_priors_S, scale, weight)) for name in names]
        result = score([references[name] for name in names], found)
        table.append({"scale": scale, "prior_weight": weight, "errors": result.errors, "rate": result.rate})
        if progress is not None:
            progress(f"scale {scale:g}, prior weight {weight:g}: {100 * result.rate:.2f} % of words wrong")
        return result.errors

    scale = min(scales, key=lambda value: errors(value, prior_weights[0]))
    weight = min(prior_weights, key=lambda value: errors(scale, value))
    return ScaleChoice(scale, weight, table)
