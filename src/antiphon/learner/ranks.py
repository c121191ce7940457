"""A super-learner: K ranks compute one learner's gradient together (hierarchical ADPSGD, arXiv 1907.05701).

    w += optimizer(w, (1/K) sum_r g_r(w)) - w

Rank 0 leads: it is the learner that the others of the run see, exchanges with them and folds what exchanges add. The
others follow: among themselves the ranks are a run of allreduce, over a shared memory of their own, in which each rank
takes its part of the leader's batch, and after each step the leader's weights. Nobody outside waits for them.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from torch import Tensor

from antiphon.learner.progress import Work
from antiphon.learner.weights import Weights
from antiphon.transport.assembly import assemble
from antiphon.transport.block import OUTSTANDING, Block, Col, Gauge, Head, Status, wait_for
from antiphon.transport.place import Place

END = -1
"""Among the leader's tickets: its epoch has ended."""


class Leader:
    """Rank 0's side of its learner.

    Args:
        place: the learner's place in the run.
        w_N: the learner's weights, which all ranks begin with.
        waits_s: how long the others, and their gradients, are waited for.
    """

    def __init__(self, place: Place, w_N: Tensor, waits_s: float) -> None:
        within = place.within()
        assert within.folder is not None
        within.folder.mkdir(mode=0o700)
        self.learner, self.waits_s = place.learner, waits_s
        self.block = Block.create(place.ranks, within.folder)
        self._weights = Weights(self.block.allocate(w_N.numel()), 0)
        self._weights.w_N.copy_(w_N)
        self.block.head[Head.PARAMETERS], self.block.head[Head.READY] = w_N.numel(), 1
        self._row_C = self.block.board_LC[0]
        self._row_C[Col.PID], self._row_C[Col.WAITS], self._row_C[Col.STATE] = os.getpid(), 1, Status.JOINED
        self.rounds = assemble(within, self.block, self._weights, timeout_s=waits_s).transport
        states_K = self.block.board_LC[:, Col.STATE]
        wait_for(lambda: bool((states_K >= Status.JOINED).all()), waits_s, f"all {place.ranks} ranks", self._gone)
        self.rounds.start()

    def stepped(self, round: int, w_N: Tensor, step_s: float) -> None:
        """Give the others the weights after ``round``; they have taken the last ones, or had no gradient for this."""
        self._weights.w_N.copy_(w_N)
        self.block.gauges_LC[0, Gauge.STEP_S] = step_s
        self._row_C[Col.STEPS] = round + 1

    def show(self, ticket: int) -> None:
        """Add a ticket, or `END`, to those that the others follow."""
        shown, read_K = int(self._row_C[Col.DRAWN]), self.block.board_LC[1:, Col.DRAWN]
        wait_for(
            lambda: bool(shown - read_K.min() < OUTSTANDING), self.waits_s, "the other ranks to follow", self._gone
        )
        self.block.outstanding_LK[0, shown % OUTSTANDING] = ticket
        self._row_C[Col.DRAWN] = shown + 1

    def end(self, status: Status = Status.DONE) -> None:
        """Tell the others that the learner has ended, and leave; doing so twice is harmless."""
        if self._row_C[Col.STATE] == Status.JOINED:
            self._row_C[Col.STATE] = status
        self.rounds.close()

    def _gone(self) -> str | None:
        gone = [rank for rank in range(self.block.learners) if self.block.dead(rank)]
        return f"ranks {gone} of learner {self.learner} are gone, and its gradient needs them all" if gone else None


class Led(Work):
    """The leader's work: each ticket is shown to those that follow."""

    def __init__(self, work: Work, leader: Leader) -> None:
        self.work, self.leader, self.again = work, leader, work.again

    def take(self, total: int | None = None) -> int | None:
        """Return the learner's next ticket."""
        return self._shown(self.work.take(total))

    def rest(self, total: int) -> int | None:
        """Return a ticket that others left."""
        return self._shown(self.work.rest(total))

    def over(self, stopping: bool) -> None:
        """Tell that an epoch has ended, the last one where the run is asked to stop; nobody follows after that."""
        head = self.leader.block.head
        if not head[Head.STOP]:
            head[Head.STOP] = int(stopping)
            self.leader.show(END)

    def position(self, ticket: int) -> int:
        """Return where a ticket lies in the work."""
        return self.work.position(ticket)

    def end_oldest(self) -> None:
        """Mark the ticket that was taken first as ended."""
        self.work.end_oldest()

    def _shown(self, ticket: int | None) -> int | None:
        if ticket is not None:
            self.leader.show(ticket)
        return ticket


class Followed(Work):
    """The work of a rank that follows: the leader's tickets.

    Args:
        block: the memory that the ranks share.
        rank: this process's.
        timeout_s: how long the leader's next ticket, or its weights, are waited for.
        rounds_of: how many tickets a round of the run has: one a learner where learners wait for each other, else 1.
    """

    def __init__(self, block: Block, rank: int, timeout_s: float, rounds_of: int = 1) -> None:
        super().__init__(block, rank)
        self.timeout_s, self._rounds_of = timeout_s, rounds_of
        self._row_C, self._leader_C = block.board_LC[rank], block.board_LC[0]
        self._leader = Weights(block.buffers or block.allocate(int(block.head[Head.PARAMETERS])), 0)

    def take(self, total: int | None = None) -> int | None:
        """Return the leader's next ticket, or None where its epoch ended."""
        read = int(self._row_C[Col.DRAWN])
        self._wait(lambda: bool(self._leader_C[Col.DRAWN] > read), "the number of the leader's next batch")
        ticket = int(self.block.outstanding_LK[0, read % OUTSTANDING])
        self._row_C[Col.DRAWN] = read + 1
        return None if ticket == END else ticket

    def position(self, ticket: int) -> int:
        """Return where a ticket lies in the work."""
        return ticket - ticket % self._rounds_of

    def end_oldest(self) -> None:
        """Nothing is held: the leader's row shows the ticket."""

    def weights(self, round: int, timeout_s: float | None = None) -> Tensor:
        """Return the leader's weights [N] after ``round``: they stay so until all have a gradient for the next.

        Those "after" a round that there is no more are the learner's last, which it has when all learners have ended.
        """
        what = f"the leader's weights after round {round}"
        self._wait(lambda: bool(self._leader_C[Col.STEPS] > round), what, timeout_s)
        return self._leader.w_N

    def _wait(self, ready: Callable[[], bool], what: str, timeout_s: float | None = None) -> None:
        wait_for(ready, timeout_s or self.timeout_s, what, self._gone)

    def _gone(self) -> str | None:
        if self.block.dead(0) or self.block.board_LC[0, Col.STATE] == Status.DONE:
            return "rank 0, which leads this learner, has ended"
        return None
