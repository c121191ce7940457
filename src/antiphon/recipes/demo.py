"""`antiphon demo`: every stage in turn, from recordings to a word error rate and a page to look at."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from antiphon.config import TrainConfig
from antiphon.errors import ArgumentError
from antiphon.recipes.align import align
from antiphon.recipes.decode import decode
from antiphon.recipes.prepare import prepare
from antiphon.recipes.train import stored_config, train
from antiphon.records import FolderLock, Json, output_folder, record, write_json
from antiphon.report.page import write_report
from antiphon.strategies import strategy_class

STAGES = ("prepare", "align", "train", "decode", "report")
DEMO_NAME = "demo.json"


@dataclass(frozen=True)
class Demo:
    """What the demo is asked for.

    Args:
        out: the folder that gets ``data``, ``run`` and ``report.html``.
        corpus: ``prompts`` or another that `antiphon prepare` knows.
        source: the corpus's folder or file, where it needs one.
        strategy, learners, epochs, seed: of the training; None takes what suits the corpus.
    """

    out: Path
    corpus: str = "prompts"
    source: Path | None = None
    strategy: str | None = None
    learners: int | None = None
    epochs: int | None = None
    seed: int = 0

    def run(self, first: str, last: str, *, overwrite: bool, tell: Callable[[str], None]) -> Json:
        """Run the stages from ``first`` to ``last`` and return the run's summary, with the seconds of each stage.

        Raises:
            UserError: whatever a stage finds wrong.
        """
        data, run = self.out / "data", self.out / "run"
        stages: dict[str, Callable[[], Json]] = {
            "prepare": lambda: prepare(self.corpus, data, source=self.source, overwrite=overwrite),
            "align": lambda: align(data, seed=self.seed, overwrite=overwrite),
            "train": lambda: train(data, run, self._config(data), overwrite=overwrite),
            "decode": lambda: decode(run, "test", progress=tell),
            "report": lambda: write_report([run], self.out / "report.html"),
        }
        seconds: dict[str, float] = {}
        result: Json = {}
        for name in STAGES[STAGES.index(first) : STAGES.index(last) + 1]:
            tell(f"--- {name}")
            began = time.monotonic()
            result = stages[name]()
            seconds[name] = round(time.monotonic() - began, 2)
        result = {**record("demo"), **{k: v for k, v in result.items() if k not in ("schema", "command")}}
        return {**result, "seconds": {**seconds, "total": round(sum(seconds.values()), 2)}, "out": str(self.out)}

    def check(self) -> None:
        """Find a mistake in what training is asked for now, not when data are prepared and aligned.

        Raises:
            ArgumentError: an unknown strategy, or a number outside its bounds.
        """
        # The batch is the corpus's, and not yet known.
        TrainConfig(
            strategy=self.strategy or TrainConfig.strategy,
            learners=TrainConfig.learners if self.learners is None else self.learners,
            epochs=TrainConfig.epochs if self.epochs is None else self.epochs,
            seed=self.seed,
            batch=max(TrainConfig.batch, self.learners or 0),
        )
        strategy_class(self.strategy or TrainConfig.strategy)

    def _config(self, data: Path) -> TrainConfig:
        return stored_config(data).with_changes(
            strategy=self.strategy, learners=self.learners, epochs=self.epochs, seed=self.seed
        )


def parse_stages(text: str | None) -> tuple[str, str]:
    """Read ``FROM[:TO]``.

    >>> parse_stages("train"), parse_stages("align:train"), parse_stages(None)
    (('train', 'report'), ('align', 'train'), ('prepare', 'report'))
    """
    first, _, last = (text or "").partition(":")
    first, last = first or STAGES[0], last or STAGES[-1]
    for name in (first, last):
        if name not in STAGES:
            raise ArgumentError(f"--stage {text}: stages are {', '.join(STAGES)}")
    if STAGES.index(first) > STAGES.index(last):
        raise ArgumentError(f"--stage {text}: {first} comes after {last}")
    return first, last


def demo(wanted: Demo, stage: str | None, *, overwrite: bool, tell: Callable[[str], None]) -> Json:
    """Run the demo in its folder, which is held while it goes on.

    Raises:
        UserError: the folder is not empty, or a stage finds something wrong.
    """
    first, last = parse_stages(stage)
    wanted.check()
    again = first != STAGES[0]
    keep = () if wanted.source is None else (wanted.source,)
    output_folder(wanted.out, overwrite=overwrite and not again, resume=again, keep=keep)
    with FolderLock(wanted.out):
        # An interrupted demo can be begun again with --overwrite: this file says that the folder is a demo's.
        write_json(wanted.out / DEMO_NAME, record("demo", done=False))
        result = wanted.run(first, last, overwrite=overwrite or again, tell=tell)
        write_json(wanted.out / DEMO_NAME, result)
    return result
