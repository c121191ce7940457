"""The acoustic model of arXiv 2110.11199: bidirectional LSTM, linear bottleneck, softmax over HMM states."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from antiphon.errors import unknown_name

PRESETS: dict[str, dict[str, float]] = {
    "small": {"layers": 2, "cells": 256, "bottleneck": 128, "dropout": 0.2},
    # 6 x 1,024 cells, bottleneck 256: the Switchboard model of arXiv 2110.11199.
    "swb-lstm": {"layers": 6, "cells": 1024, "bottleneck": 256, "dropout": 0.0},
}
"""Sizes by name; cells count both directions, as the paper does: 1,024 cells are 512 a direction."""


class LstmAcousticModel(nn.Module):
    """Frames in, unnormalised log-probabilities of the states out.

    Args:
        features: F.
        states: S.
        layers: bidirectional LSTM layers.
        cells: of a layer, both directions together.
        bottleneck: width of the linear layer before the softmax.
        dropout: between the layers, and before the bottleneck.

    >>> model = LstmAcousticModel(features=120, states=30, layers=1, cells=8, bottleneck=4)
    >>> model(torch.zeros(2, 21, 120)).shape
    torch.Size([2, 21, 30])
    """

    def __init__(
        self, features: int, states: int, *, layers: int, cells: int, bottleneck: int, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.lstm = nn.LSTM(
            features,
            cells // 2,
            layers,
            batch_first=True,
            bidirectional=True,
            dropout=dropout if layers > 1 else 0.0,
        )
        self.dropout = nn.Dropout(dropout)
        self.bottleneck = nn.Linear(cells, bottleneck)
        self.output = nn.Linear(bottleneck, states)

    def forward(self, features_BTF: Tensor) -> Tensor:
        """Return logits [B, T, S] of features [B, T, F]."""
        hidden_BTH, _ = self.lstm(features_BTF)
        return cast(Tensor, self.output(self.bottleneck(self.dropout(hidden_BTH))))


def build_model(name: str, features: int, states: int) -> LstmAcousticModel:
    """Return an acoustic model by the name of its preset.

    ``swb-lstm`` is the paper's: 6 layers of 1,024 cells, bottleneck 256; with 260 features and 32,000 states it has
    43.15 M parameters.

    Raises:
        ArgumentError: there is no preset of that name; the nearest is offered.

    >>> sum(p.numel() for p in build_model("swb-lstm", features=260, states=32_000).parameters()) / 1e6
    43.154944
    """
    return LstmAcousticModel(features, states, **preset(name))  # type: ignore[arg-type]


def preset(name: str) -> dict[str, float]:
    """Return the sizes of a preset.

    Raises:
        ArgumentError: there is none of that name; the nearest is offered.
    """
    if name not in PRESETS:
        raise unknown_name("model", name, PRESETS)
    return PRESETS[name]


@torch.no_grad()
def log_posteriors(model: nn.Module, features_TF: Tensor, window: int = 21, hop: int = 7) -> Tensor:
    """Return log-posteriors [T, S]: posteriors of overlapping windows, as long as in training, averaged.

    Each frame is seen by window / hop windows; at the ends the first and the last frame are repeated.
    """
    frames = len(features_TF)
    margin = window - hop
    length = -(-(frames + margin) // hop) * hop + margin
    rows_T = torch.arange(-margin, length - margin).clamp(0, frames - 1)
    windows_BTF = features_TF[rows_T].unfold(0, window, hop).transpose(1, 2)
    posteriors_BTS = model(windows_BTF).softmax(-1)
    states = posteriors_BTS.shape[-1]
    sum_TS = torch.zeros(length, states)
    for number, window_TS in enumerate(posteriors_BTS):
        sum_TS[number * hop : number * hop + window] += window_TS
    middle_TS = sum_TS[margin : margin + frames] * (hop / window)
    return middle_TS.clamp(min=1e-10).log()
