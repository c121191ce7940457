"""What one step may be: accumulated, clipped, autocast, skipped by a scaler, by closure, of two optimizers."""

from __future__ import annotations

import pytest
import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

import antiphon
from antiphon.errors import ArgumentError
from antiphon.transport.block import Col


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))


def data(samples=32):
    inputs_NF = torch.randn(samples, 4, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs_NF, inputs_NF.sum(1, keepdim=True))


def sgd(model):
    return optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def alone(model, optimizer=None, **more):
    return antiphon.Learner(model, optimizer or sgd(model), **more)


def equal(model, other):
    return all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def groups(loader, size):
    batches = list(loader)
    return [batches[k : k + size] for k in range(0, len(batches), size)]


def test_several_batches_make_one_step():
    model, plain = build(), build()
    learner, optimizer = alone(model), sgd(plain)
    loader = DataLoader(data(), batch_sampler=learner.batch_sampler(data(), 4))
    for group in groups(loader, 3):
        with learner.step(batches=len(group)):
            learner.optimizer.zero_grad()
            for inputs, targets in group:
                ((model(inputs) - targets).square().mean() / len(group)).backward()
            learner.optimizer.step()
        optimizer.zero_grad()
        for inputs, targets in group:
            ((plain(inputs) - targets).square().mean() / len(group)).backward()
        optimizer.step()
    assert equal(model, plain)
    assert (learner.metrics["steps"], learner.metrics["samples"]) == (3, 32)
    assert all(ticket >= 8 for ticket in learner.block.unfinished())
    assert learner.epoch == pytest.approx(7 / 8)
    learner.close()


@pytest.mark.parametrize("batches", [0, 3])
def test_a_step_cannot_end_batches_that_are_not_in_hand(batches):
    learner = alone(build())
    loader = iter(DataLoader(data(), batch_sampler=learner.batch_sampler(data(), 4)))
    inputs, _ = next(loader)
    with pytest.raises(ArgumentError, match=rf"step\(batches={batches}\)"), learner.step(batches=batches):
        learner.model(inputs).sum().backward()
        learner.optimizer.step()
    learner.close()


@pytest.mark.parametrize("autocast", [False, True])
def test_clipping_and_autocast(autocast):
    model, plain = build(), build()
    learner, optimizer = alone(model), sgd(plain)
    for inputs, targets in DataLoader(data(), batch_size=8):
        with learner.step():
            _backward(model, learner.optimizer, inputs, targets, autocast)
            learner.optimizer.step()
        _backward(plain, optimizer, inputs, targets, autocast)
        optimizer.step()
    assert equal(model, plain)
    learner.close()


def _backward(model, optimizer, inputs, targets, autocast):
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = (model(inputs) - targets).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.1)


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_a_grad_scaler_skips(fused):
    """The second of three overflows: no step is made, the round counts, and the scale is halved."""
    models = [build(), build()]
    optimizers = [optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=fused) for model in models]
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in models]
    learner = alone(models[0], optimizers[0])
    for k, (inputs, _) in enumerate(DataLoader(data(24), batch_size=8)):
        with learner.step():
            _scaled(models[0], optimizers[0], scalers[0], inputs, overflow=k == 1)
        _scaled(models[1], optimizers[1], scalers[1], inputs, overflow=k == 1)
    assert equal(*models)
    assert scalers[0].get_scale() == 512.0
    assert learner.metrics["steps"] == 3 and sum(learner.metrics["staleness"]) == 3
    assert learner.metrics["skipped"] == (0 if fused else 1)
    learner.close()


def _scaled(model, optimizer, scaler, inputs, overflow):
    optimizer.zero_grad()
    scaler.scale(model(inputs).square().mean() * (float("inf") if overflow else 1.0)).backward()
    scaler.step(optimizer)
    scaler.update()


def closure_of(model, optimizer, inputs):
    def closure():
        optimizer.zero_grad()
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        return loss

    return closure


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_closure_evaluated_once(dtype):
    model, plain = build().to(dtype), build().to(dtype)
    learner = alone(model)
    inputs = data()[:8][0].to(dtype)
    values = []
    with learner.step():
        values.append(learner.optimizer.step(closure_of(model, learner.optimizer, inputs)))
    optimizer = sgd(plain)
    values.append(optimizer.step(closure_of(plain, optimizer, inputs)))
    assert torch.equal(*values)
    for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter, other)
    learner.close()


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_lbfgs_is_itself(line_search):
    model, plain = build(), build()
    learner = alone(model, optim.LBFGS(model.parameters(), lr=0.1, line_search_fn=line_search))
    optimizer = optim.LBFGS(plain.parameters(), lr=0.1, line_search_fn=line_search)
    inputs = data()[:16][0]
    for _ in range(2):
        with learner.step():
            learner.optimizer.step(closure_of(model, learner.optimizer, inputs))
        optimizer.step(closure_of(plain, optimizer, inputs))
    assert equal(model, plain)
    learner.close()


def test_lbfgs_in_bfloat16_sees_the_weights_that_it_asks_for():
    """Each later evaluation is at the masters, rounded; with weights that never moved the loss would not fall."""
    model = build().bfloat16()
    learner = alone(model, optim.LBFGS(model.parameters(), lr=0.5, max_iter=10))
    inputs = data()[:16][0].bfloat16()
    seen = []

    def closure():
        learner.optimizer.zero_grad()
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).float().square().mean()
        loss.backward()
        seen.append(loss.item())
        return loss

    with learner.step():
        learner.optimizer.step(closure)
    assert len(seen) > 3 and min(seen[1:]) < 0.5 * seen[0]
    learner.close()


def test_two_optimizers_and_one_of_them_rests():
    models = [build(), build()]
    pairs = [[sgd(model[0]), optim.Adam(model[2].parameters())] for model in models]
    learner = alone(models[0], pairs[0])
    for k, (inputs, _) in enumerate(DataLoader(data(), batch_size=8)):
        with learner.step():
            _step_of_two(models[0], pairs[0], inputs, rest=k == 1)
        _step_of_two(models[1], pairs[1], inputs, rest=k == 1)
    assert equal(*models)
    assert learner.metrics["steps"] == 4 and learner.metrics["skipped"] == 0
    assert learner.block.board_LC[0, Col.STEPS] == 4
    learner.close()


def _step_of_two(model, optimizers, inputs, rest):
    for optimizer in optimizers:
        optimizer.zero_grad()
    model(inputs).square().mean().backward()
    for optimizer in optimizers[: 1 if rest else 2]:
        optimizer.step()


def test_each_optimizer_steps_once_at_most():
    model = build()
    optimizers = [sgd(model[0]), sgd(model[2])]
    learner = alone(model, optimizers)
    model(data()[:4][0]).sum().backward()
    with pytest.raises(ArgumentError, match="must be called once"), learner.step():
        optimizers[1].step()
        optimizers[1].step()
    learner.close()


@pytest.mark.long
def test_a_compiled_model():
    """Compiling takes a C++ compiler and half a minute."""
    model, plain = build(), build()
    compiled = torch.compile(model)
    try:
        compiled(data()[:4][0])
    except Exception as error:
        pytest.skip(f"torch.compile does not work here: {error}")
    learner, optimizer = alone(compiled), sgd(plain)
    for inputs, targets in DataLoader(data(), batch_size=8):
        with learner.step():
            learner.optimizer.zero_grad()
            (compiled(inputs) - targets).square().mean().backward()
            learner.optimizer.step()
        optimizer.zero_grad()
        (plain(inputs) - targets).square().mean().backward()
        optimizer.step()
    for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter, other)
    assert learner.consensus().keys() == compiled.state_dict().keys()
    learner.close()
