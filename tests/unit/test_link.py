"""One connection: a frame that has to wait is taken later, and its taker is told that things have moved."""

from __future__ import annotations

import socket

from antiphon.transport.frames import Frame, What
from antiphon.transport.link import Link


class Poll:
    def add(self, fd, ready, readable=True, writable=False):
        self.wanted = (readable, writable)

    def remove(self, fd):
        self.wanted = (False, False)


class Receiver:
    """Takes frames once it is ``ready``, and notes how many it had each time that it was told of progress."""

    def __init__(self):
        self.ready, self.taken, self.seen = False, [], []

    def room(self, frame):
        return memoryview(bytearray(frame.length))

    def arrived(self, frame, body):
        if self.ready:
            self.taken.append(bytes(body))
        return self.ready

    def moved(self):
        self.seen.append(len(self.taken))

    def down(self, link, reason):
        raise AssertionError(reason)


def test_progress_is_told_when_a_frame_that_waited_is_taken_and_nothing_comes_after_it():
    near, far = socket.socketpair()
    poll, receiver = Poll(), Receiver()
    link = Link(near, poll, receiver)
    far.sendall(Frame(What.NOTE, length=4).pack() + b"last")
    link.pump()
    assert receiver.taken == [] and receiver.seen[-1] == 0
    assert not poll.wanted[0], "nothing is read while a frame waits"
    receiver.ready = True
    link.pump()
    assert receiver.taken == [b"last"]
    assert receiver.seen[-1] == 1, "the pair that this frame completed would wait for ever"
    assert poll.wanted[0]
    link.close()
    far.close()
