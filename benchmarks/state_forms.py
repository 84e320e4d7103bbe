"""Other forms of `recurrence_steps_triton.token_kernel`, for `benchmarks.state_kernels` to time."""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.kernels.launch import begin_pdl
from penstock.kernels.states import PIECE

LENGTH = tl.constexpr(PIECE)
LINES = tl.constexpr(16)  # of a matrix unit's product, of which a single token has two


@triton.jit
def tile_kernel(
    q, k, v, decay, weight, keys, values, gates, updates, query_start, slots, starts, stepping, bases,
    states, skip, out, scale, state_slot,
    q_stride, q_head, k_stride, k_head, v_stride, v_head, key_slot, value_slot, gate_slot, length, share,
    COLUMNS: tl.constexpr, STAGES: tl.constexpr, EVICT: tl.constexpr, SKIP: tl.constexpr, HEADS: tl.constexpr,
    GROUP: tl.constexpr, KEY_DIM: tl.constexpr, KEY_LANES: tl.constexpr, DIM: tl.constexpr, DELTA: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A share of the tiles of a row that is a single token, results and entries. A tile is some columns of one head.
    All that a tile takes is asked for before any of it is used, with STAGES > 1 while another is computed."""
    begin_pdl(PDL)
    row = tl.program_id(1)
    token = tl.load(query_start + row).to(tl.int64)
    count = (tl.load(query_start + row + 1) - token).to(tl.int32)
    start = tl.load(starts + row)
    slot = tl.load(slots + row).to(tl.int64)
    base = tl.maximum(start // LENGTH * LENGTH, tl.load(bases + row))
    if tl.load(stepping + row) > 0 and count == 1:
        tiles: tl.constexpr = (DIM + COLUMNS - 1) // COLUMNS
        key_entry: tl.constexpr = HEADS // GROUP * KEY_DIM
        lane = tl.arange(0, KEY_LANES)
        wanted = lane < KEY_DIM
        stays = lane < tl.where(base > 0, KEY_DIM, 0)
        line = tl.arange(0, LINES)
        back = tl.arange(0, LENGTH)  # the latest entry first: what has faded least is most exact
        known = back < start - base
        own_place = start % length
        place = own_place - 1 - back
        place = tl.where(place < 0, place + length, place)
        place = tl.where(known, place, 0)
        first = tl.program_id(0) * share
        for tile in tl.range(first, tl.minimum(first + share, HEADS * tiles), num_stages=STAGES):
            head = tile // tiles
            key_head = head // GROUP
            column = tile % tiles * COLUMNS + tl.arange(0, COLUMNS)
            inside = column < DIM
            state = tl.load(
                states + slot * state_slot + head * KEY_DIM * DIM + lane[:, None] * DIM + column[None, :],
                mask=stays[:, None] & inside[None, :], other=0.0, eviction_policy=EVICT,
            )  # fmt: skip
            ring = (updates if DELTA else values) + slot * value_slot + head * DIM
            update = tl.load(
                ring + (place * (HEADS * DIM))[:, None] + column[None, :],
                mask=known[:, None] & inside[None, :], other=0.0,
            )  # fmt: skip
            before = tl.load(
                keys + slot * key_slot + key_head * KEY_DIM + (place * key_entry)[None, :] + lane[:, None],
                mask=wanted[:, None] & known[None, :], other=0.0,
            )  # fmt: skip
            gate = gates + slot * gate_slot + head
            fades = tl.load(gate + place * (2 * HEADS), mask=known, other=0.0)
            own_query, own_key = q + token * q_stride + key_head * q_head, k + token * k_stride + key_head * k_head
            there = wanted[None, :]
            asked = tl.load(own_query + lane[None, :], mask=there & (line == 0)[:, None], other=0.0)
            if DELTA:
                of_key = there & (line == 1)[:, None]
                asked = tl.where(of_key, tl.load(own_key + lane[None, :], mask=of_key, other=0.0), asked)
            query = tl.load(own_query + lane, mask=wanted, other=0.0).to(tl.float32)
            given_key = tl.load(own_key + lane, mask=wanted, other=0.0)
            given = tl.load(v + token * v_stride + head * v_head + column, mask=inside, other=0.0)
            own = tl.load(decay + token * HEADS + head)
            own_share = tl.load(weight + token * HEADS + head)
            key, value = given_key.to(tl.float32), given.to(tl.float32)
            left = tl.exp(own + tl.cumsum(fades, 0) - fades)  # of each entry
            whole = tl.exp(own + tl.sum(fades, 0))  # of the state
            scores = tl.dot(asked, before, input_precision="ieee")  # [LINES, LENGTH]
            score = tl.sum(tl.where((line == 0)[:, None], scores, 0.0), 0) * left
            if DELTA:
                score_key = tl.sum(tl.where((line == 1)[:, None], scores, 0.0), 0) * left
                wide = update.to(tl.float32)
                found, given_already = sum_both(state, query, key)
                found_late, given_late = sum_both(wide, score, score_key)
                new = own_share * (value - whole * given_already - given_late)
            else:
                score *= tl.load(gate + place * (2 * HEADS) + HEADS, mask=known, other=0.0)
                found = tl.sum(state * query[:, None], 0)
                found_late = tl.sum(update.to(tl.float32) * score[:, None], 0)
                new = own_share * value
            found = (whole * found + found_late + tl.sum(query * key, 0) * new) * scale
            if SKIP:
                found += value * tl.load(skip + head)
            own_line = slot * value_slot + (own_place * HEADS + head) * DIM + column
            tl.store(out + (token * HEADS + head) * DIM + column, found.to(out.dtype.element_ty), mask=inside)
            tl.store(values + own_line, given, mask=inside)
            if DELTA:
                tl.store(updates + own_line, new.to(updates.dtype.element_ty), mask=inside)
            if tile % tiles == 0:
                own_gate = gate + own_place * (2 * HEADS)
                tl.store(own_gate, own)
                tl.store(own_gate + HEADS, own_share)
                if head % GROUP == 0:
                    target = keys + slot * key_slot + own_place * key_entry + key_head * KEY_DIM
                    tl.store(target + lane, given_key, mask=wanted)


@triton.jit(do_not_specialize=("heads", "tiles"))
def group_kernel(
    q, k, v, decay, weight, keys, values, gates, updates, query_start, slots, starts, stepping, bases,
    states, skip, out, scale, state_slot,
    q_stride, q_head, k_stride, k_head, v_stride, v_head, key_slot, value_slot, gate_slot, length, heads, tiles,
    COLUMNS: tl.constexpr, STAGES: tl.constexpr, EVICT: tl.constexpr, EARLY: tl.constexpr, SKIP: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, KEY_DIM: tl.constexpr, KEY_LANES: tl.constexpr, DIM: tl.constexpr,
    DELTA: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Results and entries of a row that is a single token: of so many heads that share a key, and of so many tiles of
    COLUMNS of each. Loads of a tile are under way while the one before is computed, and while entries are scored."""
    begin_pdl(PDL)
    row = tl.program_id(2)
    token = tl.load(query_start + row).to(tl.int64)
    count = (tl.load(query_start + row + 1) - token).to(tl.int32)
    start = tl.load(starts + row)
    slot = tl.load(slots + row).to(tl.int64)
    base = tl.maximum(start // LENGTH * LENGTH, tl.load(bases + row))
    if tl.load(stepping + row) > 0 and count == 1:
        first_head = tl.program_id(1) * heads
        key_head = first_head // GROUP
        first_column = tl.program_id(0) * tiles * COLUMNS
        lane = tl.arange(0, KEY_LANES)
        wanted = lane < KEY_DIM
        stays = lane < tl.where(base > 0, KEY_DIM, 0)
        back = tl.arange(0, LENGTH)  # the latest entry first: what has faded least is most exact
        known = back < start - base
        own_place = start % length
        place = own_place - 1 - back
        place = tl.where(known, tl.where(place < 0, place + length, place), 0)
        held = states + slot * state_slot + lane[:, None] * DIM
        ring = (updates if DELTA else values) + slot * value_slot + (place * (HEADS * DIM))[:, None]
        keys += slot * key_slot + key_head * KEY_DIM
        q += token * q_stride + key_head * q_head
        k += token * k_stride + key_head * k_head
        asked, before = load_scored(q, k, keys, place, known, lane, wanted, HEADS // GROUP * KEY_DIM)
        query = tl.load(q + lane, mask=wanted, other=0.0).to(tl.float32)
        given_key = tl.load(k + lane, mask=wanted, other=0.0)
        key, pair = given_key.to(tl.float32), scale * 0.0
        query_scores = tl.zeros([LENGTH], tl.float32)
        key_scores = query_scores
        if not EARLY:
            query_scores, key_scores = score_entries(asked, before)
            pair = tl.sum(query * key, 0)
        if first_head % GROUP == 0 and tl.program_id(0) == 0:
            tl.store(keys + own_place * (HEADS // GROUP * KEY_DIM) + lane, given_key, mask=wanted)
        for work in tl.range(heads * tiles, num_stages=STAGES):
            head, tile = first_head + work // tiles, work % tiles
            column = first_column + tile * COLUMNS + tl.arange(0, COLUMNS)
            inside = column < DIM
            gate = gates + slot * gate_slot + head
            fades = tl.load(gate + place * (2 * HEADS), mask=known, other=0.0)
            given = tl.load(v + token * v_stride + head * v_head + column, mask=inside, other=0.0)
            state = tl.load(
                held + head * KEY_DIM * DIM + column[None, :], mask=stays[:, None] & inside[None, :], other=0.0,
                eviction_policy=EVICT,
            )  # fmt: skip
            update = tl.load(
                ring + head * DIM + column[None, :], mask=known[:, None] & inside[None, :], other=0.0
            )  # fmt: skip
            own = tl.load(decay + token * HEADS + head)
            share = tl.load(weight + token * HEADS + head)
            if EARLY and work == 0:  # when all loads are under way
                query_scores, key_scores = score_entries(asked, before)
                pair = tl.sum(query * key, 0)
            left = tl.exp(own + tl.cumsum(fades, 0) - fades)  # of each entry
            whole = tl.exp(own + tl.sum(fades, 0))  # of the state
            score = query_scores * left
            value, wide = given.to(tl.float32), update.to(tl.float32)
            if DELTA:
                found, known_part = sum_both(state, query, key)
                found_late, known_late = sum_both(wide, score, key_scores * left)
                new = share * (value - whole * known_part - known_late)
            else:
                score *= tl.load(gate + place * (2 * HEADS) + HEADS, mask=known, other=0.0)
                found, found_late = tl.sum(state * query[:, None], 0), tl.sum(wide * score[:, None], 0)
                new = share * value
            found = (whole * found + found_late + pair * new) * scale
            if SKIP:
                found += value * tl.load(skip + head)
            own_line = slot * value_slot + (own_place * HEADS + head) * DIM + column
            tl.store(out + (token * HEADS + head) * DIM + column, found.to(out.dtype.element_ty), mask=inside)
            tl.store(values + own_line, given, mask=inside)
            if DELTA:
                tl.store(updates + own_line, new.to(updates.dtype.element_ty), mask=inside)
            if tile == 0 and first_column == 0:
                own_gate = gate + own_place * (2 * HEADS)
                tl.store(own_gate, own)
                tl.store(own_gate + HEADS, share)


@triton.jit
def load_scored(q, k, keys, place, known, lane, wanted, ENTRY: tl.constexpr):
    """A token's query and key as the first lines of a tile, and the keys of entries as the columns of another."""
    line = tl.arange(0, LINES)[:, None]
    asked = tl.load(q + lane[None, :], mask=wanted[None, :] & (line == 0), other=0.0)
    of_key = wanted[None, :] & (line == 1)
    asked = tl.where(of_key, tl.load(k + lane[None, :], mask=of_key, other=0.0), asked)
    held = keys + (place * ENTRY)[None, :] + lane[:, None]
    return asked, tl.load(held, mask=wanted[:, None] & known[None, :], other=0.0)


@triton.jit
def score_entries(asked, before):
    """How a token's query and its key meet the entries' keys."""
    line = tl.arange(0, LINES)
    scores = tl.dot(asked, before, input_precision="ieee")  # [LINES, LENGTH]
    query_scores = tl.sum(tl.where((line == 0)[:, None], scores, 0.0), 0)
    return query_scores, tl.sum(tl.where((line == 1)[:, None], scores, 0.0), 0)


@triton.jit
def sum_both(tile, a, b):
    """What columns of a tile of fp32 give with each of two vectors, in one pass over it."""
    products = tl.join(tile * a[:, None], tile * b[:, None])
    return tl.split(tl.sum(products, 0))
