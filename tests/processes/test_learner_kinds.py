"""Learners of every kind, several at once: low precision, skipped steps, closures, averaged state, staged weights."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest
import torch
from forked import DEADLINE_S, ForkLaunch, done, taken
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

import antiphon
from antiphon.errors import LearnerError
from antiphon.learner import joining as module
from antiphon.learner.staged import StagedWeights
from antiphon.strategies import STRATEGIES
from antiphon.transport.place import LEARNER

NAMES = sorted(STRATEGIES)
FEATURES = 4


def watch(launch):
    watched = launch.watch(lambda seen: None, every_s=0.01)
    assert watched.faults == [], watched.faults
    assert done(launch) == list(range(launch.learners))


def data(samples=96):
    draw = torch.Generator().manual_seed(1)
    inputs_NF = torch.randn(samples, FEATURES, generator=draw)
    return TensorDataset(torch.arange(samples), inputs_NF, inputs_NF.sum(1, keepdim=True))


def build(dtype=torch.float32, norm=False):
    torch.manual_seed(1)
    hidden = [nn.Linear(FEATURES, 8), *([nn.BatchNorm1d(8)] if norm else []), nn.Tanh(), nn.Linear(8, 1)]
    return nn.Sequential(*hidden).to(dtype)


def learner_of(model, strategy, optimizer=None, **more):
    torch.set_num_threads(1)
    optimizer = optimizer or optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return antiphon.Learner(model, optimizer, strategy, timeout_s=DEADLINE_S, **more)


def train(learner, epochs=2, batch=16, backward=None, update=None, accumulate=1):
    """The usual loop; ``backward(loss)`` and ``update()`` stand in for the usual two."""
    samples, model = data(), learner.model
    loader = DataLoader(samples, batch_sampler=learner.batch_sampler(samples, batch, epochs))
    dtype = next(model.parameters()).dtype
    for _ in range(epochs):
        batches = list(loader)
        for k in range(0, len(batches), accumulate):
            group = batches[k : k + accumulate]
            with learner.step(batches=len(group)):
                learner.optimizer.zero_grad()
                for which, inputs, targets in group:
                    loss = (model(inputs.to(dtype)) - targets.to(dtype)).float().square().mean()
                    (backward or torch.Tensor.backward)(loss)
                    print("took", *which.tolist(), flush=True)
                (update or learner.optimizer.step)()
    learner.finish()


def save(folder: Path, learner, **more):
    torch.save(
        {
            "w_N": learner.weights.w_N.clone(),
            "consensus": learner.consensus(),
            "metrics": learner.metrics,
            "state": {name: value.clone() for name, value in learner.model.state_dict().items()},
            **more,
        },
        folder / f"learner-{learner.number}.pt",
    )
    learner.close()


def saved(folder: Path, learners: int):
    return [torch.load(folder / f"learner-{n}.pt") for n in range(learners)]


def rows(results):
    return torch.stack([each["w_N"] for each in results])


def run(body, learners, folder):
    with ForkLaunch(body, learners, folder) as launch:
        watch(launch)
    return launch


@pytest.mark.parametrize("name", NAMES)
def test_every_strategy_trains_in_bfloat16(name, tmp_path):
    def body():
        learner = learner_of(build(torch.bfloat16), name)
        train(learner)
        save(tmp_path, learner)

    launch = run(body, 3, tmp_path)
    results = saved(tmp_path, 3)
    assert set(Counter(taken(launch)).values()) == {2}
    mean_N = rows(results).mean(0)
    for each in results:
        assert {value.dtype for value in each["consensus"].values()} == {torch.bfloat16}
        flat_N = torch.cat([value.reshape(-1) for value in each["consensus"].values()])
        assert torch.equal(flat_N, mean_N.bfloat16())
        own_N = torch.cat([value.reshape(-1) for value in each["state"].values()])
        assert torch.equal(own_N, each["w_N"].bfloat16())
    if name == "allreduce":
        assert bool((rows(results) == rows(results)[0]).all())


def apart(learner, part=slice(None)):
    """Set learners apart by their numbers, as a step would."""
    learner.weights.begin_step()
    learner.weights.w_N[part] += learner.number
    learner.weights.end_step()


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("name", ["random-ring", "sync-ring"])
def test_exchanges_conserve_the_sum_of_masters(name, staged, tmp_path, monkeypatch):
    if staged:
        monkeypatch.setattr(module, "weights_on", lambda device, *rest: StagedWeights(*rest, device))

    def body():
        model = build(torch.bfloat16)
        learner = learner_of(model, name, optim.SGD(model.parameters(), lr=0.0))
        before_N = learner.weights.w_N.clone()
        apart(learner)
        train(learner, epochs=8)
        save(tmp_path, learner, before_N=before_N)

    run(body, 3, tmp_path)
    results = saved(tmp_path, 3)
    weights_LN = rows(results).double()
    torch.testing.assert_close(weights_LN.mean(0), results[0]["before_N"].double() + 1.0, atol=1e-5, rtol=0)
    assert float((weights_LN - weights_LN.mean(0)).abs().max()) < 0.3, "they were 2 apart"


@pytest.mark.parametrize("name", NAMES)
def test_every_strategy_trains_staged(name, tmp_path, monkeypatch):
    """What a model on a GPU goes through, on the CPU."""
    monkeypatch.setattr(module, "weights_on", lambda device, *rest: StagedWeights(*rest, device))

    def body():
        learner = learner_of(build(), name)
        assert learner.weights.w_N.data_ptr() != learner.weights.buffers.weights_LN[learner.number].data_ptr()
        train(learner, epochs=4)
        save(tmp_path, learner)

    launch = run(body, 3, tmp_path)
    results = saved(tmp_path, 3)
    assert set(Counter(taken(launch)).values()) == {4}
    mean_N = rows(results).mean(0)
    for each in results:
        torch.testing.assert_close(torch.cat([v.reshape(-1) for v in each["consensus"].values()]), mean_N)
        torch.testing.assert_close(torch.cat([v.reshape(-1) for v in each["state"].values()]), each["w_N"])
    assert float((rows(results) - mean_N).abs().max()) < 1.0
    if name == "allreduce":
        assert bool((rows(results) == rows(results)[0]).all())
    model = build()
    model.load_state_dict(results[0]["consensus"])
    _, inputs, targets = data()[:]
    before, after = ((each(inputs) - targets).square().mean().item() for each in (build(), model))
    assert after < 0.5 * before


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_step_that_a_grad_scaler_skips_at_one_learner_stops_nobody(name, fused, tmp_path):
    def body():
        model = build()
        optimizer = optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=fused)
        learner = learner_of(model, name, optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (4 + learner.number))

        def backward(loss):
            overflows = (learner.number, learner.round) == (1, 2)
            scaler.scale(loss * (float("inf") if overflows else 1.0)).backward()

        def update():
            scaler.step(optimizer)
            scaler.update()

        train(learner, backward=backward, update=update)
        save(tmp_path, learner, scale=scaler.get_scale())

    launch = run(body, 3, tmp_path)
    results = saved(tmp_path, 3)
    assert set(Counter(taken(launch)).values()) == {2}
    assert [each["scale"] for each in results][::2] == [16.0, 64.0]
    assert bool(torch.isfinite(rows(results)).all())
    if results[1]["metrics"]["steps"] > 2:
        assert results[1]["scale"] == 16.0
        assert results[1]["metrics"]["skipped"] == (1 if not fused or name == "allreduce" else 0)
    if name == "allreduce":
        assert bool((rows(results) == rows(results)[0]).all())


def test_a_skipped_gradient_counts_as_zero_in_the_mean(tmp_path):
    """Two learners, one step: the second overflows, so both make half of the first one's step."""

    def body():
        model = build()
        optimizer = optim.SGD(model.parameters(), lr=0.5)
        learner = learner_of(model, "allreduce", optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        before_N = learner.weights.w_N.clone()
        with learner.step():
            _, inputs, targets = data()[:8]
            loss = (model(inputs) - targets).square().mean()
            scaler.scale(loss * (float("nan") if learner.number else 1.0)).backward()
            gradient_N = torch.cat([p.grad.reshape(-1) for p in model.parameters()]) / 8.0
            scaler.step(optimizer)
            scaler.update()
        learner.finish()
        save(tmp_path, learner, before_N=before_N, gradient_N=gradient_N)

    run(body, 2, tmp_path)
    first, second = saved(tmp_path, 2)
    torch.testing.assert_close(first["w_N"], first["before_N"] - 0.5 * first["gradient_N"] / 2)
    assert torch.equal(first["w_N"], second["w_N"])
    assert [each["metrics"]["skipped"] for each in (first, second)] == [0, 1]


@pytest.mark.parametrize("name", NAMES)
def test_accumulated_batches_are_shared_like_others(name, tmp_path):
    def body():
        learner = learner_of(build(), name)
        train(learner, epochs=2, batch=12, accumulate=2)
        save(tmp_path, learner)

    launch = run(body, 2, tmp_path)
    assert Counter(taken(launch)) == dict.fromkeys(range(96), 2)
    assert sum(each["metrics"]["samples"] for each in saved(tmp_path, 2)) == 192


def closures(learner):
    _, inputs, targets = data()[:32]

    def closure():
        learner.optimizer.zero_grad()
        loss = (learner.model(inputs) - targets).square().mean()
        loss.backward()
        return loss

    for _ in range(20):
        with learner.step():
            learner.optimizer.step(closure)
    learner.finish()


def test_lbfgs_exchanges(tmp_path):
    def body():
        model = build()
        learner = learner_of(model, "random-ring", optim.LBFGS(model.parameters(), lr=0.1, max_iter=4))
        closures(learner)
        save(tmp_path, learner)

    run(body, 2, tmp_path)
    results = saved(tmp_path, 2)
    assert sum(each["metrics"]["exchanges"]["committed"] for each in results) > 0
    assert bool(torch.isfinite(rows(results)).all())


@pytest.mark.parametrize("kind", [optim.SGD, optim.LBFGS])
def test_closures_where_gradients_are_averaged(kind, tmp_path):
    """One evaluation a step is as good as backward(); several cannot all be averaged."""

    def body():
        model = build()
        learner = learner_of(model, "allreduce", kind(model.parameters(), lr=0.1))
        closures(learner)
        save(tmp_path, learner)

    if kind is optim.SGD:
        run(body, 2, tmp_path)
        results = saved(tmp_path, 2)
        assert torch.equal(results[0]["w_N"], results[1]["w_N"])
    else:
        with pytest.raises(LearnerError, match="LBFGS evaluates its closure several times a step"):
            run(body, 2, tmp_path)


def test_several_optimizers(tmp_path):
    def pair(name):
        model = build()
        optimizers = [optim.SGD(model[0].parameters(), lr=0.05), optim.Adam(model[2].parameters(), lr=0.01)]
        learner = learner_of(model, name, optimizers)

        def update():
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

        train(learner, update=update)
        save(tmp_path, learner)

    for name in ("random-ring", "delay-by-one"):
        run(lambda name=name: pair(name), 2, tmp_path)
    with pytest.raises(LearnerError, match="allreduce averages all gradients .* takes one optimizer, not 2"):
        run(lambda: pair("allreduce"), 2, tmp_path)


@pytest.mark.parametrize("name", ["allreduce", "sync-ring", "random-ring"])
def test_averaged_buffers_come_together(name, tmp_path):
    def body():
        model = build(norm=True)
        learner = learner_of(model, name, optim.SGD(model.parameters(), lr=0.0), buffers="average")
        with torch.no_grad():
            model[1].running_mean += learner.number
        model.eval()
        train(learner, epochs=8)
        save(tmp_path, learner)

    run(body, 3, tmp_path)
    means = torch.stack([each["state"]["1.running_mean"] for each in saved(tmp_path, 3)])
    torch.testing.assert_close(means.mean(0), torch.ones(8), atol=1e-5, rtol=0)
    assert float((means - 1.0).abs().max()) < (1e-6 if name == "allreduce" else 0.15)
    state = saved(tmp_path, 3)[0]["consensus"]
    torch.testing.assert_close(state["1.running_mean"], means.mean(0), atol=1e-5, rtol=0)
    torch.testing.assert_close(state["1.running_var"], torch.ones(8), atol=1e-5, rtol=0)


def test_local_buffers_stay_apart(tmp_path):
    def body():
        model = build(norm=True)
        learner = learner_of(model, "random-ring", optim.SGD(model.parameters(), lr=0.0), buffers="local")
        with torch.no_grad():
            model[1].running_mean += learner.number
        model.eval()
        train(learner)
        save(tmp_path, learner)

    run(body, 2, tmp_path)
    for number, each in enumerate(saved(tmp_path, 2)):
        assert each["consensus"]["1.running_mean"].tolist() == [float(number)] * 8


@pytest.mark.parametrize("name", ["sync-ring", "random-ring"])
def test_averaged_moments_conserve_their_sum(name, tmp_path):
    """Momentum 1 and gradients of zero: only exchanges move the moments, once they have been set apart."""

    def body():
        model = build()
        optimizer = optim.SGD(model.parameters(), lr=0.0, momentum=1.0)
        learner = learner_of(model, name, optimizer, optimizer_state="average")
        apart(learner, slice(learner.weights.w_N.numel() // 2, None))
        train(learner, epochs=8, backward=lambda loss: (loss * 0.0).backward())
        buffers_N = torch.cat([optimizer.state[p]["momentum_buffer"].reshape(-1) for p in model.parameters()])
        save(tmp_path, learner, moments_N=buffers_N)

    run(body, 3, tmp_path)
    moments_LN = torch.stack([each["moments_N"] for each in saved(tmp_path, 3)])
    torch.testing.assert_close(moments_LN.mean(0), torch.ones(moments_LN.shape[1]), atol=1e-5, rtol=0)
    assert float((moments_LN - 1.0).abs().max()) < 0.15


def test_learners_that_are_not_made_alike_are_refused(tmp_path):
    def body():
        buffers = ("average", "local")[int(os.environ[LEARNER])]
        learner_of(build(norm=True), "random-ring", buffers=buffers)

    with pytest.raises(LearnerError, match="make its Learner alike"), ForkLaunch(body, 2, tmp_path) as launch:
        launch.watch(lambda seen: None, every_s=0.01)
