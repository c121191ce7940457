"""`antiphon train`: an acoustic model, trained by several learners with a chosen strategy."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from antiphon.config import TrainConfig, parse_slow
from antiphon.errors import ArgumentError
from antiphon.records import Json

HELP = "Train an acoustic model with several learners and a chosen strategy."
INJECT_HELP = (
    "a fault on purpose, KIND:LEARNER@STEP[:SECONDS]: freeze, kill, nan, leave, join, jitter (docs/faults.md);"
    " may be given several times"
)
EXAMPLE = "antiphon train data/prompts --out runs/ring --strategy random-ring --learners 4"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments; what is not given comes from the recipe that `prepare` stored."""
    parser.add_argument("data", type=Path, metavar="DATA", help="what `antiphon prepare` wrote and `align` aligned")
    parser.add_argument("--out", type=Path, required=True, metavar="RUN", help="the run's folder")
    parser.add_argument("--align", type=Path, metavar="DIR", help="the alignment's folder (default: DATA/align)")
    parser.add_argument(
        "--strategy", metavar="S", help="allreduce, sync-ring, fixed-ring, random-ring (default), delay-by-one"
    )
    parser.add_argument("--learners", type=int, metavar="L", help="model replicas that train (default 4)")
    parser.add_argument(
        "--ranks-per-learner", type=int, metavar="K", help="processes that compute one learner's gradient (default 1)"
    )
    parser.add_argument(
        "--batch", type=int, metavar="B", help="samples over all learners in one step of each (default 64)"
    )
    parser.add_argument(
        "--epochs", type=int, metavar="E", help="passes over the training data by all learners (default 16)"
    )
    parser.add_argument("--lr", type=float, help="learning rate after the warm-up, for the total batch (default 0.5)")
    parser.add_argument("--first-lr", type=float, help="learning rate at the start of the warm-up (default 0.1)")
    parser.add_argument("--warmup-epochs", type=float, metavar="E", help="length of the warm-up (default 3)")
    parser.add_argument(
        "--hold-epochs", type=float, metavar="E", help="epoch from which lr falls by 1/sqrt(2) an epoch (default 10)"
    )
    parser.add_argument("--momentum", type=float, help="of SGD (default 0.9)")
    parser.add_argument("--clip", type=float, help="largest norm of a learner's gradient; 0 for none (default 5)")
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="a preset: small (default: 2 layers, 256 cells), swb-lstm (6 layers, 1,024 cells)",
    )
    parser.add_argument("--layers", type=int, help="bidirectional LSTM layers")
    parser.add_argument("--cells", type=int, help="cells of a layer, both directions together")
    parser.add_argument("--bottleneck", type=int, help="width of the linear layer before the softmax")
    parser.add_argument("--dropout", type=float, help="between the layers")
    parser.add_argument("--seed", type=int, help="of weights, order and strategy (default 0)")
    parser.add_argument("--threads", type=int, metavar="N", help="computing threads of each learner (default 1)")
    parser.add_argument(
        "--timeout", type=float, metavar="S", help="how long a synchronous round may take (default 300)"
    )
    parser.add_argument(
        "--slow", action="append", default=[], metavar="L=F", help="make learner L's steps take F times as long"
    )
    parser.add_argument(
        "--restart",
        type=int,
        default=3,
        metavar="N",
        help="start a learner that was killed again, up to N times, in an asynchronous run on one host (default 3)",
    )
    parser.add_argument("--inject", action="append", default=[], metavar="FAULT", help=INJECT_HELP)
    parser.add_argument("--resume", action="store_true", help="go on with the run in --out from its newest checkpoint")
    parser.add_argument("--overwrite", action="store_true", help="replace what --out holds")


def run(args: argparse.Namespace) -> Json:
    """Train, then print what came out."""
    from antiphon.recipes.train import train
    from antiphon.report.tables import print_table, run_table

    config = _config(args)
    summary = train(
        args.data,
        args.out,
        config,
        align=args.align,
        resume=args.resume,
        overwrite=args.overwrite,
        inject=args.inject,
        restarts=args.restart,
    )
    file = sys.stderr if args.json else sys.stdout
    if "wall_s" in summary:
        print_table(run_table([summary]), file)
        print(summary["out"], file=file)
    else:  # another learner of a torchrun job: learner 0 tells what came out
        args.json = False
    return summary


def _config(args: argparse.Namespace) -> TrainConfig:
    """Return the corpus's settings with those given; or, to resume, the run's own, from which none may differ."""
    from antiphon.recipes.acoustics import Acoustics
    from antiphon.recipes.train import stored_config
    from antiphon.speech.model import preset

    names = (
        "strategy learners ranks_per_learner batch epochs lr first_lr warmup_epochs hold_epochs momentum clip layers"
        " cells bottleneck dropout seed"
    )
    own = {name: getattr(args, name) for name in names.split() if getattr(args, name) is not None}
    given = {
        **(preset(args.model) if args.model else {}),
        **own,
        "threads_per_learner": args.threads,
        "timeout_s": args.timeout,
        "slow": parse_slow(args.slow) or None,
    }
    if not args.resume:
        return stored_config(args.data).with_changes(**given)
    config = Acoustics.of_run(args.out).config
    if other := [name for name, value in given.items() if config.with_changes(**{name: value}) != config]:
        raise ArgumentError(
            f"--resume goes on with the settings of {args.out}: leave out {', '.join(other)}, or train anew"
        )
    return config
