"""Rows that sample under a mask: the plan names them, and their masks are made once the tokens before them are known.

Every plan with masked rows gets exactly one `MaskWork`, in the order of the plans; the executors sample nothing of the
masked rows before it has come. It leaves out rows whose choice has ended since, so it may be empty. Rows whose
structure has not begun are among its rows: their output may not end yet. While it is being worked on, the guides in it
are not to be called: the scheduler next does so when that step's result comes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.engine_core.grammar.masks import MaskRow
from penstock.engine_core.scheduling.slots import Lane
from penstock.engine_core.scheduling.state import Drafts, GuidedRow, State


@dataclass(frozen=True, slots=True, eq=False)
class MaskWork:
    """What a step's masks are made from. Entries that no row of it covers are not masked."""

    step: int
    epoch: int
    rows: tuple[MaskRow, ...]


def guided_rows(state: State, lane: Lane, drafts: Drafts | None) -> tuple[tuple[GuidedRow, ...], int]:
    """The lane's rows that sample under a mask, and the last planned step that ran any of them."""
    slots = state.slots
    rows = slots.guided[lane.slots].nonzero()[0]
    if not len(rows):
        return (), 0
    behind = int(slots.last[lane.slots[rows]].max())
    if drafts is None:
        return tuple([GuidedRow(lane.choices[row], row, row, []) for row in rows.tolist()]), behind
    sizes = drafts.sizes(len(lane.slots))
    entries = (np.cumsum(sizes) - sizes)[rows]
    carried = dict(zip(drafts.rows.tolist(), drafts.ids, strict=True))
    return tuple([
        GuidedRow(lane.choices[row], row, entry, carried.get(row, []))
        for row, entry in zip(rows.tolist(), entries.tolist(), strict=True)
    ]), behind


def mask_work(state: State) -> MaskWork | None:
    """The work for the next step in order whose guides have taken every token before it; None if there is none."""
    if not state.unmasked or state.unmasked[0].behind > state.followed:
        return None
    flight = state.unmasked.popleft()
    ending = {id(found.choice) for found in state.judged.values()} if state.followed > state.applied else ()
    rows = []
    for guided in flight.guided:
        choice, guide = guided.choice, guided.choice.guide
        if guide is not None and not choice.ended and id(choice) not in ending:
            rows.append(MaskRow(guide, guided.drafts, guided.entry))
    return MaskWork(flight.step, state.epoch, tuple(rows))
