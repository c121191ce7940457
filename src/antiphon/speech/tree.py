"""Phonetic decision trees: which triphone states share one distribution.

A tree for each (phone, HMM position) asks questions about the left and the right neighbour. Questions are sets of
phones, found by clustering; the best split anywhere is taken first, until there are enough leaves (S. J. Young,
J. J. Odell and P. C. Woodland, "Tree-based state tying for high accuracy acoustic modelling", 1994).

Phones are numbered from 1; 0 as a neighbour stands for the edge of an utterance.
Shapes: T frames, F features, N distinct (left, centre, right, position), P phones, S states (the leaves).
"""

from __future__ import annotations

import heapq
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from antiphon.speech.kaldi import Fst, kaldi_hmm_gmm

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

LEFT, RIGHT = 0, 2
VARIANCE_FLOOR = 0.01  # features are normalised to variance 1


@dataclass(frozen=True)
class TriphoneStats:
    """Sums over the frames of each triphone state.

    Attributes:
        keys_N4: left phone, centre phone, right phone and HMM position of each row.
        count_N: frames.
        sum_NF: sum of the features.
        square_NF: sum of their squares.
    """

    keys_N4: Ints
    count_N: Floats
    sum_NF: Floats
    square_NF: Floats

    def select(self, rows: npt.NDArray[np.bool_]) -> TriphoneStats:
        """Return some of the rows."""
        return TriphoneStats(self.keys_N4[rows], self.count_N[rows], self.sum_NF[rows], self.square_NF[rows])


def collect_stats(
    features_TF: npt.NDArray[np.float32], phone_T: Ints, position_T: Ints, utterance_T: Ints
) -> TriphoneStats:
    """Sum the features of each triphone state.

    Args:
        features_TF: features of all aligned utterances, one after another.
        phone_T: phone of each frame, from 1.
        position_T: HMM position of each frame; a phone begins wherever position 0 begins.
        utterance_T: number of the utterance of each frame.
    """
    frame_key_T3 = np.stack([utterance_T, phone_T, position_T], axis=1)
    starts = np.flatnonzero(np.any(np.diff(frame_key_T3, axis=0, prepend=-1), axis=1))
    utterance, phone, position = frame_key_T3[starts].T
    instance = np.cumsum(position == 0) - 1
    first = np.flatnonzero(position == 0)
    before = np.concatenate([[0], phone[first][:-1]])
    after = np.concatenate([phone[first][1:], [0]])
    new_utterance = np.diff(utterance[first], prepend=-1) != 0
    before[new_utterance] = 0
    after[:-1][new_utterance[1:]] = 0

    keys = np.stack([before[instance], phone, after[instance], position], axis=1)
    keys_N4, row = np.unique(keys, axis=0, return_inverse=True)
    order = np.argsort(row, kind="stable")
    group_starts = np.searchsorted(row[order], np.arange(len(keys_N4)))
    features = features_TF.astype(np.float64)
    lengths = np.diff(starts, append=len(phone_T)).astype(np.float64)

    def grouped(values: Floats) -> Floats:
        return np.asarray(np.add.reduceat(values[order], group_starts, axis=0))

    return TriphoneStats(
        keys_N4.astype(np.int64),
        grouped(lengths),
        grouped(np.add.reduceat(features, starts, axis=0)),
        grouped(np.add.reduceat(features**2, starts, axis=0)),
    )


def gaussian_log_likelihood(count: Floats, sum_F: Floats, square_F: Floats) -> Floats:
    r"""Log-likelihood of frames under the diagonal Gaussian that fits them best.

    :math:`-\frac{n}{2} \sum_f (\log 2 \pi v_f + c_f / v_f)` with c the variance and v = max(c, floor).

    Args:
        count: frames, [...].
        sum_F: sums of the features, [..., F].
        square_F: sums of squares, [..., F].
    """
    frames = np.asarray(count)[..., None]
    mean = sum_F / frames
    variance = square_F / frames - mean**2
    floored = np.maximum(variance, VARIANCE_FLOOR)
    return np.asarray(-0.5 * frames[..., 0] * (np.log(2 * np.pi * floored) + variance / floored).sum(axis=-1))


def phone_questions(stats: TriphoneStats, phone_count: int) -> list[frozenset[int]]:
    """Find sets of phones that sound alike, by merging the two nearest clusters until one is left.

    The distance is the log-likelihood lost by a merge, on the middle HMM position. Every cluster on the way, every
    single phone, and the edge of an utterance become questions.
    """
    count_P, sum_PF, square_PF = _phone_sums(stats)
    present = np.flatnonzero(count_P)
    count, total, square = count_P[present], sum_PF[present], square_PF[present]
    members = [frozenset([int(phone)]) for phone in present]
    questions = {frozenset([phone]) for phone in range(phone_count + 1)}
    own = gaussian_log_likelihood(count, total, square) if len(present) else np.zeros(0)
    while len(members) > 1:
        first, second = np.triu_indices(len(members), 1)
        merged = gaussian_log_likelihood(
            count[first] + count[second], total[first] + total[second], square[first] + square[second]
        )
        best = int(np.argmin(own[first] + own[second] - merged))
        a, b = int(first[best]), int(second[best])
        members[a] |= members.pop(b)
        for sums in (count, total, square):
            sums[a] += sums[b]
        own[a] = merged[best]
        count, own = np.delete(count, b), np.delete(own, b)
        total, square = np.delete(total, b, axis=0), np.delete(square, b, axis=0)
        questions.add(members[a])
    return sorted(questions, key=sorted)


def _phone_sums(stats: TriphoneStats) -> tuple[Floats, Floats, Floats]:
    middle = stats.select(stats.keys_N4[:, 3] == 1)
    centre = middle.keys_N4[:, 1]
    size = int(centre.max(initial=0)) + 1
    count_P = np.zeros(size)
    sum_PF, square_PF = (np.zeros((size, stats.sum_NF.shape[1])) for _ in range(2))
    np.add.at(count_P, centre, middle.count_N)
    np.add.at(sum_PF, centre, middle.sum_NF)
    np.add.at(square_PF, centre, middle.square_NF)
    return count_P, sum_PF, square_PF


@dataclass
class Node:
    """A leaf with its state, or a question with two branches."""

    state: int = -1
    side: int = LEFT
    question: frozenset[int] = frozenset()
    branches: tuple[Node, Node] | None = None  # (neighbour is in the question, it is not)

    def leaves(self) -> Iterator[Node]:
        """Yield the leaves, `yes` branches first."""
        if self.branches is None:
            yield self
        else:
            yield from self.branches[0].leaves()
            yield from self.branches[1].leaves()


@dataclass
class Tree:
    """One small tree for each (phone, position), and the states at their leaves.

    Attributes:
        phone_count: phones are numbered 1 to this.
        positions: HMM positions of a phone.
        roots: the tree of each (phone, position).
        phone_S: phone of each state.
        position_S: HMM position of each state.
    """

    phone_count: int
    positions: int
    roots: dict[tuple[int, int], Node]
    phone_S: npt.NDArray[np.int16] = field(init=False)
    position_S: npt.NDArray[np.int16] = field(init=False)

    def __post_init__(self) -> None:
        owners: list[tuple[int, int]] = []
        for key in sorted(self.roots):
            for leaf in self.roots[key].leaves():
                leaf.state = len(owners)
                owners.append(key)
        self.phone_S, self.position_S = np.array(owners, np.int16).reshape(-1, 2).T.copy()

    @property
    def states(self) -> int:
        """The number of leaves."""
        return len(self.phone_S)

    @property
    def context_width(self) -> int:
        """Phones in a window: 1 if nothing is asked about neighbours, else 3."""
        return 1 if all(root.branches is None for root in self.roots.values()) else 3

    def state(self, left: int, centre: int, right: int, position: int) -> int:
        """Return the state of one HMM position of a phone between two others."""
        node = self.roots[centre, position]
        while node.branches is not None:
            neighbour = left if node.side == LEFT else right
            node = node.branches[0 if neighbour in node.question else 1]
        return node.state

    def state_counts(self, stats: TriphoneStats) -> tuple[Floats, Floats, Floats]:
        """Sum triphone statistics by state: frames [S], sums [S, F] and squares [S, F]."""
        states = np.array([self.state(*key) for key in stats.keys_N4.tolist()], np.int64)
        count_S = np.zeros(self.states)
        sum_SF, square_SF = (np.zeros((self.states, stats.sum_NF.shape[1])) for _ in range(2))
        np.add.at(count_S, states, stats.count_N)
        np.add.at(sum_SF, states, stats.sum_NF)
        np.add.at(square_SF, states, stats.square_NF)
        return count_S, sum_SF, square_SF


def monophone_tree(phone_count: int, positions: int) -> Tree:
    """Return the tree that asks nothing: one state for each phone and position."""
    phones = range(1, phone_count + 1)
    return Tree(phone_count, positions, {(p, k): Node() for p in phones for k in range(positions)})


@dataclass(frozen=True)
class _Split:
    gain: float
    side: int
    question: frozenset[int]
    yes: npt.NDArray[np.bool_]


def _best_split(stats: TriphoneStats, questions: list[frozenset[int]], min_frames: float) -> _Split | None:
    """Find the question that gains most log-likelihood, with ``min_frames`` on each side."""
    asked: list[tuple[int, frozenset[int]]] = []
    answers: list[npt.NDArray[np.bool_]] = []
    for side in (LEFT, RIGHT):
        neighbour_N = stats.keys_N4[:, side]
        for question in questions:
            yes_N = np.isin(neighbour_N, list(question))
            if yes_N.any() and not yes_N.all():
                asked.append((side, question))
                answers.append(yes_N)
    if not asked:
        return None
    yes_QN = np.array(answers)
    count_Q = yes_QN @ stats.count_N
    total = stats.count_N.sum()
    allowed = np.flatnonzero((count_Q >= min_frames) & (total - count_Q >= min_frames))
    if not len(allowed):
        return None
    count_Q, yes_QN = count_Q[allowed], yes_QN[allowed]
    sum_F, square_F = stats.sum_NF.sum(axis=0), stats.square_NF.sum(axis=0)
    sum_QF, square_QF = yes_QN @ stats.sum_NF, yes_QN @ stats.square_NF
    gain_Q = (
        gaussian_log_likelihood(count_Q, sum_QF, square_QF)
        + gaussian_log_likelihood(total - count_Q, sum_F - sum_QF, square_F - square_QF)
        - gaussian_log_likelihood(total, sum_F, square_F)
    )
    best = int(np.argmax(gain_Q))
    side, question = asked[int(allowed[best])]
    return _Split(float(gain_Q[best]), side, question, yes_QN[best])


def build_tree(
    stats: TriphoneStats,
    base: Tree,
    *,
    states: int,
    whole: frozenset[int] = frozenset(),
    min_frames: float = 60,
    min_gain: float = 100,
) -> Tree:
    """Grow a tree by taking the best split anywhere until it has ``states`` leaves.

    Args:
        stats: sums of each triphone state.
        base: the monophone tree to grow from.
        states: leaves wanted; fewer when no allowed split is left, never fewer than the roots.
        whole: phones whose trees are not split (silence).
        min_frames: frames on each side of a split.
        min_gain: log-likelihood a split must gain, in nats.
    """
    questions = phone_questions(stats, base.phone_count)
    roots = {key: Node() for key in base.roots}
    queue: list[tuple[float, int, Node, TriphoneStats, _Split]] = []
    serial = 0

    def enqueue(node: Node, rows: TriphoneStats) -> None:
        nonlocal serial
        split = _best_split(rows, questions, min_frames)
        if split is not None and split.gain >= min_gain:
            serial += 1
            heapq.heappush(queue, (-split.gain, serial, node, rows, split))

    for (phone, position), root in roots.items():
        if phone not in whole:
            enqueue(root, stats.select((stats.keys_N4[:, 1] == phone) & (stats.keys_N4[:, 3] == position)))
    leaves = len(roots)
    while queue and leaves < states:
        _, _, node, rows, split = heapq.heappop(queue)
        node.side, node.question, node.branches = split.side, split.question, (Node(), Node())
        leaves += 1
        enqueue(node.branches[0], rows.select(split.yes))
        enqueue(node.branches[1], rows.select(~split.yes))
    return Tree(base.phone_count, base.positions, roots)


def context_dependency(tree: Tree) -> Fst:
    """Hand a tree to kaldi-hmm-gmm.

    The library can read one but not build one, and reads only through its pickle hook, which takes the bytes of
    Kaldi's binary form: nested event maps, TE (table), SE (split) and CE (constant).
    """
    width = tree.context_width
    centre = width // 2
    data = [_token("ContextDependency"), _int32(width), _int32(centre), _token("ToPdf")]
    data += [_token("TE"), _int32(centre), b"\xfc" + struct.pack("<I", tree.phone_count + 1), _token("(")]
    data.append(_token("NULL"))  # there is no phone 0
    for phone in range(1, tree.phone_count + 1):
        data += [_token("TE"), _int32(-1), b"\xfc" + struct.pack("<I", tree.positions), _token("(")]
        data += [_event_map(tree.roots[phone, position]) for position in range(tree.positions)]
        data.append(_token(")"))
    data += [_token(")"), _token("EndContextDependency")]
    signed = np.frombuffer(b"".join(data), dtype=np.int8).tolist()
    context = kaldi_hmm_gmm.ContextDependency.__new__(kaldi_hmm_gmm.ContextDependency)
    context.__setstate__((signed,))
    return context


def _event_map(node: Node) -> bytes:
    if node.branches is None:
        return _token("CE") + _int32(node.state)
    phones = sorted(node.question)
    packed = b"\x04" + struct.pack(f"<{len(phones) + 1}i", len(phones), *phones)
    branches = b"".join(_event_map(branch) for branch in node.branches)
    return _token("SE") + _int32(node.side) + packed + _token("{") + branches + _token("}")


def _token(text: str) -> bytes:
    return text.encode() + b" "


def _int32(value: int) -> bytes:
    return b"\x04" + struct.pack("<i", value)
