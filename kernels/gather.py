"""The inputs of a step from its rows: token ids, positions, places in the pages, and how long each row is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

DECODING = -1  # in `InputRows.starts`: the slot's last known token


@dataclass(frozen=True)
class InputRows:
    """Which positions of which slots a step computes. Rows and tokens may be padded: see `gather_inputs`."""

    query_start: Tensor  # int32 [rows + 1], first token of each row
    slots: Tensor  # int32 [rows]
    starts: Tensor  # int32 [rows], first position of a chunk; below 0: counted back from the slot's known tokens
    draft_ids: Tensor  # int32 [tokens], the id of a token that is a draft; below 0: what stands in the slot's row


@dataclass(frozen=True)
class Inputs:
    """What the model is given."""

    input_ids: Tensor  # int32 [tokens]
    positions: Tensor  # int64 [tokens]
    slot_mapping: Tensor  # int64 [tokens], block * block_size + offset of each token's keys and values
    context: Tensor  # int32 [rows], keys of each row, its new ones included


def gather_inputs(rows: InputRows, tokens: Tensor, known: Tensor, block_tables: Tensor, block_size: int) -> Inputs:
    """One launch on a GPU, which waits for nothing; on a CPU the same by `gather_rows`.

    tokens: int32 [slots, row_length]. known: int32 [slots]. block_tables: int32 [slots, max_blocks]. A token at or past
    the last row's end has id 0, position 0 and place 0, which is scratch; a row without tokens has context 0. A
    position past the end of its slot's tables writes to scratch and is not counted as a key.
    """
    if tokens.is_cuda:
        from penstock.kernels.gather_triton import gather_tokens

        return gather_tokens(rows, tokens, known, block_tables, block_size)
    return gather_rows(rows, tokens, known, block_tables, block_size)


def gather_rows(rows: InputRows, tokens: Tensor, known: Tensor, block_tables: Tensor, block_size: int) -> Inputs:
    """The reference of `gather_inputs`, by numpy, whose small operations start fastest."""
    query_start, slots, starts, drafts = (
        column.numpy() for column in (rows.query_start, rows.slots, rows.starts, rows.draft_ids)
    )
    firsts = np.where(starts < 0, np.maximum(known.numpy()[slots] + starts, 0), starts)  # [rows]
    counts = np.diff(query_start)
    used = int(query_start[-1])
    ids, positions, places = (np.zeros(len(drafts), kind) for kind in (np.int32, np.int64, np.int64))
    at = np.arange(used) - np.repeat(query_start[:-1] - firsts, counts)  # [used tokens]
    token_slots = np.repeat(slots, counts)
    length, capacity = tokens.shape[1], block_tables.shape[1] * block_size
    known_ids = tokens.numpy()[token_slots, np.minimum(at, length - 1)] * (at < length)
    ids[:used] = np.where(drafts[:used] >= 0, drafts[:used], known_ids)
    positions[:used] = at
    blocks = block_tables.numpy()[token_slots, np.minimum(at, capacity - 1) // block_size].astype(np.int64)
    places[:used] = np.where(at < capacity, blocks * block_size + at % block_size, 0)
    context = np.where(counts > 0, np.minimum(firsts + counts, capacity), 0).astype(np.int32)
    return Inputs(*(torch.from_numpy(column) for column in (ids, positions, places, context)))
