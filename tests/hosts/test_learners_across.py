"""Learners on hosts of their own: they train as one run, and go on through cuts, losses, delays, freezes and deaths."""

from __future__ import annotations

import re
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from forked import train, until
from learners import END_S, Meter, Run, apart, assert_sum_conserved, leave_results
from namespaces import Hosts

STEP_S = 0.01
LEARNERS = 4
MORE_KILLED = [[3], [2], [0, 1]]


@pytest.fixture
def hosts():
    with Hosts(2) as made:
        yield made


def body(folder, *, samples, lr=0.0, epochs=1, before_step=lambda learner: None):
    """Be a learner whose steps wait a little, as for an accelerator, and move by exchanges alone."""

    def step(learner):
        if lr == 0.0:
            apart(learner)
        before_step(learner)
        time.sleep(STEP_S)

    return lambda: train(
        "random-ring", epochs=epochs, batch=16, samples=samples, lr=lr, before_step=step, at_end=leave_results(folder)
    )


def until_exchanged(meter):
    """Wait until each learner has read more over the network than now."""
    before_L = meter.values_L.copy()
    until(lambda: bool((meter.values_L > before_L).all()), "exchanges over the network", END_S)


def test_near_peers_by_memory_and_far_ones_by_network_in_one_run(hosts, tmp_path):
    with Run(hosts, [2, 2], body(tmp_path, samples=256, lr=0.05, epochs=3), tmp_path) as run:
        run.finish()
    assert run.taken() == Counter(dict.fromkeys(range(256), 3)), "every sample once an epoch"
    results = run.results()
    for result in results:
        assert result["shared_bytes"] > 0 and result["network_bytes"] > 0
        assert all(torch.equal(value, results[0]["consensus"][key]) for key, value in result["consensus"].items())
    mean_N = torch.stack([result["own_N"] for result in results]).mean(0)
    consensus_N = torch.cat([value.reshape(-1) for value in results[0]["consensus"].values()])
    torch.testing.assert_close(consensus_N, mean_N)
    counts = [result["metrics"]["exchanges"] for result in results]
    assert sum(count["committed"] for count in counts) == sum(count["applied"] for count in counts) > 20


@pytest.mark.parametrize("ipv6", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_cut_link_and_its_healing(hosts, tmp_path, ipv6):
    """Both sides go on during the cut, exchange again after it, and the sum is what it was."""
    meter = Meter(tmp_path, LEARNERS)
    learner = body(tmp_path, samples=96_000, before_step=meter.network_bytes)
    with Run(hosts, [2, 2], learner, tmp_path, ipv6=ipv6) as run:
        until_exchanged(meter)
        hosts.cut(1)
        run.until_steps(100)
        assert run.present(0) == run.present(3) == [0, 1, 2, 3], "silence is not death"
        read_L = meter.values_L.copy()
        run.until_steps(50)
        assert (meter.values_L == read_L).all(), "nothing comes through a cut"
        hosts.heal(1)
        until_exchanged(meter)
        run.stop()
        run.finish()
    assert_sum_conserved(run.results(), LEARNERS)
    spread = max(float((a["own_N"] - b["own_N"]).abs().max()) for a in run.results() for b in run.results())
    assert spread < 1.5, "they were 3 apart, and have mixed"


def test_five_of_a_hundred_packets_lost_both_ways(hosts, tmp_path):
    meter = Meter(tmp_path, LEARNERS)
    hosts.lose(0, 0.05)
    hosts.lose(1, 0.05)
    learner = body(tmp_path, samples=96_000, before_step=meter.network_bytes)
    with Run(hosts, [2, 2], learner, tmp_path) as run:
        run.until_steps(100)
        until_exchanged(meter)
        run.stop()
        run.finish()
    assert_sum_conserved(run.results(), LEARNERS)


@pytest.mark.long
def test_a_wire_of_twenty_milliseconds(hosts, tmp_path):
    """By the interface that is named: exchanges and work go over it, the sum and every sample are whole."""
    hosts.delay(20)
    with Run(hosts, [2, 2], body(tmp_path, samples=2_000), tmp_path, wire=True) as run:
        run.finish()
    assert run.taken() == Counter(dict.fromkeys(range(2_000), 1))
    assert_sum_conserved(run.results(), LEARNERS)
    assert all(result["network_bytes"] > 0 for result in run.results())


@pytest.mark.long
def test_a_learner_that_is_frozen_and_thawed(hosts, tmp_path):
    """The others go on, on both hosts; once thawed it exchanges again, and the sum is what it was."""
    meter = Meter(tmp_path, LEARNERS)
    learner = body(tmp_path, samples=96_000, before_step=meter.network_bytes)
    with Run(hosts, [2, 2], learner, tmp_path) as run:
        until_exchanged(meter)
        run.freeze(2)
        run.until_steps(100, [0, 1, 3])
        assert run.present(0) == run.present(3) == [0, 1, 2, 3], "silence is not death"
        run.thaw(2)
        until_exchanged(meter)
        run.stop()
        run.finish()
    assert_sum_conserved(run.results(), LEARNERS)


@pytest.mark.parametrize("killed", [[2, 3], *(pytest.param(them, marks=pytest.mark.long) for them in MORE_KILLED)])
def test_the_others_do_the_work_of_those_that_are_killed(hosts, tmp_path, killed):
    """One learner of a host, or all of them at once: every sample is taken all the same, few of them twice."""
    with Run(hosts, [2, 2], body(tmp_path, samples=2_000, lr=0.05), tmp_path) as run:
        run.until_steps(30)
        run.kill(*killed)
        run.finish(killed)
    survivors = [number for number in range(LEARNERS) if number not in killed]
    taken = run.taken()
    # The last batch of one that was killed may have been ended without its having said so.
    assert set(taken) == set(range(2_000))
    assert taken.total() - 2_000 < 200, "only what was ended after the last note is done again"
    results = run.results(survivors)
    for result in results:
        assert all(torch.isfinite(value).all() for value in result["consensus"].values())
        assert all(torch.equal(value, results[0]["consensus"][key]) for key, value in result["consensus"].items())


def test_a_fast_host_does_the_work_of_a_slow_one(hosts, tmp_path):
    """Work goes from host to host: each takes as much as it can."""

    def slow_host(learner):
        if learner.number >= 2:
            time.sleep(9 * STEP_S)

    with Run(hosts, [2, 2], body(tmp_path, samples=2_000, before_step=slow_host), tmp_path) as run:
        run.finish()
    steps = [result["metrics"]["steps"] for result in run.results()]
    assert run.taken() == Counter(dict.fromkeys(range(2_000), 1))
    assert sum(steps) == 500
    assert sum(steps[:2]) > 2 * sum(steps[2:]), "half of the work was the slow host's"


@pytest.mark.long
def test_torchrun_on_two_hosts(hosts, tmp_path):
    """The example, as a user would start it, on a link of 4 Gbit/s."""
    script = Path(__file__).parents[2] / "examples" / "spirals.py"
    environment = {"ANTIPHON_SECRET": "a secret for the tests", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    launchers = []
    for host in range(2):
        hosts.limit(host, "4gbit")
        argv = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(host)]
        argv += ["--nproc-per-node", "2", "--master-addr", hosts.address(0), "--master-port", "29500", str(script)]
        launchers.append(hosts.start(host, argv, tmp_path / f"host-{host}.log", environment))
    statuses = [launcher.wait(timeout=180) for launcher in launchers]
    logs = [(tmp_path / f"host-{host}.log").read_text() for host in range(2)]
    assert statuses == [0, 0], "\n".join(logs)
    (accuracy,) = re.findall(r"accuracy ([\d.]+), steps of learner \d", logs[0] + logs[1])
    assert float(accuracy) > 0.9
