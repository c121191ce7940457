"""`antiphon align`: states of all frames and a decoding graph for a prepared corpus."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from antiphon.records import Json

HELP = "Train a triphone GMM-HMM, align every frame with it, and build the decoding graph."
EXAMPLE = "antiphon align data/prompts --states 400"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("data", type=Path, metavar="DATA", help="what `antiphon prepare` wrote")
    parser.add_argument("--out", type=Path, help="the folder to write (default: DATA/align)")
    parser.add_argument("--states", type=int, metavar="N", help="leaves of the decision tree (default: by the speech)")
    parser.add_argument("--gaussians", type=int, metavar="N", help="Gaussians in all (default: by the speech)")
    parser.add_argument("--lm-order", type=int, default=3, metavar="N", help="words in an n-gram (default: 3)")
    parser.add_argument("--seed", type=int, default=0, help="of the first alignment and the splits (default: 0)")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier alignment")


def run(args: argparse.Namespace) -> Json:
    """Align, then print what came out."""
    from antiphon.recipes.align import align
    from antiphon.speech.scoring import wer_line

    result = align(
        args.data,
        out=args.out,
        states=args.states,
        gaussians=args.gaussians,
        lm_order=args.lm_order,
        seed=args.seed,
        overwrite=args.overwrite,
    )
    console = Console(file=sys.stderr if args.json else sys.stdout, highlight=False)
    console.print(_table(result))
    if result["gmm_wer"] is not None:
        console.print(f"GMM on test: {wer_line(result['gmm_wer'])}", soft_wrap=True, markup=False)
    console.print(result["out"], soft_wrap=True, markup=False)
    return result


def _table(result: Json) -> Table:
    table = Table(show_header=False)
    rows = {
        "corpus": result["corpus"],
        "utterances aligned": f"{result['aligned']} ({len(result['failed'])} failed)",
        "phones": result["phones"],
        "states": result["states"],
        "Gaussians": result["gaussians"],
        "graph states": result["graph_states"],
        "acoustic scale": result["gmm_scale"],
        "seconds": ", ".join(f"{name} {value:.1f}" for name, value in result["seconds"].items()),
    }
    for name, value in rows.items():
        table.add_row(name, str(value))
    return table
