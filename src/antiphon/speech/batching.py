"""Non-overlapping subsequences of utterances: the samples that training draws its batches from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

IGNORED = -100
"""The target of frames that do not count: padding, and frames that could not be aligned."""


class Subsequences:
    """The utterances of a split, cut into pieces of ``length`` frames; a sample is one piece.

    Where the cuts fall is drawn anew for each utterance and epoch, so that no frame always stands at an edge; the
    number of samples is the same in every epoch.

    Args:
        features_TF: features of all utterances of the corpus, float32; a memory map will do.
        targets_T: states of all frames, -1 where there is none.
        spans: (first frame, frames) of each utterance of the split.
        length: frames of one sample.
        seed: of the cuts; None cuts every utterance at its first frame.
    """

    def __init__(
        self,
        features_TF: NDArray[np.float32],
        targets_T: NDArray[np.int32],
        spans: Sequence[tuple[int, int]],
        length: int = 21,
        seed: int | None = None,
    ) -> None:
        self.features_TF, self.targets_T, self.length, self.seed = features_TF, targets_T, length, seed
        first, frames = np.array(spans, np.int64).reshape(-1, 2).T
        pieces = -(-(frames + (0 if seed is None else length - 1)) // length)
        self._utterance = np.repeat(np.arange(len(pieces)), pieces)
        self._piece = np.arange(len(self._utterance)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        self._first, self._frames = first, frames
        self.frames = int(frames.sum())

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._piece)

    def batch(self, samples: Sequence[int], epoch: int = 0) -> tuple[Tensor, Tensor]:
        """Return features [B, T, F] and targets [B, T]; frames outside the utterance are its edge's, and ignored."""
        utterance_B, piece_B = self._utterance[samples], self._piece[samples]
        offset_B = self._offsets(epoch)[utterance_B]
        place_BT = (piece_B * self.length - offset_B)[:, None] + np.arange(self.length)
        frames_B1 = self._frames[utterance_B][:, None]
        inside_BT = (place_BT >= 0) & (place_BT < frames_B1)
        row_BT = self._first[utterance_B][:, None] + place_BT.clip(0, frames_B1 - 1)
        targets_BT = np.where(inside_BT & (self.targets_T[row_BT] >= 0), self.targets_T[row_BT], IGNORED)
        return torch.from_numpy(self.features_TF[row_BT]), torch.from_numpy(targets_BT.astype(np.int64))

    def _offsets(self, epoch: int) -> NDArray[np.int64]:
        if self.seed is None:
            return np.zeros(len(self._first), np.int64)
        return np.random.default_rng([self.seed, epoch]).integers(0, self.length, len(self._first))
