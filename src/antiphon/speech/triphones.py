"""Training of the GMM-HMM by Viterbi EM: monophones from a flat start, a tree, then triphones.

Each pass aligns every utterance with its own words, then estimates mixtures and transitions from the aligned frames.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from antiphon.errors import DataError
from antiphon.speech.gmm import Mixtures, gather, split, update
from antiphon.speech.graph import SILENCE_NUMBER
from antiphon.speech.hmm import POSITIONS, Hmm
from antiphon.speech.kaldi import Fst, kaldi_hmm_gmm, kaldifst
from antiphon.speech.tree import TriphoneStats, build_tree, collect_stats, monophone_tree

Transitions = npt.NDArray[np.int32]
Progress = Callable[[str], None]

ACOUSTIC_SCALE = 0.1
SELF_LOOP_SCALE = 0.1
BEAM, RETRY_BEAM = 12.0, 60.0
EQUAL_ALIGNMENT_RETRIES = 10
MONOPHONE_PASSES, TRIPHONE_PASSES = 12, 10
MONOPHONE_GAUSSIANS = 4  # for each monophone state


@dataclass(frozen=True)
class Transcribed:
    """Utterances with their words.

    Attributes:
        ids: names.
        features: float32 [T, F] of each.
        words: word numbers of each.
    """

    ids: Sequence[str]
    features: Sequence[npt.NDArray[np.float32]]
    words: Sequence[list[int]]


class Aligner:
    """Finds the likeliest states of utterances whose words are known.

    Args:
        hmm: states and transition probabilities; its later updates are followed.
        lexicon: L without disambiguation labels.
        utterances: what to align.
    """

    def __init__(self, hmm: Hmm, lexicon: Fst, utterances: Transcribed) -> None:
        self._hmm = hmm
        self._utterances = utterances
        options = kaldi_hmm_gmm.TrainingGraphCompilerOptions(transition_scale=0.0, self_loop_scale=0.0)
        compiler = kaldi_hmm_gmm.TrainingGraphCompiler(
            trans_model=hmm.transitions, ctx_dep=hmm.context, lex_fst=lexicon, disambig_syms=[], opts=options
        )
        self._graphs = [compiler.compile_graph_from_text(words) for words in utterances.words]

    def equal(self, seed: int) -> list[Transitions | None]:
        """Spread the states of each utterance evenly over its frames; None where there are too few frames."""
        rows: list[Transitions | None] = []
        for graph, features_TF in zip(self._graphs, self._utterances.features, strict=True):
            found, path = kaldifst.equal_align(
                ifst=graph, length=len(features_TF), rand_seed=seed, num_retries=EQUAL_ALIGNMENT_RETRIES
            )
            labels = kaldifst.get_linear_symbol_sequence(path)[1] if found else []
            rows.append(np.array(labels, np.int32) if labels else None)
        return rows

    def align(self, mixtures: Mixtures) -> list[Transitions | None]:
        """Return the transition id of each frame, by a Viterbi search; None where no path reaches the end."""
        config = kaldi_hmm_gmm.AlignConfig(beam=BEAM, retry_beam=RETRY_BEAM)
        model = mixtures.to_kaldi()
        transitions = self._hmm.transitions
        rows: list[Transitions | None] = []
        for name, graph, features_TF in zip(self._utterances.ids, self._graphs, self._utterances.features, strict=True):
            weighted = graph.copy()
            kaldi_hmm_gmm.add_transition_probs(
                trans_model=transitions,
                disambig_syms=[],
                transition_scale=1.0,
                self_loop_scale=SELF_LOOP_SCALE,
                fst=weighted,
            )
            decodable = kaldi_hmm_gmm.DecodableAmDiagGmmScaled(
                am=model, tm=transitions, feats=features_TF, scale=ACOUSTIC_SCALE
            )
            *_, labels, _ = kaldi_hmm_gmm.align_utterance_wrapper(
                config=config,
                utt=name,
                acoustic_scale=ACOUSTIC_SCALE,
                fst=weighted,
                decodable=decodable,
                num_done=0,
                num_error=0,
                num_retried=0,
                tot_like=0.0,
                frame_count=0,
            )
            rows.append(np.array(labels, np.int32) if len(labels) == len(features_TF) else None)
        return rows


@dataclass(frozen=True)
class GmmHmm:
    """A trained model: states with transitions, and their mixtures."""

    hmm: Hmm
    mixtures: Mixtures


@dataclass(frozen=True)
class _Aligned:
    """The aligned utterances joined: frames [T, F], transition ids [T], utterance numbers [T]."""

    features_TF: npt.NDArray[np.float32]
    transitions_T: Transitions
    utterance_T: npt.NDArray[np.int64]


def _join(utterances: Transcribed, rows: Sequence[Transitions | None]) -> _Aligned:
    done = [(i, row) for i, row in enumerate(rows) if row is not None]
    if not done:
        raise DataError("no training utterance could be aligned: are the transcripts those of the recordings?")
    return _Aligned(
        np.concatenate([utterances.features[i] for i, _ in done]),
        np.concatenate([row for _, row in done]),
        np.concatenate([np.full(len(row), i) for i, row in done]),
    )


def _reestimate(
    model: GmmHmm, aligned: _Aligned, gaussians: int | None, rng: np.random.Generator
) -> tuple[GmmHmm, float]:
    """Return the model estimated from aligned frames, and the log-likelihood a frame before."""
    state_T = model.hmm.state_of_transition[aligned.transitions_T].astype(np.int64)
    sums = gather(model.mixtures, aligned.features_TF, state_T)
    model.hmm.update_transitions(aligned.transitions_T)
    mixtures = update(model.mixtures, sums)
    if gaussians is not None:
        counts = np.bincount(state_T, minlength=mixtures.states).astype(np.float64)
        mixtures = split(mixtures, counts, gaussians, rng)
    return GmmHmm(model.hmm, mixtures), sums.log_likelihood / len(state_T)


def _train(
    stage: str,
    model: GmmHmm,
    aligner: Aligner,
    utterances: Transcribed,
    *,
    first: Sequence[Transitions | None] | None,
    passes: int,
    gaussians: int,
    rng: np.random.Generator,
    progress: Progress,
) -> GmmHmm:
    """Run EM passes; Gaussians grow evenly until three passes before the last."""
    start, growing = model.mixtures.gaussians, max(passes - 3, 1)
    for number in range(1, passes + 1):
        rows = first if first is not None and number == 1 else aligner.align(model.mixtures)
        target = start + (gaussians - start) * number // growing if number <= growing else None
        model, score = _reestimate(model, _join(utterances, rows), target, rng)
        failed = sum(row is None for row in rows)
        progress(
            f"{stage} pass {number}/{passes}: log-likelihood {score:.2f} a frame,"
            f" {model.mixtures.gaussians} Gaussians" + (f", {failed} utterances not aligned" if failed else "")
        )
    return model


def train_monophones(
    utterances: Transcribed, lexicon: Fst, phone_count: int, *, seed: int, progress: Progress
) -> tuple[GmmHmm, TriphoneStats]:
    """Train context-free states from an even spread of states over frames.

    Args:
        utterances: training utterances.
        lexicon: L without disambiguation labels.
        phone_count: phones, silence among them, without epsilon.
        seed: draws the first alignment and the splits.
        progress: takes a line a pass.

    Returns:
        The model, and the statistics of triphone states for a tree.

    Raises:
        DataError: nothing could be aligned.
    """
    hmm = Hmm(monophone_tree(phone_count, POSITIONS))
    rng = np.random.default_rng(seed)
    frames_TF = np.concatenate(list(utterances.features)).astype(np.float64)
    mixtures = Mixtures.alike(frames_TF.mean(axis=0), frames_TF.var(axis=0), hmm.tree.states)
    aligner = Aligner(hmm, lexicon, utterances)
    model = _train(
        "monophones",
        GmmHmm(hmm, mixtures),
        aligner,
        utterances,
        first=aligner.equal(seed),
        passes=MONOPHONE_PASSES,
        gaussians=MONOPHONE_GAUSSIANS * hmm.tree.states,
        rng=rng,
        progress=progress,
    )
    aligned = _join(utterances, aligner.align(model.mixtures))
    state_T = hmm.state_of_transition[aligned.transitions_T]
    phone_T, position_T = (owner[state_T].astype(np.int64) for owner in (hmm.tree.phone_S, hmm.tree.position_S))
    return model, collect_stats(aligned.features_TF, phone_T, position_T, aligned.utterance_T)


def train_triphones(
    utterances: Transcribed,
    lexicon: Fst,
    monophones: GmmHmm,
    stats: TriphoneStats,
    *,
    states: int,
    gaussians: int,
    seed: int,
    progress: Progress,
) -> GmmHmm:
    """Grow a tree over triphone states and train a mixture for each leaf.

    Args:
        utterances: training utterances.
        lexicon: L without disambiguation labels.
        monophones: the model that gave ``stats``.
        stats: statistics of triphone states.
        states: leaves of the tree.
        gaussians: Gaussians in all.
        seed: draws the splits.
        progress: takes a line a pass.
    """
    tree = build_tree(stats, monophones.hmm.tree, states=states, whole=frozenset([SILENCE_NUMBER]))
    progress(f"tree: {tree.states} states from {len(stats.keys_N4)} triphone states")
    hmm = Hmm(tree)
    model = GmmHmm(hmm, Mixtures.single(*tree.state_counts(stats)))
    return _train(
        "triphones",
        model,
        Aligner(hmm, lexicon, utterances),
        utterances,
        first=None,
        passes=TRIPHONE_PASSES,
        gaussians=gaussians,
        rng=np.random.default_rng(seed),
        progress=progress,
    )
