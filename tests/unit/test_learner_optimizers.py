"""Whatever the optimizer and the precision: a learner alone is the ordinary loop, to the bit where that is float32."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn, optim

import antiphon
from antiphon.errors import ArgumentError

OPTIMIZERS = {
    "SGD": lambda p, **more: optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01, **more),
    "Adam": lambda p, **more: optim.Adam(p, lr=0.01, amsgrad=True, **more),
    "AdamW": lambda p, **more: optim.AdamW(p, lr=0.01, **more),
    "RMSprop": lambda p, **more: optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True, **more),
    "Adagrad": lambda p, **more: optim.Adagrad(p, lr=0.05, **more),
    "Adadelta": lambda p, **more: optim.Adadelta(p, **more),
    "NAdam": lambda p, **more: optim.NAdam(p, **more),
    "RAdam": lambda p, **more: optim.RAdam(p, **more),
    "Rprop": lambda p, **more: optim.Rprop(p, **more),
    "ASGD": lambda p, **more: optim.ASGD(p, **more),
    "Adamax": lambda p, **more: optim.Adamax(p, **more),
    "Adafactor": lambda p, **more: optim.Adafactor(p, **more),
}
FOREACH = [name for name in OPTIMIZERS if name != "Adafactor"]
CASES = [(name, {}) for name in OPTIMIZERS]
CASES += [(name, {"foreach": foreach}) for name in FOREACH for foreach in (False, True)]
CASES += [(name, {"fused": True}) for name in ("SGD", "Adam", "AdamW", "Adagrad")]


def build(seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)


def batch(k, dtype=torch.float32):
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(k)).to(dtype)


def loss_of(model, k):
    inputs = batch(k, next(model.parameters()).dtype)
    return (model(inputs) - inputs[:, :3]).float().square().mean()


def loop(model, optimizer, steps=5):
    for k in range(steps):
        optimizer.zero_grad()
        loss_of(model, k).backward()
        optimizer.step()


def learn(learner, steps=5):
    for k in range(steps):
        with learner.step():
            learner.optimizer.zero_grad()
            loss_of(learner.model, k).backward()
            learner.optimizer.step()


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize(("name", "more"), CASES, ids=lambda value: str(value))
def test_every_optimizer_is_itself(name, more):
    model, plain = build(), build()
    learner = antiphon.Learner(model, OPTIMIZERS[name](model.parameters(), **more))
    learn(learner)
    loop(plain, OPTIMIZERS[name](plain.parameters(), **more))
    state = learner.consensus()
    learner.close()
    assert same(state, plain.state_dict())
    assert same(model.state_dict(), plain.state_dict())


def test_muon_and_parameter_groups():
    def make(model):
        matrices = [p for p in model.parameters() if p.ndim == 2]
        return optim.Muon(matrices, lr=0.01)

    model, plain = build(), build()
    learner = antiphon.Learner(model, make(model))
    learn(learner)
    learner.close()
    loop(plain, make(plain))
    assert same(model.state_dict(), plain.state_dict())


def test_sparse_adam():
    def make():
        torch.manual_seed(0)
        return nn.Embedding(10, 3, sparse=True)

    def step(model, optimizer):
        optimizer.zero_grad()
        model(torch.tensor([1, 3, 3])).square().sum().backward()
        optimizer.step()

    model, plain = make(), make()
    learner = antiphon.Learner(model, optim.SparseAdam(model.parameters(), lr=0.1))
    other = optim.SparseAdam(plain.parameters(), lr=0.1)
    for _ in range(3):
        with learner.step():
            step(model, learner.optimizer)
        step(plain, other)
    learner.close()
    assert same(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_low_precision_is_the_loop_with_float32_masters(name, dtype):
    """The reference keeps a float32 model by hand, and rounds it for each gradient."""
    model, plain, masters = build(dtype=dtype), build(dtype=dtype), build(dtype=dtype).float()
    learner = antiphon.Learner(model, OPTIMIZERS[name](model.parameters()))
    learn(learner)
    optimizer = OPTIMIZERS[name](masters.parameters())
    for k in range(5):
        plain.load_state_dict(masters.state_dict())
        plain.zero_grad()
        loss_of(plain, k).backward()
        for master, parameter in zip(masters.parameters(), plain.parameters(), strict=True):
            master.grad = parameter.grad.float()
        optimizer.step()
    plain.load_state_dict(masters.state_dict())
    whole_N = torch.cat([p.detach().reshape(-1) for p in masters.parameters()])
    assert torch.equal(learner.weights.w_N, whole_N)
    assert same(learner.consensus(), plain.state_dict())
    learner.close()
    assert same(model.state_dict(), plain.state_dict())


def test_steps_too_small_for_bfloat16_are_not_lost():
    """1 - 2^-12 is 1 in bfloat16: by itself the parameter would never move."""
    model = nn.Linear(1, 1, bias=False).bfloat16()
    nn.init.ones_(model.weight)
    learner = antiphon.Learner(model, optim.SGD(model.parameters(), lr=2.0**-12))
    for _ in range(64):
        with learner.step():
            learner.optimizer.zero_grad()
            model(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()
            learner.optimizer.step()
    assert float(learner.weights.w_N) == 1 - 64 * 2.0**-12
    assert model.weight.item() == float(torch.tensor(1 - 64 * 2.0**-12).bfloat16()) < 1
    learner.close()


def test_between_steps_the_optimizer_has_the_models_own_parameters():
    """So zero_grad, clipping by the optimizer's groups, and the state's keys mean what they say."""
    model = build(dtype=torch.bfloat16)
    learner = antiphon.Learner(model, OPTIMIZERS["Adam"](model.parameters()))
    learn(learner, steps=2)
    held = [p for group in learner.optimizer.param_groups for p in group["params"]]
    assert all(a is b for a, b in itertools.zip_longest(held, model.parameters()))
    assert list(learner.optimizer.state) == held
    assert {value["exp_avg"].dtype for value in learner.optimizer.state.values()} == {torch.float32}
    learner.optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    learner.close()


def test_a_state_made_before_is_carried_over():
    model, other = build(dtype=torch.bfloat16), build(dtype=torch.bfloat16)
    optimizer = OPTIMIZERS["Adam"](model.parameters())
    loop(model, optimizer)
    saved, weights = optimizer.state_dict(), {k: v.clone() for k, v in model.state_dict().items()}
    other.load_state_dict(weights)
    optimizer = OPTIMIZERS["Adam"](other.parameters())
    optimizer.load_state_dict(saved)
    learner = antiphon.Learner(other, optimizer)
    learn(learner, steps=1)
    assert {int(state["step"]) for state in optimizer.state.values()} == {6}
    learner.close()


def test_frozen_tied_and_mixed_precision_together():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4).bfloat16()
            self.third = nn.Linear(4, 4, bias=False)
            self.third.weight = self.first.weight
            self.second.bias.requires_grad_(False)

        def forward(self, inputs):
            return self.third(self.second(self.first(inputs).bfloat16()).float())

    torch.manual_seed(0)
    model = Mixed()
    frozen = model.second.bias.clone()
    learner = antiphon.Learner(model, OPTIMIZERS["SGD"](model.parameters()))
    assert learner.weights.w_N.numel() == 32
    before_N = learner.weights.w_N.clone()
    with learner.step():
        model(batch(0)).square().mean().backward()
        learner.optimizer.step()
    assert bool((learner.weights.w_N != before_N).any())
    assert model.first.weight is model.third.weight
    state = learner.consensus()
    assert state["first.weight"].dtype == torch.float32 and state["second.weight"].dtype == torch.bfloat16
    assert torch.equal(state["first.weight"], state["third.weight"])
    assert torch.equal(state["second.bias"], frozen)
    learner.close()


def test_what_would_not_be_exchanged_is_refused():
    model, other = build(), build(1)
    with pytest.raises(ArgumentError, match=r"shape \(7, 4\) that is not the model's"):
        antiphon.Learner(model, optim.SGD([*model.parameters(), *other.parameters()], lr=0.1))
    with pytest.raises(ArgumentError, match=r"parameter 0.weight is in two optimizers"):
        antiphon.Learner(model, [optim.SGD(model.parameters(), lr=0.1) for _ in range(2)])
    with pytest.raises(ArgumentError, match="not an empty list"):
        antiphon.Learner(model, [])
    model[0].weight.requires_grad_(False)
    learner = antiphon.Learner(model, optim.SGD(model.parameters(), lr=0.1))
    model[0].weight.requires_grad_(True)
    with pytest.raises(ArgumentError, match="was frozen when the Learner was made"):
        learn(learner, steps=1)
    learner.close()
