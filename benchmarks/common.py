"""What the benchmarks share: the default acoustic model on random frames, and the frame of a script."""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from types import FrameType

# Before torch is loaded, which reads it once.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from antiphon.config import TrainConfig  # noqa: E402
from antiphon.errors import AntiphonError, ArgumentError, UserError  # noqa: E402
from antiphon.records import Json, to_json  # noqa: E402
from antiphon.speech.model import build_model  # noqa: E402

MODEL, FEATURES, STATES = "small", 120, 330
"""The default acoustic model, at the size it has on the small corpora."""
FRAMES = TrainConfig().subsequence_frames
LR = 0.01


def acoustic_model(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model, the same for the same seed, and SGD with momentum over it."""
    torch.manual_seed(seed)
    model = build_model(MODEL, FEATURES, STATES)
    return model, sgd(model.parameters())


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return SGD with momentum, as training uses it."""
    return torch.optim.SGD(parameters, lr=LR, momentum=TrainConfig().momentum)


def random_frames(samples: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return features [samples, T, F] and targets [samples, T]."""
    draw = torch.Generator().manual_seed(seed)
    features_BTF = torch.randn(samples, FRAMES, FEATURES, generator=draw)
    return features_BTF, torch.randint(STATES, (samples, FRAMES), generator=draw)


def loss_of(model: nn.Module, features_BTF: Tensor, targets_BT: Tensor) -> Tensor:
    """Return the cross-entropy, nats a frame."""
    return nn.functional.cross_entropy(model(features_BTF).flatten(0, 1), targets_BT.flatten())


def median(values: Sequence[float]) -> float:
    """Return the median; what repeats are summed up by, for it does not mind one that was disturbed."""
    return statistics.median(values)


def at_least(name: str, value: float, least: float) -> None:
    """Raise ArgumentError where ``value`` is below its bound."""
    if not value >= least:
        raise ArgumentError(f"{name} must be at least {least:g}, not {value:g}")


def progress(text: str) -> None:
    """Tell on standard error how far it is."""
    print(text, file=sys.stderr, flush=True)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], as_json: bool) -> None:
    """Print a table: to standard output, or to standard error where that is for the JSON object."""
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="left" if column == columns[0] else "right")
    for row in rows:
        table.add_row(*row)
    stream = sys.stderr if as_json else sys.stdout
    Console(file=stream, width=None if stream.isatty() else 120).print(table)


def main(
    description: str,
    configure: Callable[[argparse.ArgumentParser], None],
    run: Callable[[argparse.Namespace], Json],
    words: Sequence[str] | None = None,
) -> int:
    """Run a benchmark and return its exit status: 0 done, 2 a user's mistake, 130 stopped, 1 anything else."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    configure(parser)
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="measure it N times (default 5)")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line of standard output")
    args = parser.parse_args(words)
    signal.signal(signal.SIGTERM, _terminated)
    try:
        at_least("--repeats", args.repeats, 1)
        result = run(args)
    except KeyboardInterrupt:
        message, status = "stopped", 130
    except UserError as error:
        message, status = str(error), 2
    except AntiphonError as error:
        message, status = str(error), 1
    else:
        if args.json:
            print(to_json(result))
        return 0
    print(f"{parser.prog}: {message}", file=sys.stderr)
    return status


def _terminated(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
