"""Acceptance in Triton: one program a row, entry after entry."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.acceptance import REJECTED, threshold
from penstock.kernels.random_triton import acceptance_word
from penstock.kernels.sampling_tables import NO_DRAFT, PENALTIES, Entries, SlotHistory, SlotSampling

PENALISED = tl.constexpr(PENALTIES)
THROWN = tl.constexpr(REJECTED)
ABSENT = tl.constexpr(NO_DRAFT)
DRAWN = -1  # the threshold of a server whose drafts are held against what was drawn


def accept_rows(
    tokens: Tensor, entries: Entries, sampling: SlotSampling, history: SlotHistory, rate: float | None = None
) -> None:
    """`kernels.acceptance.accept` by the kernel, without waiting for the device."""
    assert history.tokens.is_contiguous()
    assert history.counts.is_contiguous()
    accept_kernel[(len(entries.start) - 1,)](
        tokens, entries.start, entries.slots, entries.drafts, sampling.uses, sampling.seed,
        history.tokens, history.known, history.counts,
        len(history.known) - 1, history.tokens.shape[1], history.counts.shape[1],
        THRESHOLD=DRAWN if rate is None else threshold(rate), num_warps=1,
    )  # fmt: skip


@triton.jit
def accept_kernel(
    tokens, entry_start, entry_slots, drafts, uses, seeds, history, known, counts, scratch, row_length, vocabulary,
    THRESHOLD: tl.constexpr,
):  # fmt: skip
    """One row: its entries as far as each is the draft behind it, and one more."""
    row = tl.program_id(0)
    first = tl.load(entry_start + row)
    end = tl.load(entry_start + row + 1)
    if first < end:
        slot = tl.load(entry_slots + first).to(tl.int64)
        if slot < scratch:
            position = tl.load(known + slot)
            seed = tl.load(seeds + slot)
            penalised = tl.load(uses + slot) & PENALISED
            right = first * 0 + 1
            for at in range(first, end):
                if right == 1:
                    token = tl.load(tokens + at)
                    draft = tl.load(drafts + at)
                    if THRESHOLD >= 0:
                        held = (token >= 0) & (draft != ABSENT) & (acceptance_word(seed, position) < THRESHOLD)
                        token = tl.where(held, draft, token)
                        tl.store(tokens + at, token)
                        right = held.to(tl.int32)
                    else:
                        right = (token == draft).to(tl.int32)
                    written = tl.maximum(token, 0)
                    tl.store(history + slot * row_length + position, written, mask=position < row_length)
                    if penalised != 0:
                        tl.atomic_add(counts + slot * vocabulary + written, 2, sem="relaxed")
                    position += 1
                else:
                    tl.store(tokens + at, THROWN)
            tl.store(known + slot, position)
