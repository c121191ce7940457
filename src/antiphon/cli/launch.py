"""`antiphon launch`: starts a script of the user's once for each learner."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from antiphon.errors import ArgumentError, LearnerError
from antiphon.records import Json, record

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
    parser.add_argument("script", type=Path, help="the script: it makes an antiphon.Learner")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what the script is given")


def run(args: argparse.Namespace) -> Json:
    """Run the script with all learners, and wait for them."""
    from antiphon.training.launch import Launch

    if not args.script.is_file():
        raise ArgumentError(f"{args.script}: no such script")
    for name in ("learners", "ranks_per_learner", "threads"):
        if getattr(args, name) < 1:
            raise ArgumentError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(args, name)}")
    threads = str(args.threads)
    command = [sys.executable, str(args.script), *args.arguments]
    environment, ranks = {"OMP_NUM_THREADS": threads}, args.ranks_per_learner
    with Launch(command, args.learners, environment=environment, ranks=ranks) as launch:
        try:
            watched = launch.watch(lambda seen: None)
        except KeyboardInterrupt:
            launch.stop()
            launch.wait(launch.grace_s)
            raise
    for fault in watched.faults:
        if fault.kind == "failed":
            raise LearnerError(f"learner {fault.learner} {fault.text}; the others went on without it")
        print(f"antiphon: learner {fault.learner} {fault.text}; the others went on", file=sys.stderr)
    return record("launch", threads_per_learner=args.threads, learners=args.learners, faults=len(watched.faults))
