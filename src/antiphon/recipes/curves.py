"""What a person sees of a run while it goes on: a progress bar on a terminal, lines elsewhere, TensorBoard always."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from antiphon.config import TrainConfig
from antiphon.records import Json


class Curves:
    """Shows progress and evaluations on standard error, and writes them as TensorBoard events."""

    def __init__(self, config: TrainConfig, run: Path) -> None:
        self.config = config
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._bar = Progress(
            TextColumn("{task.fields[head]}"),
            BarColumn(),
            TextColumn("{task.fields[tail]}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("train", total=float(config.epochs), head="epoch 0", tail="starting learners")
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and only a run needs it

        self._board = SummaryWriter(str(run / "tensorboard"))

    def progress(self, row: Json) -> None:
        """Show how far the learners are, and each one's share of the steps."""
        total = sum(row["steps_by_learner"]) or 1
        shares = " ".join(f"{100 * steps / total:.0f}%" for steps in row["steps_by_learner"])
        loss = "-" if row["loss"] is None else f"{row['loss']:.3f}"
        self._bar.update(
            self._task,
            completed=row["epoch"],
            head=f"epoch {row['epoch']:.1f}/{self.config.epochs}",
            tail=f"loss {loss}  {row['frames_per_s']:,.0f} frames/s  shares {shares}",
        )
        self._scalars(row, "loss", "lr", "frames_per_s")

    def evaluation(self, row: Json) -> None:
        """Show an evaluation of the consensus model."""
        self._console.print(
            f"epoch {row['epoch']:5.1f}  held-out loss {row['heldout_loss']:.3f}  frame accuracy"
            f" {100 * row['frame_accuracy']:.1f} %  consensus distance {row['consensus_distance']:.2e}"
            f"  lr {row['lr']:.3g}",
            markup=False,
        )
        self._scalars(row, "heldout_loss", "frame_accuracy", "consensus_distance")

    def _scalars(self, row: Json, *names: str) -> None:
        # TensorBoard counts steps in whole numbers: thousandths of an epoch keep the fraction.
        for name in names:
            if row[name] is not None:
                self._board.add_scalar(name, row[name], int(1000 * row["epoch"]))

    def __enter__(self) -> Curves:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self._bar.stop()
        self._board.close()
