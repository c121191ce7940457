"""`antiphon decode`: words and their error rate from a trained run."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from antiphon.records import Json

HELP = "Decode a split with a run's consensus model, and print the word error rate."
EXAMPLE = "antiphon decode runs/ring --split test"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("run", type=Path, metavar="RUN", help="what `antiphon train` wrote")
    parser.add_argument("--split", default="test", help="train, dev or test (default)")
    parser.add_argument("--scale", type=float, help="acoustic scale (default: chosen on dev)")
    parser.add_argument("--prior-weight", type=float, help="weight of the log priors (default: chosen on dev)")
    parser.add_argument("--beam", type=float, default=13.0, help="beam of the search (default 13)")
    parser.add_argument("--max-active", type=int, default=5000, help="states kept a frame (default 5000)")


def run(args: argparse.Namespace) -> Json:
    """Decode, then print the %WER line."""
    from antiphon.recipes.decode import decode
    from antiphon.speech.scoring import wer_line

    result = decode(
        args.run,
        args.split,
        scale=args.scale,
        prior_weight=args.prior_weight,
        beam=args.beam,
        max_active=args.max_active,
        progress=lambda line: print(line, file=sys.stderr),
    )
    file = sys.stderr if args.json else sys.stdout
    print(
        f"scale {result['scale']:g}, prior weight {result['prior_weight']:g};"
        f" {result['real_time_factor']:.3f} times real time; {result['out']}",
        file=file,
    )
    if result["gmm_wer"] is not None:
        print(f"GMM      {wer_line(result['gmm_wer'])}", file=file)
    print(f"network  {wer_line(result['wer'])}", file=file)
    return result
