"""What training, decoding and the learners share: a run's data, model and samples, found by its folder."""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from antiphon.config import TrainConfig
from antiphon.errors import DataError, FolderError
from antiphon.records import CONFIG_NAME, Json, read_json
from antiphon.speech.alignment import Alignment, load_alignment
from antiphon.speech.batching import Subsequences
from antiphon.speech.manifest import FBANK_DIM, PreparedData
from antiphon.speech.model import LstmAcousticModel

MODEL_NAME = "model.pt"


@dataclass(frozen=True)
class Acoustics:
    """A run's settings, the data it learns from and that data's alignment."""

    config: TrainConfig
    data: PreparedData
    alignment: Alignment

    @classmethod
    def of_run(cls, run: Path) -> Acoustics:
        """Read what ``config.json`` of a run names.

        Raises:
            FolderError: it is not a run, or its data is gone or has changed.
        """
        if not (run / CONFIG_NAME).is_file():
            raise FolderError(f"{run} is not a run (no {CONFIG_NAME}): name a folder that `antiphon train` wrote")
        try:
            row = read_json(run / CONFIG_NAME)
            config, data, align = TrainConfig.from_json(row["train"]), Path(row["data"]), Path(row["align"])
            data_sha256, alignment_sha256 = row["data_sha256"], row["alignment_sha256"]
        except (DataError, KeyError, TypeError, ValueError, AttributeError) as error:
            reason = f"no {error}" if isinstance(error, KeyError) else error
            raise FolderError(
                f"{run / CONFIG_NAME} does not hold a run's settings ({reason}): train again with --overwrite"
            ) from None
        acoustics = cls.of_data(config, data, align)
        for folder, now, then in (
            (data, acoustics.data.sha256, data_sha256),
            (align, acoustics.alignment_sha256, alignment_sha256),
        ):
            if now != then:
                raise FolderError(f"{folder} has changed since {run} was trained on it: train again")
        return acoustics

    @classmethod
    def of_data(cls, config: TrainConfig, data: Path, align: Path | None = None) -> Acoustics:
        """Open prepared and aligned data.

        Raises:
            FolderError: it is not prepared, not aligned, or aligned before it was prepared anew.
        """
        prepared, alignment = PreparedData(data), load_alignment(data, align)
        if alignment.info["data_sha256"] != prepared.sha256:
            raise FolderError(f"{data} was prepared anew after it was aligned: run `antiphon align {data} --overwrite`")
        return cls(config, prepared, alignment)

    def to_json(self) -> Json:
        """Return what ``config.json`` holds."""
        return {
            "train": self.config.to_json(),
            "data": str(self.data.folder.resolve()),
            "align": str(self.alignment.folder.resolve()),
            "data_sha256": self.data.sha256,
            "alignment_sha256": self.alignment_sha256,
            "features": FBANK_DIM,
            "states": self.alignment.states,
        }

    @property
    def alignment_sha256(self) -> str:
        """Fingerprint of the states of all frames: other states of the same number make nonsense of a model."""
        return hashlib.sha256(np.ascontiguousarray(self.alignment.pdf_T).data).hexdigest()

    def model(self) -> LstmAcousticModel:
        """Build the model; the weights depend on the seed alone."""
        torch.manual_seed(self.config.seed)
        return LstmAcousticModel(FBANK_DIM, self.alignment.states, **dataclasses.asdict(self.config.model))

    def samples(self, split: str) -> Subsequences:
        """Return the samples of a split: cut at random for training, at the first frame elsewhere."""
        seed = self.config.seed if split == "train" else None
        spans = [(utterance.first_frame, utterance.frames) for utterance in self.data.split(split)]
        length = self.config.subsequence_frames
        return Subsequences(self.data.fbank, self.alignment.pdf_T, spans, length, seed)


@torch.no_grad()
def heldout(model: nn.Module, samples: Subsequences, batch: int = 256) -> tuple[float, float]:
    """Return the cross-entropy in nats a frame and the share of frames whose state is found.

    Raises:
        DataError: no frame is aligned.
    """
    model.eval()
    loss = right = frames = 0.0
    for begin in range(0, len(samples), batch):
        features_BTF, targets_BT = samples.batch(range(begin, min(begin + batch, len(samples))))
        logits_NS, targets_N = model(features_BTF).flatten(0, 1), targets_BT.flatten()
        loss += float(nn.functional.cross_entropy(logits_NS, targets_N, reduction="sum"))
        right += float((logits_NS.argmax(1) == targets_N).sum())
        frames += float((targets_N >= 0).sum())
    if not frames:
        raise DataError("no frame of the held-out utterances is aligned: align the corpus again, or split it otherwise")
    return loss / frames, right / frames
