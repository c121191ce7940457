"""`antiphon launch`: starts a script of the user's once for each learner."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from antiphon.cli.train import INJECT_HELP
from antiphon.errors import ArgumentError, LearnerError
from antiphon.records import Json, record

if TYPE_CHECKING:
    from antiphon.training.launch import Watched

HELP = "Start a Python script of yours once for each learner, on this machine."
EXAMPLE = "antiphon launch --learners 4 examples/spirals.py"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--learners", type=int, default=4, metavar="L", help="learners to start (default 4)")
    parser.add_argument(
        "--ranks-per-learner",
        type=int,
        default=1,
        metavar="K",
        help="processes of each learner, which compute its gradient together (default 1)",
    )
    parser.add_argument("--threads", type=int, default=1, help="computing threads of each learner (default 1)")
    parser.add_argument(
        "--restart",
        type=int,
        default=3,
        metavar="N",
        help="start a learner that was killed again, up to N times, where the strategy is asynchronous (default 3)",
    )
    parser.add_argument("--inject", action="append", default=[], metavar="FAULT", help=INJECT_HELP)
    parser.add_argument("script", type=Path, help="the script: it makes an antiphon.Learner")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what the script is given")


class _Teller:
    """Tells on standard error what happens to who is present."""

    def __init__(self) -> None:
        self._told = 0

    def __call__(self, seen: Watched) -> None:
        from antiphon.training.launch import membership_text

        for fault in seen.faults[self._told :]:
            print(f"antiphon: {fault}", file=sys.stderr)
        self._told = len(seen.faults)
        for note in seen.news:
            if note["event"] == "membership":
                print(f"antiphon: {membership_text(note)}", file=sys.stderr)
        seen.news.clear()


def run(args: argparse.Namespace) -> Json:
    """Run the script with all learners, and wait for them."""
    from antiphon.training.launch import Launch
    from antiphon.transport.faults import INJECT, parse_all

    if not args.script.is_file():
        raise ArgumentError(f"{args.script}: no such script")
    for name in ("learners", "ranks_per_learner", "threads"):
        if getattr(args, name) < 1:
            raise ArgumentError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(args, name)}")
    if args.restart < 0:
        raise ArgumentError(f"--restart must be at least 0, not {args.restart}")
    threads = str(args.threads)
    command = [sys.executable, str(args.script), *args.arguments]
    parse_all(args.inject, args.learners)
    environment, ranks, restarts = {"OMP_NUM_THREADS": threads}, args.ranks_per_learner, args.restart
    if args.inject:
        environment[INJECT] = " ".join(args.inject)
    with Launch(command, args.learners, environment=environment, ranks=ranks, restarts=restarts) as launch:
        try:
            watched = launch.watch(_Teller())
        except KeyboardInterrupt:
            launch.stop()
            launch.wait(launch.grace_s)
            raise
    for fault in watched.faults:
        if fault.kind == "failed":
            raise LearnerError(f"learner {fault.learner} {fault.text}; the others went on without it")
    return record("launch", threads_per_learner=args.threads, learners=args.learners, faults=len(watched.faults))
