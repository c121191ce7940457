"""One learner of an acoustic model: the process that `antiphon train` starts L times."""

from __future__ import annotations

import math
import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn

from antiphon.errors import LearnerError
from antiphon.learner.learner import Learner
from antiphon.learner.notes import FOLDER
from antiphon.recipes.acoustics import Acoustics
from antiphon.transport.assembly import gather
from antiphon.transport.block import Block, Gauge
from antiphon.transport.place import RUN, Place

RESUME_NAME = "resume.pt"
LOGS = "logs"


def learn(run: Path) -> None:
    """Take this process's share of a run's work, from the start or from where an earlier session stopped."""
    place = Place.find()
    # Under torchrun and srun the run's folder is written by another process.
    if place.rank == 0:
        gather(place)
    if not place.creates and place.folder is not None:
        Block.attach(place.folder, place.learners)
    os.environ.setdefault(FOLDER, str(run / LOGS))
    (run / LOGS).mkdir(exist_ok=True)
    acoustics = Acoustics.of_run(run)
    config = acoustics.config
    torch.set_num_threads(config.threads_per_learner)
    model = acoustics.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=config.schedule.at(0.0), momentum=config.momentum)
    first_ticket = 0
    if (run / RESUME_NAME).exists():
        checkpoint = torch.load(run / RESUME_NAME, weights_only=True)
        model.load_state_dict(checkpoint["model"])
        first_ticket = checkpoint["tickets"]
        states = checkpoint["optimizers"]
        if not place.incarnation and place.learner < len(states) and states[place.learner] is not None:
            optimizer.load_state_dict(states[place.learner])
    learner = Learner(
        model,
        optimizer,
        config.strategy,
        seed=config.seed,
        slow=config.slow.get(place.learner, 1.0),
        timeout_s=config.timeout_s,
        first_ticket=first_ticket,
    )
    if RUN not in os.environ:
        # Ctrl-C reaches every process that torchrun or srun has started: all stop after the step in hand.
        signal.signal(signal.SIGINT, lambda *_: learner.block.request_stop())
    # Dropout must differ between learners, and between a run and its resumption.
    torch.manual_seed(hash((config.seed, place.learner, place.rank, place.incarnation, first_ticket)))
    try:
        _work(learner, acoustics)
        learner.finish()
        if place.rank == 0:
            torch.save(optimizer.state_dict(), optimizer_path(run, learner.number))
    finally:
        learner.close()


def optimizer_path(run: Path, learner: int) -> Path:
    """Return where a learner leaves its optimizer's state as it ends."""
    return run / LOGS / f"optimizer-{learner}.pt"


def _work(learner: Learner, acoustics: Acoustics) -> None:
    config, samples = acoustics.config, acoustics.samples("train")
    model, optimizer = learner.model, learner.optimizer
    gauges = learner.block.gauges_LC[learner.seat]
    sampler = learner.batch_sampler(samples, config.batch, config.epochs)
    model.train()
    while sampler.epoch < config.epochs and not learner.stopping():
        for indices in sampler:
            lr = config.schedule.at(learner.epoch)
            for group in optimizer.param_groups:
                group["lr"] = lr
            with learner.step():
                features_BTF, targets_BT = samples.batch(indices, epoch=int(learner.epoch))
                optimizer.zero_grad()
                logits_NS, targets_N = model(features_BTF).flatten(0, 1), targets_BT.flatten()
                frames = int((targets_N >= 0).sum())
                # A batch may be all padding: its loss is then zero, not zero over zero.
                loss = nn.functional.cross_entropy(logits_NS, targets_N, reduction="sum") / max(frames, 1)
                loss.backward()  # type: ignore[no-untyped-call]
                if config.clip:
                    nn.utils.clip_grad_norm_(model.parameters(), config.clip)
                value = loss.item()
                if not math.isfinite(value) and not learner.heals:
                    raise LearnerError(
                        f"the loss is not a number in step {learner.round} at learning rate {lr:g}: lower --lr,"
                        " or clip more with --clip"
                    )
                optimizer.step()
            if not math.isfinite(value):
                continue
            # The other ranks of a learner have as many, and it is the leader that tells.
            gauges[Gauge.LOSS] += value * frames * learner.place.ranks
            gauges[Gauge.WEIGHT] += frames * learner.place.ranks


if __name__ == "__main__":
    try:
        learn(Path(sys.argv[1]))
    except LearnerError as error:
        sys.exit(f"antiphon: {error}")
