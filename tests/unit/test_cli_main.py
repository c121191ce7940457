"""The frame of the command line: exit statuses, and what goes to which stream."""

from __future__ import annotations

import argparse
import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from antiphon.cli import main as frame
from antiphon.errors import ArgumentError, DataError, DeadlineError, LearnerError

# Prints without end; the pipe to it is closed after one line.
ENDLESS = """
import sys, types
from antiphon.cli import main as frame
fake = types.ModuleType("antiphon.cli.fake")
fake.HELP, fake.EXAMPLE, fake.configure = "prints", "antiphon fake", lambda parser: None
def run(args):
    while True:
        print("a line of a long table")
fake.run = run
sys.modules["antiphon.cli.fake"] = fake
frame.COMMANDS = ("fake",)
sys.exit(frame.main(["fake"]))
"""


class Fake:
    """The command `fake`: its ``run`` does what the test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        module: Any = ModuleType("antiphon.cli.fake")
        module.HELP = "stand in for a command"
        module.EXAMPLE = "antiphon fake --learners 4"
        module.configure = lambda parser: parser.add_argument("--learners", type=int, default=1)
        module.run = lambda args: self.run(args)
        self.run: Callable[[argparse.Namespace], dict[str, Any]] = lambda args: {"learners": args.learners}
        monkeypatch.setitem(sys.modules, "antiphon.cli.fake", module)
        monkeypatch.setattr(frame, "COMMANDS", ("fake",))

    def fails_with(self, error: BaseException) -> None:
        def run(args: argparse.Namespace) -> dict[str, Any]:
            raise error

        self.run = run


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    monkeypatch.delenv("ANTIPHON_DEBUG", raising=False)
    return Fake(monkeypatch)


def test_done_is_0(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    assert frame.main(["fake"]) == 0
    assert capsys.readouterr() == ("", "")


def test_json_is_the_last_line_and_strict(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    def run(args: argparse.Namespace) -> dict[str, Any]:
        print("a table")
        return {"learners": args.learners, "word": "zwölf", "loss": float("nan")}

    fake.run = run
    assert frame.main(["fake", "--learners", "3", "--json"]) == 0
    output = capsys.readouterr().out
    assert output.endswith("\n")
    last = output.splitlines()[-1]
    assert json.loads(last, parse_constant=pytest.fail) == {"learners": 3, "word": "zwölf", "loss": None}


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (ArgumentError("--learners must be at least 1, not 0"), 2, "--learners must be at least 1, not 0"),
        (DataError("text:3: no words"), 2, "text:3: no words"),
        (LearnerError("learner 2 vanished"), 1, "learner 2 vanished"),
        (DeadlineError("no answer in 30 s"), 1, "no answer in 30 s"),
        (KeyboardInterrupt(), 130, "stopped"),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "a.wav"), 2, "No such file or directory (a.wav)"),
        (PermissionError(errno.EACCES, "Permission denied", "out"), 2, "Permission denied (out)"),
        (ConnectionResetError(errno.ECONNRESET, "reset"), 1, "[Errno 104] reset"),
        (BrokenPipeError(errno.EPIPE, "a learner's pipe broke"), 1, "[Errno 32] a learner's pipe broke"),
    ],
)
def test_a_failure_is_one_line_and_a_status(
    fake: Fake, capsys: pytest.CaptureFixture[str], error: BaseException, status: int, text: str
) -> None:
    fake.fails_with(error)
    assert frame.main(["fake", "--json"]) == status
    assert capsys.readouterr() == ("", f"antiphon: {text}\n")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_says_what_to_do(fake: Fake, capsys: pytest.CaptureFixture[str], number: int) -> None:
    fake.fails_with(OSError(number, os.strerror(number), "exp/demo/model.pt"))
    assert frame.main(["fake"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("antiphon: the disk is full (exp/demo/model.pt): free some space and run")


def test_an_error_of_ours_is_not_hidden(fake: Fake) -> None:
    fake.fails_with(AssertionError("an invariant"))
    with pytest.raises(AssertionError, match="an invariant"):
        frame.main(["fake"])


def test_debug_shows_where(fake: Fake, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANTIPHON_DEBUG", "1")
    fake.fails_with(LearnerError("learner 2 vanished"))
    assert frame.main(["fake"]) == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("status", [0, 3])
def test_a_command_may_exit_by_itself(fake: Fake, status: int) -> None:
    fake.fails_with(SystemExit(status))
    assert frame.main(["fake"]) == status


def test_sigterm_stops_as_ctrl_c_does(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    def run(args: argparse.Namespace) -> dict[str, Any]:
        signal.raise_signal(signal.SIGTERM)
        return {}

    fake.run = run
    assert frame.main(["fake"]) == 130
    assert capsys.readouterr().err == "antiphon: stopped\n"


def test_a_misspelt_command_gets_the_nearest(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    assert frame.main(["fkae"]) == 2
    assert capsys.readouterr().err == "antiphon: unknown command 'fkae': did you mean 'fake'? Known: fake\n"


@pytest.mark.parametrize(
    ("words", "why"),
    [(["--learners", "x"], "invalid int value: 'x'"), (["--lear", "3"], "unrecognized arguments: --lear 3")],
)
def test_a_bad_option_is_one_line_and_2(
    fake: Fake, capsys: pytest.CaptureFixture[str], words: list[str], why: str
) -> None:
    assert frame.main(["fake", *words]) == 2
    message = capsys.readouterr().err
    assert message.startswith("antiphon fake: ") and message.endswith(f"{why}\nSee: antiphon fake --help\n")


def test_help_shows_options_and_an_example(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    assert frame.main(["fake", "--help"]) == 0
    output = capsys.readouterr().out
    assert "--learners" in output and "--json" in output and "example:\n  antiphon fake --learners 4" in output


@pytest.mark.parametrize(("words", "status"), [(["--help"], 0), (["-h"], 0), ([], 2)])
def test_the_overview_lists_commands(
    fake: Fake, capsys: pytest.CaptureFixture[str], words: list[str], status: int
) -> None:
    assert frame.main(words) == status
    assert "  fake      stand in for a command\n" in capsys.readouterr().out


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    command = [sys.executable, "-c", ENDLESS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == b"a line of a long table\n"
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 1


def test_a_library_that_is_not_installed_is_named_with_its_extra(
    fake: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.fails_with(ModuleNotFoundError("No module named 'kaldifst'", name="kaldifst"))
    assert frame.main(["fake"]) == 2
    assert capsys.readouterr().err == (
        "antiphon: fake needs kaldifst, which is not installed: pip install 'antiphon[speech]'\n"
    )


def test_a_module_of_our_own_that_is_missing_is_not_the_users_mistake(fake: Fake) -> None:
    fake.fails_with(ModuleNotFoundError("No module named 'antiphon.gone'", name="antiphon.gone"))
    with pytest.raises(ModuleNotFoundError):
        frame.main(["fake"])
