"""The command line under test: run here with its output caught, or started as a process of its own."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

# Loaded now, lest a test wait for it while a run that it watches goes on.
import antiphon.recipes.decode
import antiphon.recipes.train  # noqa: F401
from antiphon.cli.main import main
from antiphon.records import Json, read_events
from antiphon.transport.block import process_runs

DEADLINE_S = 240.0
FORMATS = Path(__file__).parents[2] / "docs" / "formats.md"
SMALL = ("--layers", "1", "--cells", "16", "--bottleneck", "8", "--batch", "64")
"""A model that takes milliseconds a step."""


@dataclass(frozen=True)
class Result:
    """What a command left: its exit status and what it wrote to both streams."""

    status: int
    out: str
    err: str

    @property
    def object(self) -> Json:
        """The one JSON object that --json prints, and nothing else on standard output."""
        assert self.status == 0, self.err
        (line,) = self.out.splitlines()
        value: Json = json.loads(line)
        return value

    @property
    def complaint(self) -> str:
        """The one line by which a command says what the user did wrong."""
        assert self.status == 2, f"status {self.status}: {self.err}"
        assert self.out == ""
        assert "Traceback" not in self.err
        (line,) = [line for line in self.err.splitlines() if not line.startswith("See: ")]
        return line


def antiphon(*words: object, deadline_s: float = DEADLINE_S) -> Result:
    """Run a command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with deadline(deadline_s, f"antiphon {words[0]}"), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main([str(word) for word in words])
    return Result(status, out.getvalue(), err.getvalue())


@contextlib.contextmanager
def deadline(seconds: float, what: str) -> Iterator[None]:
    """Fail where the body takes longer."""

    def late(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"{what} took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def until(ready: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Wait for a condition."""
    end = time.monotonic() + deadline_s
    while not ready():
        assert time.monotonic() < end, f"waited {deadline_s} s for {what}"
        time.sleep(0.02)


class Started:
    """A command as a process: ``with Started(folder, "train", ...) as process``. It does not outlive the body.

    Args:
        folder: where its output and its temporary files go.
        words: what follows ``antiphon`` on the command line.
        program: what is run instead of ``antiphon``.
    """

    def __init__(self, folder: Path, *words: object, program: tuple[str, ...] = ("-m", "antiphon")) -> None:
        self.temporary = folder / "tmp"
        self.temporary.mkdir(parents=True)
        self._files = [(folder / name).open("w+") for name in ("out", "err")]
        self.process = subprocess.Popen(
            [sys.executable, *program, *map(str, words)],
            stdin=subprocess.DEVNULL,
            stdout=self._files[0],
            stderr=self._files[1],
            env={**os.environ, "TMPDIR": str(self.temporary)},
            start_new_session=True,
        )

    def __enter__(self) -> Started:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for file in self._files:
            file.close()

    def result(self, deadline_s: float = DEADLINE_S) -> Result:
        """Wait for its end."""
        status = self.process.wait(deadline_s)
        texts = []
        for file in self._files:
            file.seek(0)
            texts.append(file.read())
        return Result(status, *texts)

    @property
    def leftovers(self) -> list[Path]:
        """What it left among the temporary files."""
        return list(self.temporary.glob("antiphon-*"))


def events(run: Path, *kinds: str) -> list[Json]:
    """Return the events of a run so far, of the kinds named or of all."""
    if not (run / "events.jsonl").exists():
        return []
    return [event for event in read_events(run) if not kinds or event["event"] in kinds]


def learners(run: Path) -> list[int]:
    """Return the process numbers of a run's learners."""
    pids: list[int] = events(run, "run_started")[-1]["pids"]
    return pids


def all_gone(pids: list[int]) -> bool:
    return not any(process_runs(pid) for pid in pids)


@contextlib.contextmanager
def meanwhile(action: Callable[[], None]) -> Iterator[None]:
    """Do something in another thread while the body runs, and raise what it raised."""
    failures: list[BaseException] = []

    def guarded() -> None:
        try:
            action()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    try:
        yield
    finally:
        thread.join(DEADLINE_S)
    if failures:
        raise failures[0]


# What docs/formats.md promises


def documented(heading: str) -> dict[str, str]:
    """Return the table under a heading of docs/formats.md: first column -> second, without the marks of code."""
    _, _, section = FORMATS.read_text().partition(f" {heading}")
    section = re.split(r"\n#", section)[0]
    rows = [line.strip("| ").split(" | ", 1) for line in section.splitlines() if line.startswith("| `")]
    assert rows, f"{FORMATS} has no table under '{heading}'"
    return {name.strip("` "): text for name, text in rows}


def fields(text: str) -> set[str]:
    """Return the names in code marks, those of an inner object and of values left out.

    >>> sorted(fields("`a`, `b` {`c`}, `kind` (`died`)"))
    ['a', 'b', 'kind']
    """
    return set(re.findall(r"`(\w+)`", re.sub(r"[({][^})]*[})]", "", text)))


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
