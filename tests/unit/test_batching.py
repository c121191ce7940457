"""Samples: every frame once an epoch, cuts that move, padding that does not count."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from antiphon.speech.batching import IGNORED, Subsequences

SPANS = [(0, 50), (50, 7), (57, 21), (80, 1), (90, 100)]
"""Frames 78 to 79 and 81 to 89 belong to utterances of other splits."""
FRAMES = 190


def samples(seed: int | None, length: int = 21, targets_T: np.ndarray | None = None) -> Subsequences:
    """Return samples whose features are (frame number, 0) and whose targets are the frame numbers."""
    features_TF = np.stack([np.arange(FRAMES), np.zeros(FRAMES)], 1).astype(np.float32)
    targets_T = np.arange(FRAMES, dtype=np.int32) if targets_T is None else targets_T
    return Subsequences(features_TF, targets_T, SPANS, length, seed)


def counted(subsequences: Subsequences, epoch: int) -> list[int]:
    _, targets_BT = subsequences.batch(range(len(subsequences)), epoch)
    return sorted(targets_BT[targets_BT != IGNORED].tolist())


OWN = sorted(frame for first, frames in SPANS for frame in range(first, first + frames))


@pytest.mark.parametrize("seed", [None, 0, 3])
@pytest.mark.parametrize("length", [1, 7, 21, 200])
@pytest.mark.parametrize("epoch", [0, 1, 5])
def test_every_frame_of_the_split_once_an_epoch(seed: int | None, length: int, epoch: int) -> None:
    assert counted(samples(seed, length), epoch) == OWN


def test_features_belong_to_the_frame_of_the_target_or_to_the_edge() -> None:
    features_BTF, targets_BT = samples(seed=2).batch(range(len(samples(seed=2))), epoch=4)
    inside_BT = targets_BT != IGNORED
    assert features_BTF.dtype == torch.float32 and targets_BT.dtype == torch.int64
    assert torch.equal(features_BTF[..., 0][inside_BT].long(), targets_BT[inside_BT])
    assert set(features_BTF[..., 0].long().flatten().tolist()) == set(OWN)


def test_a_padded_sample_by_hand() -> None:
    features_BTF, targets_BT = samples(seed=None, length=4).batch([13, 14])
    # The second utterance, frames 50 to 56, in two pieces of four.
    assert targets_BT.tolist() == [[50, 51, 52, 53], [54, 55, 56, IGNORED]]
    assert features_BTF[1, :, 0].tolist() == [54, 55, 56, 56]


def test_cuts_move_with_the_epoch_and_their_number_does_not() -> None:
    moving = samples(seed=0)
    first_frames = []
    for epoch in range(4):
        _, targets_BT = moving.batch(range(len(moving)), epoch)
        first_frames.append(targets_BT[:, 0].tolist())
    assert len({tuple(row) for row in first_frames}) == 4
    assert len(moving) == sum(-(-(frames + 20) // 21) for _, frames in SPANS)


def test_held_out_cuts_stay_and_no_sample_is_empty() -> None:
    still = samples(seed=None)
    assert len(still) == sum(-(-frames // 21) for _, frames in SPANS)
    _, targets_BT = still.batch(range(len(still)), epoch=0)
    assert torch.equal(targets_BT, still.batch(range(len(still)), epoch=9)[1])
    assert bool((targets_BT != IGNORED).any(1).all())


def test_the_same_seed_and_epoch_give_the_same_samples() -> None:
    one, two, other = samples(seed=5).batch([3, 1], 2), samples(seed=5).batch([3, 1], 2), samples(seed=6)
    assert torch.equal(one[0], two[0]) and torch.equal(one[1], two[1])
    assert not torch.equal(
        samples(seed=5).batch(range(len(other)), 2)[1],
        other.batch(range(len(other)), 2)[1],
    )


def test_a_sample_does_not_depend_on_its_batch() -> None:
    whole = samples(seed=1).batch(range(10), 3)
    for place, sample in enumerate((7, 2)):
        part = samples(seed=1).batch([7, 2], 3)
        assert torch.equal(part[1][place], whole[1][sample]) and torch.equal(part[0][place], whole[0][sample])


def test_frames_that_are_not_aligned_do_not_count() -> None:
    targets_T = np.arange(FRAMES, dtype=np.int32)
    targets_T[50:57] = -1
    assert counted(samples(0, targets_T=targets_T), 0) == [frame for frame in OWN if not 50 <= frame < 57]


def test_frames_are_counted() -> None:
    assert samples(0).frames == sum(frames for _, frames in SPANS)
