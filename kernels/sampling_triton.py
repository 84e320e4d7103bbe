"""The sampler in Triton: five launches, whatever the entries ask for.

1. adjust (kernels/adjustment_triton.py): where a request changes its logits the changed ones are written in fp32, for
   that entry alone.
2. survey: each span of each entry's vocabulary gives its best logit and, where there is top_k, those of small groups.
3. rank (kernels/ranking_triton.py), one program an entry: top_k from those groups. Few tokens are left as a rule, from
   which it draws at once.
4. draw (kernels/drawing_triton.py): each span of the other entries that are not greedy gives its best score.
5. choose, one program an entry: the best of the spans. For top_p it is tested and, if it lies outside, replaced by the
   next that may lie inside.

A program of an entry that has nothing to do in a launch ends at once. Spans follow from the vocabulary's size alone,
and nothing is summed in an order that a race decides: an entry's token does not depend on its neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels import records
from penstock.kernels.adjustment_triton import adjust_kernel
from penstock.kernels.drawing_triton import ADJUSTED, choose_kernel, draw_kernel, read_logits
from penstock.kernels.random_triton import acceptance_word
from penstock.kernels.ranking_triton import rank_kernel
from penstock.kernels.records import Chosen, Entries, SlotHistory, SlotSampling, threshold

TOP_K = tl.constexpr(records.TOP_K)
PENALISED = tl.constexpr(records.PENALTIES)
THROWN = tl.constexpr(records.REJECTED)
ABSENT = tl.constexpr(records.NO_DRAFT)
DRAWN = -1  # the threshold of a server whose drafts are held against what was drawn


@dataclass(frozen=True)
class Cut:
    """How a vocabulary is cut: numbers of tokens, powers of 2. The same for every batch."""

    span: int = 8192  # of one program of the survey and the draw
    group: int = 64  # whose best logit is kept for top_k
    piece: int = 2048  # of one turn of a program that gathers candidates
    sweep: int = 8192  # of one turn of a program that goes through a whole entry
    tile: int = 512  # of one turn of the draw
    few: int = 2048  # candidates that the ranking holds at once


CUT = Cut()


def choose_tokens(
    logits: Tensor, entries: Entries, sampling: SlotSampling, history: SlotHistory, cut: Cut = CUT
) -> Chosen:
    """`kernels.sampling.sample_entries` by the kernels, without waiting for the device."""
    count, vocabulary = logits.shape
    assert logits.stride(1) == 1
    assert history.tokens.is_contiguous()
    assert history.counts.is_contiguous()
    spans, lanes = triton.cdiv(vocabulary, cut.span), triton.next_power_of_2(triton.cdiv(vocabulary, cut.span))
    group_lanes = triton.next_power_of_2(triton.cdiv(vocabulary, cut.group))

    def memory(*shape: int, kind: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(count, *shape, dtype=kind, device=logits.device)

    changed = memory(vocabulary, kind=torch.float32)  # the logits of entries whose request changes them
    peaks = memory(spans, kind=torch.float32)  # NaN where a logit is not finite
    best = memory(spans)  # the token of each peak
    groups = memory(group_lanes, kind=torch.float32)  # best logits
    floors = memory()  # key of the last token to draw from, negative where the ranking drew
    tokens = memory()
    scores, drawn, keys = memory(spans, kind=torch.float32), memory(spans), memory(spans)  # the best with noise
    masses = memory(spans, kind=torch.float64)  # of the tokens that are drawn from
    listed = memory(group_lanes)  # groups that hold candidates
    candidates = memory(2, cut.few)  # keys and tokens
    adjust_kernel[(count, spans)](
        logits, changed, entries.slots, entries.depth, entries.drafts, entries.masks, sampling.uses,
        sampling.repetition, sampling.presence, sampling.frequency, sampling.prompt_tokens, sampling.edit_counts,
        sampling.edit_tokens, sampling.edit_until, sampling.edit_early, sampling.edit_late, sampling.word_counts,
        sampling.words, sampling.masks, history.tokens, history.known, history.counts,
        logits.stride(0), vocabulary, sampling.own_masks, sampling.masks.shape[1], sampling.edit_tokens.shape[1],
        sampling.words.shape[1], history.tokens.shape[1],
        LONGEST=sampling.words.shape[2], SPAN=cut.span, num_warps=16,
    )  # fmt: skip
    survey_kernel[(count, spans)](
        logits, changed, peaks, best, groups, entries.slots, entries.masks, sampling.uses,
        logits.stride(0), vocabulary, group_lanes, SPAN=cut.span, GROUP=cut.group, num_warps=8,
    )  # fmt: skip
    common = (
        entries.slots, entries.depth, entries.masks, sampling.uses, history.known, sampling.temperature,
        sampling.top_p, sampling.seed,
    )  # fmt: skip
    rank_kernel[(count,)](
        logits, changed, peaks, groups, floors, tokens, listed, candidates, *common, sampling.min_p, sampling.top_k,
        logits.stride(0), vocabulary, spans,
        GROUP=cut.group, GROUPS=group_lanes, PIECE=cut.piece, SWEEP=cut.sweep, FEW=cut.few, SPANS=lanes, num_warps=8,
    )  # fmt: skip
    draw_kernel[(count, spans)](
        logits, changed, peaks, floors, scores, drawn, keys, masses, *common, logits.stride(0), vocabulary, spans,
        SPAN=cut.span, TILE=cut.tile, SPANS=lanes, num_warps=4,
    )  # fmt: skip
    choose_kernel[(count,)](
        logits, changed, peaks, best, floors, scores, drawn, keys, masses, tokens, *common,
        logits.stride(0), vocabulary, spans, SPAN=cut.span, TILE=cut.tile, SWEEP=cut.sweep, SPANS=lanes, num_warps=16,
    )  # fmt: skip
    return Chosen(tokens, changed)


@triton.jit
def survey_kernel(
    logits, changed, peaks, best, groups, entry_slots, entry_masks, uses, stride, vocabulary, most_groups,
    SPAN: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One span of one entry: its best token. A forbidden one is -inf, but only where logits were changed."""
    entry = tl.program_id(0).to(tl.int64)
    span = tl.program_id(1)
    used = tl.load(uses + tl.load(entry_slots + entry))
    adjusted = ((used & ADJUSTED) != 0) | (tl.load(entry_masks + entry) >= 0)
    start = span * SPAN
    places = start + tl.arange(0, SPAN)
    there = places < vocabulary
    x = read_logits(logits + entry * stride, changed + entry * vocabulary, adjusted, places, there)
    finite = (tl.abs(x) < float("inf")) | ((x == float("-inf")) & (adjusted | ~there))
    odd = tl.max((~finite).to(tl.int32), 0)
    x = tl.where(finite, x, float("-inf"))
    peak, at = tl.max(x, 0, return_indices=True)
    place = entry * tl.num_programs(1) + span
    tl.store(peaks + place, tl.where(odd > 0, float("nan"), peak))
    tl.store(best + place, start + at)
    if (used & TOP_K) != 0:
        group = span * (SPAN // GROUP) + tl.arange(0, SPAN // GROUP)
        tops = tl.max(tl.reshape(x, (SPAN // GROUP, GROUP)), 1)
        tl.store(groups + entry * most_groups + group, tops, mask=group < most_groups)


def accept_rows(
    tokens: Tensor, entries: Entries, sampling: SlotSampling, history: SlotHistory, rate: float | None = None
) -> None:
    """`kernels.sampling.accept` by the kernel, without waiting for the device."""
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
