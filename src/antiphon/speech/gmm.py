"""Gaussian mixtures, one for each HMM state, trained on frames whose states are known (Viterbi EM).

The sums of the E step and the update are NumPy, grouped by state: the library's own accumulators take one frame a call,
and its splitting of Gaussians draws from a generator that cannot be seeded. It searches the alignments (alignment.py).

Shapes: T frames, F features, S states, G Gaussians of all states (those of a state stand together).
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from antiphon.speech.kaldi import kaldi_hmm_gmm

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

VARIANCE_FLOOR = 0.01  # features are normalised to variance 1
PERTURBATION = 0.2  # of a standard deviation, between the two halves of a split Gaussian
SPLIT_POWER = 0.2  # Gaussians of a state grow with this power of its frames
MIN_FRAMES_OF_SPLIT = 20.0
SCORE_BLOCK_FRAMES = 4096


@dataclass
class Mixtures:
    """Diagonal Gaussian mixtures of all states.

    Attributes:
        weight_G: weights, adding up to 1 in each state.
        mean_GF: means.
        variance_GF: variances.
        first_S: number of each state's first Gaussian.
    """

    weight_G: Floats
    mean_GF: Floats
    variance_GF: Floats
    first_S: Ints

    @classmethod
    def single(cls, count_S: Floats, sum_SF: Floats, square_SF: Floats, min_frames: float = 5) -> Mixtures:
        """Return one Gaussian for each state; a state with fewer than ``min_frames`` frames gets everyone's."""
        mean_F = sum_SF.sum(axis=0) / count_S.sum()
        variance_F = square_SF.sum(axis=0) / count_S.sum() - mean_F**2
        frames_S1 = np.maximum(count_S, 1)[:, None]
        seen_S1 = count_S[:, None] >= min_frames
        mean_SF = np.where(seen_S1, sum_SF / frames_S1, mean_F)
        variance_SF = np.where(seen_S1, square_SF / frames_S1 - mean_SF**2, variance_F)
        states = len(count_S)
        return cls(np.ones(states), mean_SF, np.maximum(variance_SF, VARIANCE_FLOOR), np.arange(states))

    @classmethod
    def alike(cls, mean_F: Floats, variance_F: Floats, states: int) -> Mixtures:
        """Return the same one Gaussian for every state."""
        variance_SF = np.maximum(np.tile(variance_F, (states, 1)), VARIANCE_FLOOR)
        return cls(np.ones(states), np.tile(mean_F, (states, 1)), variance_SF, np.arange(states))

    @property
    def states(self) -> int:
        """The number of states."""
        return len(self.first_S)

    @property
    def gaussians(self) -> int:
        """The number of Gaussians."""
        return len(self.weight_G)

    def slices(self) -> list[slice]:
        """Return where the Gaussians of each state stand."""
        return [slice(int(a), int(b)) for a, b in zip(self.first_S, [*self.first_S[1:], self.gaussians], strict=True)]

    def _projection(self) -> tuple[Floats, Floats, Floats]:
        """Return (a_G, b_GF, c_GF) of log(weight x density) = a + b x + c x^2."""
        constant = np.log(self.weight_G) - 0.5 * (
            np.log(2 * np.pi * self.variance_GF) + self.mean_GF**2 / self.variance_GF
        ).sum(axis=1)
        return constant, self.mean_GF / self.variance_GF, -0.5 / self.variance_GF

    def log_likelihood(self, features_TF: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Return log p(frame | state), float32 [T, S]."""
        constant_G, linear_GF, quadratic_GF = self._projection()
        scores_TS = np.empty((len(features_TF), self.states), np.float32)
        for start in range(0, len(features_TF), SCORE_BLOCK_FRAMES):
            block_TF = features_TF[start : start + SCORE_BLOCK_FRAMES].astype(np.float64)
            joint_TG = constant_G + block_TF @ linear_GF.T + block_TF**2 @ quadratic_GF.T
            peak_TS = np.maximum.reduceat(joint_TG, self.first_S, axis=1)
            joint_TG -= np.repeat(peak_TS, np.diff(self.first_S, append=self.gaussians), axis=1)
            total_TS = np.add.reduceat(np.exp(joint_TG, out=joint_TG), self.first_S, axis=1)
            scores_TS[start : start + SCORE_BLOCK_FRAMES] = peak_TS + np.log(total_TS)
        return scores_TS

    def to_kaldi(self) -> object:
        """Return the same mixtures as the library's ``AmDiagGmm``."""
        model = kaldi_hmm_gmm.AmDiagGmm()
        for rows in self.slices():
            gmm = kaldi_hmm_gmm.DiagGmm(rows.stop - rows.start, self.mean_GF.shape[1])
            gmm.set_weights(self.weight_G[rows].astype(np.float32))
            inverse = (1 / self.variance_GF[rows]).astype(np.float32)
            gmm.set_invvars_and_means(inverse, self.mean_GF[rows].astype(np.float32))
            gmm.compute_gconsts()
            model.add_pdf(gmm)
        return model


@dataclass(frozen=True)
class MixtureSums:
    """What the E step gathers: frames, sums and sums of squares of each Gaussian, and the log-likelihood."""

    count_G: Floats
    sum_GF: Floats
    square_GF: Floats
    log_likelihood: float


def gather(mixtures: Mixtures, features_TF: npt.NDArray[np.float32], state_T: Ints) -> MixtureSums:
    """Share each frame among the Gaussians of its state by their posteriors (E step).

    Args:
        mixtures: the mixtures.
        features_TF: frames, float32 [T, F].
        state_T: state of each frame.
    """
    constant_G, linear_GF, quadratic_GF = mixtures._projection()
    count_G = np.zeros(mixtures.gaussians)
    sum_GF, square_GF = np.zeros_like(mixtures.mean_GF), np.zeros_like(mixtures.mean_GF)
    order = np.argsort(state_T, kind="stable")
    ends = np.searchsorted(state_T[order], np.arange(mixtures.states + 1))
    total = 0.0
    for state, rows in enumerate(mixtures.slices()):
        frames = order[ends[state] : ends[state + 1]]
        if not len(frames):
            continue
        x_TF = features_TF[frames].astype(np.float64)
        square_TF = x_TF**2
        joint_TM = constant_G[rows] + x_TF @ linear_GF[rows].T + square_TF @ quadratic_GF[rows].T
        likelihood_T = np.logaddexp.reduce(joint_TM, axis=1)
        posterior_TM = np.exp(joint_TM - likelihood_T[:, None])
        count_G[rows] = posterior_TM.sum(axis=0)
        sum_GF[rows] = posterior_TM.T @ x_TF
        square_GF[rows] = posterior_TM.T @ square_TF
        total += float(likelihood_T.sum())
    return MixtureSums(count_G, sum_GF, square_GF, total)


def update(mixtures: Mixtures, sums: MixtureSums, min_frames: float = 5) -> Mixtures:
    """Return the most likely mixtures for ``sums`` (M step).

    A Gaussian with fewer than ``min_frames`` frames is dropped while its state has another; the last of a state that
    has too few stays as it was.
    """
    keep_G = sums.count_G >= min_frames
    for rows in mixtures.slices():
        if not keep_G[rows].any():
            keep_G[rows.start + int(np.argmax(sums.count_G[rows]))] = True
    state_G = _state_of_gaussian(mixtures)[keep_G]
    count_G, sum_GF, square_GF = sums.count_G[keep_G], sums.sum_GF[keep_G], sums.square_GF[keep_G]
    fresh_G1 = (count_G >= min_frames)[:, None]
    frames_G1 = np.maximum(count_G, min_frames)[:, None]
    mean_GF = np.where(fresh_G1, sum_GF / frames_G1, mixtures.mean_GF[keep_G])
    variance_GF = np.where(fresh_G1, square_GF / frames_G1 - mean_GF**2, mixtures.variance_GF[keep_G])
    share_G = np.maximum(count_G, 1e-10)
    share_S = np.bincount(state_G, weights=share_G, minlength=mixtures.states)
    first_S = np.searchsorted(state_G, np.arange(mixtures.states))
    weight_G = share_G / share_S[state_G]
    return Mixtures(weight_G, mean_GF, np.maximum(variance_GF, VARIANCE_FLOOR), first_S)


def _state_of_gaussian(mixtures: Mixtures) -> Ints:
    return np.repeat(np.arange(mixtures.states), np.diff(mixtures.first_S, append=mixtures.gaussians))


def split(mixtures: Mixtures, count_S: Floats, gaussians: int, rng: np.random.Generator) -> Mixtures:
    """Split Gaussians until there are ``gaussians`` in all, or no state has frames for more.

    The next Gaussian goes to the state with most frames^0.2 a Gaussian, and halves that state's heaviest.

    Args:
        mixtures: the mixtures.
        count_S: frames of each state.
        gaussians: Gaussians wanted.
        rng: draws the direction of each split.
    """
    wanted_S = np.diff(mixtures.first_S, append=mixtures.gaussians)
    queue = [(-(float(n) ** SPLIT_POWER) / m, s) for s, (n, m) in enumerate(zip(count_S, wanted_S, strict=True))]
    heapq.heapify(queue)
    missing = gaussians - mixtures.gaussians
    while missing > 0 and queue:
        _, state = heapq.heappop(queue)
        if count_S[state] < (wanted_S[state] + 1) * MIN_FRAMES_OF_SPLIT:
            continue
        wanted_S[state] += 1
        missing -= 1
        heapq.heappush(queue, (-(float(count_S[state]) ** SPLIT_POWER) / int(wanted_S[state]), state))
    parts = [
        _split_state(mixtures, rows, int(wanted), rng) for rows, wanted in zip(mixtures.slices(), wanted_S, strict=True)
    ]
    weight_G, mean_GF, variance_GF = (np.concatenate(column) for column in zip(*parts, strict=True))
    return Mixtures(weight_G, mean_GF, variance_GF, np.cumsum(wanted_S) - wanted_S)


def _split_state(
    mixtures: Mixtures, rows: slice, wanted: int, rng: np.random.Generator
) -> tuple[Floats, Floats, Floats]:
    weight, mean, variance = mixtures.weight_G[rows], mixtures.mean_GF[rows], mixtures.variance_GF[rows]
    while len(weight) < wanted:
        heaviest = int(np.argmax(weight))
        step_F = PERTURBATION * np.sqrt(variance[heaviest]) * rng.standard_normal(mean.shape[1])
        weight = np.append(weight, weight[heaviest] / 2)
        weight[heaviest] /= 2
        mean = np.concatenate([mean, [mean[heaviest] - step_F]])
        mean[heaviest] = mean[heaviest] + step_F
        variance = np.concatenate([variance, [variance[heaviest]]])
    return weight, mean, variance
