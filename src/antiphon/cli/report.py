"""`antiphon report`: one page from what runs wrote."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from antiphon.errors import ArgumentError, FolderError
from antiphon.records import Json
from antiphon.report.tables import print_table, run_table

HELP = "Make one HTML page from what one run or several wrote; several are drawn over each other."
EXAMPLE = "antiphon report runs/ring runs/allreduce --out compared.html"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder, finished or not")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE.html",
        help="the page (default: RUN/report.html for one run, ./report.html for several)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a page that is there already")


def run(args: argparse.Namespace) -> Json:
    """Write the page, and print a table of the runs and where the page is."""
    runs: list[Path] = args.runs
    out: Path = args.out or (runs[0] / "report.html" if len(runs) == 1 else Path("report.html"))
    _check_output(out, args.overwrite)
    # Imported here: drawing takes a second to load, and an engine alone is installed without it.
    from antiphon.report.page import write_report

    result = write_report(runs, out)
    to = sys.stderr if args.json else sys.stdout
    print_table(run_table(result["runs"]), to)
    print(f"{out} ({result['size_bytes'] / 1000:.0f} kB)", file=to)
    return result


def _check_output(out: Path, overwrite: bool) -> None:
    if out.suffix.lower() not in (".html", ".htm"):
        raise ArgumentError(f"--out {out}: a report is an HTML file; give it a name that ends in .html")
    if out.is_dir():
        raise FolderError(f"--out {out} is a folder: name a file, such as {out / 'report.html'}")
    if out.exists() and not overwrite:
        raise FolderError(f"{out} is there already: pass --overwrite to replace it, or --out another file")
