"""`antiphon decode`: words from a trained run, their error rate, and the files that scoring tools read."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from antiphon.errors import ArgumentError, DataError, FolderError
from antiphon.recipes.acoustics import MODEL_NAME, Acoustics
from antiphon.records import CONFIG_NAME, SUMMARY_NAME, FolderLock, Json, read_json, record, write_json, write_text
from antiphon.speech.decoding import Decoder, Scores, choose_scale, scaled
from antiphon.speech.manifest import SPLITS, Utterance
from antiphon.speech.model import LstmAcousticModel, log_posteriors
from antiphon.speech.scoring import score, wer_line, write_trn
from antiphon.training import checkpoint

WER_NAME = "wer.json"
SCALES = (0.1, 0.07, 0.15, 0.2)
PRIOR_WEIGHTS = (1.0, 0.7, 0.4)


def decode(
    run: Path,
    split: str = "test",
    *,
    scale: float | None = None,
    prior_weight: float | None = None,
    beam: float = 13.0,
    max_active: int = 5000,
    progress: Callable[[str], None] = lambda line: None,
) -> Json:
    """Decode a split with a run's consensus model, score it, and write ``RUN/decode/SPLIT``.

    The scores are scale x (log posterior - weight x log prior); both numbers are chosen on dev unless given.

    Args:
        run: what `antiphon train` wrote.
        split: ``train``, ``dev`` or ``test``.
        scale: acoustic scale.
        prior_weight: weight of the log priors.
        beam: of the search.
        max_active: states kept a frame.
        progress: takes a line a step.

    Returns:
        What ``wer.json`` holds; for the test split the run's ``summary.json`` holds the error rate too.

    Raises:
        ArgumentError: an unknown split, a number outside its bounds, or one of scale and weight without the other.
        FolderError: the run is not whole, or its data has changed.
    """
    if split not in SPLITS:
        raise ArgumentError(f"split must be one of {', '.join(SPLITS)}, not '{split}'")
    if (scale is None) != (prior_weight is None):
        raise ArgumentError("give both --scale and --prior-weight, or neither: they are chosen on dev together")
    if scale is not None and not 0 < scale < math.inf:
        raise ArgumentError(f"scale must be above 0 and finite, not {scale}")
    if prior_weight is not None and not 0 <= prior_weight < math.inf:
        raise ArgumentError(f"prior_weight must be at least 0 and finite, not {prior_weight}")
    acoustics = Acoustics.of_run(run)
    utterances = acoustics.data.split(split)
    with FolderLock(run):
        return _decode(run, split, acoustics, utterances, (scale, prior_weight), (beam, max_active), progress)


def _decode(
    run: Path,
    split: str,
    acoustics: Acoustics,
    utterances: Sequence[Utterance],
    weights: tuple[float | None, float | None],
    search: tuple[float, int],
    progress: Callable[[str], None],
) -> Json:
    model = load_model(run, acoustics)
    _summary(run)
    decoder = Decoder.open(acoustics.alignment.graph, acoustics.alignment.words, beam=search[0], max_active=search[1])
    log_priors_S = acoustics.alignment.log_priors_S
    scale, prior_weight = weights
    table: list[Json] = []
    if scale is None or prior_weight is None:
        dev = acoustics.data.split("dev")
        choice = choose_scale(
            decoder,
            {u.id: posteriors(model, acoustics, u) for u in dev},
            {u.id: u.words for u in dev},
            log_priors_S,
            scales=SCALES,
            prior_weights=PRIOR_WEIGHTS,
            progress=lambda line: progress(f"on dev: {line}"),
        )
        scale, prior_weight, table = choice.scale, choice.prior_weight, choice.table
    began = time.perf_counter()
    found = [
        decoder.search(scaled(posteriors(model, acoustics, u), log_priors_S, scale, prior_weight)) for u in utterances
    ]
    seconds = time.perf_counter() - began
    errors = score([u.words for u in utterances], [path.words for path in found])
    folder = run / "decode" / split
    folder.mkdir(parents=True, exist_ok=True)
    ids = [u.id for u in utterances]
    write_trn(folder / "hyp.trn", ids, [path.words for path in found])
    write_trn(folder / "ref.trn", ids, [u.words for u in utterances])
    write_text(folder / "wer.txt", wer_line(errors) + "\n")
    result = record(
        "decode",
        split=split,
        wer=errors.to_json(),
        gmm_wer=acoustics.alignment.info["gmm_wer"] if split == "test" else None,
        scale=scale,
        prior_weight=prior_weight,
        chosen_on_dev=table,
        beam=search[0],
        max_active=search[1],
        without_path=[u.id for u, path in zip(utterances, found, strict=True) if not path.found],
        real_time_factor=seconds / sum(u.duration_s for u in utterances),
        decode_s=seconds,
        out=str(folder),
    )
    write_json(folder / WER_NAME, result)
    if split == "test":
        write_json(run / SUMMARY_NAME, {**_summary(run), "wer": errors.to_json()})
    return result


def load_model(run: Path, acoustics: Acoustics) -> LstmAcousticModel:
    """Return the run's consensus model, ready to be evaluated.

    Raises:
        FolderError: training has not come to its end, or the model's file is broken.
    """
    path = run / MODEL_NAME
    if not (run / SUMMARY_NAME).is_file():
        raise FolderError(f"{run} was not trained to its end (no {SUMMARY_NAME}): go on with `antiphon train --resume`")
    model = acoustics.model()
    state = checkpoint.load(path)
    try:
        model.load_state_dict(state)
    except (RuntimeError, TypeError):
        raise FolderError(f"{path} holds other weights than {run / CONFIG_NAME} describes: train again") from None
    return model.eval()


def posteriors(model: LstmAcousticModel, acoustics: Acoustics, utterance: Utterance) -> Scores:
    """Return the log-posteriors [T, S] of one utterance."""
    features_TF = torch.from_numpy(np.array(acoustics.data.frames_of(utterance, acoustics.data.fbank)))
    scores_TS: Scores = log_posteriors(model, features_TF, acoustics.config.subsequence_frames).numpy()
    return scores_TS


def _summary(run: Path) -> Json:
    try:
        return read_json(run / SUMMARY_NAME)
    except DataError as error:
        raise FolderError(str(error)) from None
