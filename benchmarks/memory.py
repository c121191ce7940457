"""What the engine takes of memory: copies of the weights that a learner has beyond what a plain PyTorch loop has.

Learners are processes that train one large linear layer by SGD with momentum. Their memory is looked at again and again
while they run (Pss: a page that several map counts in part for each), and the largest of the sums is taken.

example: python benchmarks/memory.py --parameters 41000000 --json
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import common
import torch
from torch import Tensor, nn

from antiphon.errors import ArgumentError, DeadlineError, LearnerError
from antiphon.learner.learner import Learner
from antiphon.records import Json, record
from antiphon.strategies import STRATEGIES
from antiphon.training.launch import Launch
from antiphon.transport.block import process_runs, stopped

SCRIPT = Path(__file__)
PLAIN = "plain"
WARMUP_STEPS = 3
START_LIMIT_S = 180.0
LOOK_S = 0.02
FREEZE_S = 1.0
FREEZES = 6
FLOAT_BYTES = 4


# --- one learner


def work(strategy: str, parameters: int, steps_file: str) -> None:
    """Train until this process is ended, and add a byte to the file at each step."""
    torch.set_num_threads(1)
    side = _side(parameters)
    model = nn.Linear(side, side, bias=False)
    optimizer, features_BF = common.sgd(model.parameters()), torch.randn(1, side)
    learner = None if strategy == PLAIN else Learner(model, optimizer, strategy)
    with Path(steps_file).open("wb", buffering=0) as steps:
        while True:
            if learner is None:
                _step(model, optimizer, features_BF)
            else:
                with learner.step():
                    _step(model, optimizer, features_BF)
            steps.write(b".")


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, features_BF: Tensor) -> None:
    optimizer.zero_grad()
    model(features_BF).square().mean().backward()
    optimizer.step()


def _side(parameters: int) -> int:
    return math.isqrt(parameters)


# --- the watch over them


@dataclass
class Use:
    """Bytes of all learners together."""

    total: int = 0
    """All that they have in memory."""
    shared: int = 0
    """Of it, pages of the run's shared memory that were ever touched."""


def measure(strategy: str, parameters: int, learners: int, seconds: float, freeze: bool = False) -> Use:
    """Run the learners and return the most that was seen of each; ``freeze`` stops the last one now and then."""
    with tempfile.TemporaryDirectory(prefix="memory-") as folder:
        command = [sys.executable, str(SCRIPT), "--worker", strategy, str(parameters), folder]
        with Launch(command, learners, environment={"OMP_NUM_THREADS": "1"}, logs=Path(folder)) as launch:
            _await_steps(launch, Path(folder), WARMUP_STEPS)
            use, begin_s = Use(), time.monotonic()
            while (now_s := time.monotonic() - begin_s) < seconds:
                if freeze:
                    _freeze(launch.pids[-1], now_s)
                use.total = max(use.total, sum(_pss_bytes(pid) for pid in launch.pids))
                use.shared = max(use.shared, (launch.block.folder / "block").stat().st_blocks * 512)
                time.sleep(LOOK_S)
            os.kill(launch.pids[-1], signal.SIGCONT)
            # The figures are of learners that train: all still do.
            _await_steps(launch, Path(folder), max(_steps(Path(folder), launch)) + 1)
            return use


def _freeze(pid: int, now_s: float) -> None:
    """Stop the process for one period, and let it go on for the next."""
    frozen = int(now_s / FREEZE_S) % 2 == 0
    if frozen != stopped(pid):
        os.kill(pid, signal.SIGSTOP if frozen else signal.SIGCONT)


def _await_steps(launch: Launch, folder: Path, steps: int) -> None:
    deadline_s = time.monotonic() + START_LIMIT_S
    while min(_steps(folder, launch)) < steps:
        for learner, pid in enumerate(launch.pids):
            if not process_runs(pid):
                words = (folder / f"learner-{learner}.log").read_text(errors="replace").strip().splitlines()
                raise LearnerError(f"learner {learner} ended: {words[-1] if words else 'without a word'}")
        if time.monotonic() > deadline_s:
            raise DeadlineError(f"waited {START_LIMIT_S:g} s for {steps} steps of each learner")
        time.sleep(LOOK_S)


def _steps(folder: Path, launch: Launch) -> list[int]:
    files = [_steps_file(folder, learner) for learner in range(launch.learners)]
    return [file.stat().st_size if file.exists() else 0 for file in files]


def _steps_file(folder: Path, learner: int) -> Path:
    return folder / f"learner-{learner}.steps"


def _pss_bytes(pid: int) -> int:
    """Return a process's share of the memory that it maps (proc_pid_smaps(5))."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024


# --- the script


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the script's own arguments."""
    parser.add_argument("--parameters", type=int, default=41_000_000, metavar="N", help="weights (default 41000000)")
    parser.add_argument("--learners", type=int, default=4, metavar="L", help="processes (default 4)")
    parser.add_argument(
        "--strategies",
        default="random-ring,delay-by-one,allreduce",
        help="separated by commas (default random-ring,delay-by-one,allreduce)",
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="how long each is looked at (default 5)")


def run(args: argparse.Namespace) -> Json:
    """Measure, print, and return the record."""
    for name, least in (("parameters", 1), ("learners", 2), ("seconds", 0.1)):
        common.at_least(f"--{name}", getattr(args, name), least)
    planned = scenarios(args.strategies.split(","))
    result = record("benchmarks/memory.py", threads_per_learner=1)
    parameters = _side(args.parameters) ** 2
    copy_bytes = parameters * FLOAT_BYTES * args.learners
    rows: dict[tuple[str, bool], dict[str, list[float]]] = {}
    plain_samples: list[float] = []
    for repeat in range(args.repeats):
        plain = measure(PLAIN, parameters, args.learners, args.seconds)
        plain_samples.append(plain.total / copy_bytes)
        for strategy, frozen in planned:
            seconds = max(args.seconds, 2 * FREEZES * FREEZE_S) if frozen else args.seconds
            use = measure(strategy, parameters, args.learners, seconds, frozen)
            row = rows.setdefault((strategy, frozen), {"extra_copies": [], "shared_copies": []})
            row["extra_copies"].append((use.total - plain.total) / copy_bytes)
            row["shared_copies"].append(use.shared / copy_bytes)
            label = f"{strategy}{', one frozen now and then' if frozen else ''}"
            common.progress(
                f"repeat {repeat + 1} of {args.repeats}: {label}: {row['extra_copies'][-1]:.2f} extra copies"
            )
    result |= {
        "parameters": parameters,
        "learners": args.learners,
        "repeats": args.repeats,
        "plain_copies": common.median(plain_samples),
        "rows": [
            {"strategy": strategy, "frozen": frozen, **{name: common.median(row[name]) for name in row}, "samples": row}
            for (strategy, frozen), row in rows.items()
        ],
        "samples": {"plain_copies": plain_samples},
    }
    show(result, args.json)
    return result


def scenarios(strategies: Sequence[str]) -> list[tuple[str, bool]]:
    """Return what is run: each strategy, and those that wait for nobody with a learner frozen now and then too."""
    for strategy in strategies:
        if strategy not in STRATEGIES:
            raise ArgumentError(f"--strategies must be of {', '.join(sorted(STRATEGIES))}, not {strategy!r}")
    frozen = [(strategy, True) for strategy in strategies if not STRATEGIES[strategy].waits]
    return [(strategy, False) for strategy in strategies] + frozen


def show(result: Json, as_json: bool) -> None:
    """Print the table."""
    rows = [
        [
            row["strategy"] + (", one frozen now and then" if row["frozen"] else ""),
            f"{row['extra_copies']:.2f}",
            f"{row['shared_copies']:.2f}",
        ]
        for row in result["rows"]
    ]
    title = (
        f"Copies of {result['parameters']:,} weights a learner, beyond the {result['plain_copies']:.2f} of a plain loop"
    )
    common.print_table(title, ["", "extra", "shared memory touched, weights included"], rows, as_json)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        strategy, parameters, folder = sys.argv[2:]
        work(strategy, int(parameters), str(_steps_file(Path(folder), int(os.environ["ANTIPHON_LEARNER"]))))
    sys.exit(common.main(__doc__ or "", configure, run))
