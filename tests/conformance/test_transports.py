"""Every strategy over every transport, in fair weather and foul: the laws that hold whatever happens to messages."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transports import BUILDERS, TRANSPORTS, Weather
from virtual import LEARNERS, PARAMETERS, first_weights, sums

from antiphon.errors import DeadlineError
from antiphon.simulation.engine import distances
from antiphon.strategies import STRATEGIES

NAMES = sorted(STRATEGIES)
ROUNDING = 2e-5
NOTHING = torch.zeros(PARAMETERS)


def stand_still(learner, round):
    return NOTHING


def drawn_steps(seed, learners, rounds):
    steps_LRN = 0.1 * torch.randn(learners, rounds, PARAMETERS, generator=torch.Generator().manual_seed(seed))
    return steps_LRN, lambda learner, round: steps_LRN[learner, round]


def assert_both_or_neither(outcome):
    counts = outcome.counts
    assert sum(each.committed for each in counts) == sum(each.applied for each in counts)
    assert sum(each.torn for each in counts) == 0


@pytest.mark.parametrize("learners", LEARNERS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("transport", sorted(TRANSPORTS))
def test_steps_alone_move_the_sum(transport, name, learners):
    rounds = 4 + 2 * learners
    steps_LRN, steps = drawn_steps(1, learners, rounds)
    outcome = TRANSPORTS[transport](name, learners, rounds, steps, Weather())
    expected = sums(outcome.first_LN) - steps_LRN.double().sum((0, 1))
    torch.testing.assert_close(sums(outcome.last_LN), expected, atol=ROUNDING, rtol=0)
    assert outcome.rounds == [rounds] * learners
    assert_both_or_neither(outcome)


@pytest.mark.parametrize("learners", LEARNERS[1:])
@pytest.mark.parametrize("name", [name for name in NAMES if name != "allreduce"])
@pytest.mark.parametrize("transport", sorted(TRANSPORTS))
def test_the_distance_shrinks(transport, name, learners):
    weather = Weather(delay=0.1, delay_s=0.005, settled=True)
    outcome = TRANSPORTS[transport](name, learners, 3 * learners + 6, stand_still, weather)
    torch.testing.assert_close(sums(outcome.last_LN), sums(first_weights(learners)), atol=ROUNDING, rtol=0)
    assert distances(outcome.last_LN) < 0.3 * distances(outcome.first_LN)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("transport", sorted(TRANSPORTS))
@given(
    learners=st.sampled_from(LEARNERS[1:]),
    weather=st.builds(
        Weather,
        drop=st.sampled_from([0.0, 0.1, 0.3]),
        double=st.sampled_from([0.0, 0.3]),
        corrupt=st.sampled_from([0.0, 0.2]),
        delay=st.sampled_from([0.0, 0.3]),
        delay_s=st.sampled_from([0.005, 0.04]),
        slowest=st.integers(1, 8),
        seed=st.integers(0, 1000),
    ),
)
@settings(derandomize=True, max_examples=4, deadline=None)
def test_foul_weather_costs_exchanges_but_no_part_of_the_sum(transport, name, learners, weather):
    steps_LRN, steps = drawn_steps(weather.seed, learners, 8)
    outcome = TRANSPORTS[transport](name, learners, 8, steps, weather)
    expected = sums(outcome.first_LN) - steps_LRN.double().sum((0, 1))
    torch.testing.assert_close(sums(outcome.last_LN), expected, atol=ROUNDING, rtol=0)
    assert_both_or_neither(outcome)


@pytest.mark.parametrize("transport", sorted(BUILDERS))
def test_a_round_that_another_never_begins_has_a_deadline(transport, monkeypatch):
    monkeypatch.setattr("transports.TIMEOUT_S", 0.3)
    with BUILDERS[transport](3, True, Weather()) as company:
        company.ends[0].start_mix(0, ((1, 1 / 3), (2, 1 / 3)))
        with pytest.raises(DeadlineError, match="waited 0.3 s in round 0"):
            company.ends[0].finish_mix(0)


@pytest.mark.parametrize("transport", sorted(BUILDERS))
def test_an_exchange_whose_messages_are_all_lost_is_given_up(transport):
    with BUILDERS[transport](2, False, Weather(drop=1.0)) as company:
        company.ends[0].propose(1, 0.5)
        company.until(lambda: company.ends[0].counts.late == 1, "the deadline")
        assert not company.ends[0].protocol.open
        company.until(lambda: company.ends[0].present() == (0,), "the silence to be noticed")
    torch.testing.assert_close(company.values(), first_weights(2))
