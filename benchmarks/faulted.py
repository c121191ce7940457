"""One learner of `faults.py`: a process that takes its share of a given work, and notes each of its steps."""

from __future__ import annotations

import sys
import time

import torch
from straggling import Job
from workers import POOL, acoustic_task

from antiphon.learner.learner import Learner
from antiphon.transport.place import Place


def work(job: Job, samples: int) -> None:
    """Train until all samples have been taken, by whichever learners are there."""
    torch.set_num_threads(1)
    # A process that takes over from one that died goes on with its file.
    with job.trace(Place.find().learner).open("ab", buffering=0) as trace:
        task = acoustic_task(job, Place.find().learner, trace)
        learner = Learner(task.model, task.optimizer, job.strategy, exchange_every=1, timeout_s=job.patience_s)
        for _ in learner.batch_sampler(range(samples), job.local_batch * job.learners, epochs=1):
            with learner.step():
                task.optimizer.zero_grad()
                loss = task.forward(task.model, learner.round % POOL)
                time.sleep(job.wait_s)
                loss.backward()
                task.optimizer.step()
            exchanges = learner.metrics["exchanges"]
            task.note(learner.transport.bytes_read, exchanges["committed"] + exchanges["applied"])
        learner.finish()
        learner.close()


if __name__ == "__main__":
    work(Job.from_text(sys.argv[1]), int(sys.argv[2]))
