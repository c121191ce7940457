"""`antiphon launch` and torchrun, as a user types them: what they print, return and leave behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from forked import until

from antiphon.transport.block import process_runs

SCRIPT = Path(__file__).with_name("script.py")
DEADLINE_S = 60.0


@pytest.fixture
def place(tmp_path):
    """Where the script writes, and where the commands have their temporary files."""
    (tmp_path / "out").mkdir()
    (tmp_path / "tmp").mkdir()
    return tmp_path


def start(place, *words, module=("antiphon", "launch", "--learners", "2")):
    """Start a command in a session of its own."""
    environment = {**os.environ, "TMPDIR": str(place / "tmp"), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", *module, *map(str, words)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def end(process):
    output, errors = process.communicate(timeout=DEADLINE_S)
    return process.returncode, output, errors


def pids(place):
    return [int(path.read_text()) for path in sorted((place / "out").glob("pid-*"))]


def wait_until_begun(place, learners=2):
    until(lambda: len(list((place / "out").glob("began-*"))) == learners, "the learners to begin", DEADLINE_S)


def assert_nothing_left(place):
    until(lambda: not any(process_runs(pid) for pid in pids(place)), "the learners to be gone", 10.0)
    assert list((place / "tmp").glob("antiphon-*")) == []


def assert_same_consensus(place, learners=2):
    states = [torch.load(place / "out" / f"consensus-{learner}.pt") for learner in range(learners)]
    assert all(torch.equal(state[key], states[0][key]) for state in states for key in states[0])


def test_launch_runs_a_script_to_its_end(place):
    launch = start(place, "--json", SCRIPT, place / "out")
    status, output, errors = end(launch)
    assert (status, errors) == (0, "")
    *lines, last = output.splitlines()
    assert sorted(line.partition(" made")[0] for line in lines) == [f"learner {n} of 2" for n in range(2)]
    result = json.loads(last)
    assert (result["command"], result["learners"], result["faults"]) == ("launch", 2, 0)
    assert_same_consensus(place)
    assert_nothing_left(place)


def test_torchrun_runs_a_script_to_its_end(place):
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    status, output, errors = end(start(place, SCRIPT, place / "out", module=torchrun))
    assert status == 0, errors
    assert {line.partition(" made")[0] for line in output.splitlines()} == {"learner 0 of 2", "learner 1 of 2"}
    assert_same_consensus(place)
    assert_nothing_left(place)


def test_ctrl_c_leaves_nothing_behind(place):
    launch = start(place, SCRIPT, place / "out", "random-ring", 5000)
    wait_until_begun(place)
    launch.send_signal(signal.SIGINT)
    status, output, errors = end(launch)
    assert status == 130
    assert errors.strip() == "antiphon: stopped"
    assert output.count("made") == 2, "the learners have come to an end of their own"
    assert_same_consensus(place)
    assert_nothing_left(place)


def test_a_killed_launcher_takes_its_learners_along(place):
    launch = start(place, SCRIPT, place / "out", "sync-ring", 10**6)
    wait_until_begun(place)
    launch.kill()
    launch.communicate(timeout=DEADLINE_S)
    assert len(pids(place)) == 2
    until(lambda: not any(process_runs(pid) for pid in pids(place)), "the learners to be gone", 10.0)


def test_an_error_of_one_learner_is_shown_once_and_is_the_status(place):
    status, output, errors = end(start(place, SCRIPT, place / "out", "random-ring", 20, 1))
    assert status == 1
    assert errors.count("Traceback") == errors.count("ValueError: a bad sample") == 1
    assert errors.splitlines()[-1] == "antiphon: learner 1 ended with status 1; the others went on without it"
    assert output.startswith("learner 0 of 2 made ")
    assert_nothing_left(place)


def test_scripts_that_cannot_be_run(place):
    missing = place / "no.py"
    status, output, errors = end(start(place, missing))
    assert (status, output, errors) == (2, "", f"antiphon: {missing}: no such script\n")
    idle = place / "idle.py"
    idle.write_text("print('hello')\n")
    status, output, errors = end(start(place, idle))
    assert status == 1 and output.startswith("hello")
    assert "ended without having made its antiphon.Learner" in errors
    assert list((place / "tmp").glob("antiphon-*")) == []
