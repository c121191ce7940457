"""Tests across hosts need network namespaces: skipped, with the reason, where they may not be made."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import pytest

# The harness, and learners as forked processes.
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "processes")]

from namespaces import reason_against  # noqa: E402


@functools.cache
def _reason() -> str | None:
    return reason_against()


@pytest.fixture(autouse=True)
def _permitted() -> None:
    if reason := _reason():
        pytest.skip(f"hosts are made of network namespaces: {reason}")
