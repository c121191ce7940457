"""What becomes of a run when a learner is frozen, killed, broken, leaves or comes late: scripted faults, for real."""

from __future__ import annotations

import math
import time
from collections import Counter

import pytest
import torch
from forked import ForkLaunch, done, taken, train

import antiphon.learner.learner
from antiphon.errors import LearnerError
from antiphon.transport.block import Col, Head, Status
from antiphon.transport.faults import INJECT

WAIT_S = 0.01
"""In each step, for an accelerator: so that learners do not compete for the processors."""


def run(folder, faults, *, learners=3, restarts=0, look=lambda seen: None, **how):
    """Train with faults to the end; return the launch and what was watched."""

    def before_step(learner):
        time.sleep(WAIT_S)

    def body():
        train(how.pop("strategy", "random-ring"), before_step=before_step, **how)

    with ForkLaunch(body, learners, folder, environment={INJECT: faults}, restarts=restarts) as launch:
        watched = launch.watch(look, every_s=0.005)
        buffers = launch.block.allocate(int(launch.block.head[Head.PARAMETERS]))
        launch.final_LN = buffers.weights_LN.clone()
    return launch, watched


def changes(watched):
    return [(note["learner"], note["change"]) for note in watched.news if note["event"] == "membership"]


def told(watched, event="learner"):
    """The last note of each learner."""
    return {note["learner"]: note for note in watched.news if note["event"] == event}


def test_one_that_is_frozen_goes_on_by_itself(tmp_path):
    frozen = []

    def look(seen):
        steps_L = seen.block.board_LC[:, Col.STEPS]
        frozen.append((int(steps_L[1]), int(steps_L[[0, 2]].sum())))

    launch, watched = run(tmp_path, "freeze:1@4:0.6", epochs=10, look=look)
    assert watched.faults == [] and done(launch) == [0, 1, 2]
    assert Counter(taken(launch)) == dict.fromkeys(range(64), 10)
    others = [sum_ for mine, sum_ in frozen if mine == 4]
    assert others[-1] - others[0] > 20, "the others go on meanwhile"
    assert launch.board(Col.STEPS)[1] > 10
    assert sum(learner["exchanges"]["torn"] for learner in told(watched).values()) == 0


def test_one_that_is_killed_returns_with_a_neighbours_weights(tmp_path):
    launch, watched = run(tmp_path, "kill:1@5", epochs=20, restarts=1)
    (fault,) = watched.faults
    assert (fault.learner, fault.text, fault.restarted) == (1, "was killed by SIGKILL", True)
    assert changes(watched) == [(1, "returned")]
    (note,) = [note for note in watched.news if note["event"] == "membership"]
    assert note["step"] == 5 and note["source"] in (0, 2) and 0 < note["jump"] < 1 and 0 <= fault.jump < 1
    assert done(launch) == [0, 1, 2] and watched.present == [0, 1, 2]
    assert launch.board(Col.INCARNATION) == [0, 1, 0]
    assert set(Counter(taken(launch)).values()) == {20}, "it has done again what it held, or others have"
    assert sum(launch.board(Col.REPEATED)) in (4, 5), "one batch"
    metrics = told(watched)
    assert metrics[1]["incarnation"] == 1 and metrics[1]["steps"] == launch.board(Col.STEPS)[1] > 5
    assert metrics[1]["exchanges"]["committed"] > 0 and metrics[1]["exchanges"]["applied"] > 0
    assert float((launch.final_LN - launch.final_LN.mean(0)).abs().max()) < 0.5


def test_one_that_is_killed_again_and_again_is_given_up(tmp_path):
    faults = "kill:1@2 kill:1@4 kill:1@6"
    launch, watched = run(tmp_path, faults, epochs=20, restarts=2)
    assert [fault.restarted for fault in watched.faults] == [True, True, False]
    assert launch.board(Col.STEPS)[1] == 6 and done(launch) == [0, 2]
    assert set(Counter(taken(launch)).values()) == {20}


def test_learner_0_returns_too(tmp_path):
    launch, watched = run(tmp_path, "kill:0@5", epochs=20, restarts=1)
    assert changes(watched) == [(0, "returned")] and done(launch) == [0, 1, 2]


def test_without_restarts_or_with_a_strategy_that_waits_none_returns(tmp_path):
    launch, watched = run(tmp_path / "async", "kill:1@5", epochs=3)
    assert [fault.restarted for fault in watched.faults] == [False] and done(launch) == [0, 2]
    with pytest.raises(LearnerError, match="^learner 1 was killed by SIGKILL$"):
        run(tmp_path / "sync", "kill:1@5", epochs=3, restarts=3, strategy="sync-ring")


def test_one_whose_weights_are_not_finite_heals_and_spoils_nobody(tmp_path):
    rows = []

    def look(seen):
        if seen.begun:
            buffers = seen.map_weights()
            rows.append([bool(buffers.weights_LN[n].isfinite().all()) for n in range(3)])
            mean_N, distance = seen.consensus()
            assert bool(mean_N.isfinite().all()) and math.isfinite(distance)

    launch, watched = run(tmp_path, "nan:2@6", epochs=10, look=look)
    assert watched.faults == [] and done(launch) == [0, 1, 2]
    assert changes(watched) == [(2, "reseeded")]
    assert all(row[:2] == [True, True] for row in rows)
    assert bool(launch.final_LN.isfinite().all())
    metrics = told(watched)
    assert [metrics[n]["reseeded"] for n in range(3)] == [0, 0, 1]
    assert metrics[2]["exchanges"]["nonfinite"] > 0
    assert metrics[0]["exchanges"]["nonfinite"] == metrics[1]["exchanges"]["nonfinite"] == 0


def test_one_that_diverges_for_good_gives_up(tmp_path):
    """Others are finite, and it breaks its weights again and again."""
    faults = " ".join(f"nan:1@{step}" for step in range(2, 40, 2))
    launch, watched = run(tmp_path, faults, epochs=10)
    (fault,) = watched.faults
    assert fault.learner == 1 and "training diverges; lower the learning rate" in fault.text
    assert changes(watched) == [(1, "reseeded")] * 3
    assert Counter(taken(launch)) == dict.fromkeys(range(64), 10)


@pytest.mark.parametrize("workers", [0, 1])
def test_one_that_leaves_is_not_missed(tmp_path, workers):
    launch, watched = run(tmp_path, "leave:1@5", epochs=6, workers=workers)
    assert watched.faults == [] and done(launch) == [0, 2] and watched.present == [0, 2]
    assert launch.board(Col.STATE)[1] == Status.AWAY
    assert changes(watched) == [(1, "left")]
    assert Counter(taken(launch)) == dict.fromkeys(range(64), 6)
    metrics = told(watched)
    assert 5 <= metrics[1]["steps"] <= 8
    assert sum(learner["exchanges"]["torn"] for learner in metrics.values()) == 0
    committed, applied = (sum(m["exchanges"][name] for m in metrics.values()) for name in ("committed", "applied"))
    assert committed == applied


def test_one_that_comes_late_takes_part(tmp_path):
    launch, watched = run(tmp_path, "join:1@30", epochs=10)
    assert watched.faults == [] and done(launch) == [0, 1, 2]
    assert changes(watched) == [(1, "joined")]
    steps_L = launch.board(Col.STEPS)
    assert sum(steps_L) == 150 and 10 < steps_L[1] < 45
    assert told(watched)[1]["exchanges"]["committed"] > 0
    assert Counter(taken(launch)) == dict.fromkeys(range(64), 10)


def test_one_that_comes_when_the_work_is_done_ends_with_the_others(tmp_path):
    launch, watched = run(tmp_path, "join:1@100000", epochs=2)
    assert watched.faults == [] and done(launch) == [0, 1, 2]
    assert launch.board(Col.STEPS)[1] == 0 and bool(launch.final_LN.isfinite().all())


def test_random_step_times_slow_one_down(tmp_path):
    launch, watched = run(tmp_path, "jitter:1@0:0.06", epochs=10)
    steps_L = launch.board(Col.STEPS)
    assert watched.faults == [] and sum(steps_L) == 150
    assert steps_L[1] < 0.6 * steps_L[0]


def test_messages_that_are_lost_doubled_late_or_spoilt_cost_nothing_but_time(tmp_path):
    faults = "drop:0@2:.3 double:1@2:.5 corrupt:2@2:.3 delay:0@9/commit:.4 drop:2@14/accept"
    launch, watched = run(tmp_path, faults, epochs=15)
    assert watched.faults == [] and done(launch) == [0, 1, 2]
    counts = [m["exchanges"] for m in told(watched).values()]
    assert sum(count["torn"] for count in counts) == 0
    assert sum(count["committed"] for count in counts) == sum(count["applied"] for count in counts) > 0
    assert sum(count["duplicate"] for count in counts) > 0
    assert bool(torch.isfinite(launch.final_LN).all())


def test_learners_tell_their_numbers_while_they_run(tmp_path, monkeypatch):
    monkeypatch.setattr(antiphon.learner.learner, "TELL_S", 0.05)
    launch, watched = run(tmp_path, "", learners=2, epochs=10)
    metrics = told(watched, "metrics")
    assert sorted(metrics) == [0, 1]
    final = told(watched)
    assert all(final[n]["steps"] >= metrics[n]["steps"] > 0 for n in (0, 1))
    for note in final.values():
        tickets = note["tickets"]
        assert tickets["ended"] == tickets["taken"] == note["steps"] and tickets["again"] == 0
