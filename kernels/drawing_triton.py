"""Steps 3 to 5 of kernels/sampling.py in Triton, for entries whose top_k, if any, leaves more than a few tokens.

A token's key says how far it lies below the best, divided by the temperature: the bits of that float32, which is never
negative, in the same order; the best token's is 0. min_p and top_k are a largest key. top_p is not looked for: the
winner of the draw is a token that top_p keeps if the mass of the better ones is below p of all, which one pass tells.
If not, only better tokens than this one come into question, and the best score among those is next. The kept token with
the best score comes out in the end, as if the others had been left out at first; p of the draws are right at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.kernels import random, records
from penstock.kernels.random_triton import gumbel_noise, noise_bound, tile_words

DRAWS = tl.constexpr(records.DRAWS)
TOP_P = tl.constexpr(records.TOP_P)
ADJUSTED = tl.constexpr(records.ADJUSTED)
ABSENT = tl.constexpr(0x7FFFFFFF)  # a key past every token's, and past every token's id
LEAST = tl.constexpr(random.GUMBEL_MIN)  # noise, and so the score of the best token
MOST = tl.constexpr(random.GUMBEL_MAX)


@triton.jit
def read_logits(logits, line, changed, places, there):
    """An entry's logits after steps 1 and 2. changed: whether those stand in `line` and not in `logits`."""
    if changed:
        x = tl.load(line + places, mask=there, other=float("-inf"))
    else:
        x = tl.load(logits + places, mask=there, other=float("-inf")).to(tl.float32)
    return x


@triton.jit
def read_peak(peaks, spans, SPANS: tl.constexpr):
    """The best logit of an entry, and whether there is any and all were finite."""
    lanes = tl.arange(0, SPANS)
    found = tl.load(peaks + lanes, mask=lanes < spans, other=float("-inf"))
    peak = tl.max(tl.where(found == found, found, float("inf")), 0)
    return peak, tl.abs(peak) < float("inf")


@triton.jit
def distance(x, peak, temperature):
    """How far below the best, in units of the temperature."""
    return tl.div_rn(peak - x, temperature)


@triton.jit
def best_of(scores, tokens, keys):
    """The best score's token, the lowest among equals, and its key."""
    score = tl.max(scores, 0)
    token = tl.min(tl.where(scores == score, tokens, ABSENT), 0)
    return score, token, tl.min(tl.where(tokens == token, keys, ABSENT), 0)


@triton.jit
def draw_span(
    logits, line, changed, peak, temperature, seed, position, limit, start, vocabulary,
    SPAN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Score, token and key of the best with noise among the tokens of a span whose key is at most `limit`; their mass.

    The score is -inf and the key ABSENT where there is none, or none that noise could make the best of the entry. Noise
    is computed only for tiles that hold a token which could pass the leader.
    """
    lanes = tl.arange(0, TILE)
    leader = peak * 0.0 + LEAST
    score = tl.full((TILE,), float("-inf"), tl.float32)
    token = tl.full((TILE,), ABSENT, tl.int32)
    key = tl.full((TILE,), ABSENT, tl.int32)
    mass = tl.zeros((TILE,), tl.float64)
    for first in range(start, start + SPAN, TILE):
        places = first + lanes
        there = places < vocabulary
        below = distance(read_logits(logits, line, changed, places, there), peak, temperature)
        keys = below.to(tl.int32, bitcast=True)
        kept = keys <= limit
        mass += tl.where(kept, tl.exp(-below), 0.0).to(tl.float64)
        if MOST - tl.min(tl.where(kept, below, float("inf")), 0) > leader:
            words = tile_words(seed, position, first, TILE)
            if tl.max(tl.where(kept, noise_bound(words) - below, float("-inf")), 0) > leader:
                found = tl.where(kept, gumbel_noise(words) - below, float("-inf"))
                better = found > score
                score = tl.where(better, found, score)
                token = tl.where(better, places, token)
                key = tl.where(better, keys, key)
                leader = tl.maximum(leader, tl.max(found, 0))
    best, at, place = best_of(score, token, key)
    return best, at, place, tl.sum(mass, 0)


@triton.jit
def draw_kernel(
    logits, changed, peaks, floors, scores, drawn, keys, masses,
    entry_slots, entry_depth, entry_masks, uses, known, temperatures, top_p, seeds, stride, vocabulary, spans,
    SPAN: tl.constexpr, TILE: tl.constexpr, SPANS: tl.constexpr,
):  # fmt: skip
    """One span of one entry."""
    entry = tl.program_id(0).to(tl.int64)
    span = tl.program_id(1)
    slot = tl.load(entry_slots + entry)
    used = tl.load(uses + slot)
    if (used & DRAWS) == 0:
        return
    limit = tl.load(floors + entry)
    if limit < 0:
        return
    peak, _alive = read_peak(peaks + entry * spans, spans, SPANS)
    adjusted = ((used & ADJUSTED) != 0) | (tl.load(entry_masks + entry) >= 0)
    position = tl.load(known + slot) + tl.load(entry_depth + entry)
    score, token, key, mass = draw_span(
        logits + entry * stride, changed + entry * vocabulary, adjusted, peak, tl.load(temperatures + slot),
        tl.load(seeds + slot), position, limit, span * SPAN, vocabulary, SPAN, TILE,
    )  # fmt: skip
    place = entry * spans + span
    tl.store(scores + place, score)
    tl.store(drawn + place, token)
    tl.store(keys + place, key)
    tl.store(masses + place, mass)


@triton.jit
def mass_above(logits, line, changed, peak, temperature, key, vocabulary, SWEEP: tl.constexpr):
    """The mass of an entry's tokens whose key is below `key`."""
    lanes = tl.arange(0, SWEEP)
    mass = tl.zeros((SWEEP,), tl.float64)
    for first in range(0, vocabulary, SWEEP):
        places = first + lanes
        below = distance(read_logits(logits, line, changed, places, places < vocabulary), peak, temperature)
        mass += tl.where(below.to(tl.int32, bitcast=True) < key, tl.exp(-below), 0.0).to(tl.float64)
    return tl.sum(mass, 0)


@triton.jit
def choose_kernel(
    logits, changed, peaks, best, floors, scores, drawn, keys, masses, tokens,
    entry_slots, entry_depth, entry_masks, uses, known, temperatures, top_p, seeds, stride, vocabulary, spans,
    SPAN: tl.constexpr, TILE: tl.constexpr, SWEEP: tl.constexpr, SPANS: tl.constexpr,
):  # fmt: skip
    """The token of one entry from the best of its spans."""
    entry = tl.program_id(0).to(tl.int64)
    slot = tl.load(entry_slots + entry)
    used = tl.load(uses + slot)
    peak, alive = read_peak(peaks + entry * spans, spans, SPANS)
    lanes = tl.arange(0, SPANS)
    there = lanes < spans
    if not alive:
        tl.store(tokens + entry, -1)
        return
    if (used & DRAWS) == 0:
        found = tl.load(peaks + entry * spans + lanes, mask=there, other=float("-inf"))
        places = tl.load(best + entry * spans + lanes, mask=there, other=ABSENT)
        tl.store(tokens + entry, tl.min(tl.where(found == peak, places, ABSENT), 0))
        return
    limit = tl.load(floors + entry)
    if limit < 0:
        return
    score = tl.load(scores + entry * spans + lanes, mask=there, other=float("-inf"))
    token = tl.load(drawn + entry * spans + lanes, mask=there, other=ABSENT)
    key = tl.load(keys + entry * spans + lanes, mask=there, other=ABSENT)
    _lead, chosen, reach = best_of(score, token, key)
    if (used & TOP_P) != 0:
        own, line = logits + entry * stride, changed + entry * vocabulary
        adjusted = ((used & ADJUSTED) != 0) | (tl.load(entry_masks + entry) >= 0)
        temperature = tl.load(temperatures + slot)
        seed = tl.load(seeds + slot)
        position = tl.load(known + slot) + tl.load(entry_depth + entry)
        mass = tl.sum(tl.load(masses + entry * spans + lanes, mask=there, other=0.0), 0)
        need = mass * tl.load(top_p + slot).to(tl.float64)
        while reach > 0:  # the best token is always kept
            if mass_above(own, line, adjusted, peak, temperature, reach, vocabulary, SWEEP) < need:
                reach = reach * 0
            else:
                for span in range(spans):
                    if tl.min(tl.where(lanes == span, key, ABSENT), 0) >= reach:
                        new_score, new_token, new_key, _mass = draw_span(
                            own, line, adjusted, peak, temperature, seed, position, reach - 1, span * SPAN, vocabulary,
                            SPAN, TILE,
                        )  # fmt: skip
                        score = tl.where(lanes == span, new_score, score)
                        token = tl.where(lanes == span, new_token, token)
                        key = tl.where(lanes == span, new_key, key)
                _lead, chosen, reach = best_of(score, token, key)
    tl.store(tokens + entry, chosen)
