"""The acoustic model of arXiv 2110.11199: bidirectional LSTM, linear bottleneck, softmax over HMM states."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from antiphon.config import ModelConfig, model_named


class LstmAcousticModel(nn.Module):
    """Frames in, unnormalised log-probabilities of the states out.

    Args:
        config: layers, cells (both directions together), bottleneck, dropout between layers.
        features: F.
        states: S.

    >>> model = LstmAcousticModel(ModelConfig(layers=1, cells=8, bottleneck=4), features=120, states=30)
    >>> model(torch.zeros(2, 21, 120)).shape
    torch.Size([2, 21, 30])
    """

    def __init__(self, config: ModelConfig, features: int, states: int) -> None:
        super().__init__()
        self.config = config
        self.lstm = nn.LSTM(
            features,
            config.cells // 2,
            config.layers,
            batch_first=True,
            bidirectional=True,
            dropout=config.dropout if config.layers > 1 else 0.0,
        )
        self.dropout = nn.Dropout(config.dropout)
        self.bottleneck = nn.Linear(config.cells, config.bottleneck)
        self.output = nn.Linear(config.bottleneck, states)

    def forward(self, features_BTF: Tensor) -> Tensor:
        """Return logits [B, T, S] of features [B, T, F]."""
        hidden_BTH, _ = self.lstm(features_BTF)
        return cast(Tensor, self.output(self.bottleneck(self.dropout(hidden_BTH))))


def build_model(name: str | ModelConfig, features: int, states: int) -> LstmAcousticModel:
    """Return an acoustic model by the name of its preset, or by its configuration.

    ``swb-lstm`` is the paper's: 6 layers of 1,024 cells, bottleneck 256; with 260 features and 32,000 states it has
    43.15 M parameters.

    >>> sum(p.numel() for p in build_model("swb-lstm", features=260, states=32_000).parameters()) / 1e6
    43.154944
    """
    config = model_named(name) if isinstance(name, str) else name
    return LstmAcousticModel(config, features, states)


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
