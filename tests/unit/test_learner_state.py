"""Buffers and optimizer states: recomputed, each learner's own, or averaged."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import nn, optim

import antiphon
from antiphon.errors import ArgumentError
from antiphon.learner.replica import Replica


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def inputs(k):
    return torch.randn(16, 3, generator=torch.Generator().manual_seed(k)) * (k + 1)


def learn(learner, steps=3):
    for k in range(steps):
        with learner.step():
            learner.optimizer.zero_grad()
            learner.model(inputs(k)).square().mean().backward()
            learner.optimizer.step()


def test_without_a_choice_the_user_is_told_and_with_one_not():
    model = build()
    with pytest.warns(UserWarning, match=r"consensus\(batches=...\)"):
        antiphon.Learner(model, optim.SGD(model.parameters(), lr=0.1)).close()
    for choice in ("recompute", "local", "average"):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            learner = antiphon.Learner(model, optim.SGD(model.parameters(), lr=0.1), buffers=choice)
        assert (learner.metrics["buffers"], learner.metrics["optimizer_state"]) == (choice, "local")
        learner.close()


def test_unknown_choices_are_refused():
    model = build()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ArgumentError, match="buffers must be one of recompute, local, average, not 'mean'"):
        antiphon.Learner(model, optimizer, buffers="mean")
    with pytest.raises(ArgumentError, match="optimizer_state must be one of local, average, not 'mean'"):
        antiphon.Learner(model, optimizer, buffers="local", optimizer_state="mean")


def test_statistics_are_recomputed_on_the_consensus():
    model = build()
    learner = antiphon.Learner(model, optim.SGD(model.parameters(), lr=0.1), buffers="recompute")
    learn(learner)
    own = {name: value.clone() for name, value in model.state_dict().items()}
    state = learner.consensus(batches=[inputs(0), inputs(1)])
    both = torch.cat([inputs(0), inputs(1)])
    assert torch.equal(
        learner.consensus(batches=both)["1.running_var"], learner.consensus(batches=[both])["1.running_var"]
    )
    learner.close()
    hidden = [nn.functional.linear(inputs(k), state["0.weight"], state["0.bias"]) for k in range(2)]
    mean = torch.stack([each.mean(0) for each in hidden]).mean(0)
    torch.testing.assert_close(state["1.running_mean"], mean)
    torch.testing.assert_close(state["1.running_var"], torch.stack([each.var(0) for each in hidden]).mean(0))
    assert not torch.equal(own["1.running_mean"], mean)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in own.items())
    assert learner.model.training


@pytest.mark.parametrize("buffers", ["recompute", "local", "average"])
def test_alone_the_choice_changes_nothing(buffers):
    model, plain = build(), build()
    learner = antiphon.Learner(model, optim.SGD(model.parameters(), lr=0.1), buffers=buffers)
    learn(learner)
    optimizer = optim.SGD(plain.parameters(), lr=0.1)
    for k in range(3):
        optimizer.zero_grad()
        plain(inputs(k)).square().mean().backward()
        optimizer.step()
    state = learner.consensus()
    learner.close()
    for name, value in plain.state_dict().items():
        assert torch.equal(state[name], value) and torch.equal(model.state_dict()[name], value), name
    assert state["1.num_batches_tracked"].dtype == torch.int64


def test_averaged_buffers_are_part_of_the_vector_and_integers_are_not():
    model = build()
    learner = antiphon.Learner(model, optim.SGD(model.parameters(), lr=0.1), buffers="average")
    parameters = sum(p.numel() for p in model.parameters())
    assert learner.weights.w_N.numel() == parameters + 8
    learn(learner)
    torch.testing.assert_close(learner.weights.w_N[parameters : parameters + 4], model[1].running_mean, rtol=0, atol=0)
    with learner.step():
        model(inputs(0)).square().mean().backward()
        before_4 = learner.weights.w_N[parameters : parameters + 4].clone()
        moved_4 = model[1].running_mean - before_4
        # As if an exchange had added 1 meanwhile: the forward pass's change and the exchange's both count.
        learner.weights.add_differences(
            [(torch.ones(learner.weights.w_N.numel()), 1.0)],
            torch.zeros_like(before_4[:1]).expand(learner.weights.w_N.numel()),
        )
        learner.optimizer.step()
    torch.testing.assert_close(model[1].running_mean, before_4 + moved_4 + 1.0)
    learner.close()


def test_buffers_that_have_no_mean_are_refused():
    model = build()
    model.register_buffer("mask", torch.tensor([0.0, -math.inf]))
    with pytest.raises(ArgumentError, match="buffer mask holds infinity or NaN"):
        Replica(model, [optim.SGD(model.parameters(), lr=0.1)], buffers="average")
    model.register_buffer("mask", torch.zeros(2, dtype=torch.float64))
    with pytest.raises(ArgumentError, match=r"buffer mask is torch.float64"):
        Replica(model, [optim.SGD(model.parameters(), lr=0.1)], buffers="average")
    model.register_buffer("mask", torch.tensor([0.0, -math.inf]), persistent=False)
    Replica(model, [optim.SGD(model.parameters(), lr=0.1)], buffers="average")


@pytest.mark.parametrize(
    "make",
    [
        lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: optim.Adam(p, lr=0.01),
        lambda p: optim.RMSprop(p, lr=0.01, momentum=0.9),
        lambda p: optim.NAdam(p, lr=0.01),
    ],
    ids=["SGD", "Adam", "RMSprop", "NAdam"],
)
def test_averaged_first_moments_live_in_the_vector(make):
    models = [build(), build()]
    learner = antiphon.Learner(models[0], make(models[0].parameters()), buffers="local", optimizer_state="average")
    parameters = sum(p.numel() for p in models[0].parameters())
    assert learner.weights.w_N.numel() == 2 * parameters
    learn(learner)
    optimizer = make(models[1].parameters())
    for k in range(3):
        optimizer.zero_grad()
        models[1](inputs(k)).square().mean().backward()
        optimizer.step()
    key = "momentum_buffer" if "momentum_buffer" in next(iter(optimizer.state.values())) else "exp_avg"
    moments_N = torch.cat([optimizer.state[p][key].reshape(-1) for p in models[1].parameters()])
    assert torch.equal(learner.weights.w_N[parameters:], moments_N)
    assert all(torch.equal(a, b) for a, b in zip(*(m.parameters() for m in models), strict=True))
    saved = learner.optimizer.state_dict()
    learner.close()
    assert torch.equal(learner.optimizer.state_dict()["state"][0][key], saved["state"][0][key])


def test_a_moment_that_comes_before_the_first_step_is_kept_and_one_that_is_loaded_replaces_it():
    model = nn.Linear(2, 1, bias=False)
    learner = antiphon.Learner(model, optim.SGD(model.parameters(), lr=0.1, momentum=0.5), optimizer_state="average")

    def step(gradient):
        with learner.step():
            model.weight.grad = torch.full((1, 2), gradient)
            learner.optimizer.step()

    learner.weights.add_differences([(torch.tensor([0.0, 0.0, 4.0, 4.0]), 0.5)], torch.zeros(4))
    step(1.0)
    assert learner.weights.w_N[2:].tolist() == [3.0, 3.0]
    step(1.0)
    assert learner.weights.w_N[2:].tolist() == [2.5, 2.5]
    saved = learner.optimizer.state_dict()
    saved["state"][0]["momentum_buffer"] = torch.full((1, 2), 8.0)
    learner.optimizer.load_state_dict(saved)
    step(0.0)
    assert learner.weights.w_N[2:].tolist() == [4.0, 4.0]
    learner.weights.replace(torch.zeros(4))
    learner._replica.restart()
    learner.weights.add_differences([(torch.tensor([0.0, 0.0, 4.0, 4.0]), 0.5)], torch.zeros(4))
    step(1.0)
    assert learner.weights.w_N[2:].tolist() == [3.0, 3.0], "begun anew, as at first"
    learner.close()


def test_an_optimizer_without_a_first_moment_cannot_average_it():
    model = build()
    learner = antiphon.Learner(model, optim.SGD(model.parameters(), lr=0.1), buffers="local", optimizer_state="average")
    with pytest.raises(ArgumentError, match="SGD keeps no first moment"):
        learn(learner)
    learner.close()
