"""`antiphon prepare`: a corpus becomes a folder of words, pronunciations and features."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from rich.table import Table

from antiphon.records import Json, read_jsonl

HELP = "Prepare a corpus: transcripts, pronunciations, features and splits"
EXAMPLE = "antiphon prepare prompts --out data/prompts"

CORPORA = """\
prompts   recorded telephone prompts of Debian (fetched with apt-get, 18.3 MB; or --source DIR)
an4       CMU AN4: --source DIR with manifest.jsonl
manifest  your own recordings: --source FILE, JSON lines with audio, text, speaker [id, split, start_s, end_s]
kaldi     a Kaldi data folder: --source DIR with wav.scp, text, utt2spk [segments], or subfolders train, dev, test
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.description = f"{HELP}\n\ncorpora:\n{CORPORA}"
    parser.add_argument("corpus", metavar="CORPUS", help="prompts, an4, manifest or kaldi")
    parser.add_argument("--out", type=Path, required=True, metavar="DATA", help="the folder to write, new or empty")
    parser.add_argument("--source", type=Path, metavar="PATH", help="the corpus's folder, or the manifest file")
    parser.add_argument(
        "--lexicon",
        type=Path,
        metavar="FILE",
        help="your own pronunciations, a word and its phones on each line; they replace the dictionary's",
    )
    parser.add_argument(
        "--normalise",
        default="speaker",
        metavar="BY",
        help="mean of the features by speaker or by utterance; the variance is by speaker (default: speaker)",
    )
    parser.add_argument(
        "--letter-to-sound",
        action="store_true",
        help="guess the words without pronunciation; without it their utterances are skipped",
    )
    parser.add_argument(
        "--rate", type=int, metavar="HZ", help="sampling rate (default: the most frequent one of the recordings)"
    )
    parser.add_argument(
        "--resample", action="store_true", help="bring recordings of another rate to it; without it they are skipped"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace what an earlier run left in DATA")


def run(args: argparse.Namespace) -> Json:
    """Prepare, and print what came of it."""
    # The libraries behind it take a moment that --help need not wait for.
    from antiphon.recipes.prepare import prepare

    info = prepare(
        args.corpus,
        args.out,
        source=args.source,
        lexicon=args.lexicon,
        normalise=args.normalise,
        letter_to_sound=args.letter_to_sound,
        rate=args.rate,
        resample=args.resample,
        overwrite=args.overwrite,
    )
    show(info, Console(stderr=args.json, highlight=False, markup=False, soft_wrap=True))
    return info


def show(info: Json, console: Console) -> None:
    """Print the splits, and what was left out."""
    table = Table("split")
    for name in ("utterances", "speakers", "minutes", "words"):
        table.add_column(name, justify="right")
    for split in info["utterances"]:
        minutes = info["seconds"][split] / 60
        figures = (info["utterances"][split], info["speakers"][split], f"{minutes:.2f}", info["words"][split])
        table.add_row(split, *map(str, figures))
    console.print(table)
    console.print(
        f"{info['lexicon_words']} words in the lexicon, {info['sample_rate']} Hz; split: {info['split_rule']}"
    )
    for warning in info["warnings"]:
        console.print(f"warning: {warning}")
    if info["missing_words"]:
        console.print(f"without pronunciation ({len(info['missing_words'])}): {_first(info['missing_words'], 8)}")
    if info["guessed_words"]:
        console.print(f"pronunciation guessed ({len(info['guessed_words'])}): {_first(info['guessed_words'], 8)}")
    if info["skipped"]:
        path = Path(info["out"]) / "skipped.jsonl"
        rows = [row for _, row in read_jsonl(path)]
        console.print(f"{info['skipped']} skipped, all in {path}; the first:")
        for row in rows[:3]:
            console.print(f"  {row['id']}: {row['reason']}")
    console.print(f"written: {info['out']}")


def _first(words: list[str], count: int) -> str:
    return ", ".join(words[:count]) + (", ..." if len(words) > count else "")
