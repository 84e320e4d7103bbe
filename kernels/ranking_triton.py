"""top_k without a sort, in Triton: from the best logits of small groups to the k best tokens.

The k-th best of the groups' best logits is no better than the k-th best logit: k groups hold one each that is as good.
So every token that top_k keeps lies in a group whose best is no worse, and as a rule there are hardly more than k such
tokens. They are gathered, the k-th best is found bit by bit from its highest, min_p and top_p are applied to what is
left, and the token is drawn. Where too many are left (large k, or many equals) the k-th best is found by going through
the whole entry, bit by bit as well, and the draw is left to kernels/drawing_triton.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.kernels import records
from penstock.kernels.drawing_triton import ABSENT, ADJUSTED, DRAWS, best_of, distance, read_logits, read_peak
from penstock.kernels.random_triton import token_noise

TOP_K = tl.constexpr(records.TOP_K)
FINITE = tl.constexpr(0x7F7FFFFF)  # the largest key of a token that is not forbidden
DRAWN = tl.constexpr(-1)  # in place of a floor


@triton.jit
def key_of_count(keys, count):
    """The smallest key that at least `count` of the keys do not exceed."""
    found = count * 0
    for turn in range(31):
        bit = (1 << 30) >> turn
        few = tl.sum((keys <= (found | (bit - 1))).to(tl.int32), 0) < count
        found = tl.where(few, found | bit, found)
    return found


@triton.jit
def key_of_mass(keys, weights, mass):
    """The smallest key up to which the weights reach `mass`. A sum of more is never smaller, for all its rounding."""
    found = tl.min(keys, 0) * 0
    for turn in range(31):
        bit = (1 << 30) >> turn
        few = tl.sum(tl.where(keys <= (found | (bit - 1)), weights, 0.0), 0) < mass
        found = tl.where(few, found | bit, found)
    return found


@triton.jit
def key_of_entry(logits, line, changed, peak, temperature, count, vocabulary, SWEEP: tl.constexpr):
    """A key that exactly `count` tokens of an entry in memory do not exceed or, among equals, `key_of_count`."""
    lanes = tl.arange(0, SWEEP)
    found = count * 0
    bit = found + (1 << 30)
    while bit > 0:
        limit = found | (bit - 1)
        seen = tl.zeros((SWEEP,), tl.int32)
        for first in range(0, vocabulary, SWEEP):
            places = first + lanes
            there = places < vocabulary
            below = distance(read_logits(logits, line, changed, places, there), peak, temperature)
            seen += (there & (below.to(tl.int32, bitcast=True) <= limit)).to(tl.int32)
        total = tl.sum(seen, 0)
        found = tl.where(total < count, found | bit, tl.where(total == count, limit, found))
        bit = tl.where(total == count, 0, bit >> 1)
    return found


@triton.jit
def gather_candidates(
    logits, line, changed, peak, temperature, limit, groups, listed, candidates, vocabulary,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, PIECE: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """Keys and tokens of all tokens whose key is at most `limit` into memory, in order; how many they are.

    More than FEW end the search.
    """
    group = tl.arange(0, GROUPS)
    chosen = groups <= limit
    tl.store(listed + tl.cumsum(chosen.to(tl.int32), 0) - 1, group, mask=chosen)
    tokens = tl.sum(chosen.to(tl.int32), 0) * GROUP
    tl.debug_barrier()
    lanes = tl.arange(0, PIECE)
    count = tokens * 0
    first = tokens * 0
    while (first < tokens) & (count <= FEW):
        at = first + lanes
        token = tl.load(listed + at // GROUP, mask=at < tokens, other=0) * GROUP + at % GROUP
        there = (at < tokens) & (token < vocabulary)
        below = distance(read_logits(logits, line, changed, token, there), peak, temperature)
        key = below.to(tl.int32, bitcast=True)
        kept = there & (key <= limit)
        place = count + tl.cumsum(kept.to(tl.int32), 0) - 1
        tl.store(candidates + place, key, mask=kept & (place < FEW))
        tl.store(candidates + FEW + place, token, mask=kept & (place < FEW))
        count += tl.sum(kept.to(tl.int32), 0)
        first += PIECE
    tl.debug_barrier()
    return count


@triton.jit
def draw_candidates(candidates, count, top_k, top_p, seed, position, FEW: tl.constexpr):
    """The winner among the best `top_k` of the candidates and, of those, what top_p keeps."""
    lanes = tl.arange(0, FEW)
    key = tl.load(candidates + lanes, mask=lanes < count, other=ABSENT)
    token = tl.load(candidates + FEW + lanes, mask=lanes < count, other=ABSENT)
    if count > top_k:
        key = tl.where(key <= key_of_count(key, top_k), key, ABSENT)
    kept = key < ABSENT
    below = tl.where(kept, key, 0).to(tl.float32, bitcast=True)
    if top_p < 1.0:
        weights = tl.where(kept, tl.exp(-below), 0.0).to(tl.float64)
        kept = key <= key_of_mass(key, weights, tl.sum(weights, 0) * top_p.to(tl.float64))
    noise = token_noise(seed, position, tl.where(kept, token, 0))
    _score, winner, _key = best_of(tl.where(kept, noise - below, float("-inf")), token, key)
    return winner


@triton.jit
def rank_kernel(
    logits, changed, peaks, group_peaks, floors, tokens, listed, candidates,
    entry_slots, entry_depth, entry_masks, uses, known, temperatures, top_p, seeds, min_p, top_k,
    stride, vocabulary, spans,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, PIECE: tl.constexpr, SWEEP: tl.constexpr, FEW: tl.constexpr,
    SPANS: tl.constexpr,
):  # fmt: skip
    """One entry: its token where top_k leaves few, otherwise the largest key to draw from."""
    entry = tl.program_id(0).to(tl.int64)
    slot = tl.load(entry_slots + entry)
    used = tl.load(uses + slot)
    if (used & DRAWS) == 0:
        return
    peak, alive = read_peak(peaks + entry * spans, spans, SPANS)
    if not alive:
        tl.store(floors + entry, DRAWN)  # there is nothing to draw
        return
    least = tl.load(min_p + slot)
    farthest = tl.where(least > 0, 0.0 - tl.log(tl.maximum(least, 1e-37)), float("inf"))
    limit = tl.minimum(farthest.to(tl.int32, bitcast=True), FINITE)
    if (used & TOP_K) != 0:
        own, line = logits + entry * stride, changed + entry * vocabulary
        adjusted = ((used & ADJUSTED) != 0) | (tl.load(entry_masks + entry) >= 0)
        temperature = tl.load(temperatures + slot)
        count = tl.load(top_k + slot)
        group = tl.arange(0, GROUPS)
        held = group * GROUP < vocabulary
        best = tl.load(group_peaks + entry * GROUPS + group, mask=held, other=float("-inf"))
        groups = tl.where(held, distance(best, peak, temperature).to(tl.int32, bitcast=True), ABSENT)
        limit = tl.minimum(limit, key_of_count(groups, count))
        few = gather_candidates(
            own, line, adjusted, peak, temperature, limit, groups, listed + entry * GROUPS,
            candidates + entry * (2 * FEW), vocabulary, GROUP, GROUPS, PIECE, FEW,
        )  # fmt: skip
        if few <= FEW:
            position = tl.load(known + slot) + tl.load(entry_depth + entry)
            winner = draw_candidates(
                candidates + entry * (2 * FEW), few, count, tl.load(top_p + slot), tl.load(seeds + slot), position, FEW
            )  # fmt: skip
            tl.store(tokens + entry, winner)
            limit = limit * 0 + DRAWN
        else:
            limit = tl.minimum(
                limit, key_of_entry(own, line, adjusted, peak, temperature, count, vocabulary, SWEEP)
            )  # fmt: skip
    tl.store(floors + entry, limit)
