"""Which rows of a step have so many queries that layers with latents expand these for them.

That follows from a row's own queries alone. The host knows where chunks begin, so it knows how many keys their rows
have; of graphs it does not, and they absorb all queries. With --batch-invariant layers absorb all queries, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.engine_core.execution.input_batch import Column, cumulated
from penstock.engine_core.execution.transfer import Upload
from penstock.kernels.latent_expansion import BLOCK, GROUP_KEYS, LONG
from penstock.kernels.records import ExpandedGroup, LongRows, RowSet

IntArray = NDArray[np.int64]


def find_long_rows(query_start: Column, starts: Column, upload: Upload, shortest: int = LONG) -> LongRows | None:
    """Of a step's rows, in one transfer; None: none is long. starts: first position of a chunk, below 0 for any other
    row. shortest: queries of a long row."""
    counts = np.diff(query_start)
    long = (counts >= shortest) & (starts >= 0)
    if not long.any():
        return None
    contexts = np.where(long, starts + counts, 0).astype(np.int64)
    sets = [*split_groups(long.nonzero()[0], contexts)]
    rest = (~long).nonzero()[0]
    arrays: list[NDArray[Any]] = []
    for rows in (*sets, rest):
        arrays += [rows, token_numbers(query_start, rows), cumulated(counts[rows])]
    for rows in sets:
        arrays += key_blocks(contexts[rows])
    sent = iter(upload.send(arrays))
    found = []
    for rows in (*sets, rest):
        own, tokens, first = next(sent), next(sent), next(sent)
        start, end = int(query_start[rows[0]]) if len(rows) else 0, 0
        if len(rows):
            end = int(query_start[rows[-1] + 1])
        joined = slice(start, end) if end - start == len(tokens) else tokens
        longest = int(counts[rows].max(initial=0)), int(contexts[rows].max(initial=0))
        found.append(RowSet(own, joined, first, *longest))
    groups = tuple(ExpandedGroup(own, next(sent), next(sent), next(sent)) for own in found[:-1])
    return LongRows(groups, found[-1] if len(rest) else None)


def split_groups(rows: IntArray, contexts: IntArray) -> Sequence[IntArray]:
    """Long rows in their order, of which those of a group have few keys between them, or it is one row."""
    groups: list[list[int]] = []
    room = 0
    for row in rows.tolist():
        keys = -(-int(contexts[row]) // BLOCK) * BLOCK
        if keys > room:
            groups.append([])
            room = GROUP_KEYS
        groups[-1].append(row)
        room -= keys
    return [np.array(group, np.int64) for group in groups]


def token_numbers(query_start: Column, rows: IntArray) -> IntArray:
    """Of the tokens of some rows: [tokens]."""
    found = [np.arange(query_start[row], query_start[row + 1], dtype=np.int64) for row in rows.tolist()]
    return np.concatenate(found) if found else np.zeros(0, np.int64)


def key_blocks(contexts: IntArray) -> tuple[Column, IntArray, IntArray]:
    """The lists of an `ExpandedGroup`."""
    blocks = -(-contexts // BLOCK)
    first = cumulated(blocks.astype(np.int32))
    rows = np.repeat(np.arange(len(blocks)), blocks)
    places = np.arange(len(rows), dtype=np.int64) - first[rows]
    return first[:-1].copy(), rows, places * BLOCK
