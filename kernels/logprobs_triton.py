"""Log-probabilities in Triton: two launches, in which tokens that nobody asked about end at once.

The first goes over spans of each token's vocabulary: sums, the rank's share, and the best logit of every small group.
The w best tokens lie in the w best groups (among equals in the first ones), so the second, one program a token, picks
those and looks at nothing else.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels import records
from penstock.kernels.drawing_triton import ADJUSTED, DRAWS, read_logits
from penstock.kernels.records import MOST, Processing, TokenLogprobs

SPAN = 8192  # tokens of one program
GROUP = 64
GROUPS_HELD = 32  # a power of 2, at least MOST
COLUMNS = tl.constexpr(1 + MOST)
PROCESSED = tl.constexpr(records.PROCESSED)
FAR = tl.constexpr(0x7FFFFFFF)  # past every token's and every group's number


def score_tokens(
    logits: Tensor,
    tokens: Tensor,
    slots: Tensor,
    widths: Tensor,
    processing: Processing | None = None,
    span: int = SPAN,
    group: int = GROUP,
) -> TokenLogprobs:
    """`kernels.logprobs.token_logprobs` by the kernels, without waiting for the device. span, group: powers of 2."""
    count, vocabulary = logits.shape
    assert logits.stride(1) == 1
    spans, groups = triton.cdiv(vocabulary, span), triton.next_power_of_2(triton.cdiv(vocabulary, group))

    def memory(*shape: int, kind: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=kind, device=logits.device)

    found = TokenLogprobs(
        memory(count, 1 + MOST, kind=torch.int32), memory(count, 1 + MOST), memory(count, kind=torch.int32)
    )
    peaks, masses, better = memory(count, spans), memory(count, spans), memory(count, spans, kind=torch.int32)
    tops = memory(count, groups)
    if processing is None:  # nobody's slot has PROCESSED, and nothing else of it is read
        processing = Processing(torch.zeros_like(widths), found.values, found.ranks, None)
    adjusted = found.values if processing.adjusted is None else processing.adjusted
    given = (logits, adjusted, tokens, slots, widths, processing.uses, processing.temperature, processing.masks)
    sum_kernel[(count, spans)](
        *given, peaks, masses, better, tops, logits.stride(0), vocabulary, groups,
        SPAN=span, GROUP=group, num_warps=8,
    )  # fmt: skip
    score_kernel[(count,)](
        *given, peaks, masses, better, tops, found.ids, found.values, found.ranks,
        logits.stride(0), vocabulary, spans,
        GROUP=group, GROUPS=groups, HELD=GROUPS_HELD, SPANS=triton.next_power_of_2(spans), num_warps=8,
    )  # fmt: skip
    return found


@triton.jit
def read_processing(uses, temperatures, masks, slot, at):
    """Whether a token is scored by logits that were changed, and what they are divided by."""
    used = tl.load(uses + slot)
    processed = (used & PROCESSED) != 0
    adjusted = processed & (((used & ADJUSTED) != 0) | (tl.load(masks + at, mask=processed, other=-1) >= 0))
    temperature = tl.load(temperatures + slot, mask=processed & ((used & DRAWS) != 0), other=1.0)
    return adjusted, temperature


@triton.jit
def read_scored(logits, line, adjusted, temperature, places, there):
    """What a token's logits are scored by."""
    x = read_logits(logits, line, adjusted, places, there)
    if temperature != 1.0:
        x = tl.div_rn(x, temperature)
    return x


@triton.jit
def sum_kernel(
    logits, changed, tokens, slots, widths, uses, temperatures, masks, peaks, masses, better, tops,
    stride, vocabulary, groups,
    SPAN: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One span of one token's logits."""
    at = tl.program_id(0).to(tl.int64)
    token = tl.load(tokens + at)
    if token < 0:
        return
    slot = tl.load(slots + at)
    if tl.load(widths + slot) < 0:
        return
    span = tl.program_id(1)
    adjusted, temperature = read_processing(uses, temperatures, masks, slot, at)
    raw, line = logits + at * stride, changed + at * vocabulary
    own = read_scored(raw, line, adjusted, temperature, token, token >= 0)
    places = span * SPAN + tl.arange(0, SPAN)
    x = read_scored(raw, line, adjusted, temperature, places, places < vocabulary)
    peak = tl.max(x, 0)
    place = at * tl.num_programs(1) + span
    tl.store(peaks + place, peak)
    tl.store(masses + place, tl.sum(tl.exp(x - tl.where(peak == float("-inf"), 0.0, peak)), 0))
    tl.store(better + place, tl.sum((x > own).to(tl.int32), 0))
    group = span * (SPAN // GROUP) + tl.arange(0, SPAN // GROUP)
    tl.store(tops + at * groups + group, tl.max(tl.reshape(x, (SPAN // GROUP, GROUP)), 1), mask=group < groups)


@triton.jit
def score_kernel(
    logits, changed, tokens, slots, widths, uses, temperatures, masks, peaks, masses, better, tops, ids, values, ranks,
    stride, vocabulary, spans,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, HELD: tl.constexpr, SPANS: tl.constexpr,
):  # fmt: skip
    """One token: its value and rank, and the best ones."""
    at = tl.program_id(0).to(tl.int64)
    token = tl.load(tokens + at)
    if token < 0:
        return
    slot = tl.load(slots + at)
    width = tl.load(widths + slot)
    if width < 0:
        return
    adjusted, temperature = read_processing(uses, temperatures, masks, slot, at)
    raw, line = logits + at * stride, changed + at * vocabulary
    span = tl.arange(0, SPANS)
    there = span < spans
    highs = tl.load(peaks + at * spans + span, mask=there, other=float("-inf"))
    sums = tl.load(masses + at * spans + span, mask=there, other=0.0)
    peak = tl.max(highs, 0)
    total = peak + tl.log(tl.sum(sums * tl.exp(highs - peak), 0))
    tl.store(ids + at * COLUMNS, token)
    tl.store(values + at * COLUMNS, read_scored(raw, line, adjusted, temperature, token, token >= 0) - total)
    tl.store(ranks + at, 1 + tl.sum(tl.load(better + at * spans + span, mask=there, other=0), 0))
    if width > 0:
        group = tl.arange(0, GROUPS)
        best = tl.load(tops + at * GROUPS + group, mask=group * GROUP < vocabulary, other=float("-inf"))
        held = tl.arange(0, HELD)
        chosen = tl.full((HELD,), FAR // GROUP - 1, tl.int32)
        for turn in range(width):
            high = tl.max(best, 0)
            first = tl.min(tl.where(best == high, group, FAR), 0)
            chosen = tl.where(held == turn, first, chosen)
            best = tl.where(group == first, float("-inf"), best)
        places = chosen[:, None] * GROUP + tl.arange(0, GROUP)[None, :]  # [groups, tokens of each]
        x = read_scored(raw, line, adjusted, temperature, places, places < vocabulary)
        for turn in range(width):
            high = tl.max(x)
            first = tl.min(tl.where(x == high, places, FAR))
            tl.store(ids + at * COLUMNS + 1 + turn, first)
            tl.store(values + at * COLUMNS + 1 + turn, high - total)
            x = tl.where(places == first, float("-inf"), x)
