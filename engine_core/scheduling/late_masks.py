"""Rows whose masks are late sit steps out, and the steps go.

A row under a grammar samples under a mask that follows from all its tokens. With steps in flight a plan is made before
the last of them is known. Then the row may be in the plan, and its step waits behind the forward pass until the mask
has come: that costs nothing where masks come in time. Or it sits out until the token has come and the mask is made, and
no row ever waits for it: then it has a token in every second step at most.

A row sits out when one of its last masks was not there as its token came, and took long to make: those are made beside
the steps. It does so for the sake of rows that wait for no mask alone: where there are none, all run. It is back in the
first plan behind its token and its mask, so it waits for these and for nothing else. Drafts behind which a mask is not
there stay behind, and a prompt whose end is sampled under a mask that is not there stops a position short of it.

Which step computes a position decides nothing about its token. A row that sits out keeps its slot and its blocks, is no
part of the step's accounts, and may be preempted like any other.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np

from penstock.engine_core.grammar.guide import Guide
from penstock.engine_core.scheduling.request import Sequence
from penstock.engine_core.scheduling.running_batch import RunningBatch
from penstock.engine_core.scheduling.state import SchedulerState

Ready = Mapping[Sequence, Guide]  # rows that others do not wait for, with their guides
NOBODY: Mapping[Sequence, Guide] = {}
LOOKAHEAD = 16  # waiting prompts that may be in the step as well


def sit_out(state: SchedulerState, batch: RunningBatch) -> tuple[RunningBatch, Ready]:
    """The rows of a batch without those whose masks are late; and of the ones that stay, those that others do not wait
    for, so that no entry of theirs may need a mask that is not there."""
    long = state.steps.long_mask
    guided = zip(batch.guided_rows.rows, batch.guided_rows.guides, strict=True)
    found = [each.row for each, guide in guided if guide.seconds > long]  # their masks may come behind the forward pass
    if not found or len(found) == len(batch.slots):
        return batch, NOBODY
    slots, absent, ready = state.slots, [], {}
    for row in found:
        sequence = batch.sequences[row]
        guide = sequence.guide
        assert guide is not None
        if slots.last[sequence.slot] <= state.steps.followed and has_mask(state, guide):
            ready[sequence] = guide
        else:
            absent.append(row)
    return (slots.batch(np.delete(batch.slots, absent)) if absent else batch), ready


def has_mask(state: SchedulerState, guide: Guide) -> bool:
    """Whether the mask is there behind a guide that has taken all tokens; it is asked for if it is not."""
    if not (guide.ready or guide.lent):
        state.steps.wanted.append(guide)
    return guide.ready and not guide.lent


def short_of_end(state: SchedulerState, batch: RunningBatch, sequence: Sequence, start: int, count: int) -> int:
    """How many of a prompt's `count` positions from `start` on a chunk has: those before the last where others would
    wait for the first mask. `batch`: rows that decode in the step."""
    guide = sequence.guide
    if guide is None or start + count < len(sequence.tokens) or has_mask(state, guide):
        return count
    prompts = itertools.chain(state.prefilling, itertools.islice(state.queue, LOOKAHEAD))
    return count - 1 if len(batch.slots) or any(other.guide is None for other in prompts) else count
