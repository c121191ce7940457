"""The three Kaldi wheels, imported in the one order that works, and what they lack.

kaldi-hmm-gmm must come before kaldifst: the other way round the import hangs or ends in a TypeError. Every other
module takes the libraries from here. Their objects have no types, so an FST is ``Fst``, which is ``Any``.
"""

# isort: skip_file
from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

import kaldi_hmm_gmm
import kaldifst
import kaldi_decoder

__all__ = ["Fst", "arc_count", "kaldi_decoder", "kaldi_hmm_gmm", "kaldifst", "quiet", "relabel_inputs"]

Fst: TypeAlias = Any


def arc_count(fst: Fst) -> int:
    """Return the number of arcs of all states."""
    return sum(fst.num_arcs(state) for state in range(fst.num_states))


def relabel_inputs(fst: Fst, new_labels: npt.NDArray[np.int32]) -> None:
    """Replace every input label ``i`` of ``fst`` by ``new_labels[i]``, in place.

    Args:
        fst: a ``StdVectorFst``.
        new_labels: int32 [largest label + 1]; entry 0, epsilon, must stay 0.
    """
    assert new_labels[0] == 0
    labels: list[int] = new_labels.tolist()
    for state in range(fst.num_states):
        arcs = [
            kaldifst.StdArc(labels[arc.ilabel], arc.olabel, arc.weight, arc.nextstate)
            for arc in kaldifst.ArcIterator(fst, state)
        ]
        fst.delete_arcs(state, len(arcs))
        for arc in arcs:
            fst.add_arc(state, arc)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Drop what the libraries' C++ prints to standard error: a line for every section of a file they read.

    Errors are exceptions, and those pass.
    """
    sys.stderr.flush()
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
