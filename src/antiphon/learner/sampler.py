"""The batches of one learner: a batch sampler for torch's DataLoader, over tickets that all learners share."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from antiphon.errors import ArgumentError
from antiphon.learner.progress import EpochOrder, Work


class BatchSampler:
    """Yields this learner's batches of one epoch each time it is iterated; made by `Learner.batch_sampler`."""

    def __init__(
        self,
        work: Work,
        order: EpochOrder,
        epochs: int | None,
        stopping: Callable[[], bool],
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        self.work, self.order, self.epochs, self._stopping = work, order, epochs, stopping
        self._rank, self._ranks = rank, ranks
        self.epoch = 0
        """How many times it was iterated, the one in hand included."""
        self.ended = False
        """Whether the last epoch is over, or the run was asked to stop."""
        self.tickets = {"taken": 0, "ended": 0, "again": 0}
        """Counts: what it has taken, and ended; and of the latter, what somebody else had taken before."""
        self._taken: deque[int] = deque()
        self._progress = 0.0

    def __iter__(self) -> Iterator[list[int]]:
        """Yield lists of sample numbers until the epoch's tickets are gone."""
        self.epoch += 1
        last = self.epochs is not None and self.epoch >= self.epochs
        while not self._stopping():
            ticket = self.work.take(self.epoch * self.order.batches)
            if ticket is None and last:
                ticket = self.work.rest(self.epoch * self.order.batches)
            if ticket is None:
                break
            self._taken.append(ticket)
            self.tickets["taken"] += 1
            batch = self.order.batch(ticket)
            # Of a batch that is too small for all ranks, some take the same sample.
            yield batch[self._rank :: self._ranks] or batch[:1]
        self.ended = last or self._stopping()
        self.work.over(self._stopping())

    def __len__(self) -> int:
        """Return the batches of one epoch that fall to this learner when all are equally fast."""
        return self.order.batches // self.order.learners

    @property
    def progress(self) -> float:
        """Where the batch in hand, or else the last one, lies in the work of all learners, in epochs."""
        return self.work.position(self._taken[0]) / self.order.batches if self._taken else self._progress

    def end(self, batches: int) -> tuple[int, int]:
        """Mark the batches that were taken first as done: return their samples, and how many a dead learner had before.

        Raises:
            ArgumentError: fewer are in hand.
        """
        if batches < 1 or batches > max(1, len(self._taken)):
            raise ArgumentError(
                f"step(batches={batches}) must end at least 1 batch, and not more than the {len(self._taken)} in hand"
            )
        samples = repeated = 0
        for _ in range(min(batches, len(self._taken))):
            self._progress = self.progress
            ticket = self._taken.popleft()
            self.work.end_oldest()
            size, again = len(self.order.batch(ticket)), ticket in self.work.again
            self.tickets["ended"] += 1
            self.tickets["again"] += again
            samples, repeated = samples + size, repeated + size * again
        return samples, repeated
