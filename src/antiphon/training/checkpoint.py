"""Checkpoints of a run: the consensus model, each learner's optimizer, and how far the work had come."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch

from antiphon.errors import FolderError
from antiphon.learner.pool import Pool
from antiphon.transport.block import Block, Col

FOLDER = "checkpoints"
KEPT = 3


def save(path: Path, state: Any) -> None:
    """Write ``state`` so that a reader sees a whole file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with beside.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException as error:
        beside.unlink(missing_ok=True)
        # torch tells of a failed write in words of its own; what the system said, such as a full disk, lies beneath.
        said = error.__context__ if isinstance(error, RuntimeError) else error
        if isinstance(said, OSError):
            raise OSError(said.errno, said.strerror, str(path)) from error
        raise


def load(path: Path) -> Any:
    """Read what `save` wrote.

    Raises:
        FolderError: the file is missing or broken.
    """
    try:
        return torch.load(path, weights_only=True)
    except FileNotFoundError:
        raise FolderError(f"{path} is not there") from None
    except Exception as error:  # the bytes of a broken file may fail the reader in any way
        raise FolderError(f"{path} is not a whole file of weights ({type(error).__name__})") from error


def checkpoints(run: Path) -> list[Path]:
    """Return a run's checkpoints, the oldest first."""
    found = [path for path in (run / FOLDER).glob("epoch-*.pt") if re.fullmatch(r"epoch-\d+\.pt", path.name)]
    return sorted(found, key=lambda path: int(path.stem.partition("-")[2]))


def load_latest(run: Path) -> dict[str, Any]:
    """Return the newest checkpoint.

    Raises:
        FolderError: there is none, or it cannot be read.
    """
    found = checkpoints(run)
    if not found:
        raise FolderError(f"{run} has no checkpoint to resume from: start it anew with --overwrite")
    try:
        state: dict[str, Any] = load(found[-1])
    except FolderError as error:
        raise FolderError(f"{error}: delete it to resume from the one before") from error
    return state


def prune(run: Path) -> None:
    """Keep the newest few."""
    for path in checkpoints(run)[:-KEPT]:
        path.unlink()


def tickets_done(block: Block, first: int, waits: bool) -> int:
    """Return the first ticket that a resumed run has to take: all before it have been ended.

    Args:
        block: the run's shared memory.
        first: the first ticket of this session.
        waits: whether learners go in rounds: what they have ended of a round in hand is then done again.
    """
    if waits:
        return first + block.learners * int(block.board_LC[:, Col.STEPS].min())
    pool = Pool(block, block.local[0], first)
    # Each learner tells how far its own host has come.
    others = (learners for host, learners in pool.learners.items() if host != pool.host)
    return min([pool.floor(), *(max(first, int(block.board_LC[each, Col.FLOOR].max())) for each in others)])
