"""Processes that do one thing at a time when told, all at once: what one measures does not disturb another's turn.

Each reads a line from standard input, the name of a method and its arguments, and answers with one line, what it
returned. Both ways the lines are JSON.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from antiphon.errors import DeadlineError, LearnerError
from antiphon.transport.block import Block
from antiphon.transport.place import Place

Took = dict[str, Any]
"""What something took, by the name of the figure."""

LIMIT_S = 120.0
"""For anything that a process is told to do: many times what it takes."""


def obey(worker: object) -> None:
    """Do what is asked for, until standard input ends."""
    _say({})
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        _say(getattr(worker, name)(*arguments))


def _say(answer: Took | None) -> None:
    print(json.dumps(answer or {}), flush=True)


class Driven:
    """Learners, each a process that runs ``script`` with ``words``; use as a context manager.

    Args:
        script: ends in `obey` with what the learner is.
        words: arguments of the script.
        prefixes: for each learner, words before its command, which put it elsewhere.
    """

    def __init__(self, script: Path, words: Sequence[str], prefixes: Sequence[Sequence[str]] = ((), ())) -> None:
        self.block = Block.create(len(prefixes))
        self.processes = []
        for learner, prefix in enumerate(prefixes):
            place = Place(learner, len(prefixes), self.block.folder, creates=False)
            self.processes.append(
                subprocess.Popen(
                    [*prefix, sys.executable, str(script), *words],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    bufsize=0,
                    env={**os.environ, **place.environment()},
                )
            )

    def __enter__(self) -> Self:
        """Wait until all are ready."""
        try:
            self._answers()
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let them end; end them where something went wrong."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self.processes:
            try:
                process.wait(20.0 if error is None else 0.1)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.block.remove()

    def all(self, name: str, *arguments: object) -> list[Took]:
        """Let all do the same at the same time, and return what it took each."""
        # Learner 0 is told last: whatever it starts, the others are ready for.
        for learner in reversed(range(len(self.processes))):
            self._tell(learner, name, arguments)
        return self._answers()

    def one(self, learner: int, name: str, *arguments: object) -> Took:
        """Let one learner do something."""
        self._tell(learner, name, arguments)
        return self._answer(learner)

    def _tell(self, learner: int, name: str, arguments: Sequence[object]) -> None:
        pipe = self.processes[learner].stdin
        assert pipe is not None
        try:
            pipe.write(json.dumps([name, *arguments]).encode() + b"\n")
        except BrokenPipeError:
            raise LearnerError(f"learner {learner} ended; its last words are above") from None

    def _answers(self) -> list[Took]:
        return [self._answer(learner) for learner in range(len(self.processes))]

    def _answer(self, learner: int) -> Took:
        pipe = self.processes[learner].stdout
        assert pipe is not None
        poll = select.poll()
        poll.register(pipe, select.POLLIN)
        if not poll.poll(LIMIT_S * 1e3):
            raise DeadlineError(f"waited {LIMIT_S:g} s for learner {learner}")
        line = pipe.readline()
        if not line:
            raise LearnerError(f"learner {learner} ended; its last words are above")
        answer: Took = json.loads(line)
        return answer
