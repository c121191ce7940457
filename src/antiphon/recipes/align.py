"""From a prepared corpus to states of all frames and a decoding graph: `antiphon align`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.console import Console

from antiphon.errors import ArgumentError, DataError
from antiphon.records import FolderLock, Json, output_folder, record, write_json, write_text
from antiphon.speech.alignment import (
    ALIGN_FOLDER,
    ALIGN_NAME,
    GRAPH_NAME,
    LM_NAME,
    NOT_ALIGNED,
    PDF_NAME,
    PHONE_NAME,
    PHONES_NAME,
    PRIORS_NAME,
    STATES_NAME,
    WORDS_NAME,
)
from antiphon.speech.decoding import Decoder, choose_scale
from antiphon.speech.gmm import Mixtures
from antiphon.speech.graph import Symbols, decoding_graph, lexicon_fst, write_graph
from antiphon.speech.hmm import Hmm
from antiphon.speech.kaldi import Fst
from antiphon.speech.language_model import MAX_ORDER, grammar_fst, train_language_model
from antiphon.speech.manifest import PreparedData, Utterance
from antiphon.speech.scoring import WordErrors, score
from antiphon.speech.triphones import Aligner, GmmHmm, Transcribed, train_monophones, train_triphones

Progress = Callable[[str], None]

FEWEST_STATES = 100
TRIPHONE_STATES_PER_LEAF = 20
SECONDS_PER_LEAF = 2
GAUSSIANS_PER_STATE = 8
FRAMES_PER_GAUSSIAN = 75
GMM_SCALES = (0.05, 0.07, 0.1)
GMM_BEAM = 10.0  # the scales are small, so the costs are: a wider beam found no other words, in thrice the time
FAILED_SHARE_ALLOWED = 0.1
FAILED_NAMED = 5


def align(
    data: Path,
    *,
    out: Path | None = None,
    states: int | None = None,
    gaussians: int | None = None,
    lm_order: int = 3,
    seed: int = 0,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Json:
    """Train a triphone GMM-HMM, align every frame of the corpus, and build and try the decoding graph.

    Args:
        data: what `antiphon prepare` wrote.
        out: the folder to write; ``data/align`` if not given.
        states: leaves of the decision tree; if not given, what the corpus's recipe says, else `default_states`.
        gaussians: Gaussians of all states; if not given, what the recipe says, else `default_gaussians`.
        lm_order: words in the longest n-gram, 1 to 5.
        seed: draws the first alignment and the splits of Gaussians.
        overwrite: replace an earlier alignment.
        progress: takes a line a step; standard error if not given.

    Returns:
        The object of ``align.json``.

    Raises:
        ArgumentError: an argument is out of its bounds.
        FolderError: ``data`` is not prepared, or the folder to write is not empty.
        DataError: too many utterances cannot be aligned.
    """
    _check_bounds(states, gaussians, lm_order, seed)
    prepared = PreparedData(data)
    recipe = prepared.info.get("recipe", {}).get("align", {})
    states = recipe.get("states") if states is None else states
    gaussians = recipe.get("gaussians") if gaussians is None else gaussians
    folder = output_folder(data / ALIGN_FOLDER if out is None else out, overwrite=overwrite, keep=(data,))
    report = Console(stderr=True, highlight=False, markup=False).print if progress is None else progress
    with FolderLock(folder):
        return _Job(prepared, folder, seed, report).run(states, gaussians, lm_order)


def _check_bounds(states: int | None, gaussians: int | None, lm_order: int, seed: int) -> None:
    for name, value, low in (("states", states, 1), ("gaussians", gaussians, 1), ("seed", seed, 0)):
        if value is not None and value < low:
            raise ArgumentError(f"{name} must be at least {low}, got {value}")
    if not 1 <= lm_order <= MAX_ORDER:
        raise ArgumentError(f"lm_order must be from 1 to {MAX_ORDER}, got {lm_order}")


def default_states(train_s: float, triphone_states: int) -> int:
    """Return the leaves wanted: one for 20 distinct triphone states seen, if there are 2 s of speech for each.

    The first bound is for corpora with few words, which have little to tie: AN4, with 38 minutes and 100 words, does
    not gain from more leaves than a single voice's prompts of 12 minutes.

    >>> default_states(2271, 4716), default_states(701, 6402), default_states(100, 3000)
    (235, 320, 100)
    """
    return max(min(triphone_states // TRIPHONE_STATES_PER_LEAF, int(train_s / SECONDS_PER_LEAF)), FEWEST_STATES)


def default_gaussians(states: int, train_frames: int) -> int:
    """Return the Gaussians wanted: eight a state, if there are 75 frames for each."""
    return min(GAUSSIANS_PER_STATE * states, train_frames // FRAMES_PER_GAUSSIAN)


@dataclass
class _Job:
    """One alignment: its corpus, its folder, and the seconds of each step."""

    data: PreparedData
    folder: Path
    seed: int
    progress: Progress
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        self.seconds[name] = round(time.monotonic() - start, 2)

    def run(self, states: int | None, gaussians: int | None, lm_order: int) -> Json:
        """Do all steps; the closing file comes last."""
        symbols = Symbols.of_lexicon(self.data.lexicon)
        symbols.write_phones(self.folder / PHONES_NAME)
        symbols.write_words(self.folder / WORDS_NAME)
        lexicon, _ = lexicon_fst(self.data.lexicon, symbols, disambiguate=False)
        train = self.data.split("train")
        model = self._train(train, symbols, lexicon, states, gaussians)
        with self.step("alignment"):
            failed = self._align_all(model, symbols, lexicon)
        with self.step("language_model"):
            sentences = [utterance.words for utterance in train]
            train_language_model(sentences, self.data.lexicon, order=lm_order, path=self.folder / LM_NAME)
        with self.step("graph"):
            grammar = grammar_fst(self.folder / LM_NAME, self.folder / WORDS_NAME)
            graph = decoding_graph(model.hmm, self.data.lexicon, symbols, grammar)
            write_graph(graph, self.folder / GRAPH_NAME)
        self.progress(f"decoding graph: {graph.num_states} states, {len(self.data.lexicon)} words")
        with self.step("decoding"):
            scale, errors = self._try_out(model.mixtures, Decoder(graph, symbols.words, beam=GMM_BEAM))
        result = record(
            "align",
            corpus=self.data.corpus,
            data_sha256=self.data.sha256,
            seed=self.seed,
            phones=len(symbols.phones) - 1,
            states=model.hmm.tree.states,
            gaussians=model.mixtures.gaussians,
            aligned=len(self.data.utterances) - len(failed),
            failed=failed,
            gmm_wer=None if errors is None else errors.to_json(),
            gmm_scale=scale,
            lm_order=lm_order,
            graph_states=graph.num_states,
            seconds={**self.seconds, "total": round(sum(self.seconds.values()), 2)},
            out=str(self.folder),
        )
        write_json(self.folder / ALIGN_NAME, result)
        return result

    def _transcribed(self, utterances: Sequence[Utterance], symbols: Symbols) -> Transcribed:
        """Return features and word numbers; utterances with a word that the lexicon lacks are left out."""
        known = [u for u in utterances if all(word in self.data.lexicon for word in u.words)]
        return Transcribed(
            [u.id for u in known],
            [np.ascontiguousarray(self.data.frames_of(u, self.data.mfcc)) for u in known],
            [[symbols.word_numbers[word] for word in u.words] for u in known],
        )

    def _train(
        self, train: list[Utterance], symbols: Symbols, lexicon: Fst, states: int | None, gaussians: int | None
    ) -> GmmHmm:
        spoken = self._transcribed(train, symbols)
        phones = len(symbols.phones) - 1
        with self.step("monophones"):
            monophones, stats = train_monophones(spoken, lexicon, phones, seed=self.seed, progress=self.progress)
        if states is None:
            states = default_states(sum(utterance.duration_s for utterance in train), len(stats.keys_N4))
        if gaussians is None:
            gaussians = default_gaussians(states, sum(utterance.frames for utterance in train))
        with self.step("triphones"):
            return train_triphones(
                spoken,
                lexicon,
                monophones,
                stats,
                states=states,
                gaussians=gaussians,
                seed=self.seed,
                progress=self.progress,
            )

    def _align_all(self, model: GmmHmm, symbols: Symbols, lexicon: Fst) -> list[str]:
        """Align every utterance of every split, write states and priors, and return the ids that failed."""
        utterances = {u.id: u for u in self.data.utterances}
        spoken = self._transcribed(self.data.utterances, symbols)
        pdf_T = np.full(self.data.frames, NOT_ALIGNED, np.int32)
        failed = set(utterances) - set(spoken.ids)
        for name, row in zip(spoken.ids, Aligner(model.hmm, lexicon, spoken).align(model.mixtures), strict=True):
            if row is None:
                failed.add(name)
            else:
                self.data.frames_of(utterances[name], pdf_T)[:] = model.hmm.state_of_transition[row]
        names = [u.id for u in self.data.utterances if u.id in failed]
        self._check_failures(names)
        _write_states(self.folder, pdf_T, model.hmm, symbols)
        counts = np.zeros(model.hmm.tree.states)
        for utterance in self.data.split("train"):
            states_T = self.data.frames_of(utterance, pdf_T)
            counts += np.bincount(states_T[states_T >= 0], minlength=len(counts))
        # One more frame each: a state unseen after the last pass would have a prior of minus infinity.
        priors_S = np.log((counts + 1) / (counts + 1).sum())
        np.save(self.folder / PRIORS_NAME, priors_S.astype(np.float32))
        return names

    def _check_failures(self, failed: list[str]) -> None:
        if not failed:
            return
        named = ", ".join(failed[:FAILED_NAMED]) + (", ..." if len(failed) > FAILED_NAMED else "")
        text = f"{len(failed)} of {len(self.data.utterances)} utterances cannot be aligned ({named})"
        if len(failed) > FAILED_SHARE_ALLOWED * len(self.data.utterances):
            raise DataError(
                f"{self.data.folder}: {text}; at most {FAILED_SHARE_ALLOWED:.0%} may fail: check that"
                " the transcripts are those of the recordings and that the lexicon has their words"
            )
        self.progress(text)

    def _try_out(self, mixtures: Mixtures, decoder: Decoder) -> tuple[float, WordErrors | None]:
        """Choose the acoustic scale on dev and return it with the errors on test; without a test split, no errors."""
        no_priors_S = np.zeros(mixtures.states, np.float32)
        scale = GMM_SCALES[0]
        dev = self._split("dev")
        if dev:
            scores = {u.id: mixtures.log_likelihood(self.data.frames_of(u, self.data.mfcc)) for u in dev}
            references = {u.id: u.words for u in dev}
            choice = choose_scale(
                decoder,
                scores,
                references,
                no_priors_S,
                scales=GMM_SCALES,
                prior_weights=(0.0,),
                progress=self.progress,
            )
            scale = choice.scale
        test = self._split("test")
        if not test:
            return scale, None
        found = [
            decoder.decode(np.float32(scale) * mixtures.log_likelihood(self.data.frames_of(u, self.data.mfcc)))
            for u in test
        ]
        return scale, score([u.words for u in test], found)

    def _split(self, name: str) -> list[Utterance]:
        return [utterance for utterance in self.data.utterances if utterance.split == name]


def _write_states(folder: Path, pdf_T: npt.NDArray[np.int32], hmm: Hmm, symbols: Symbols) -> None:
    """Write the state and the phone of each frame, and the phone and position of each state."""
    phone_T = np.where(pdf_T >= 0, hmm.tree.phone_S[pdf_T], NOT_ALIGNED).astype(np.int16)
    np.save(folder / PDF_NAME, pdf_T)
    np.save(folder / PHONE_NAME, phone_T)
    owners = zip(hmm.tree.phone_S.tolist(), hmm.tree.position_S.tolist(), strict=True)
    write_text(folder / STATES_NAME, "".join(f"{symbols.phones[phone]} {position}\n" for phone, position in owners))
