"""The acoustic model's size and presets, and posteriors averaged over windows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from antiphon.errors import ArgumentError
from antiphon.speech.model import LstmAcousticModel, build_model, log_posteriors, preset


def test_the_model_of_the_paper_has_the_size_of_the_paper() -> None:
    # arXiv 2110.11199: 6 layers of 1,024 cells, a bottleneck of 256, 32,000 states: 43 M parameters.
    with torch.device("meta"):
        model = build_model("swb-lstm", 260, 32_000)
    assert sum(parameter.numel() for parameter in model.parameters()) == 43_154_944


def test_parameters_by_hand() -> None:
    model = LstmAcousticModel(features=5, states=11, layers=2, cells=8, bottleneck=3, dropout=0.1)
    lstm = 2 * 4 * 4 * (5 + 4 + 2) + 2 * 4 * 4 * (8 + 4 + 2)
    assert sum(parameter.numel() for parameter in model.parameters()) == lstm + (8 * 3 + 3) + (3 * 11 + 11)


def test_a_misspelt_preset_gets_the_nearest() -> None:
    with pytest.raises(ArgumentError, match="unknown model 'swb-lstn': did you mean 'swb-lstm'"):
        preset("swb-lstn")


def test_dropout_is_for_training_alone() -> None:
    torch.manual_seed(0)
    model = LstmAcousticModel(features=4, states=6, layers=1, cells=8, bottleneck=5, dropout=0.5)
    x_BTF = torch.randn(2, 9, 4)
    assert not torch.equal(model(x_BTF), model(x_BTF))
    model.eval()
    assert torch.equal(model(x_BTF), model(x_BTF))


class ByPlace(nn.Module):
    """Logits that depend on the frame and on its place in the window: state = feature, weighed by the place."""

    def __init__(self, states: int = 3) -> None:
        super().__init__()
        self.states = states

    def forward(self, x_BTF: Tensor) -> Tensor:
        place_T = torch.arange(x_BTF.shape[1], dtype=torch.float32)
        return x_BTF[..., : self.states] * (1 + place_T[None, :, None] / 10)


def averaged(model: nn.Module, x_TF: Tensor, window: int, hop: int) -> Tensor:
    """Average window by window, as the docstring tells it, with no cleverness."""
    frames = len(x_TF)
    sum_TS, seen_T = torch.zeros(frames, model(x_TF[None])[0].shape[-1]), torch.zeros(frames)
    for begin in range(-(window - hop), frames, hop):
        rows = [min(max(row, 0), frames - 1) for row in range(begin, begin + window)]
        posteriors_TS = model(x_TF[rows][None])[0].softmax(-1)
        for place, row in enumerate(range(begin, begin + window)):
            if 0 <= row < frames:
                sum_TS[row] += posteriors_TS[place]
                seen_T[row] += 1
    assert bool((seen_T == window / hop).all())
    return (sum_TS / seen_T[:, None]).log()


@pytest.mark.parametrize("frames", [1, 2, 6, 7, 8, 20, 21, 22, 100])
@pytest.mark.parametrize(("window", "hop"), [(21, 7), (6, 3), (4, 4), (5, 1)])
def test_posteriors_are_the_mean_over_windows(frames: int, window: int, hop: int) -> None:
    x_TF = torch.randn(frames, 3, generator=torch.Generator().manual_seed(frames))
    found_TS = log_posteriors(ByPlace(), x_TF, window, hop)
    assert found_TS.shape == (frames, 3)
    assert torch.allclose(found_TS, averaged(ByPlace(), x_TF, window, hop), atol=1e-5)
    assert torch.allclose(found_TS.exp().sum(1), torch.ones(frames), atol=1e-5)


@pytest.mark.parametrize("frames", [1, 5, 21, 40])
def test_of_the_lstm_too(frames: int) -> None:
    torch.manual_seed(0)
    model = LstmAcousticModel(features=4, states=6, layers=2, cells=8, bottleneck=5).eval()
    x_TF = torch.randn(frames, 4)
    assert torch.allclose(log_posteriors(model, x_TF), averaged(model, x_TF, 21, 7), atol=1e-5)


def test_one_window_is_the_model_itself() -> None:
    torch.manual_seed(0)
    model = LstmAcousticModel(features=4, states=6, layers=1, cells=8, bottleneck=5).eval()
    x_TF = torch.randn(21, 4)
    assert torch.allclose(log_posteriors(model, x_TF, window=21, hop=21), model(x_TF[None])[0].log_softmax(-1))


def test_posteriors_of_nought_stay_finite() -> None:
    x_TF = torch.tensor([[1000.0, 0.0, 0.0]])
    assert bool(torch.isfinite(log_posteriors(ByPlace(), x_TF)).all())
