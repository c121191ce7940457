"""One learner: a model and its optimizer, bound to a strategy, its peers and its share of the work."""

from __future__ import annotations

import atexit
import contextlib
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from antiphon.errors import ArgumentError, DeadlineError
from antiphon.learner.gradients import GradientMean
from antiphon.learner.injected import Injected
from antiphon.learner.joining import begin, join
from antiphon.learner.membership import Change, Healing, come_later, jump_of
from antiphon.learner.notes import Notes, folder_of
from antiphon.learner.pace import Pace
from antiphon.learner.progress import EpochOrder, Patience, Rounds, Tickets, Work, waiting_for
from antiphon.learner.ranks import Followed, Leader, Led
from antiphon.learner.replica import Replica
from antiphon.learner.sampler import BatchSampler
from antiphon.learner.statistics import recomputed, warn_of_statistics
from antiphon.learner.updates import Updates
from antiphon.learner.weights import Weights
from antiphon.strategies import strategy_class
from antiphon.strategies.base import AverageGradients, Exchange, FinishMix, StartMix
from antiphon.transport.assembly import End, assemble, meet
from antiphon.transport.block import Block, Col, Gauge, Head, Status, wait_for
from antiphon.transport.mirror import collect, leave, missing_text
from antiphon.transport.place import Place

SWITCH_S = 5e-4
DAY_S = 24 * 3600.0
TELL_S = 1.0
"""How often a learner notes its metrics."""
ANSWER_S, COPY_S = 0.25, 25e-9
"""How long a peer's answer is waited for, and how much longer for each parameter that it has to copy first."""


class Learner:
    """Trains ``model`` with the other learners of the run: each is a process that runs the same script.

    Started by ``antiphon launch --learners L script.py``, or by torchrun or srun on one host or several; alone, it is
    an ordinary loop. All learners begin with the weights of learner 0. One step is w += optimizer(snapshot) - snapshot,
    an exchange w += c (s_other - s_own); the sum of all learners' weights is moved by steps alone (arXiv 2110.11199).
    All of that is in float32: a parameter of lower precision has a float32 master, on which the optimizer steps.

    Args:
        model: its parameters that require a gradient take part, tied ones once: float32, bfloat16 or float16, on the
            CPU or on one CUDA device, where exchanges hide behind the gradient.
        optimizer: any of torch.optim over these parameters, or several, each of which may step once within a
            ``step()``. A GradScaler may skip a step; a closure is evaluated as the step begins. LBFGS and its like
            evaluate theirs again and again, which strategies that average gradients cannot do.
        strategy: a name, such as ``"random-ring"``.
        seed: of the strategy's draws and of the order of the samples; the same for all learners.
        buffers: what becomes of floating-point buffers. ``"recompute"``: statistics of BatchNorm are each learner's
            own, and ``consensus(batches=...)`` computes them anew. ``"local"``: they are each learner's own.
            ``"average"``: they are exchanged as weights are. By default "recompute", and a warning where there are
            any. Integers are never mixed.
        optimizer_state: ``"local"``, or ``"average"`` to exchange first moments (momentum_buffer, exp_avg) as weights
            are, at twice the memory. Second moments stay local: mixing differences could leave them negative.
        exchange_every: an asynchronous learner starts an exchange every so many of its steps; ``"auto"`` chooses 1 to
            64 by what exchanges are measured to cost, so that they take 5 % of a step at most.
        slow: each step takes this many times as long (to see what a straggler does).
        timeout_s: how long a synchronous round may take.
        first_ticket: where a resumed run goes on.

    Raises:
        ArgumentError: an unknown strategy, a parameter that cannot take part, a number outside its bounds.
        DeadlineError: the other learners did not come.

    >>> model = nn.Linear(3, 1)
    >>> learner = Learner(model, torch.optim.SGD(model.parameters(), lr=0.1))
    >>> data = torch.utils.data.TensorDataset(torch.randn(32, 3), torch.randn(32, 1))
    >>> loader = torch.utils.data.DataLoader(data, batch_sampler=learner.batch_sampler(data, batch=8))
    >>> for inputs, targets in loader:
    ...     with learner.step():
    ...         learner.optimizer.zero_grad()
    ...         (model(inputs) - targets).square().mean().backward()
    ...         _ = learner.optimizer.step()
    >>> sorted(learner.consensus()), learner.metrics["steps"]
    (['bias', 'weight'], 4)
    >>> learner.close()
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        strategy: str = "random-ring",
        *,
        seed: int = 0,
        buffers: str | None = None,
        optimizer_state: str = "local",
        exchange_every: int | str = "auto",
        slow: float = 1.0,
        timeout_s: float = 300.0,
        first_ticket: int = 0,
    ) -> None:
        kind = strategy_class(strategy)
        if slow < 1.0:
            raise ArgumentError(f"slow must be at least 1 (that many times as long), not {slow}")
        self.model, self.seed, self.slow, self.timeout_s = model, seed, slow, timeout_s
        optimizers = (optimizer,) if isinstance(optimizer, Optimizer) else tuple(optimizer)
        self.buffers, self.optimizer_state = buffers or "recompute", optimizer_state
        self._replica = Replica(model, optimizers, self.buffers, optimizer_state)
        self.optimizer = optimizers[0]
        if buffers is None:
            warn_of_statistics(model)
        self.place, waits = Place.find(), kind.waits
        self._follows = self.place.rank > 0
        place = self.place
        if self._follows:
            place, kind = place.within(), strategy_class("allreduce")
        self.number, self.learners = self.place.learner, self.place.learners
        self.seat, seats = place.learner, place.learners
        """Its row of `block`: its number; of a rank that follows, its rank."""
        self.strategy = kind(self.seat, seats, seed)
        averages = seats > 1 and AverageGradients() in self.strategy.gradient(0, range(seats))
        if (averages or place.ranks > 1) and len(optimizers) > 1:
            who = strategy if averages else "a learner of several ranks"
            raise ArgumentError(
                f"{who} averages all gradients before the optimizer's step, so it takes one optimizer, not"
                f" {len(optimizers)}: use parameter groups of one"
            )
        # What follows in step is not for a rank to choose.
        processes = -(-self.place.learners * self.place.ranks // self.place.hosts)
        self._pace = Pace(1 if self._follows else exchange_every, processes, kind.waits)
        self.round = 0
        self.block = place.open()
        self._owns_block = place.creates
        if place.creates:
            atexit.register(self.block.remove)
        self._faults = Injected.find(self.place, self.block, waits, lambda: self.round, seed)
        self._tell_at_s = time.monotonic() + TELL_S
        alone = place.creates and seats == 1
        self.notes = Notes(None if alone or self._follows else folder_of(self.block.folder), self.seat)
        met = meet(place, self.block, self._replica.layout.size, timeout_s)
        self.weights, late = self._join(place, kind.waits)
        deadline_s = ANSWER_S + COPY_S * self.weights.w_N.numel()
        script = None if self._follows else self._faults.script
        end = assemble(
            place,
            self.block,
            self.weights,
            met,
            script=script,
            waits=kind.waits,
            deadline_s=deadline_s,
            timeout_s=timeout_s,
        )
        self.transport = end.transport
        if seats > 1:
            # Python hands its lock over after 5 ms unless told otherwise: an age for the exchange thread.
            sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_S))
        begin(self.block, self.seat, self._replica, self.weights, end, timeout_s, late)
        self._leader = Leader(place, self.weights.w_N, timeout_s) if place.ranks > 1 else None
        self.work = self._work(waits, first_ticket, end)
        self._sampler: BatchSampler | None = None
        meetings = [*([self._leader.rounds] if self._leader else []), *([self.transport] if averages else [])]
        gradients = GradientMean(self._replica, *meetings) if meetings else None
        self._updates = Updates(self._replica, self.weights, gradients, self._gradient_known)
        self._healing = Healing(self.block, self.seat, self._replica, self.weights)
        self.staleness: Counter[int] = Counter()
        self.compute_s = self.wait_s = 0.0
        self._additions = 0
        self._closed = False
        self._over = ""
        """Why no further step may be made, or nothing."""
        atexit.register(self.close)

    def _join(self, place: Place, waits: bool) -> tuple[Weights, bool]:
        """Return the learner's weights, and whether it comes into a run that has begun."""
        late = self._faults.script.late()
        if late is None and not place.incarnation:
            return join(self.block, self.seat, self._replica, waits, self.timeout_s), False
        weights, change = come_later(self.block, self.seat, self._replica, place.incarnation, late or 0, self.timeout_s)
        self.round = change.step
        self.notes.write("membership", **vars(change))
        return weights, True

    # --- the work

    def _work(self, waits: bool, first_ticket: int, end: End) -> Work:
        if self._follows:
            return Followed(self.block, self.seat, self.timeout_s, self.place.learners if waits else 1)
        work = (Rounds if waits else Tickets)(self.block, self.seat, first_ticket)
        if self.place.incarnation and isinstance(work, Tickets):
            work.pool.reclaim()
            self.block.board_LC[self.seat, Col.INCARNATION] = self.place.incarnation
        if end.mirror and isinstance(work, Tickets):
            work.share_over(self.transport, end.mirror.notes)
        return Led(work, self._leader) if self._leader else work

    def batch_sampler(self, dataset: Sized, batch: int, epochs: int | None = None) -> BatchSampler:
        """Return a batch sampler for a DataLoader over ``dataset``: this learner's share of each epoch.

        Args:
            dataset: anything with a length; its order is shuffled anew each epoch, the same for all learners.
            batch: samples over all learners in one step of each; a learner takes batch / learners of them.
            epochs: how many there will be, where known: at the end of the last, what a dead learner left is done too;
                by a DataLoader with workers, only what it left before the others had drawn their last.

        Raises:
            ArgumentError: the batch is smaller than the number of learners, or the data set is.
        """
        if self._sampler is not None:
            raise ArgumentError("batch_sampler() was called already: make one, and iterate over it once an epoch")
        learners, ranks = self.place.learners, self.place.ranks
        if batch < learners * ranks:
            each = "learners" if ranks == 1 else "learners' ranks"
            raise ArgumentError(f"batch must be at least the number of {each} ({learners * ranks}), not {batch}")
        order = EpochOrder(len(dataset), batch // learners, learners, self.seed)
        self._sampler = BatchSampler(self.work, order, epochs, self.stopping, self.place.rank, ranks)
        return self._sampler

    @property
    def epoch(self) -> float:
        """Global progress: where the batch in hand lies in the work of all learners, in epochs.

        Learners that wait for each other agree on it in every round, so that a rate that follows it keeps them equal.
        """
        return self._sampler.progress if self._sampler else 0.0

    def stopping(self) -> bool:
        """Say whether the run is to stop before its end (Ctrl-C): all learners stop after the same round."""
        stop = int(self.block.head[Head.STOP])
        return self._faults.leaving or stop > 0 and (not self.strategy.waits or self.round >= stop - 1)

    @contextlib.contextmanager
    def step(self, batches: int = 1) -> Iterator[None]:
        """Wrap the forward and backward passes and the optimizer's step of one batch, or of several accumulated ones.

        An exception that leaves it ends this learner's part: what it had not ended is given to others.

        Args:
            batches: how many batches of the sampler end with this step, where gradients are accumulated.

        Raises:
            ArgumentError: the optimizer made no step or several, or there were fewer batches.
        """
        self._begin_step()
        try:
            yield
            self._end_step(batches)
        except BaseException:
            self._over = "a step of this learner has failed: make a new Learner, in a new run"
            self.block.board_LC[self.seat, Col.STATE] = Status.FAILED
            if self._leader:
                self._leader.end(Status.FAILED)
            self._updates.give_up()
            raise

    def _begin_step(self) -> None:
        if self._over or self._closed:
            raise ArgumentError(self._over or "this learner is closed")
        if not self._follows:
            self._faults.begin_step(self.weights, self._replica)
        if self.heals and not self.weights.finite:
            self.notes.write("membership", **vars(self._healing.heal(self.round)))
        self._updates.begin()
        for action in self.strategy.computing(self.round, self.transport.present()):
            match action:
                case StartMix(coefficients):
                    self.transport.start_mix(self.round, coefficients)
                case _:
                    raise AssertionError(f"{action} cannot be done before the gradient")
        self._began_s, self._waited_s = time.perf_counter(), 0.0

    def _gradient_known(self) -> None:
        """Do what comes before the gradient is applied."""
        self._slow_down()
        began_s = time.perf_counter()
        if self._updates.gradients:
            self._updates.gradients.take(self.round)
        for action in self.strategy.gradient(self.round, self.transport.present()):
            match action:
                case FinishMix():
                    self.transport.finish_mix(self.round)
                case AverageGradients():
                    pass  # taken above
                case _:
                    raise AssertionError(f"{action} cannot be done before the step")
        self._waited_s = time.perf_counter() - began_s
        self.staleness[self.weights.additions - self.weights.folded] += 1

    def _end_step(self, batches: int) -> None:
        self._updates.finish()
        row_C = self.block.board_LC[self.seat]
        if self.weights.additions != self._additions:
            row_C[Col.MIXED], self._additions = self.round, self.weights.additions
        step_s = time.perf_counter() - self._began_s
        if self._leader:
            self._leader.stepped(self.round, self.weights.w_N, step_s)
        elif isinstance(self.work, Followed):
            self._updates.replace(self.work.weights(self.round))
        self.block.gauges_LC[self.seat, Gauge.STEP_S] = step_s
        self.wait_s += self._waited_s
        self.compute_s += step_s - self._waited_s
        self._start_exchanges()
        self.round += 1
        row_C[Col.STEPS] = self.round
        if self._sampler:
            samples, repeated = self._sampler.end(batches)
            row_C[Col.SAMPLES] += samples
            row_C[Col.REPEATED] += repeated
        self._faults.end_step()
        if time.monotonic() >= self._tell_at_s:
            self._tell_at_s = time.monotonic() + TELL_S
            self.notes.write("metrics", **self.metrics)

    def _start_exchanges(self) -> None:
        due = self._pace.due(self.weights.fold_s, self.transport.exchange_s)
        for action in () if due is None else self.strategy.stepped(due, self.transport.present()):
            match action:
                case Exchange(peer, coefficient):
                    self.transport.propose(peer, coefficient)
                case _:
                    raise AssertionError(f"{action} cannot be done after the step")

    @property
    def heals(self) -> bool:
        """Whether this learner, should its weights become not finite, begins again with a neighbour's."""
        return not self._follows and self.learners > 1 and self.place.ranks == 1 and not self.strategy.waits

    def _slow_down(self) -> None:
        # Even sleep(0) gives the core away.
        if delay_s := self._faults.delay_s():
            time.sleep(delay_s)
        if self.slow > 1.0:
            if self._replica.device.type == "cuda":
                torch.cuda.synchronize(self._replica.device)
            time.sleep((self.slow - 1.0) * (time.perf_counter() - self._began_s))

    # --- the end

    def finish(self) -> None:
        """End this learner's part: let exchanges in flight end, and wait for the others to end theirs."""
        if self._faults.leaving:
            self.leave()
        if self._over or self._closed:
            return
        self._over = "this learner has finished: consensus() and close() end its part in the run"
        states_L = self.block.board_LC[:, Col.STATE]
        if isinstance(self.work, Followed):
            self._updates.replace(self.work.weights(self.round, DAY_S))
        else:
            self._finish_with_others(states_L)
        self._replica.unbind()
        states_L[self.seat] = Status.DONE
        if self._leader:
            self._leader.stepped(self.round, self.weights.w_N, 0.0)
            self._leader.end()

    def leave(self) -> None:
        """End this learner's part before the run ends: the others do its work, and go on without its weights.

        Raises:
            ArgumentError: the strategy's learners wait for each other.
        """
        if self._over or self._closed:
            return
        if self.strategy.waits:
            raise ArgumentError(f"learners of {self.strategy.name} wait for each other: none can leave")
        self._over = "this learner has left the run"
        self.transport.refuse()
        self.transport.drain(deadline_s=10.0)
        self._updates.settle()
        change = Change(self.seat, "left", self.round, None, jump_of(self.block, self.seat))
        self.block.board_LC[self.seat, Col.STATE] = Status.AWAY
        self.transport.close()
        self._replica.unbind()
        self.notes.write("membership", **vars(change))

    def _finish_with_others(self, states_L: NDArray[np.int64]) -> None:
        self.transport.drain(deadline_s=10.0)
        self.weights.retire()
        states_L[self.seat] = Status.DRAINED
        patience = Patience(self.block)
        with contextlib.suppress(DeadlineError):
            wait_for(lambda: not waiting_for(self.block, self.seat, patience), DAY_S, "the other learners")
        if not self.transport.drain(deadline_s=2.0):
            self.transport.close()
        self._updates.settle()
        # Of learners on other hosts too, while they are still there.
        collect(self.block)

    @property
    def leads(self) -> bool:
        """Whether this process is the one to save or print what all have in common.

        True for one of them: rank 0 of the lowest-numbered learner that is present. Best asked after `consensus`.
        """
        block = self.block
        return not self._follows and all(
            block.dead(number) or block.board_LC[number, Col.STATE] == Status.ABSENT for number in range(self.number)
        )

    def consensus(self, batches: Iterable[Any] | None = None) -> dict[str, Tensor]:
        """Return a plain state_dict: the mean of all present learners' weights.

        Called after the last epoch of a sampler with ``epochs``, it first lets all learners come to their end.

        Args:
            batches: inputs of the training data, to recompute the statistics of BatchNorm on (buffers="recompute");
                without them buffers are this learner's own, or averaged.
        """
        if self._sampler and self._sampler.ended:
            self.finish()
        if not self._over:
            self.weights.publish()
        block = self._block_of_the_run()
        assert block.buffers is not None
        if missing := collect(block):
            warnings.warn(missing_text(missing), stacklevel=2)
        present = [n for n in range(block.learners) if n not in missing and not block.dead(n)]
        mean_N, _ = block.buffers.consensus(present)
        state = self._replica.layout.state_dict(self.model, mean_N)
        return state if batches is None else recomputed(self.model, state, batches)

    def _block_of_the_run(self) -> Block:
        """Return the learners' memory; a rank that follows waits until its learner has ended, if it has itself."""
        if not self._follows:
            return self.block
        assert self.place.folder is not None
        block = Block.attach(self.place.folder, self.place.learners, self.timeout_s)
        block.allocate(self._replica.layout.size)
        state_C = block.board_LC[self.place.learner]
        if self._over:
            wait_for(lambda: bool(state_C[Col.STATE] >= Status.DONE), self.timeout_s, "the learner's rank 0 to end")
        return block

    @property
    def metrics(self) -> dict[str, Any]:
        """What this learner has done so far; fields of the ``learner`` event in docs/formats.md."""
        return {
            "learner": self.number,
            "ranks": self.place.ranks,
            "incarnation": self.place.incarnation,
            "steps": self.round,
            "samples": int(self.block.board_LC[self.seat, Col.SAMPLES]),
            "compute_s": self.compute_s,
            "wait_s": self.wait_s,
            "exchange_s": self.transport.exchange_s,
            "staleness": [self.staleness[k] for k in range(max(self.staleness, default=-1) + 1)],
            "exchanges": dict(vars(self.transport.counts)),
            "bytes": self.transport.bytes_read,
            "tickets": dict(self._sampler.tickets) if self._sampler else {"taken": 0, "ended": 0, "again": 0},
            "reseeded": self._healing.count,
            "skipped": self._updates.skipped,
            "buffers": self.buffers,
            "optimizer_state": self.optimizer_state,
            "exchange_every": self._pace.every,
        }

    def close(self) -> None:
        """Leave the run; closing twice is harmless."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        atexit.unregister(self.block.remove)
        self._updates.close()
        if not self._over:
            self.transport.drain(deadline_s=1.0)
        if not self.block.remote:
            self.transport.close()
        self.notes.write("learner", **self.metrics)
        self.notes.close()
        leave(self.block, self.seat)
        self.transport.close()
        if self._leader:
            self._leader.end()
        self._replica.unbind()
        self.weights.close()
        if self._owns_block:
            self.block.remove()
