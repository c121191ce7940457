"""Real processes that train together, and what becomes of them when one is slow, frozen, killed or wrong."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from forked import ForkLaunch, done, problem, taken, train, until
from torch import nn

import antiphon
from antiphon.errors import LearnerError
from antiphon.learner.progress import Patience
from antiphon.strategies import STRATEGIES
from antiphon.transport.block import Col, Head, process_runs

NAMES = sorted(STRATEGIES)
ACCELERATOR_S = 0.01
"""A wait in each step that stands for an accelerator, so that the processors are not what learners compete for."""


def waiting(learner):
    time.sleep(ACCELERATOR_S)


def watch(launch, look=lambda seen: None):
    return launch.watch(look, every_s=0.01)


def final_weights(launch):
    """The learners' rows as they left them."""
    buffers = launch.block.allocate(int(launch.block.head[Head.PARAMETERS]))
    return buffers.weights_LN.clone()


def save(folder):
    """What a learner does at its end: leave its weights, its consensus and its numbers."""

    def at_end(learner):
        own_N = torch.cat([parameter.detach().reshape(-1) for parameter in learner.model.parameters()])
        torch.save([own_N, learner.consensus()], folder / f"{learner.number}.pt")
        (folder / f"{learner.number}.json").write_text(json.dumps(learner.metrics))

    return at_end


def saved(folder, learners):
    return (
        [torch.load(folder / f"{learner}.pt") for learner in learners],
        [json.loads((folder / f"{learner}.json").read_text()) for learner in learners],
    )


def committed(metrics):
    return sum(m["exchanges"]["committed"] for m in metrics)


@pytest.mark.parametrize("learners", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_every_strategy_trains_to_the_end(name, learners, tmp_path):
    with ForkLaunch(lambda: train(name, at_end=save(tmp_path)), learners, tmp_path) as launch:
        watched = watch(launch)
    assert watched.faults == [] and done(launch) == list(range(learners))
    assert set(Counter(taken(launch)).values()) == {3}
    assert sum(launch.board(Col.SAMPLES)) == 3 * 64
    weights, metrics = saved(tmp_path, range(learners))
    first = weights[0][1]
    for own_N, consensus in weights:
        assert torch.isfinite(own_N).all()
        # Whoever asks last gets the same, though others may have gone on to use their model.
        assert all(torch.equal(consensus[key], first[key]) for key in first)
    mean_N = torch.stack([own_N for own_N, _ in weights]).mean(0)
    torch.testing.assert_close(torch.cat([value.reshape(-1) for value in first.values()]), mean_N)
    assert [m["steps"] for m in metrics] == launch.board(Col.STEPS)
    assert [sum(m["staleness"]) for m in metrics] == launch.board(Col.STEPS)
    if STRATEGIES[name].waits:
        steps = launch.board(Col.STEPS)
        assert len(set(steps)) == 1
        stale = int(name != "allreduce" and learners > 1)
        assert [m["staleness"] for m in metrics] == [[0] * stale + steps[:1]] * learners
    else:
        assert committed(metrics) == sum(m["exchanges"]["applied"] for m in metrics)
        assert (committed(metrics) > 0) == (learners > 1)
    assert sum(m["exchanges"]["torn"] for m in metrics) == 0


def test_learners_of_allreduce_end_equal_to_the_bit(tmp_path):
    with ForkLaunch(lambda: train("allreduce"), 4, tmp_path) as launch:
        watch(launch)
        weights_LN = final_weights(launch)
    assert bool((weights_LN == weights_LN[0]).all())
    assert float(weights_LN[0].abs().max()) > 0


@pytest.mark.parametrize("name", ["random-ring", "fixed-ring"])
def test_exchanges_conserve_the_sum_of_the_weights(name, tmp_path):
    """With a learning rate of zero only exchanges move weights, once the learners have been set apart."""

    def apart(learner):
        if learner.round == 0:
            with torch.no_grad():
                learner.weights.w_N.add_(float(learner.number))
        waiting(learner)

    with ForkLaunch(lambda: train(name, lr=0.0, samples=512, before_step=apart), 4, tmp_path) as launch:
        watch(launch)
        weights_LN = final_weights(launch)
    _, model = problem()
    start_N = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    torch.testing.assert_close(weights_LN.double().mean(0), start_N.double() + 1.5, atol=1e-5, rtol=0)
    spread = float((weights_LN - weights_LN.mean(0)).abs().max())
    assert spread < 0.3, "the learners were 3 apart, and have exchanged for some thirty rounds"


def test_the_others_do_the_work_of_one_that_is_ten_times_slower(tmp_path):
    def body():
        train("random-ring", epochs=4, samples=128, batch=8, slow={3: 10.0}, before_step=waiting, at_end=save(tmp_path))

    with ForkLaunch(body, 4, tmp_path) as launch:
        watched = watch(launch)
    assert watched.faults == [] and done(launch) == [0, 1, 2, 3]
    assert Counter(taken(launch)) == dict.fromkeys(range(128), 4)
    steps = launch.board(Col.STEPS)
    assert sum(steps) == 4 * 64
    assert 4 < sum(steps[:3]) / 3 / steps[3] < 25
    _, metrics = saved(tmp_path, range(4))
    assert sum(m["exchanges"]["torn"] for m in metrics) == 0
    assert metrics[3]["exchanges"]["applied"] > 0, "the slow one answers from its exchange thread"


def kill_at(number, step):
    def before_step(learner):
        if (learner.number, learner.round) == (number, step):
            os.kill(os.getpid(), signal.SIGKILL)
        waiting(learner)

    return before_step


@pytest.mark.parametrize("step", [0, 5])
def test_the_others_finish_the_work_of_one_that_is_killed(step, tmp_path):
    with ForkLaunch(lambda: train("random-ring", before_step=kill_at(1, step)), 4, tmp_path) as launch:
        watched = watch(launch)
        assert launch.block.unfinished() == [] or min(launch.block.unfinished()) >= 3 * 16
    (fault,) = watched.faults
    assert (fault.learner, fault.kind, fault.text) == (1, "died", "was killed by SIGKILL")
    assert 1 <= fault.tickets_returned <= 2
    assert done(launch) == [0, 2, 3] and watched.present == [0, 2, 3]
    assert launch.board(Col.STEPS)[1] == step
    assert Counter(taken(launch)) == dict.fromkeys(range(64), 3)
    assert sum(launch.board(Col.REPEATED)) == 4
    assert not launch.block.folder.exists()


def test_one_that_is_killed_at_its_last_batch(tmp_path):
    """The others have nothing left to do by then: they wait for it, and do it once it is dead."""

    def before_step(learner):
        waiting(learner)
        if learner.number == 1:
            mine = [int(held) - 1 for held in learner.block.outstanding_LK[1] if held]
            held_by = learner.block.unfinished
            until(lambda: [ticket for ticket in held_by() if ticket < 16] == mine, "the others to have ended theirs")
            os.kill(os.getpid(), signal.SIGKILL)

    with ForkLaunch(lambda: train("random-ring", epochs=1, before_step=before_step), 4, tmp_path) as launch:
        watched = watch(launch)
    assert [fault.learner for fault in watched.faults] == [1]
    assert Counter(taken(launch)) == dict.fromkeys(range(64), 1)


@pytest.mark.parametrize("name", [name for name in NAMES if STRATEGIES[name].waits])
def test_a_strategy_that_waits_ends_at_once_with_the_one_that_is_killed(name, tmp_path):
    launch = ForkLaunch(lambda: train(name, before_step=kill_at(2, 4)), 4, tmp_path)
    began = time.monotonic()
    with pytest.raises(LearnerError, match="^learner 2 was killed by SIGKILL$"), launch:
        watch(launch)
    assert time.monotonic() - began < 10.0
    assert all(process.poll() is not None for process in launch._processes.values())
    assert not launch.block.folder.exists()


def fail_at(number, step):
    def before_step(learner):
        if (learner.number, learner.round) == (number, step):
            raise ValueError("a bad sample")
        waiting(learner)

    return before_step


def test_an_error_of_one_is_named_though_the_others_fail_for_it(tmp_path):
    """Even where it is the last to end: it has failed before them, and lingers until one of them is gone."""

    def body():
        try:
            train("sync-ring", before_step=fail_at(3, 4))
        except ValueError:
            others = [launch.block.board_LC[n, Col.PID] for n in range(3)]
            until(lambda: not all(process_runs(pid) for pid in others), "another to end")
            raise

    launch = ForkLaunch(body, 4, tmp_path)
    with pytest.raises(LearnerError, match="^learner 3 ended with status 1: ValueError: a bad sample"), launch:
        watch(launch)
    assert launch.log(3).count("ValueError: a bad sample") == 1


def test_the_others_go_on_without_one_that_fails(tmp_path):
    with ForkLaunch(lambda: train("random-ring", before_step=fail_at(0, 4)), 3, tmp_path) as launch:
        watched = watch(launch)
    (fault,) = watched.faults
    assert (fault.learner, fault.kind) == (0, "failed") and "ValueError: a bad sample" in fault.text
    assert launch.log(0).count("Traceback") == 1
    assert Counter(taken(launch)) == dict.fromkeys(range(64), 3)


def test_a_failed_step_is_known_to_the_others_though_its_process_goes_on(tmp_path):
    """It catches its error and lingers; the others do its work and end without it."""

    def body():
        try:
            train("random-ring", before_step=fail_at(1, 2))
        except ValueError:
            until(lambda: False, "nothing", deadline_s=8.0)

    with ForkLaunch(body, 3, tmp_path) as launch:
        until(lambda: done(launch) == [0, 2], "the others to end", deadline_s=8.0)
        assert launch._processes[1].poll() is None
    assert Counter(taken(launch)) == dict.fromkeys(range(64), 3)


def test_all_that_fail_are_an_error_of_the_run(tmp_path):
    def fail(learner):
        raise ValueError("always")

    with (
        pytest.raises(LearnerError, match="all learners ended before their time; learner . ended with status 1"),
        ForkLaunch(lambda: train("random-ring", before_step=fail), 2, tmp_path) as launch,
    ):
        watch(launch)


def test_one_that_is_frozen_for_a_while_comes_back(tmp_path):
    """The others go on meanwhile; back again, it exchanges and ends its part."""

    def body():
        train("random-ring", epochs=6, before_step=waiting, at_end=save(tmp_path))

    with ForkLaunch(body, 3, tmp_path) as launch:
        steps_L = launch.block.board_LC[:, Col.STEPS]
        until(lambda: int(steps_L[1]) >= 4, "learner 1 to begin")
        os.kill(launch.pids[1], signal.SIGSTOP)
        before = steps_L.copy()
        until(lambda: bool((steps_L[[0, 2]] >= before[[0, 2]] + 12).all()), "the others to go on")
        assert steps_L[1] <= before[1] + 1
        os.kill(launch.pids[1], signal.SIGCONT)
        watched = watch(launch)
    assert watched.faults == [] and done(launch) == [0, 1, 2]
    assert Counter(taken(launch)) == dict.fromkeys(range(64), 6)
    _, metrics = saved(tmp_path, range(3))
    assert sum(m["exchanges"]["torn"] for m in metrics) == 0
    assert committed(metrics) == sum(m["exchanges"]["applied"] for m in metrics)
    assert launch.board(Col.MIXED)[1] > 4, "it has mixed since"


def test_a_learner_that_is_frozen_for_good_does_not_hold_the_run(tmp_path, monkeypatch):
    """The others do the work, and what it holds is lost; the launcher ends it and says so."""
    monkeypatch.setattr(Patience.__init__, "__defaults__", (0.5, time.monotonic))

    def body():
        train("random-ring", epochs=3, before_step=waiting, at_end=save(tmp_path))

    with ForkLaunch(body, 3, tmp_path) as launch:
        steps_L = launch.block.board_LC[:, Col.STEPS]
        until(lambda: int(steps_L[1]) >= 2, "learner 1 to begin")
        os.kill(launch.pids[1], signal.SIGSTOP)
        watched = watch(launch)
    assert [(fault.learner, fault.kind) for fault in watched.faults] == [(1, "died")]
    assert watched.faults[0].text == "was stopped (SIGSTOP) and did not go on, so that it was killed" and done(
        launch
    ) == [0, 2]


def test_a_run_that_is_asked_to_stop_stops_in_step(tmp_path):
    def body():
        train("sync-ring", epochs=1000, at_end=save(tmp_path))

    with ForkLaunch(body, 3, tmp_path) as launch:
        until(lambda: bool((launch.block.board_LC[:, Col.STEPS] > 5).all()), "some steps")
        launch.stop()
        assert launch.wait(10.0)
    assert done(launch) == [0, 1, 2]
    assert len(set(launch.board(Col.STEPS))) == 1


def test_loaders_with_workers(tmp_path):
    """They take batches ahead, from forked processes of their own."""
    began = time.monotonic()
    with ForkLaunch(lambda: train("random-ring", epochs=2, workers=1), 2, tmp_path) as launch:
        watched = watch(launch)
    assert watched.faults == [] and done(launch) == [0, 1]
    assert Counter(taken(launch)) == dict.fromkeys(range(64), 2)
    assert time.monotonic() - began < 14.0, "learners that wait for each other's batches lose patience after 15 s"


def test_one_that_fails_before_it_joins_ends_the_run(tmp_path):
    def body():
        if os.environ["ANTIPHON_LEARNER"] == "1":
            raise RuntimeError("no such data")
        train("random-ring")

    with (
        pytest.raises(LearnerError, match="learner 1 ended with status 1: RuntimeError: no such data"),
        ForkLaunch(body, 3, tmp_path) as launch,
    ):
        watch(launch)
    assert all(process.poll() is not None for process in launch._processes.values())


def test_one_that_never_makes_a_learner_ends_the_run(tmp_path):
    def body():
        if os.environ["ANTIPHON_LEARNER"] == "1":
            return
        train("random-ring")

    with (
        pytest.raises(LearnerError, match="learner 1 ended without having made its antiphon.Learner"),
        ForkLaunch(body, 2, tmp_path) as launch,
    ):
        watch(launch)


def test_a_failure_after_the_end_is_told_and_costs_no_weights(tmp_path):
    def fail(learner):
        if learner.number == 0:
            raise RuntimeError("no room for the result")

    with ForkLaunch(lambda: train("random-ring", at_end=fail), 2, tmp_path) as launch:
        watched = watch(launch)
    (fault,) = watched.faults
    assert (fault.learner, fault.kind) == (0, "failed") and "no room for the result" in fault.text
    assert watched.present == [0, 1]


def test_models_that_differ_are_refused(tmp_path):
    def body():
        model = nn.Linear(3, 1 + int(os.environ["ANTIPHON_LEARNER"]))
        antiphon.Learner(model, torch.optim.SGD(model.parameters(), lr=0.1))

    with (
        pytest.raises(LearnerError, match="learner 1 has 8 parameters, learner 0 has 4"),
        ForkLaunch(body, 2, tmp_path) as launch,
    ):
        watch(launch)


def test_a_second_learner_in_one_process_is_refused(tmp_path):
    def body():
        train("random-ring", epochs=1)
        train("random-ring", epochs=1)

    with ForkLaunch(body, 2, tmp_path) as launch:
        watched = watch(launch)
    assert all("this process has had its Learner already" in fault.text for fault in watched.faults)
    assert len(watched.faults) == 2 and watched.present == [0, 1]


def test_what_one_does_to_its_model_after_the_end_is_nobody_elses(tmp_path):
    """Learner 0 loads the consensus, and more, before learner 1 asks for it."""

    def at_end(learner):
        if learner.number == 0:
            with torch.no_grad():
                for parameter in learner.model.parameters():
                    parameter.fill_(1e6)
            (tmp_path / "done").touch()
        else:
            until((tmp_path / "done").exists, "learner 0")
            torch.save(learner.consensus(), tmp_path / "consensus.pt")

    with ForkLaunch(lambda: train("random-ring", at_end=at_end), 2, tmp_path) as launch:
        assert watch(launch).faults == []
    assert all(value.abs().max() < 100 for value in torch.load(tmp_path / "consensus.pt").values())


def test_the_example_learns(tmp_path):
    path = Path(__file__).parents[2] / "examples" / "spirals.py"
    spec = importlib.util.spec_from_file_location("spirals", path)
    spirals = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(spirals)
    spirals.EPOCHS = 30
    with ForkLaunch(spirals.main, 4, tmp_path) as launch:
        assert watch(launch).faults == []
    words = launch.log(0).split()
    assert float(words[words.index("accuracy") + 1].rstrip(",")) > 0.95
    assert sum(launch.board(Col.SAMPLES)) == 30 * 4000


def test_nothing_is_left_over():
    """Of all the runs of this module: no process and no thread."""
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("exchange")] == []


def test_another_learner_leads_where_learner_0_has_died(tmp_path):
    def say(learner):
        print("leads", learner.leads, flush=True)

    with ForkLaunch(lambda: train("random-ring", before_step=kill_at(0, 2), at_end=say), 3, tmp_path) as launch:
        launch.watch(lambda seen: None)
        assert ["leads True" in launch.log(number) for number in range(3)] == [False, True, False]
        assert "leads False" in launch.log(2)
