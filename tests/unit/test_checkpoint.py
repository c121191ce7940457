"""Checkpoints: whole files or none, the newest few kept, and where a resumed run begins."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch

from antiphon.errors import FolderError
from antiphon.training import checkpoint
from antiphon.transport.block import Block, Col

STATE = {"model": {"w": torch.arange(3.0)}, "tickets": 7, "optimizers": []}


@pytest.fixture
def block(tmp_path: Path) -> Block:
    folder = tmp_path / "block"
    folder.mkdir()
    return Block.create(3, folder)


def write(run: Path, *numbers: int) -> None:
    for number in numbers:
        checkpoint.save(run / checkpoint.FOLDER / f"epoch-{number:03d}.pt", {**STATE, "tickets": number})


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    write(tmp_path, 1)
    state = checkpoint.load_latest(tmp_path)
    assert state["tickets"] == 1 and torch.equal(state["model"]["w"], STATE["model"]["w"])


def test_the_newest_is_by_number_not_by_name(tmp_path: Path) -> None:
    write(tmp_path, 999, 1000, 2)
    assert checkpoint.load_latest(tmp_path)["tickets"] == 1000
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["epoch-002.pt", "epoch-999.pt", "epoch-1000.pt"]


def test_the_newest_three_are_kept(tmp_path: Path) -> None:
    write(tmp_path, 1, 2, 3, 4, 10)
    (tmp_path / checkpoint.FOLDER / "mine.pt").touch()
    checkpoint.prune(tmp_path)
    assert sorted(path.name for path in (tmp_path / checkpoint.FOLDER).iterdir()) == [
        "epoch-003.pt",
        "epoch-004.pt",
        "epoch-010.pt",
        "mine.pt",
    ]


def test_a_failed_save_leaves_the_old_file_alone(tmp_path: Path) -> None:
    write(tmp_path, 1)
    path = tmp_path / checkpoint.FOLDER / "epoch-001.pt"
    before = path.read_bytes()
    with pytest.raises(AttributeError, match="local object"):
        checkpoint.save(path, {"cannot be pickled": lambda: None})
    assert path.read_bytes() == before
    assert [entry.name for entry in path.parent.iterdir()] == ["epoch-001.pt"]


def test_a_full_disk_is_what_the_system_says_it_is(tiny_disk: Path) -> None:
    path = tiny_disk / "model.pt"
    with pytest.raises(OSError) as caught:
        checkpoint.save(path, {"w": torch.zeros(100_000)})
    assert caught.value.errno == errno.ENOSPC and caught.value.filename == str(path)
    assert list(tiny_disk.iterdir()) == []


def test_no_checkpoint_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(FolderError, match="no checkpoint to resume from: start it anew with --overwrite"):
        checkpoint.load_latest(tmp_path)


@pytest.mark.parametrize("damage", ["nothing", "empty", "text", "half", "pickle"])
def test_a_broken_file_is_one_clear_line(tmp_path: Path, damage: str) -> None:
    path = tmp_path / checkpoint.FOLDER / "epoch-002.pt"
    write(tmp_path, 1, 2)
    whole = path.read_bytes()
    begin = whole.index(b"data.pkl") + 20
    match damage:
        case "nothing":
            path.unlink()
        case "empty":
            path.write_bytes(b"")
        case "text":
            path.write_bytes(b"these are no weights\n")
        case "half":
            path.write_bytes(whole[: len(whole) // 2])
        case "pickle":
            path.write_bytes(whole[:begin] + b"\xff" * 20 + whole[begin + 20 :])
    with pytest.raises(FolderError) as caught:
        checkpoint.load(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    if damage != "nothing":
        with pytest.raises(FolderError, match="epoch-002.pt .* delete it to resume from the one before"):
            checkpoint.load_latest(tmp_path)


# Where a resumed run begins


def test_a_synchronous_run_goes_on_after_the_rounds_counted(block: Block) -> None:
    block.outstanding_LK[0, 0] = 31
    # In the middle of a round: what learner 1 has ended of it is done again, for a round begins with all of them.
    block.board_LC[:3, Col.STEPS] = [3, 4, 3]
    assert block.learners == 3
    assert checkpoint.tickets_done(block, first=12, waits=True) == 12 + 3 * 3


def drawn(block: Block, tickets: int) -> None:
    for index in range(tickets):
        block.draws().draw(learner=0, index=index)
    block.board_LC[0, Col.DRAWN] = tickets


def test_an_asynchronous_run_goes_on_at_the_first_ticket_not_ended(block: Block) -> None:
    drawn(block, 17)
    block.outstanding_LK[0, 0], block.outstanding_LK[2, 5] = 15 + 1, 13 + 1
    assert checkpoint.tickets_done(block, first=0, waits=False) == 13


def test_with_nothing_in_hand_it_goes_on_after_all_that_was_drawn(block: Block) -> None:
    drawn(block, 4)
    assert checkpoint.tickets_done(block, first=6, waits=False) == 10


def test_a_ticket_taken_over_from_a_dead_learner_counts_once(block: Block) -> None:
    block.outstanding_LK[1, 0] = 5 + 1
    drawn(block, 9)
    assert checkpoint.tickets_done(block, 0, waits=False) == 5
    assert block.claim_again(5, dead=1)
    assert checkpoint.tickets_done(block, 0, waits=False) == 9
    block.outstanding_LK[0, 0] = 5 + 1
    assert checkpoint.tickets_done(block, 0, waits=False) == 5
