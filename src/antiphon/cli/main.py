"""The `antiphon` command: finds the subcommand, runs it, and turns errors into exit statuses.

Exit status: 0 done, 2 a user's mistake, 130 stopped by Ctrl-C, 1 anything else.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib
import os
import select
import signal
import sys
import traceback
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn, Protocol, cast

from antiphon.errors import AntiphonError, UserError, unknown_name
from antiphon.records import Json, to_json

COMMANDS = ("demo", "prepare", "align", "train", "decode", "report", "launch")


class Command(Protocol):
    """What each file beside this one offers."""

    HELP: str
    EXAMPLE: str

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's arguments."""

    def run(self, args: argparse.Namespace) -> Json:
        """Do it; what it returns is the object that --json prints."""


class Parser(argparse.ArgumentParser):
    """An argument parser that says what is wrong in one line and how to learn more."""

    def error(self, message: str) -> NoReturn:
        """Print one line to standard error and exit with 2."""
        self.exit(2, f"{self.prog}: {message}\nSee: {self.prog} --help\n")


def parser_of(name: str) -> tuple[Parser, Command]:
    """Return the parser and the module of one command."""
    module = cast(Command, importlib.import_module(f"antiphon.cli.{name}"))
    parser = Parser(
        prog=f"antiphon {name}",
        description=module.HELP,
        epilog="example:\n  " + module.EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    module.configure(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line of standard output")
    return parser, module


def overview() -> str:
    """Return what `antiphon --help` prints."""
    lines = ["usage: antiphon COMMAND ...", ""]
    for name in COMMANDS:
        lines.append(f"  {name:9s} {parser_of(name)[1].HELP.splitlines()[0]}")
    return "\n".join([*lines, "", "antiphon COMMAND --help tells more, with an example.", ""])


def _terminated(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _dispatch(words: Sequence[str]) -> int:
    """Run the command that ``words`` name and return its exit status."""
    if not words or words[0] in ("-h", "--help"):
        print(overview(), end="")
        return 0 if words else 2
    if words[0] not in COMMANDS:
        raise unknown_name("command", words[0], COMMANDS)
    parser, module = parser_of(words[0])
    args = parser.parse_args(words[1:])
    result = module.run(args)
    if args.json:
        print(to_json(result))
    return 0


def _explain(error: OSError) -> tuple[str, int]:
    """Return what to print for an error of the operating system, and the exit status."""
    where = f" ({error.filename})" if error.filename else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"the disk is full{where}: free some space and run the command again;"
            " what was finished is kept, what was half-written is not taken for whole"
        ), 2
    unusable = PermissionError | FileNotFoundError | NotADirectoryError | IsADirectoryError
    if isinstance(error, unusable) or error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
        return f"{error.strerror}{where}", 2
    return str(error), 1


def _reader_has_gone() -> bool:
    """Say whether standard output is a pipe that nobody reads any more; if so, point it at nothing."""
    with contextlib.suppress(OSError):  # not a real file, as under a test
        output = sys.stdout.fileno()
        poll = select.poll()
        poll.register(output, 0)
        if any(state & (select.POLLERR | select.POLLHUP) for _, state in poll.poll(0)):
            os.dup2(os.open(os.devnull, os.O_WRONLY), output)
            return True
    return False


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    signal.signal(signal.SIGTERM, _terminated)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
        signal.signal(signal.SIGHUP, _terminated)
    try:
        try:
            status = _dispatch(words)
        except SystemExit as stop:  # --help, or a mistake that argparse has printed
            status = stop.code if isinstance(stop.code, int) else 1
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        message, status = "stopped", 130
    except RuntimeError as error:
        if not str(error).startswith("Symlink loop"):  # what pathlib makes of ELOOP before Python 3.13
            raise
        message, status = str(error), 2
    except ModuleNotFoundError as error:
        if (error.name or "antiphon").partition(".")[0] == "antiphon":
            raise
        extra = "pip install 'antiphon[speech]'"
        print(f"antiphon: {words[0]} needs {error.name}, which is not installed: {extra}", file=sys.stderr)
        return 2
    except UserError as error:
        message, status = str(error), 2
    except (OSError, AntiphonError) as error:
        if isinstance(error, BrokenPipeError) and _reader_has_gone():
            return 1
        if os.environ.get("ANTIPHON_DEBUG"):
            traceback.print_exc()
        message, status = _explain(error) if isinstance(error, OSError) else (str(error), 1)
    print(f"antiphon: {message}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
