"""Where a process finds its place: Antiphon's launch, torchrun, or alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from antiphon.errors import ArgumentError
from antiphon.transport.block import Block
from antiphon.transport.place import HOST, HOSTS, LEARNER, LEARNERS, RANKS, RUN, Place, node_names, torchrun_folder

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "MASTER_PORT": "29500"}


def test_alone():
    assert Place.find({}) == Place(0, 1, None, creates=True)
    block = Place().open()
    assert block.learners == 1 and block.folder.is_dir()
    block.remove()


def test_under_antiphon_launch_and_there_and_back():
    place = Place(2, 4, Path("/run/x"), creates=False)
    assert place.environment() == {RUN: "/run/x", LEARNER: "2", LEARNERS: "4"}
    assert Place.find({**place.environment(), **TORCHRUN}) == place


def test_under_torchrun_the_first_makes_the_memory_that_the_others_find(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    places = [Place.find({**TORCHRUN, "RANK": str(rank)}) for rank in range(4)]
    assert [place.creates for place in places] == [True, False, False, False]
    assert len({place.folder for place in places}) == 1
    first = places[0].open()
    other = places[3].open()
    other.board_LC[3, 0] = 7
    assert first.board_LC[3, 0] == 7
    first.remove()


def test_what_a_killed_job_left_is_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    place = Place.find({**TORCHRUN, "RANK": "0"})
    place.folder.mkdir(mode=0o700)
    (place.folder / "block").symlink_to(f"/proc/{2**22 + 1}/fd/3")
    (place.folder / "again-1-2").touch()
    block = place.open()
    assert not (place.folder / "again-1-2").exists()
    assert Block.attach(place.folder, 4).learners == 4
    block.remove()


def test_jobs_and_restarts_have_folders_of_their_own():
    other = {"MASTER_PORT": "29501"}, {"TORCHELASTIC_RUN_ID": "b"}, {"TORCHELASTIC_RESTART_COUNT": "1"}
    folders = {torchrun_folder({**TORCHRUN, **more}) for more in ({}, *other)}
    assert len(folders) == 4
    assert torchrun_folder({"TORCHELASTIC_RUN_ID": "../../x/y"}).name == f"antiphon-{os.getuid()}-______x_y-0-0"


def test_torchrun_on_several_hosts():
    places = [
        Place.find({"RANK": str(2 * group + rank), "WORLD_SIZE": "4", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2",
                    "GROUP_RANK": str(group), "GROUP_WORLD_SIZE": "2", "MASTER_PORT": "29500"})
        for group in range(2) for rank in range(2)
    ]  # fmt: skip
    assert [(place.learner, place.host, place.local_rank, place.creates) for place in places] == [
        (0, 0, 0, True),
        (1, 0, 1, False),
        (2, 1, 0, True),
        (3, 1, 1, False),
    ]
    assert all((place.learners, place.hosts) == (4, 2) for place in places)
    assert [places[0].folder, places[2].folder] == [places[1].folder, places[3].folder]
    assert places[0].folder != places[2].folder, "hosts of one machine, or with a common /tmp"


def test_a_learner_started_for_torchrun_knows_its_host():
    place = Place(0, 4, Path("/run/x"), creates=False, host=1, hosts=2)
    assert place.environment() == {RUN: "/run/x", LEARNER: "0", LEARNERS: "4", HOST: "1", HOSTS: "2"}
    assert Place.find({**place.environment(), **TORCHRUN}) == place


STEP = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "3", "SLURM_STEP_NODELIST": "n[1-2]"}


def test_srun_on_several_hosts_and_on_one():
    tasks = [("0", "0", "0"), ("1", "1", "0"), ("2", "0", "1")]
    environments = [dict(zip(("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"), task, strict=True)) for task in tasks]
    places = [Place.find({**STEP, **each}) for each in environments]
    assert [(place.learner, place.host, place.local_rank, place.creates) for place in places] == [
        (0, 0, 0, True),
        (1, 0, 1, False),
        (2, 1, 0, True),
    ]
    assert all((place.learners, place.hosts) == (3, 2) for place in places)
    near = [Place.find({**STEP, **each, "SLURM_STEP_NUM_NODES": "1", "SLURM_NODEID": "0"}) for each in environments]
    assert {place.hosts for place in near} == {1} and len({place.folder for place in near}) == 1


def test_a_batch_script_and_a_single_task_are_no_learners_of_many():
    assert Place.find({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "77"}) == Place()
    assert Place.find({**STEP, "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}) == Place()


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", []),
        ("a", ["a"]),
        ("a,b-1", ["a", "b-1"]),
        ("n[9-10]", ["n9", "n10"]),
        ("n[01,03]x,m", ["n01x", "n03x", "m"]),
    ],
)
def test_lists_of_slurms_nodes(text, names):
    assert node_names(text) == names


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ({RUN: "/x", LEARNER: "one", LEARNERS: "4"}, "ANTIPHON_LEARNER must be a whole number, not 'one'"),
        ({RUN: "/x", LEARNER: "1"}, "ANTIPHON_LEARNERS must be a whole number, not None"),
        ({RUN: "/x", LEARNER: "4", LEARNERS: "4"}, "learner 4 of 4"),
        ({RUN: "/x", LEARNER: "-1", LEARNERS: "4"}, "learner -1 of 4"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "2"}, "GROUP_RANK must be a whole number, not None"),
        ({**TORCHRUN, "RANK": ""}, "RANK must be a whole number, not ''"),
        ({**STEP, "SLURM_PROCID": "1"}, "SLURM_NODEID must be a whole number, not None"),
        (
            {**STEP, "SLURM_PROCID": "3", "SLURM_LOCALID": "0", "SLURM_NODEID": "1", "SLURM_NTASKS": "4", RANKS: "2"},
            "the 2 ranks of learner 1 would lie on two hosts",
        ),
        ({RUN: "/x", LEARNER: "1", LEARNERS: "4", HOST: "2", HOSTS: "2"}, "host 2 of 2"),
    ],
)
def test_contradictions_are_named(environment, text):
    with pytest.raises(ArgumentError, match=text):
        Place.find(environment)
