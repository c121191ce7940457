"""`antiphon train`: starts the learners of an acoustic model, watches them, evaluates the consensus model."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from antiphon.config import TrainConfig
from antiphon.errors import ArgumentError, LearnerError
from antiphon.learner.parameters import state_dict_of
from antiphon.learner.progress import EpochOrder
from antiphon.recipes.acoustics import MODEL_NAME, Acoustics, heldout
from antiphon.recipes.curves import Curves
from antiphon.recipes.example import write_example
from antiphon.recipes.learner import LOGS, RESUME_NAME, learn, optimizer_path
from antiphon.records import (
    CONFIG_NAME,
    SUMMARY_NAME,
    EventWriter,
    FolderLock,
    Json,
    output_folder,
    read_json,
    record,
    write_json,
)
from antiphon.strategies import strategy_class
from antiphon.training import checkpoint
from antiphon.training.launch import Launch, Watched, membership_text
from antiphon.transport.block import Col, Gauge
from antiphon.transport.faults import INJECT, parse_all
from antiphon.transport.mirror import missing_text
from antiphon.transport.place import RANKS, Place

PROGRESS_S = 1.0
MEASURE_SHARE = 0.02
"""At most this share of the time goes into measuring the consensus distance."""
RESTARTS = 3
"""How many times a learner that was killed is started again, unless told otherwise."""
STOP_GRACE_S = 60.0


def train(
    data: Path,
    out: Path,
    config: TrainConfig,
    *,
    align: Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    inject: Sequence[str] = (),
    restarts: int = RESTARTS,
) -> Json:
    """Train an acoustic model on prepared and aligned data with L learner processes.

    Args:
        data: what `antiphon prepare` wrote, aligned by `antiphon align`.
        out: the run's folder.
        config: every setting.
        align: the alignment's folder; ``data/align`` by default.
        resume: go on with the run in ``out`` from its newest checkpoint; its own settings hold.
        overwrite: replace what ``out`` holds.
        inject: faults on purpose, ``KIND:LEARNER@STEP[:SECONDS]``.
        restarts: how many times a learner that was killed is started again; not under torchrun or srun.

    Returns:
        The run's ``summary.json``.

    Raises:
        ArgumentError: an unknown strategy, or a number outside its bounds.
        FolderError: a folder that cannot serve.
        LearnerError: learners failed.
    """
    parse_all(inject, config.learners, strategy_class(config.strategy).waits)
    if restarts < 0:
        raise ArgumentError(f"--restart must be at least 0, not {restarts}")
    if resume and overwrite:
        raise ArgumentError("--resume goes on with what --overwrite deletes: pass one of the two")
    place = Place.find()
    if place.folder is not None:
        if config.learners != place.learners:
            raise ArgumentError(f"{place.learners} learners were started: pass --learners {place.learners}")
        if config.ranks_per_learner != place.ranks:
            raise ArgumentError(
                f"--ranks-per-learner {config.ranks_per_learner} needs {RANKS}={config.ranks_per_learner} in the"
                f" environment of the job's processes, where it is {place.ranks}"
            )
        if not place.watches:
            if inject:
                os.environ[INJECT] = " ".join(inject)
            learn(out)
            return {"schema": 1, "command": "train", "learner": place.learner, "out": str(out)}
    acoustics = Acoustics.of_run(out) if resume else Acoustics.of_data(config, data, align)
    if resume and acoustics.data.folder.resolve() != data.resolve():
        raise ArgumentError(
            f"{out} was trained on {acoustics.data.folder}: --resume goes on with that, not with {data}"
        )
    if resume and (out / SUMMARY_NAME).is_file():
        print(f"antiphon: {out} was trained to its end already", file=sys.stderr)
        return read_json(out / SUMMARY_NAME)
    # Found out before the first process starts: too few samples, a split without utterances.
    EpochOrder(len(acoustics.samples("train")), acoustics.config.local_batch, acoustics.config.learners)
    acoustics.samples("dev")
    output_folder(out, resume=resume, overwrite=overwrite, keep=(acoustics.data.folder, acoustics.alignment.folder))
    with FolderLock(out), EventWriter(out) as events:
        run = _Run(acoustics, out, events, resume)
        return run.go(place, inject, restarts)


class _Run:
    """One session of a run, seen by the process that watches it."""

    def __init__(self, acoustics: Acoustics, out: Path, events: EventWriter, resume: bool) -> None:
        self.acoustics, self.config, self.out, self.events = acoustics, acoustics.config, out, events
        self.first_ticket = 0
        self.earlier: Json = {
            "steps": [0] * self.config.learners,
            "samples": 0,
            "repeated": 0,
            "again": 0,
            "frames": 0.0,
            "wall_s": 0.0,
            "staleness": [],
            "updates_lost": 0,
        }
        if resume:
            state = checkpoint.load_latest(out)
            self.first_ticket, self.earlier = state["tickets"], {**self.earlier, **state["earlier"]}
            checkpoint.save(out / RESUME_NAME, state)
        else:
            write_json(out / CONFIG_NAME, {**record("train"), **acoustics.to_json()})
        self.model = acoustics.model()
        self.dev = acoustics.samples("dev")
        self.train_samples = acoustics.samples("train")
        self.order = EpochOrder(len(self.train_samples), self.config.local_batch, self.config.learners)
        self.epoch = self.first_ticket / self.order.batches
        self.evaluated = int(self.epoch)
        self.began_s: float | None = None
        self.wall_s = 0.0
        self.last: Json = {}
        self.heard = 0
        self.metrics: dict[tuple[int, int], Json] = {}
        """The newest of each learner, by its number and incarnation."""
        self.measure_at_s = 0.0
        for notes in (out / LOGS).glob("learner-*.jsonl"):
            notes.unlink()
        self._clear_optimizers()

    def go(self, place: Place, inject: Sequence[str], restarts: int) -> Json:
        """Start the learners, watch them to the end, write what came out."""
        threads = str(self.config.threads_per_learner)
        torch.set_num_threads(1)
        launch = Launch(
            [sys.executable, "-m", "antiphon.recipes.learner", str(self.out)],
            self.config.learners,
            environment={"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, INJECT: " ".join(inject)},
            logs=self.out / LOGS,
            numbers=[0] if place.folder is not None else None,
            place=place if place.folder is not None else None,
            ranks=self.config.ranks_per_learner,
            restarts=restarts if place.folder is None else 0,
        )
        with Curves(self.config, self.out) as self.curves, launch:
            self.events.write(
                "run_started",
                strategy=self.config.strategy,
                learners=self.config.learners,
                batch=self.config.batch,
                epochs=self.config.epochs,
                parameters=sum(parameter.numel() for parameter in self.model.parameters()),
                pids=launch.pids,
                inject=list(inject),
            )
            with self._stop_on_interrupt(launch):
                watched = launch.watch(self._look)
            summary = self._finish(launch, watched)
        (self.out / RESUME_NAME).unlink(missing_ok=True)
        return summary

    @contextlib.contextmanager
    def _stop_on_interrupt(self, launch: Launch) -> Iterator[None]:
        """On Ctrl-C let the learners end their step, and keep what they have as a checkpoint."""
        try:
            yield
        except KeyboardInterrupt:
            self.events.write("run_stopped", reason="interrupted")
            if launch.watched.begun:
                launch.stop()
                launch.wait(STOP_GRACE_S)
                path = self._checkpoint(launch.watched, self._optimizers())
                print(f"antiphon: stopped at {path}: go on with --resume", file=sys.stderr)
            raise
        except LearnerError as error:
            self.events.write("run_stopped", reason=str(error))
            raise

    # --- while it runs

    def _look(self, watched: Watched) -> None:
        if not watched.begun:
            return
        now = time.monotonic()
        if self.began_s is None:
            self.began_s = self.told_s = now
            self.told_frames = 0.0
        self.wall_s = now - self.began_s
        for fault in watched.faults[self.heard :]:
            self.events.write("fault", **vars(fault))
            print(f"antiphon: {fault}", file=sys.stderr)
        self.heard = len(watched.faults)
        self._hear(watched)
        block = watched.block
        self.epoch = (self.first_ticket + int(block.board_LC[:, Col.STEPS].sum())) / self.order.batches
        if now - self.told_s >= PROGRESS_S:
            self._tell(watched, now)
        if int(self.epoch) > self.evaluated and self.epoch < self.config.epochs and watched.present:
            self.evaluated = int(self.epoch)
            self._evaluate(watched)
            self._checkpoint(watched, [])

    def _hear(self, watched: Watched) -> None:
        """Take in what learners have noted."""
        news, watched.news = watched.news, []
        for note in news:
            event = note.pop("event")
            self.events.write(event, **note)
            if event == "membership":
                print(f"antiphon: {membership_text(note)}", file=sys.stderr)
            else:
                self.metrics[note["learner"], note["incarnation"]] = note

    def _distance(self, watched: Watched) -> float | None:
        """Return the consensus distance of the learners on this host, or None where it would be measured too often."""
        began_s = time.monotonic()
        if began_s < self.measure_at_s:
            return None
        near = [learner for learner in watched.present if watched.block.is_local(learner)]
        _, distance = watched.map_weights().consensus(near)
        now_s = time.monotonic()
        self.measure_at_s = now_s + (now_s - began_s) / MEASURE_SHARE
        return distance

    def _tell(self, watched: Watched, now: float) -> None:
        board_LC, gauges_LC = watched.block.board_LC, watched.block.gauges_LC
        loss, frames = float(gauges_LC[:, Gauge.LOSS].sum()), float(gauges_LC[:, Gauge.WEIGHT].sum())
        told_loss = self.last.get("loss_sum", 0.0)
        fresh = frames - self.told_frames
        row = {
            "epoch": self.epoch,
            "loss": (loss - told_loss) / fresh if fresh else None,
            "lr": self.config.schedule.at(self.epoch),
            "frames_per_s": fresh / (now - self.told_s),
            "steps_by_learner": board_LC[:, Col.STEPS].tolist(),
            "samples_by_learner": board_LC[:, Col.SAMPLES].tolist(),
            "consensus_distance": self._distance(watched),
        }
        self.told_s, self.told_frames, self.last = now, frames, {"loss_sum": loss, "loss": row["loss"]}
        self.events.write("progress", **row)
        self.curves.progress(row)

    def _evaluate(self, watched: Watched) -> Json:
        mean_N, distance = watched.consensus()
        if watched.missing:
            print(f"antiphon: {missing_text(watched.missing)}", file=sys.stderr)
        self.model.load_state_dict(state_dict_of(self.model, mean_N))
        loss, accuracy = heldout(self.model, self.dev)
        row = {
            "epoch": self.epoch,
            "heldout_loss": loss,
            "frame_accuracy": accuracy,
            "consensus_distance": distance,
            "lr": self.config.schedule.at(self.epoch),
            "train_loss": self.last.get("loss"),
        }
        self.events.write("evaluation", **row)
        self.curves.evaluation(row)
        return row

    def _checkpoint(self, watched: Watched, optimizers: list[Any]) -> Path:
        """Write the consensus model as it is now, and what a resumed run needs to go on."""
        block = watched.block
        mean_N, _ = watched.consensus()
        tickets = checkpoint.tickets_done(block, self.first_ticket, strategy_class(self.config.strategy).waits)
        path = self.out / checkpoint.FOLDER / f"epoch-{int(tickets / self.order.batches):03d}.pt"
        state = {
            "model": state_dict_of(self.model, mean_N),
            "tickets": tickets,
            "epoch": tickets / self.order.batches,
            "optimizers": optimizers,
            "earlier": self._work_so_far(watched, tickets),
        }
        checkpoint.save(path, state)
        checkpoint.prune(self.out)
        self.events.write("checkpoint", epoch=state["epoch"], path=str(path.relative_to(self.out)))
        return path

    def _work_so_far(self, watched: Watched, tickets: int | None = None) -> Json:
        """Count the work of this session and of those that it resumes.

        Batches that were ended beyond ``tickets``, where a resumed run begins, will be done again.
        """
        earlier, block = self.earlier, watched.block
        board_LC = block.board_LC.copy()
        beyond = 0 if tickets is None else max(0, self.first_ticket + int(board_LC[:, Col.STEPS].sum()) - tickets)
        again = sum(len(self.order.batch(tickets + k)) for k in range(beyond)) if tickets is not None else 0
        return {
            "steps": (np.array(earlier["steps"]) + board_LC[:, Col.STEPS]).tolist(),
            "samples": earlier["samples"] + int(board_LC[:, Col.SAMPLES].sum()),
            "repeated": earlier["repeated"] + int(board_LC[:, Col.REPEATED].sum()),
            "again": earlier["again"] + again,
            "frames": earlier["frames"] + float(block.gauges_LC[:, Gauge.WEIGHT].sum()),
            "wall_s": earlier["wall_s"] + self.wall_s,
            "staleness": added([earlier["staleness"], *(row["staleness"] for row in self.metrics.values())]),
            "updates_lost": earlier["updates_lost"] + sum(fault.updates_lost for fault in watched.faults),
        }

    def _optimizers(self) -> list[Any]:
        paths = [optimizer_path(self.out, number) for number in range(self.config.learners)]
        states = [torch.load(path, weights_only=True) if path.exists() else None for path in paths]
        self._clear_optimizers()
        return states

    def _clear_optimizers(self) -> None:
        for number in range(self.config.learners):
            optimizer_path(self.out, number).unlink(missing_ok=True)

    # --- at the end

    def _finish(self, launch: Launch, watched: Watched) -> Json:
        self.epoch = min(self.epoch, float(self.config.epochs))
        self._tell(watched, time.monotonic())
        row = self._evaluate(watched)
        if not row["heldout_loss"] < math.log(self.acoustics.alignment.states):
            print(
                f"antiphon: the held-out loss {row['heldout_loss']:g} is no better than guessing: training has"
                " diverged, or has hardly begun; lower --lr, or give it more --epochs",
                file=sys.stderr,
            )
        self._checkpoint(watched, self._optimizers())
        checkpoint.save(self.out / MODEL_NAME, self.model.state_dict())
        self.events.write(
            "run_finished", wall_s=self.wall_s, **{k: row[k] for k in ("heldout_loss", "frame_accuracy")},
            consensus_distance=row["consensus_distance"],
        )  # fmt: skip
        write_example(self.acoustics, self.out)
        summary = self._summary(watched, row)
        write_json(self.out / SUMMARY_NAME, summary)
        return summary

    def _summary(self, watched: Watched, row: Json) -> Json:
        config, work = self.config, self._work_so_far(watched)
        counts = np.array(work["staleness"] or [0])
        return record(
            "train",
            threads_per_learner=config.threads_per_learner,
            corpus=self.acoustics.data.corpus,
            strategy=config.strategy,
            learners=config.learners,
            seed=config.seed,
            batch=config.batch,
            local_batch=config.local_batch,
            lr=config.schedule.lr,
            epochs=config.epochs,
            samples=work["samples"],
            wall_s=round(work["wall_s"], 3),
            frames_per_s=work["frames"] / work["wall_s"] if work["wall_s"] else None,
            heldout_loss=row["heldout_loss"],
            frame_accuracy=row["frame_accuracy"],
            steps_by_learner=work["steps"],
            staleness={
                "mean": float((counts * np.arange(len(counts))).sum() / max(counts.sum(), 1)),
                "max": int(np.flatnonzero(counts).max(initial=0)),
            },
            consensus_distance=row["consensus_distance"],
            samples_lost=config.epochs * len(self.train_samples) - work["samples"] + work["again"],
            samples_repeated=work["repeated"] + work["again"],
            updates_lost=work["updates_lost"],
            wer=None,
            gmm_wer=self.acoustics.alignment.info["gmm_wer"],
            parameters=sum(parameter.numel() for parameter in self.model.parameters()),
            data=str(self.acoustics.data.folder.resolve()),
            data_sha256=self.acoustics.data.sha256,
            out=str(self.out),
        )


def added(histograms: list[list[int]]) -> list[int]:
    """Return the sums of histograms of whatever lengths.

    >>> added([[1, 2], [], [3, 0, 5]])
    [4, 2, 5]
    """
    return [sum(counts) for counts in itertools.zip_longest(*histograms, fillvalue=0)]


def stored_config(data: Path) -> TrainConfig:
    """Return the settings that `antiphon prepare` stored for a corpus."""
    from antiphon.speech.manifest import PreparedData

    return TrainConfig().with_changes(**PreparedData(data).info["recipe"].get("train", {}))
