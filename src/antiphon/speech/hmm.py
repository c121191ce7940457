"""Hidden Markov models of phones: three positions in a row, tied by a tree, with their transition probabilities."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from antiphon.speech.kaldi import Fst, kaldi_hmm_gmm
from antiphon.speech.tree import Tree, context_dependency

POSITIONS = 3
SELF_LOOP_PROBABILITY = 0.75  # at the start; four frames a position


def topology(phone_count: int) -> Any:
    """Return the library's topology: each phone from 1 goes through its positions in order, none skipped."""
    rows = [f"<Topology>\n<TopologyEntry>\n<ForPhones>\n{' '.join(map(str, range(1, phone_count + 1)))}\n</ForPhones>"]
    stay, leave = SELF_LOOP_PROBABILITY, 1 - SELF_LOOP_PROBABILITY
    for k in range(POSITIONS):
        rows.append(f"<State> {k} <PdfClass> {k} <Transition> {k} {stay} <Transition> {k + 1} {leave} </State>")
    rows.append(f"<State> {POSITIONS} </State>\n</TopologyEntry>\n</Topology>\n")
    result = kaldi_hmm_gmm.HmmTopology()
    result.read("\n".join(rows))
    result.check()
    return result


@dataclass
class Hmm:
    """The states of a tree, and the library's objects for them.

    Attributes:
        tree: which state a triphone's position has.
        context: the same tree, the library's.
        transitions: its transition model; a transition id names a state and an arc out of it.
        state_of_transition: state of each transition id, int32 [ids + 1]; entry 0 is -1.
    """

    tree: Tree
    context: Fst = field(init=False)
    transitions: Any = field(init=False)
    state_of_transition: npt.NDArray[np.int32] = field(init=False)

    def __post_init__(self) -> None:
        self.context = context_dependency(self.tree)
        self.transitions = kaldi_hmm_gmm.TransitionModel(self.context, topology(self.tree.phone_count))
        states = np.array(self.transitions.transition_id_to_pdf_array(), np.int32)
        states[0] = -1
        self.state_of_transition = states

    def update_transitions(self, transitions_T: npt.NDArray[np.int32]) -> None:
        """Estimate the transition probabilities from the transition id of each frame."""
        counts = np.bincount(transitions_T, minlength=len(self.transitions.init_stats())).astype(np.float64)
        self.transitions.mle_update(counts, kaldi_hmm_gmm.MleTransitionUpdateConfig())
