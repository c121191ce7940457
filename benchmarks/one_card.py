"""Learners that share one CUDA card: the tests of it, the time of a step, and how much of exchanging is hidden.

In at most four minutes, whatever --repeats says: the CUDA tests; then learners that exchange after every step, and as
many that do not, in turn on the same card. An exchange alone is timed on an idle card: what the steps grow by, over
that, is the part of exchanging that is not hidden behind the gradient.

example: python benchmarks/one_card.py --json
         python benchmarks/one_card.py --device cpu --model small --seconds 3 --json    (a dry run without a card)
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import common
import torch
from torch import nn

from antiphon.errors import ArgumentError, LearnerError
from antiphon.learner import joining
from antiphon.learner.learner import Learner
from antiphon.learner.staged import StagedWeights
from antiphon.records import Json, record
from antiphon.speech.model import build_model
from antiphon.training.launch import Launch
from antiphon.transport.buffers import Buffers

SCRIPT = Path(__file__)
TESTS = SCRIPT.parents[1] / "tests" / "processes" / "test_cuda.py"
TEST_LIMIT_S = 110.0
LIMIT_S = 230.0
"""No repeat is begun that would end after this, the first excepted."""
SIZES = {"small": (120, 330), "swb-lstm": (260, 32_000)}
"""Features and states, by model."""
TOGETHER, APART = "together", "apart"
WARMUP_SHARE = 0.4
EXCHANGES = 5


def learn(args: argparse.Namespace) -> None:
    """Be one learner: make steps for a while, and write their median time."""
    torch.set_num_threads(1)
    if args.device == "cpu":
        joining.weights_on = lambda device, *rest: StagedWeights(*rest, device)
    model = _model(args)
    # Alone, an asynchronous strategy has nobody to exchange with; then there is all but the exchange.
    learner = Learner(model, common.sgd(model.parameters()), "random-ring", exchange_every=1)
    features, states = SIZES[args.model]
    features_BTF = torch.randn(args.batch, common.FRAMES, features, device=args.device)
    targets_BT = torch.randint(states, (args.batch, common.FRAMES), device=args.device)
    ends, begin_s = [time.perf_counter()], time.perf_counter()
    counts = (0, 0)
    while ends[-1] - begin_s < args.seconds:
        with learner.step():
            learner.optimizer.zero_grad()
            loss = common.loss_of(model, features_BTF, targets_BT)
            loss.backward()
            learner.optimizer.step()
        loss.item()
        ends.append(time.perf_counter())
        if ends[-1] - begin_s < WARMUP_SHARE * args.seconds:
            counts = (learner.round, _exchanges(learner))
    late = [end for end in ends if end - begin_s >= WARMUP_SHARE * args.seconds]
    steps = learner.round - counts[0]
    result = {
        "step_s": common.median([b - a for a, b in zip(late, late[1:], strict=False)]),
        "exchanges_per_step": (_exchanges(learner) - counts[1]) / max(1, steps),
        "exchange_cpu_s": learner.metrics["exchange_s"],
    }
    args.result.with_name(f"{args.result.name}-{args.number}").write_text(json.dumps(result))
    learner.close()


def _exchanges(learner: Learner) -> int:
    counts = learner.transport.counts
    return counts.committed + counts.applied


def _model(args: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    return build_model(args.model, *SIZES[args.model]).to(args.device)


def exchange_alone_s(args: argparse.Namespace) -> float:
    """Return the seconds of one end's part of an exchange, snapshot to fold, while the device has nothing else."""
    size = sum(parameter.numel() for parameter in _model(args).parameters())
    device = torch.device(args.device)
    first, second = (StagedWeights(buffers, n, device) for buffers in [Buffers.in_process(2, size)] for n in range(2))
    theirs, seconds = second.take(), []
    assert theirs is not None
    for _ in range(EXCHANGES):
        began_s = time.perf_counter()
        own = first.take()
        assert own is not None
        first.apply(1, theirs, own, 0.25)
        first.release(own)
        first.begin_step()
        first.end_step()
        float(first.w_N[0])
        seconds.append(time.perf_counter() - began_s)
    for weights in (first, second):
        weights.close()
    return common.median(seconds[1:])


def tests_on_the_card() -> Json:
    """Run the CUDA tests in a process of their own."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(TESTS)]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=TEST_LIMIT_S, cwd=TESTS.parents[2])
    except subprocess.TimeoutExpired:
        return {"passed": False, "summary": f"not done within {TEST_LIMIT_S:g} s"}
    lines = run.stdout.strip().splitlines()
    if run.returncode:
        common.progress(run.stdout[-4000:])
    return {"passed": run.returncode == 0, "summary": lines[-1] if lines else run.stderr.strip()[-200:]}


def measured(args: argparse.Namespace, kind: str, folder: Path) -> Json:
    """Run the learners at once, exchanging (``together``) or not, and return the medians over them."""
    result = folder / kind
    words = [str(SCRIPT), "--device", args.device, "--model", args.model, "--batch", str(args.batch)]
    words += ["--seconds", str(args.seconds), "--result", str(result), "--number"]
    if kind == TOGETHER:
        # A learner finds its number in its environment: `sh` puts it in its place.
        command = ["sh", "-c", 'exec "$@" "$ANTIPHON_LEARNER"', "sh", sys.executable, *words]
        with Launch(command, args.learners, logs=folder) as launch:
            faults = launch.watch(lambda seen: None, every_s=0.1).faults
        if faults:
            raise LearnerError("; ".join(map(str, faults)))
    else:
        running = [subprocess.Popen([sys.executable, *words, str(n)]) for n in range(args.learners)]
        statuses = [process.wait() for process in running]
        if any(statuses):
            raise LearnerError("a learner failed: its words are above")
    rows = [json.loads(path.read_text()) for path in sorted(folder.glob(f"{kind}-*"))]
    return {key: common.median([row[key] for row in rows]) for key in rows[0]}


def run(args: argparse.Namespace) -> Json:
    """Run the tests and the measurements."""
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ArgumentError("there is no CUDA device here: --device cpu makes a dry run of the measurement")
    began_s = time.monotonic()
    tests = tests_on_the_card() if args.device == "cuda" else {"passed": None, "summary": "tests not run"}
    samples: list[Json] = []
    took_s = 0.0
    for repeat in range(args.repeats):
        repeat_began_s = time.monotonic()
        if samples and repeat_began_s - began_s + took_s > LIMIT_S:
            common.progress(f"{repeat} of {args.repeats} repeats fit into {LIMIT_S:g} s")
            break
        with tempfile.TemporaryDirectory(prefix="one-card-") as folder:
            kinds = (APART, TOGETHER) if repeat % 2 == 0 else (TOGETHER, APART)
            sample = {kind: measured(args, kind, Path(folder)) for kind in kinds}
        sample["exchange_alone_s"] = exchange_alone_s(args)
        grown_s = max(0.0, sample[TOGETHER]["step_s"] - sample[APART]["step_s"])
        each_step_s = sample["exchange_alone_s"] * sample[TOGETHER]["exchanges_per_step"]
        sample["hidden"] = 1.0 - min(1.0, grown_s / each_step_s) if each_step_s else None
        sample["step_ratio"] = sample[TOGETHER]["step_s"] / sample[APART]["step_s"]
        samples.append(sample)
        took_s = time.monotonic() - repeat_began_s
        common.progress(f"repeat {repeat + 1} of {args.repeats}: {json.dumps(sample)}")
    hidden = [sample["hidden"] for sample in samples if sample["hidden"] is not None]
    names = {"device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu", "model": args.model}
    result = record("benchmarks/one_card.py") | names | {"learners": args.learners, "batch": args.batch, "tests": tests}
    result["step_ratio"] = common.median([sample["step_ratio"] for sample in samples])
    result["hidden"] = common.median(hidden) if hidden else None
    result["samples"] = samples
    common.print_table(
        f"{args.learners} learners on one {names['device']}: {tests['summary']}",
        ("repeat", "step alone", "step exchanging", "ratio", "exchange alone", "hidden"),
        [_row(number, sample) for number, sample in enumerate(samples, 1)],
        args.json,
    )
    return result


def _row(number: int, sample: Json) -> Sequence[str]:
    hidden = "-" if sample["hidden"] is None else f"{sample['hidden']:.2f}"
    apart_ms, together_ms = (1e3 * sample[kind]["step_s"] for kind in (APART, TOGETHER))
    alone_ms = 1e3 * sample["exchange_alone_s"]
    return (
        str(number),
        f"{apart_ms:.1f} ms",
        f"{together_ms:.1f} ms",
        f"{sample['step_ratio']:.3f}",
        f"{alone_ms:.1f} ms",
        hidden,
    )


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options; those without help are for the learners that the script starts."""
    parser.add_argument("--learners", type=int, default=4, metavar="L", help="on the one card (default 4)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run, staged all the same")
    parser.add_argument(
        "--model", choices=tuple(SIZES), default="swb-lstm", help="an acoustic model (default swb-lstm)"
    )
    parser.add_argument("--batch", type=int, default=64, metavar="B", help="samples of a learner's step (default 64)")
    parser.add_argument("--seconds", type=float, default=12.0, metavar="S", help="of each measurement (default 12)")
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--number", type=int, help=argparse.SUPPRESS)


def learner_main(words: Sequence[str]) -> None:
    """Be one of the learners."""
    parser = argparse.ArgumentParser()
    configure(parser)
    learn(parser.parse_args(words))


if __name__ == "__main__":
    if "--result" in sys.argv:
        learner_main(sys.argv[1:])
    else:
        sys.exit(common.main(__doc__, configure, run))
