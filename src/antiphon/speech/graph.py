"""Graphs over words, phones and states: the lexicon L, and the decoding graph HCLG.

M. Mohri, F. Pereira and M. Riley, "Weighted finite-state transducers in speech recognition", 2002. H: states,
C: context, L: lexicon, G: n-grams. In the finished graph an input label is a state's number + 1, an output label a
word's number; self-loops and transition probabilities are in it, so that it decodes a matrix of state scores.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from antiphon.errors import DataError, FolderError
from antiphon.records import write_text
from antiphon.speech.alignment import SILENCE
from antiphon.speech.hmm import Hmm
from antiphon.speech.kaldi import Fst, kaldi_hmm_gmm, kaldifst, relabel_inputs
from antiphon.speech.lexicon import Lexicon

EPSILON = "<eps>"
SILENCE_NUMBER = 1
BACKOFF, SENTENCE_START, SENTENCE_END = "#0", "<s>", "</s>"
SILENCE_PROBABILITY = 0.5
SELF_LOOP_SCALE = 0.1  # weight of self-loop probabilities against acoustic scores scaled by about as much


@dataclass(frozen=True)
class Symbols:
    """Phones and words by number.

    Attributes:
        phones: number 0 is epsilon, 1 silence.
        words: number 0 is epsilon; the back-off symbol and the sentence's ends come last.
    """

    phones: tuple[str, ...]
    words: tuple[str, ...]

    @classmethod
    def of_lexicon(cls, lexicon: Lexicon) -> Symbols:
        """Number the phones and words of a lexicon in sorted order.

        Raises:
            DataError: it is empty, or has a word that the graph needs for itself.
        """
        if not lexicon:
            raise DataError("the lexicon is empty: no word can be recognised")
        reserved = {EPSILON, BACKOFF, SENTENCE_START, SENTENCE_END} & set(lexicon)
        if reserved:
            raise DataError(f"the lexicon has the word '{min(reserved)}', which stands for something else: rename it")
        used = {phone for entries in lexicon.values() for phones in entries for phone in phones}
        words = (EPSILON, *sorted(lexicon), BACKOFF, SENTENCE_START, SENTENCE_END)
        return cls((EPSILON, SILENCE, *sorted(used - {SILENCE})), words)

    @functools.cached_property
    def phone_numbers(self) -> dict[str, int]:
        """Number of each phone."""
        return {phone: number for number, phone in enumerate(self.phones)}

    @functools.cached_property
    def word_numbers(self) -> dict[str, int]:
        """Number of each word."""
        return {word: number for number, word in enumerate(self.words)}

    def write_words(self, path: Path) -> None:
        """Write the words as an OpenFst symbol table."""
        write_text(path, "".join(f"{word} {number}\n" for number, word in enumerate(self.words)))

    def write_phones(self, path: Path) -> None:
        """Write one phone a line, in order."""
        write_text(path, "".join(phone + "\n" for phone in self.phones))


def read_words(path: Path) -> tuple[str, ...]:
    """Read a symbol table whose numbers go up from 0.

    Raises:
        FolderError: the file is missing or is not such a table; file and line are named.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise FolderError(f"{path} cannot be read ({error}): run `antiphon align` again with --overwrite") from None
    words = []
    for number, line in enumerate(lines):
        fields = line.split()
        if len(fields) != 2 or fields[1] != str(number):
            raise FolderError(f"{path}:{number + 1}: expected a word and the number {number}, found {line!r}")
        words.append(fields[0])
    return tuple(words)


def _disambiguated(lexicon: Lexicon) -> list[tuple[str, tuple[str, ...], int]]:
    """Return (word, phones, mark); homophones and beginnings of longer words get marks from 1, the others 0."""
    entries = [(word, phones) for word in sorted(lexicon) for phones in lexicon[word]]
    times = Counter(phones for _, phones in entries)
    beginnings = {phones[:length] for _, phones in entries for length in range(1, len(phones))}
    marks: Counter[tuple[str, ...]] = Counter()
    rows = []
    for word, phones in entries:
        ambiguous = times[phones] > 1 or phones in beginnings
        marks[phones] += ambiguous
        rows.append((word, phones, marks[phones] if ambiguous else 0))
    return rows


class _LexiconBuilder:
    """Builds L: silence or none before each word, silence or none at the end."""

    def __init__(self, symbols: Symbols) -> None:
        self.fst = kaldifst.StdVectorFst()
        self._symbols = symbols
        self.loop, self.after_silence = self.fst.add_state(), self.fst.add_state()
        self.fst.set_final(self.loop, 0.0)

    def path(self, start: int, end: int, labels: Iterable[int], output: int, cost: float) -> None:
        """Add a path that reads ``labels`` and writes ``output`` on its first arc, ``cost`` on its last."""
        labels = list(labels)
        state = start
        for index, label in enumerate(labels):
            last = index == len(labels) - 1
            target = end if last else self.fst.add_state()
            arc = kaldifst.StdArc(label, output if index == 0 else 0, cost if last else 0.0, target)
            self.fst.add_arc(state, arc)
            state = target


def lexicon_fst(lexicon: Lexicon, symbols: Symbols, *, disambiguate: bool) -> tuple[Fst, list[int]]:
    """Return L, phones to words with optional silence between words, and its disambiguation labels.

    Args:
        lexicon: pronunciations.
        symbols: numbers of phones and words.
        disambiguate: mark homophones and silence (#1 ...) and let #0 pass, as determinization needs.

    Returns:
        L, its arcs sorted by output, and the labels of #0, #1, ...; none without ``disambiguate``.
    """
    phone, word_number = symbols.phone_numbers, symbols.word_numbers
    rows = _disambiguated(lexicon)
    marks = max(mark for *_, mark in rows)
    first = len(symbols.phones)  # label of #0
    silence_mark = first + marks + 1
    none_cost, silence_cost = -math.log(1 - SILENCE_PROBABILITY), -math.log(SILENCE_PROBABILITY)
    silence = [SILENCE_NUMBER, silence_mark] if disambiguate else [SILENCE_NUMBER]

    builder = _LexiconBuilder(symbols)
    fst = builder.fst
    start = fst.add_state()
    fst.start = start
    fst.add_arc(start, kaldifst.StdArc(0, 0, none_cost, builder.loop))
    builder.path(start, builder.loop, silence, 0, silence_cost)
    builder.path(builder.after_silence, builder.loop, silence, 0, 0.0)
    for word, phones, mark in rows:
        labels = [phone[name] for name in phones]
        if disambiguate and mark:
            labels.append(first + mark)
        builder.path(builder.loop, builder.loop, labels, word_number[word], none_cost)
        builder.path(builder.loop, builder.after_silence, labels, word_number[word], silence_cost)
    if disambiguate:
        kaldifst.add_self_loops(fst, [first], [word_number[BACKOFF]])
    kaldifst.arcsort(fst, sort_type="olabel")
    return fst, list(range(first, silence_mark + 1)) if disambiguate else []


def decoding_graph(hmm: Hmm, lexicon: Lexicon, symbols: Symbols, grammar: Fst) -> Fst:
    """Compose HCLG with input labels = state + 1 and output labels = word numbers.

    Args:
        hmm: states and transition probabilities.
        lexicon: pronunciations of the words of the grammar.
        symbols: numbers of phones and words.
        grammar: G, its arcs sorted by input.

    Raises:
        DataError: nothing can be recognised with this grammar and lexicon.
    """
    words, disambiguation = lexicon_fst(lexicon, symbols, disambiguate=True)
    graph = kaldifst.compose(words, grammar)
    kaldifst.determinize_star(graph, use_log=True)
    kaldifst.minimize_encoded(graph)
    kaldifst.arcsort(graph, sort_type="ilabel")
    graph, windows = kaldifst.compose_context(
        disambig_syms=disambiguation,
        context_width=hmm.context.context_width,
        central_position=hmm.context.central_position,
        ifst=graph,
    )
    kaldifst.arcsort(graph, sort_type="ilabel")
    states, marks = kaldi_hmm_gmm.get_h_transducer(
        ilabel_info=windows,
        ctx_dep=hmm.context,
        trans_model=hmm.transitions,
        config=kaldi_hmm_gmm.HTransducerConfig(transition_scale=1.0),
    )
    graph = kaldifst.compose(states, graph)
    kaldifst.determinize_star(graph, use_log=True)

    ids = hmm.transitions.num_transition_ids
    without_marks = np.arange(max([ids, *marks]) + 1, dtype=np.int32)
    without_marks[marks] = 0
    relabel_inputs(graph, without_marks)
    kaldifst.minimize_encoded(graph)
    graph = kaldi_hmm_gmm.add_self_loops(
        self_loop_scale=SELF_LOOP_SCALE, disambig_syms=[], reorder=True, trans_model=hmm.transitions, ifst=graph
    )
    kaldifst.connect(graph)
    if graph.num_states == 0:
        raise DataError("the decoding graph is empty: no sentence of the language model can be pronounced")
    relabel_inputs(graph, hmm.state_of_transition + 1)
    return graph


def read_graph(path: Path) -> Fst:
    """Read a graph that ``write_graph`` wrote.

    Raises:
        FolderError: it is missing or not a graph.
    """
    graph = kaldifst.StdVectorFst.read(str(path)) if path.is_file() else None
    if graph is None or graph.num_states == 0:
        raise FolderError(f"{path} is not a decoding graph: run `antiphon align` again with --overwrite")
    return graph


def write_graph(graph: Fst, path: Path) -> None:
    """Write a graph in OpenFst's binary form.

    Raises:
        OSError: it could not be written.
    """
    if not graph.write(str(path)):
        raise OSError(f"{path}: the graph could not be written (is the disk full?)")
