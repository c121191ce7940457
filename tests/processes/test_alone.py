"""One learner alone, in this process: the ordinary loop to the bit, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import antiphon
from antiphon.errors import ArgumentError
from antiphon.strategies import STRATEGIES
from antiphon.transport.block import Col, Status

NAMES = sorted(STRATEGIES)


def alone(model, **more):
    return antiphon.Learner(model, torch.optim.SGD(model.parameters(), lr=0.1), **more)


@pytest.fixture
def learner():
    torch.manual_seed(0)
    made = alone(nn.Linear(3, 1))
    yield made
    made.close()


def step(learner):
    with learner.step():
        learner.optimizer.zero_grad()
        learner.model(torch.ones(4, 3)).square().mean().backward()
        learner.optimizer.step()


def test_an_error_in_a_step_comes_through_and_ends_the_learner(learner):
    step(learner)
    with pytest.raises(ZeroDivisionError), learner.step():
        raise ZeroDivisionError
    assert learner.block.board_LC[0, Col.STATE] == Status.FAILED
    with pytest.raises(ArgumentError, match="a step of this learner has failed"):
        step(learner)
    learner.finish()
    assert learner.block.board_LC[0, Col.STATE] == Status.FAILED


def test_a_step_without_the_optimizers_is_refused(learner):
    with pytest.raises(ArgumentError, match="without a call of the optimizer's step"), learner.step():
        pass


def test_a_second_optimizer_step_within_a_step_is_refused(learner):
    learner.model(torch.ones(4, 3)).sum().backward()
    with pytest.raises(ArgumentError, match="must be called once"), learner.step():
        learner.optimizer.step()
        learner.optimizer.step()


def test_an_optimizer_step_outside_a_step_is_refused(learner):
    learner.model(torch.ones(4, 3)).sum().backward()
    with pytest.raises(ArgumentError, match="inside `with learner.step"):
        learner.optimizer.step()


def test_a_closed_learner_makes_no_step_and_leaves_the_model_whole(learner):
    step(learner)
    before = {name: value.clone() for name, value in learner.model.state_dict().items()}
    folder = learner.block.folder
    learner.close()
    learner.close()
    assert not folder.exists()
    assert all(torch.equal(before[name], value) for name, value in learner.model.state_dict().items())
    with pytest.raises(ArgumentError, match="closed"):
        step(learner)


def test_one_sampler_a_learner(learner):
    learner.batch_sampler(range(10), 2)
    with pytest.raises(ArgumentError, match="called already"):
        learner.batch_sampler(range(10), 2)


@pytest.mark.parametrize("name", NAMES)
def test_alone_every_strategy_is_the_ordinary_loop_to_the_bit(name):
    """With a frozen, an unused, a tied and a scalar parameter in the model."""

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
            self.second.weight = self.first.weight
            self.first.bias.requires_grad_(False)
            self.unused = nn.Parameter(torch.ones(2))
            self.scale = nn.Parameter(torch.tensor(1.5))

        def forward(self, inputs):
            return self.scale * self.second(self.first(inputs).tanh())

    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Odd())
    learner = alone(models[0], strategy=name)
    plain = torch.optim.SGD(models[1].parameters(), lr=0.1)
    for k in range(5):
        inputs = torch.randn(8, 3, generator=torch.Generator().manual_seed(k))
        with learner.step():
            learner.optimizer.zero_grad()
            models[0](inputs).square().mean().backward()
            learner.optimizer.step()
        plain.zero_grad()
        models[1](inputs).square().mean().backward()
        plain.step()
    state, expected = learner.consensus(), models[1].state_dict()
    learner.close()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[key], expected[key]) for key in expected)
    assert models[0].second.weight is models[0].first.weight


def test_models_that_cannot_take_part_are_refused():
    with pytest.raises(ArgumentError, match="no parameter that requires a gradient"):
        alone(nn.Linear(2, 1).requires_grad_(False))
    with pytest.raises(ArgumentError, match=r"parameter weight is torch.float64: exchanges are in float32"):
        alone(nn.Linear(2, 1).double())
    with pytest.raises(ArgumentError, match="slow must be at least 1"):
        alone(nn.Linear(2, 1), slow=0.5)
    with pytest.raises(ArgumentError, match="random-ring"):
        alone(nn.Linear(2, 1), strategy="random_ring")
