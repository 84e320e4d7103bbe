"""Steps 1 and 2 of kernels/sampling.py in Triton, on one span of an entry's vocabulary."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels import sampling_tables

PENALTIES = tl.constexpr(sampling_tables.PENALTIES)
EDITS = tl.constexpr(sampling_tables.EDITS)
WORDS = tl.constexpr(sampling_tables.WORDS)
ALLOWED = tl.constexpr(sampling_tables.ALLOWED)
WORD_END = tl.constexpr(sampling_tables.WORD_END)
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
