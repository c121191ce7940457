"""`antiphon demo`: the whole way, from recorded speech to a word error rate."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from antiphon.records import Json

HELP = "Prepare, align, train, decode and report in one go."
EXAMPLE = "antiphon demo --out exp/demo --learners 4 --strategy random-ring"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--out", type=Path, default=Path("exp/demo"), help="the folder to write (default exp/demo)")
    parser.add_argument("--corpus", default="prompts", help="prompts (default), an4, manifest, kaldi")
    parser.add_argument("--source", type=Path, help="the corpus's folder or file, where it needs one")
    parser.add_argument("--strategy", metavar="S", help="default: random-ring")
    parser.add_argument("--learners", type=int, metavar="L", help="default: 4")
    parser.add_argument("--epochs", type=int, metavar="E", help="default: what suits the corpus")
    parser.add_argument("--seed", type=int, default=0, help="of every stage (default 0)")
    parser.add_argument("--stage", metavar="FROM[:TO]", help="only these: prepare, align, train, decode, report")
    parser.add_argument("--overwrite", action="store_true", help="replace what --out holds")


def run(args: argparse.Namespace) -> Json:
    """Run the stages, then print where the time went and what came out."""
    from antiphon.recipes.demo import Demo, demo
    from antiphon.report.tables import print_table, run_table
    from antiphon.speech.scoring import wer_line

    wanted = Demo(args.out, args.corpus, args.source, args.strategy, args.learners, args.epochs, args.seed)
    result = demo(wanted, args.stage, overwrite=args.overwrite, tell=lambda line: print(line, file=sys.stderr))
    file = sys.stderr if args.json else sys.stdout
    if result.get("strategy"):
        print_table(run_table([result]), file)
    for name, errors in (("GMM", result.get("gmm_wer")), ("network", result.get("wer"))):
        if errors:
            print(f"{name:8s} {wer_line(errors)}", file=file)
    print("seconds  " + ", ".join(f"{name} {value:.1f}" for name, value in result["seconds"].items()), file=file)
    if (args.out / "report.html").exists():
        print(f"look at  {args.out / 'report.html'}", file=file)
    return result
