"""The rows of a plan's `drafting` as columns: what the draft model runs first, then one token a row and turn."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.engine_core.execution.rows import Column, HostRows, cumulated, decode_rows, integers
from penstock.kernels.sampling_tables import NO_DRAFT


@dataclass(frozen=True)
class DraftRows:
    """Drafting after one step. Its entries are the rows that have drafts, in the plan's order."""

    first: HostRows  # positions that the draft model lacks, up to the last token of each slot
    turn: HostRows  # one token of each row that has drafts
    turns: int  # drafts of the row that has the most
    told: Column  # [told rows], slots whose drafts the result has
    told_counts: Column  # [told rows], how many


def draft_rows(drafting: bytes) -> DraftRows:
    """Of `StepPlan.drafting`."""
    slots, starts, counts, drafts, told = integers(drafting).reshape(-1, 5).T.copy()
    query_start = cumulated(counts)
    sampling = drafts.nonzero()[0]
    turn = decode_rows(slots[sampling])
    first = HostRows(
        query_start=query_start,
        slots=slots,
        starts=starts,
        last=query_start[1:][sampling] - 1,
        draft_ids=np.full(query_start[-1], NO_DRAFT, np.int32),
        entry_start=turn.entry_start,
        entry_slots=turn.entry_slots,
        depth=turn.depth,
        drafts=turn.drafts,
        decoding=0,
        longest=int(counts.max()),
    )
    heard = told.nonzero()[0]
    return DraftRows(first, turn, int(drafts.max()), slots[heard], drafts[heard])
