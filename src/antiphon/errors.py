"""The exceptions of Antiphon.

AntiphonError
├── UserError               the user can mend it: the command line prints it alone and exits with 2
│   ├── ArgumentError       an argument outside its bounds (also a ValueError)
│   ├── DataError           a recording, a text or a line of a file that cannot be used
│   └── FolderError         a folder that is in use, not empty, not a run, or only half-written
├── DeadlineError           something awaited did not arrive in time (also a TimeoutError)
└── LearnerError            a learner failed or vanished
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class AntiphonError(Exception):
    """Anything that Antiphon raises by itself."""


class UserError(AntiphonError):
    """A mistake that the user can mend; its text says how."""


class ArgumentError(UserError, ValueError):
    """An argument outside its bounds."""


class DataError(UserError):
    """Input data that cannot be used; the text names the file and the line."""


class FolderError(UserError):
    """A folder that cannot serve: in use, not empty, not a run, or half-written."""


class DeadlineError(AntiphonError, TimeoutError):
    """Something awaited did not arrive before its deadline."""


class LearnerError(AntiphonError):
    """A learner failed or vanished."""


def unknown_name(kind: str, name: str, known: Iterable[str]) -> ArgumentError:
    """Build the error for a name that is not registered, with the nearest known one offered.

    >>> str(unknown_name("strategy", "random_ring", ["random-ring", "allreduce"]))
    "unknown strategy 'random_ring': did you mean 'random-ring'? Known: allreduce, random-ring"
    """
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1)
    hint = f": did you mean '{near[0]}'?" if near else "."
    return ArgumentError(f"unknown {kind} '{name}'{hint} Known: {', '.join(names)}")
