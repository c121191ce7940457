"""Learners on a CUDA device: skipped where there is none. What they do is tested on the CPU too, in test_staged.py."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

import antiphon
from antiphon.learner.lanes import CudaLane
from antiphon.learner.staged import StagedWeights
from antiphon.strategies import STRATEGIES
from antiphon.training.launch import Launch
from antiphon.transport.buffers import Buffers

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
LEARNERS = 4


def build(dtype=torch.float32):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 1)).to("cuda", dtype)


def batch(k, dtype=torch.float32):
    inputs_NF = torch.randn(64, 8, generator=torch.Generator().manual_seed(k)).to("cuda", dtype)
    return inputs_NF, inputs_NF.sum(1, keepdim=True)


def loss_of(model, k, dtype=torch.float32):
    inputs, targets = batch(k, dtype)
    return (model(inputs) - targets).float().square().mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [optim.SGD, optim.Adam])
def test_alone_it_is_the_ordinary_loop(kind, dtype):
    model, plain = build(), build()
    learner = antiphon.Learner(model, kind(model.parameters(), lr=0.01), buffers="average")
    optimizer = kind(plain.parameters(), lr=0.01)
    for k in range(5):
        with learner.step(), torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
            learner.optimizer.zero_grad()
            loss_of(model, k).backward()
            learner.optimizer.step()
        with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
            optimizer.zero_grad()
            loss_of(plain, k).backward()
            optimizer.step()
    state = learner.consensus()
    learner.close()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value)


def test_a_recurrent_layer_stays_in_one_piece():
    """cuDNN says so where it is not."""
    torch.manual_seed(0)
    model = nn.LSTM(8, 16, 2, bidirectional=True).cuda()
    learner = antiphon.Learner(model, optim.SGD(model.parameters(), lr=0.01))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with learner.step():
                model(torch.randn(5, 3, 8, device="cuda"))[0].square().mean().backward()
                learner.optimizer.step()
    learner.close()


def test_copies_are_of_one_moment_while_the_device_is_busy():
    """Every snapshot of weights that are all equal, and change by one a step, has one value only."""
    size = 1 << 22
    device = torch.device("cuda")
    weights = StagedWeights(Buffers.in_process(1, size), 0, device, CudaLane(device))
    work = torch.randn(2048, 2048, device=device)
    for _ in range(50):
        weights.begin_step()
        weights.w_N.add_(1.0)
        weights.end_step()
        handle = weights.take()
        for _ in range(10):
            work = (work @ work).clamp(-1.0, 1.0)
        slot_N = weights.buffers.slots_LSN[0, handle.slot]
        assert float(slot_N.min()) == float(slot_N.max())
        weights.release(handle)
    weights.close()


@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_learners_on_one_card(name, tmp_path):
    """Four learners share the card; the sum of their weights is what the steps made of it."""
    command = [sys.executable, str(Path(__file__)), str(tmp_path), name]
    with Launch(command, LEARNERS, logs=tmp_path) as launch:
        watched = launch.watch(lambda seen: None, every_s=0.05)
    assert watched.faults == [], [str(fault) for fault in watched.faults]
    results = [torch.load(tmp_path / f"learner-{n}.pt", map_location="cpu") for n in range(LEARNERS)]
    weights_LN = torch.stack([each["w_N"] for each in results])
    assert bool(torch.isfinite(weights_LN).all())
    for each in results:
        flat_N = torch.cat([each["consensus"][key].reshape(-1) for key in each["names"]])
        torch.testing.assert_close(flat_N, weights_LN.mean(0))
        assert each["after"] < 0.5 * each["before"]
    if name == "allreduce":
        assert bool((weights_LN == weights_LN[0]).all())


def main(folder: Path, strategy: str) -> None:
    """Be one learner on the card."""
    data, model = TensorDataset(torch.arange(400)), build()
    learner = antiphon.Learner(
        model, optim.SGD(model.parameters(), lr=0.02, momentum=0.9), strategy, buffers="recompute", exchange_every=1
    )
    before = loss_of(model, 1000).item()
    for (which,) in DataLoader(data, batch_sampler=learner.batch_sampler(data, 16, epochs=1)):
        with learner.step():
            learner.optimizer.zero_grad()
            loss_of(model, int(which[0])).backward()
            learner.optimizer.step()
    learner.finish()
    after = loss_of(model, 1000).item()
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    result = {"w_N": learner.weights.w_N, "consensus": learner.consensus(), "names": names}
    torch.save(result | {"before": before, "after": after}, folder / f"learner-{learner.number}.pt")
    learner.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
