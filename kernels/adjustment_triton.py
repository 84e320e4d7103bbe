"""Steps 1 and 2 of kernels/sampling.py in Triton: one launch, in which entries that change nothing end at once."""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.kernels import records

PENALTIES = tl.constexpr(records.PENALTIES)
EDITS = tl.constexpr(records.EDITS)
WORDS = tl.constexpr(records.WORDS)
ALLOWED = tl.constexpr(records.ALLOWED)
ADJUSTED = tl.constexpr(records.ADJUSTED)
WORD_END = tl.constexpr(records.WORD_END)
NOT_OUTPUT = tl.constexpr(-2)  # no token's id, and not WORD_END
EDIT_LANES = tl.constexpr(128)
WORD_LANES = tl.constexpr(32)


@triton.jit
def forbid(x, bits, places, there):
    """-inf where the token's bit is 0."""
    words = tl.load(bits + (places >> 5), mask=there, other=0)
    return tl.where(((words >> (places & 31)) & 1) != 0, x, float("-inf"))


@triton.jit
def edit(line, start, end, position, tokens, until, early, late, count):
    """Add a slot's edits to the tokens start .. end - 1 of a line of logits in memory."""
    lanes = tl.arange(0, EDIT_LANES)
    for first in range(0, count, EDIT_LANES):
        at = first + lanes
        token = tl.load(tokens + at, mask=at < count, other=-1)
        mine = (token >= start) & (token < end)
        soon = position < tl.load(until + at, mask=mine, other=0)
        value = tl.where(soon, tl.load(early + at, mask=mine, other=0.0), tl.load(late + at, mask=mine, other=0.0))
        tl.store(line + token, tl.load(line + token, mask=mine, other=0.0) + value, mask=mine)


@triton.jit
def forbid_words(line, start, end, position, depth, prompt, output, drafts, words, count, LONGEST: tl.constexpr):
    """Forbid what would complete a bad word, among the tokens start .. end - 1 of a line of logits in memory.

    output: the slot's tokens. drafts: where the draft behind the entry stands; those before it come before.
    """
    lanes = tl.arange(0, WORD_LANES)
    for first in range(0, count, WORD_LANES):
        word = words + (first + lanes) * LONGEST
        token = tl.load(word, mask=first + lanes < count, other=-1)
        matches = (token >= start) & (token < end)
        for back in range(1, LONGEST):
            place = position - back
            drafted = back <= depth
            seen = tl.load(output + place, mask=(place >= prompt) & (back > depth), other=NOT_OUTPUT)
            seen = tl.where(drafted, tl.load(drafts - back, mask=drafted, other=NOT_OUTPUT), seen)
            part = tl.load(word + back, mask=matches, other=WORD_END)
            matches = matches & ((part == WORD_END) | (part == seen))
        tl.store(line + token, float("-inf"), mask=matches)


@triton.jit
def penalise(x, places, there, depth, drafts, counts, repetition, presence, frequency):
    """Repetition, then frequency and presence. counts: the slot's; drafts as above, which count as output."""
    count = tl.load(counts + places, mask=there, other=0)
    for back in range(1, depth + 1):
        count += tl.where(places == tl.load(drafts - back), 2, 0)
    repeated = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
    x = tl.where(count > 0, repeated, x)
    times = count >> 1
    return x - frequency * times.to(tl.float32) - tl.where(times > 0, presence, 0.0)


@triton.jit
def adjust_kernel(
    logits, changed, entry_slots, entry_depth, drafts, entry_masks, uses,
    repetition, presence, frequency, prompts, edit_counts, edit_tokens, edit_until, edit_early, edit_late,
    word_counts, words, masks, history, known, counts,
    stride, vocabulary, own_masks, mask_words, most_edits, most_words, row_length,
    LONGEST: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """One span of one entry. A logit that is not finite becomes NaN, forbidden or not: the entry is to fail."""
    entry = tl.program_id(0).to(tl.int64)
    slot = tl.load(entry_slots + entry).to(tl.int64)
    used = tl.load(uses + slot)
    mask = tl.load(entry_masks + entry).to(tl.int64)
    if ((used & ADJUSTED) == 0) & (mask < 0):
        return
    start = tl.program_id(1) * SPAN
    places = start + tl.arange(0, SPAN)
    there = places < vocabulary
    x = tl.load(logits + entry * stride + places, mask=there, other=0.0).to(tl.float32)
    finite = tl.abs(x) < float("inf")
    x = tl.where(finite, x, 0.0)
    depth = tl.load(entry_depth + entry)
    behind = drafts + entry
    line = changed + entry * vocabulary
    if mask >= 0:
        x = forbid(x, masks + mask * mask_words, places, there)
    if (used & ALLOWED) != 0:
        x = forbid(x, masks + (own_masks + slot) * mask_words, places, there)
    if (used & (EDITS | WORDS)) != 0:
        position = tl.load(known + slot) + depth
        tl.store(line + places, x, mask=there)
        tl.debug_barrier()
        if (used & WORDS) != 0:
            forbid_words(
                line, start, start + SPAN, position, depth, tl.load(prompts + slot), history + slot * row_length,
                behind, words + slot * most_words * LONGEST, tl.load(word_counts + slot), LONGEST,
            )  # fmt: skip
            tl.debug_barrier()
        if (used & EDITS) != 0:
            at = slot * most_edits
            edit(
                line, start, start + SPAN, position, edit_tokens + at, edit_until + at, edit_early + at,
                edit_late + at, tl.load(edit_counts + slot),
            )  # fmt: skip
            tl.debug_barrier()
        x = tl.load(line + places, mask=there, other=0.0)
        tl.debug_barrier()
    if (used & PENALTIES) != 0:
        x = penalise(
            x, places, there, depth, behind, counts + slot * vocabulary,
            tl.load(repetition + slot), tl.load(presence + slot), tl.load(frequency + slot),
        )  # fmt: skip
    tl.store(line + places, tl.where(finite, x, float("nan")), mask=there)
