from __future__ import annotations

import pytest

from antiphon.errors import (
    AntiphonError,
    ArgumentError,
    DataError,
    DeadlineError,
    FolderError,
    LearnerError,
    UserError,
    unknown_name,
)

STRATEGIES = ["allreduce", "fixed-ring", "random-ring"]


def test_the_tree() -> None:
    assert all(issubclass(kind, UserError) for kind in (ArgumentError, DataError, FolderError))
    assert all(issubclass(kind, AntiphonError) for kind in (UserError, DeadlineError, LearnerError))
    assert not issubclass(LearnerError, UserError)
    assert issubclass(ArgumentError, ValueError)
    assert issubclass(DeadlineError, TimeoutError)


@pytest.mark.parametrize(
    ("name", "offered"), [("random_ring", "random-ring"), ("fixedring", "fixed-ring"), ("allredcue", "allreduce")]
)
def test_a_near_name_is_offered(name: str, offered: str) -> None:
    text = str(unknown_name("strategy", name, STRATEGIES))
    assert text == f"unknown strategy '{name}': did you mean '{offered}'? Known: allreduce, fixed-ring, random-ring"


def test_a_far_name_gets_the_list_alone() -> None:
    error = unknown_name("strategy", "zzz", reversed(STRATEGIES))
    assert isinstance(error, ArgumentError)
    assert str(error) == "unknown strategy 'zzz'. Known: allreduce, fixed-ring, random-ring"
