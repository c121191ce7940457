"""Where a process finds its place: Antiphon's launch, torchrun, or alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from antiphon.errors import ArgumentError
from antiphon.transport.block import Block
from antiphon.transport.place import LEARNER, LEARNERS, RUN, Place, torchrun_folder

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


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ({RUN: "/x", LEARNER: "one", LEARNERS: "4"}, "ANTIPHON_LEARNER must be a whole number, not 'one'"),
        ({RUN: "/x", LEARNER: "1"}, "ANTIPHON_LEARNERS must be a whole number, not None"),
        ({RUN: "/x", LEARNER: "4", LEARNERS: "4"}, "learner 4 of 4"),
        ({RUN: "/x", LEARNER: "-1", LEARNERS: "4"}, "learner -1 of 4"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "2"}, "spans several hosts"),
        ({**TORCHRUN, "RANK": ""}, "RANK must be a whole number, not ''"),
    ],
)
def test_contradictions_are_named(environment, text):
    with pytest.raises(ArgumentError, match=text):
        Place.find(environment)
