"""Which CUDA graphs there shall be, and the order of their captures: a step is padded to the next size there is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SMALL = (1, 2, 4, 8)  # decoding rows; from there on in steps that waste at most a third
REHEARSED = frozenset((1, 2, 8, 16, 32, 64, 128, 512))  # sizes of which each may take kernels of its own
DRAFT_SHARE = 4  # a full house samples a draft for one row in four without leaving its graphs
DRAFTED_MOST = 512  # entries that are sampled in a graph where every row may have drafts: each takes a line of logits
MIXED_MOST = 2048  # tokens; beyond it no model is so small that the host would be the limit
HOST_LAYER = 900e-6  # seconds that the host of an H200 took to launch one layer's kernels: 0.5 to 0.9 ms
DEVICE_RATE = 600e12  # FLOP per second that a device reaches over a layer's products


@dataclass(frozen=True)
class GraphSizes:
    """Which graphs there shall be."""

    decode: tuple[int, ...]  # rows, one token each
    mixed: tuple[int, ...]  # tokens of rows of any length
    entries: tuple[int, ...]  # entries that are sampled
    rows: int  # most rows of a step
    max_context: int


def graph_sizes(
    layers: int, weights: int, max_num_seqs: int, step_tokens: int, max_context: int, drafts: int = 0
) -> GraphSizes:
    """For a model of so many layers and weights: steps with chunks or drafts have graphs as far as an eager one would
    wait for the host. drafts: that a draft model makes for a row."""
    few, all_drafted = max_num_seqs + max_num_seqs // DRAFT_SHARE, max_num_seqs * (1 + drafts)
    tokens = int(layers * HOST_LAYER * DEVICE_RATE / (2 * weights))
    return GraphSizes(
        decode=decode_sizes(max_num_seqs),
        mixed=mixed_sizes(min(tokens, MIXED_MOST, step_tokens)),
        entries=decode_sizes(max(few, min(all_drafted, DRAFTED_MOST))),
        rows=max_num_seqs,
        max_context=max_context,
    )


def kept_tokens(sizes: GraphSizes) -> int:
    """Tokens whose hidden states graphs keep for good beside those of the largest."""
    return sum(sizes.decode[:-1]) + sum(sizes.mixed[:-1])


def decode_sizes(most: int) -> tuple[int, ...]:
    """Rows of decode graphs, ascending, the last holding `most`: 1 2 4 8 16 24 32 48 64 96 128 160 192 224 256 .."""
    sizes = [size for size in SMALL if size < most]
    size = 16
    while size < most:
        sizes.append(size)
        size += 8 if size < 32 else 16 if size < 64 else 32 if size < 256 else 64
    return (*sizes, most)


def mixed_sizes(most: int) -> tuple[int, ...]:
    """Tokens of graphs for steps with chunks or drafts, ascending, up to `most`: none when that is 0."""
    sizes, size = [], 16
    while size <= most:
        sizes.append(size)
        size += max(16, 1 << (size.bit_length() - 3))
    return tuple(sizes)


@dataclass(frozen=True)
class Shape:
    """One graph of the first half."""

    tokens: int
    rows: int
    entries: int  # lines that are laid out for the second half
    plain: bool  # one token a row

    @property
    def lengths(self) -> tuple[int, ...]:
        """Of the columns of `StepInputs`."""
        return self.rows + 1, self.rows, self.rows, self.tokens, self.entries


def shapes(sizes: GraphSizes) -> tuple[Shape, ...]:
    """Of all graphs of the first half, ascending."""
    most = max(sizes.entries)
    decode = [Shape(size, size, min(size, most), True) for size in sizes.decode]
    return (*decode, *(Shape(size, min(size, sizes.rows), min(size, most), False) for size in sizes.mixed))


def entry_lengths(entries: int) -> tuple[int, ...]:
    """Of the columns of `Entries`."""
    return entries + 1, entries, entries, entries, entries


class Captures:
    """The graphs of one model in `capture_order`, and how many of them were captured."""

    def __init__(self, wanted: Sequence[Shape], entries: Sequence[int]) -> None:
        largest, others = capture_order(wanted, entries)
        self._order = (*largest, *others)
        self._largest = len(largest)
        self.taken = 0

    @property
    def waiting(self) -> tuple[Shape | int, ...]:
        return self._order[self.taken :]

    @property
    def largest(self) -> bool:
        """Whether the next is the largest of its kind."""
        return self.taken < self._largest

    @property
    def rehearsed(self) -> list[Shape | int]:
        """Of each kind, and of very different sizes: all that may take kernels of its own."""
        return [what for at, what in enumerate(self._order) if at < self._largest or size_of(what) in REHEARSED]

    def take(self) -> Shape | int:
        """The next, which the caller captures now."""
        self.taken += 1
        return self._order[self.taken - 1]


def capture_order(wanted: Sequence[Shape], entries: Sequence[int]) -> tuple[list[Shape | int], list[Shape | int]]:
    """The largest graph of each kind, and all others; largest first in both.

    A small one is captured into memory that the large ones have left, and the largest decide how much that is.
    """
    kinds: list[list[Shape | int]] = [
        [shape for shape in wanted if shape.plain],
        [shape for shape in wanted if not shape.plain],
        list(entries),
    ]
    largest, others = [kind[-1] for kind in kinds if kind], [what for kind in kinds for what in kind[:-1]]
    for found in (largest, others):
        found.sort(key=size_of, reverse=True)
    return largest, others


def size_of(what: Shape | int) -> int:
    return what if isinstance(what, int) else what.tokens
