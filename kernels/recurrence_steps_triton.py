"""Steps of linear recurrences in Triton: single tokens, and those of rows with drafts, from a slot's state and ring.

They leave every row's entries in the ring, chunks' among them. A state is read and not written. What is read of it is
not rounded: sums in fp32 for single tokens, three products of TF32 (fp32 for fp32 inputs) for several.
"""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.kernels.launch import begin_pdl
from penstock.kernels.states import PIECE

LENGTH = tl.constexpr(PIECE)
LINES = tl.constexpr(16)  # of a matrix unit's product, of which a single token has two
ENTRIES = tl.constexpr(32)  # of a ring that are read at once


@triton.jit
def multiply(a, b, PRECISION: tl.constexpr):
    """The product of two tiles of fp32 to about that precision."""
    if PRECISION == "IEEE":
        return tl.dot(a, b, input_precision="ieee")
    elif PRECISION == "TF32":
        return tl.dot(a, b, input_precision="tf32")
    else:
        return tl.dot(a, b, input_precision="tf32x3")


@triton.jit(do_not_specialize=("heads", "tiles"))
def token_kernel(
    q, k, v, decay, weight, keys, values, gates, updates, query_start, slots, starts, stepping, bases,
    states, skip, out, scale, state_slot,
    q_stride, q_head, k_stride, k_head, v_stride, v_head, key_slot, value_slot, gate_slot, length, heads, tiles,
    COLUMNS: tl.constexpr, STAGES: tl.constexpr, SKIP: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr, KEY_LANES: tl.constexpr, DIM: tl.constexpr, DELTA: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Results and entries of a row that is a single token: of so many heads that share a key, and of so many tiles of
    COLUMNS of each. Loads of a tile are under way while the one before is computed."""
    begin_pdl(PDL)
    row = tl.program_id(2)
    token = tl.load(query_start + row).to(tl.int64)
    count = (tl.load(query_start + row + 1) - token).to(tl.int32)
    start = tl.load(starts + row)
    slot = tl.load(slots + row).to(tl.int64)
    base = tl.maximum(start // LENGTH * LENGTH, tl.load(bases + row))
    if tl.load(stepping + row) > 0 and count == 1:
        first_head, first_column = tl.program_id(1) * heads, tl.program_id(0) * tiles * COLUMNS
        key_head = first_head // GROUP
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
        key = given_key.to(tl.float32)
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
                held + head * KEY_DIM * DIM + column[None, :], mask=stays[:, None] & inside[None, :], other=0.0
            )  # fmt: skip
            update = tl.load(
                ring + head * DIM + column[None, :], mask=known[:, None] & inside[None, :], other=0.0
            )  # fmt: skip
            own = tl.load(decay + token * HEADS + head)
            share = tl.load(weight + token * HEADS + head)
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


@triton.jit
def keep_entries(
    k, v, decay, weight, keys, values, gates, token, slot, head, position, start, there, column, inside, lane, wanted,
    k_stride, k_head, v_stride, v_head, key_slot, value_slot, gate_slot, length,
    HEADS: tl.constexpr, GROUP: tl.constexpr, KEY_DIM: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Tokens at `position` into their slot's ring: a program's columns, and what several share by one of these."""
    at = token + (position - start)
    place = position % length
    mask = there[:, None] & inside[None, :]
    value = tl.load(v + at[:, None] * v_stride + head * v_head + column[None, :], mask=mask, other=0.0)
    tl.store(values + slot * value_slot + (place[:, None] * HEADS + head) * DIM + column[None, :], value, mask=mask)
    if tl.program_id(0) == 0:
        line = gates + slot * gate_slot + place * 2 * HEADS + head
        tl.store(line, tl.load(decay + at * HEADS + head, mask=there, other=0.0), mask=there)
        tl.store(line + HEADS, tl.load(weight + at * HEADS + head, mask=there, other=0.0), mask=there)
        if head % GROUP == 0:
            own = head // GROUP
            of_key = there[:, None] & wanted[None, :]
            key = tl.load(k + at[:, None] * k_stride + own * k_head + lane[None, :], mask=of_key, other=0.0)
            target = keys + slot * key_slot + (place[:, None] * (HEADS // GROUP) + own) * KEY_DIM
            tl.store(target + lane[None, :], key, mask=of_key)


@triton.jit
def draft_kernel(
    q, k, v, decay, weight, keys, values, gates, updates, query_start, slots, starts, stepping, bases,
    states, skip, out, scale, state_slot,
    q_stride, q_head, k_stride, k_head, v_stride, v_head, key_slot, value_slot, gate_slot, length,
    COLUMNS: tl.constexpr, SPAN: tl.constexpr, SKIP: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr, KEY_LANES: tl.constexpr, DIM: tl.constexpr, DELTA: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Columns of one head of a row with drafts: results of its tokens, and its entries."""
    begin_pdl(PDL)
    row, head = tl.program_id(2), tl.program_id(1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < DIM
    lane = tl.arange(0, KEY_LANES)
    wanted = lane < KEY_DIM
    token = tl.load(query_start + row).to(tl.int64)
    count = (tl.load(query_start + row + 1) - token).to(tl.int32)
    start = tl.load(starts + row)
    slot = tl.load(slots + row).to(tl.int64)
    if tl.load(stepping + row) > 0 and count > 1:
        base = tl.maximum(start // LENGTH * LENGTH, tl.load(bases + row))
        step_row(
            q, k, v, decay, weight, keys, values, gates, updates, states, skip, out, scale, state_slot,
            token, count, start, slot, base, head, column, inside, lane, wanted,
            q_stride, q_head, k_stride, k_head, v_stride, v_head, key_slot, value_slot, gate_slot, length,
            COLUMNS, SPAN, SKIP, HEADS, GROUP, KEY_DIM, DIM, DELTA, PRECISION,
        )  # fmt: skip
        keep_entries(
            k, v, decay, weight, keys, values, gates, token, slot, head, start + tl.arange(0, SPAN), start,
            tl.arange(0, SPAN) < count, column, inside, lane, wanted, k_stride, k_head, v_stride, v_head,
            key_slot, value_slot, gate_slot, length, HEADS, GROUP, KEY_DIM, DIM,
        )  # fmt: skip


@triton.jit
def entry_kernel(
    q, k, v, decay, weight, keys, values, gates, updates, query_start, slots, starts, stepping, bases,
    q_stride, q_head, k_stride, k_head, v_stride, v_head, key_slot, value_slot, gate_slot, length,
    COLUMNS: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, KEY_DIM: tl.constexpr, KEY_LANES: tl.constexpr,
    DIM: tl.constexpr, DELTA: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Entries of a chunk, columns of one head: of what is behind its last whole piece."""
    begin_pdl(PDL)
    row, head = tl.program_id(2), tl.program_id(1)
    token = tl.load(query_start + row).to(tl.int64)
    count = (tl.load(query_start + row + 1) - token).to(tl.int32)
    if tl.load(stepping + row) == 0 and count > 0:
        start = tl.load(starts + row)
        slot = tl.load(slots + row).to(tl.int64)
        column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        lane = tl.arange(0, KEY_LANES)
        position = (start + count) // LENGTH * LENGTH + tl.arange(0, LENGTH)
        there = (position >= start) & (position < start + count)
        keep_entries(
            k, v, decay, weight, keys, values, gates, token, slot, head, position, start, there, column, column < DIM,
            lane, lane < KEY_DIM, k_stride, k_head, v_stride, v_head, key_slot, value_slot, gate_slot, length,
            HEADS, GROUP, KEY_DIM, DIM,
        )  # fmt: skip


@triton.jit
def step_row(
    q, k, v, decay, weight, keys, values, gates, updates, states, skip, out, scale, state_slot,
    token, count, start, slot, base, head, column, inside, lane, wanted,
    q_stride, q_head, k_stride, k_head, v_stride, v_head, key_slot, value_slot, gate_slot, length,
    COLUMNS: tl.constexpr, SPAN: tl.constexpr, SKIP: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr, DIM: tl.constexpr, DELTA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Tokens that follow a slot's entries. Their queries are the first SPAN lines of a tile, their keys the others."""
    kind = out.dtype.element_ty
    key_head = head // GROUP
    line = tl.arange(0, 2 * SPAN)
    step = line % SPAN
    is_key = line >= SPAN
    there = step < count
    held = states + slot * state_slot + (head * KEY_DIM + lane[:, None]) * DIM + column[None, :]
    state = tl.load(held, mask=(lane < tl.where(base > 0, KEY_DIM, 0))[:, None] & inside[None, :], other=0.0)
    at = token + step
    mask = there[:, None] & wanted[None, :]
    query = q + at[:, None] * q_stride + key_head * q_head + lane[None, :]
    asked = tl.load(query, mask=mask & ~is_key[:, None], other=0.0)
    key = k + at[:, None] * k_stride + key_head * k_head + lane[None, :]
    both = tl.where(is_key[:, None], tl.load(key, mask=mask & is_key[:, None], other=0.0), asked)
    own = tl.arange(0, SPAN)
    fades = tl.load(decay + (token + own) * HEADS + head, mask=own < count, other=0.0)
    passed = tl.sum(tl.where(own[None, :] <= step[:, None], fades[None, :], 0.0), 1)  # [lines]
    share = tl.load(weight + at * HEADS + head, mask=there, other=0.0)
    mask = there[:, None] & inside[None, :]
    value = tl.load(v + at[:, None] * v_stride + head * v_head + column[None, :], mask=mask, other=0.0)
    found = tl.zeros([2 * SPAN, COLUMNS], tl.float32)
    later = start.to(tl.float32) * 0.0  # the fading by entries that are read already, the latest first
    for back in range(0, start - base, ENTRIES):
        position = start - 1 - back - tl.arange(0, ENTRIES)
        known = position >= base
        place = tl.maximum(position, 0) % length
        gate = gates + slot * gate_slot + place * 2 * HEADS + head
        fade = tl.load(gate, mask=known, other=0.0)
        after = later + tl.cumsum(fade, 0) - fade
        entry = keys + slot * key_slot + (place * (HEADS // GROUP) + key_head)[None, :] * KEY_DIM + lane[:, None]
        score = tl.dot(
            both, tl.load(entry, mask=wanted[:, None] & known[None, :], other=0.0), input_precision="ieee"
        ) * tl.exp(passed[:, None] + after[None, :])
        old = known[:, None] & inside[None, :]
        line_of = slot * value_slot + (place[:, None] * HEADS + head) * DIM + column[None, :]
        if DELTA:
            update = tl.load(updates + line_of, mask=old, other=0.0)
        else:
            update = tl.load(values + line_of, mask=old, other=0.0)
            score *= tl.load(gate + HEADS, mask=known, other=0.0)[None, :]
        found = tl.dot(score.to(kind), update, found, input_precision="ieee")
        later += tl.sum(fade, 0)
    found += tl.exp(passed + later)[:, None] * multiply(both.to(tl.float32), state, PRECISION)
    pair = tl.dot(both, tl.trans(both), input_precision="ieee")  # [lines, lines]
    seen = (is_key & there)[None, :] & (step[None, :] <= step[:, None])
    pair *= tl.where(seen, tl.exp(tl.where(seen, passed[:, None] - passed[None, :], 0.0)), 0.0)
    update = tl.where(is_key[:, None], share[:, None] * value, 0.0)
    if DELTA:
        update = tl.where(is_key[:, None], share[:, None] * (value - found), 0.0)
        among = tl.where(step[None, :] < step[:, None], pair * share[:, None], 0.0)
        for other in range(1, count):
            this = (line == SPAN + other)[:, None]
            row = tl.sum(tl.where(this, among, 0.0), 0)
            update = tl.where(this, update - tl.sum(row[:, None] * update, 0)[None, :], update)
        mask = (there & is_key)[:, None] & inside[None, :]
        target = slot * value_slot + (((start + step) % length)[:, None] * HEADS + head) * DIM + column[None, :]
        tl.store(updates + target, update.to(kind), mask=mask)
    found = (found + multiply(pair, update, PRECISION)) * scale
    if SKIP:
        found += value * tl.load(skip + head)
    target = out + (at[:, None] * HEADS + head) * DIM + column[None, :]
    tl.store(target, found.to(kind), mask=(there & ~is_key)[:, None] & inside[None, :])
