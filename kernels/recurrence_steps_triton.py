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
ENTRIES = tl.constexpr(32)  # of a ring that are read at once
TAKEN = tl.constexpr(8)  # of them that a single token adds up at once


@triton.jit
def multiply(a, b, PRECISION: tl.constexpr):
    """The product of two tiles of fp32 to about that precision."""
    if PRECISION == "IEEE":
        return tl.dot(a, b, input_precision="ieee")
    elif PRECISION == "TF32":
        return tl.dot(a, b, input_precision="tf32")
    else:
        return tl.dot(a, b, input_precision="tf32x3")


@triton.jit
def token_kernel(
    q, k, v, decay, weight, keys, values, gates, updates, query_start, slots, starts, stepping, bases,
    states, skip, out, scale, state_slot,
    q_stride, q_head, k_stride, k_head, v_stride, v_head, key_slot, value_slot, gate_slot, length,
    COLUMNS: tl.constexpr, AHEAD: tl.constexpr, PARTS: tl.constexpr, SKIP: tl.constexpr, HEADS: tl.constexpr,
    GROUP: tl.constexpr, KEY_DIM: tl.constexpr, KEY_LANES: tl.constexpr, DIM: tl.constexpr, DELTA: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Results and entries of a row that is a single token, COLUMNS of one head. A program is one warp: it waits for no
    other, and others hide what it waits for."""
    begin_pdl(PDL)
    row, head = tl.program_id(2), tl.program_id(1)
    token = tl.load(query_start + row).to(tl.int64)
    count = (tl.load(query_start + row + 1) - token).to(tl.int32)
    start = tl.load(starts + row)
    slot = tl.load(slots + row).to(tl.int64)
    base = tl.maximum(start // LENGTH * LENGTH, tl.load(bases + row))
    if tl.load(stepping + row) > 0 and count == 1:
        column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < DIM
        own_place = start % length
        keys += slot * key_slot + head // GROUP * KEY_DIM
        gates += slot * gate_slot + head
        q += token * q_stride + head // GROUP * q_head
        k += token * k_stride + head // GROUP * k_head
        lane = tl.arange(0, KEY_LANES)
        query = tl.load(q + lane, mask=lane < KEY_DIM, other=0.0).to(tl.float32)
        given_key = tl.load(k + lane, mask=lane < KEY_DIM, other=0.0)
        key = given_key.to(tl.float32)
        own = tl.load(decay + token * HEADS + head)
        share = tl.load(weight + token * HEADS + head)
        ring = (updates if DELTA else values) + slot * value_slot + head * DIM + column
        late, known_late, fades = read_ring(
            query, key, keys, gates, ring, start - base, own_place, length, own, inside,
            COLUMNS, HEADS, GROUP, KEY_DIM, KEY_LANES, DIM, DELTA,
        )  # fmt: skip
        held = states + slot * state_slot + head * (KEY_DIM * DIM) + column
        found, known = read_state(
            held, q, k, tl.where(base > 0, KEY_DIM, 0), inside, COLUMNS, AHEAD, PARTS, KEY_DIM, DIM, DELTA
        )
        given = tl.load(v + token * v_stride + head * v_head + column, mask=inside, other=0.0)
        value, whole = given.to(tl.float32), tl.exp(fades)
        new = share * (value - (whole * known + known_late) if DELTA else value)
        found = (whole * found + late + tl.sum(query * key, 0) * new) * scale
        if SKIP:
            found += value * tl.load(skip + head)
        own_line = slot * value_slot + (own_place * HEADS + head) * DIM + column
        tl.store(out + (token * HEADS + head) * DIM + column, found.to(out.dtype.element_ty), mask=inside)
        tl.store(values + own_line, given, mask=inside)
        if DELTA:
            tl.store(updates + own_line, new.to(updates.dtype.element_ty), mask=inside)
        if tl.program_id(0) == 0:
            own_gate = gates + own_place * (2 * HEADS)
            tl.store(own_gate, own)
            tl.store(own_gate + HEADS, share)
            if head % GROUP == 0:
                tl.store(keys + own_place * (HEADS // GROUP * KEY_DIM) + lane, given_key, mask=lane < KEY_DIM)


@triton.jit
def read_state(
    held, q, k, last, inside, COLUMNS: tl.constexpr, AHEAD: tl.constexpr, PARTS: tl.constexpr, KEY_DIM: tl.constexpr,
    DIM: tl.constexpr, DELTA: tl.constexpr,
):  # fmt: skip
    """What lines of a state below `last` give with a query and, for the delta rule, with a key: `[COLUMNS]`, each by
    PARTS sums. AHEAD lines are loaded before they are used. Products are added by `tl.fma` alone: which of two products
    a compiler fuses might differ from form to form."""
    found = tl.zeros([PARTS, COLUMNS], tl.float32)
    known = tl.zeros([PARTS, COLUMNS], tl.float32)
    for first in range(0, last, AHEAD):
        for step in tl.static_range(0, AHEAD, PARTS):
            line = first + step + tl.arange(0, PARTS)
            there = line < KEY_DIM
            mask = there[:, None] & inside[None, :]
            state = tl.load(held[None, :] + (line * DIM)[:, None], mask=mask, other=0.0)
            found = tl.fma(state, tl.load(q + line, mask=there, other=0.0).to(tl.float32)[:, None], found)
            if DELTA:
                known = tl.fma(state, tl.load(k + line, mask=there, other=0.0).to(tl.float32)[:, None], known)
    return add_lines(found), add_lines(known)


@triton.jit
def read_ring(
    query, key, keys, gates, ring, count, own_place, length, fades, inside,
    COLUMNS: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, KEY_DIM: tl.constexpr, KEY_LANES: tl.constexpr,
    DIM: tl.constexpr, DELTA: tl.constexpr,
):  # fmt: skip
    """The same of the last `count` entries, and the sum of `fades` and theirs. The latest come first: what has faded
    least is most exact."""
    lane = tl.arange(0, KEY_LANES)
    found = tl.zeros([COLUMNS], tl.float32)
    known = tl.zeros([COLUMNS], tl.float32)
    for first in range(0, count, 2 * TAKEN):
        late = tl.zeros([TAKEN, COLUMNS], tl.float32)
        known_late = tl.zeros([TAKEN, COLUMNS], tl.float32)
        for half in tl.static_range(2):
            back = first + half * TAKEN + tl.arange(0, TAKEN)
            there = back < count
            place = own_place - 1 - back
            place = tl.where(there, tl.where(place < 0, place + length, place), 0)
            line = keys + (place * (HEADS // GROUP * KEY_DIM))[:, None] + lane[None, :]
            before = tl.load(line, mask=there[:, None] & (lane < KEY_DIM)[None, :], other=0.0).to(tl.float32)
            line = ring[None, :] + (place * (HEADS * DIM))[:, None]
            update = tl.load(line, mask=there[:, None] & inside[None, :], other=0.0).to(tl.float32)
            own = tl.load(gates + place * (2 * HEADS), mask=there, other=0.0)
            left = tl.exp(fades + tl.cumsum(own, 0) - own)
            fades += tl.sum(own, 0)
            if DELTA:
                known_late = tl.fma(update, (tl.sum(before * key[None, :], 1) * left)[:, None], known_late)
            else:
                left *= tl.load(gates + place * (2 * HEADS) + HEADS, mask=there, other=0.0)
            late = tl.fma(update, (tl.sum(before * query[None, :], 1) * left)[:, None], late)
        found += add_lines(late)
        known += add_lines(known_late)
    return found, known, fades


@triton.jit
def add_lines(tile):
    """The sums over up to 32 lines of `[lines, columns]`, by halves: the same bits whatever threads have them."""
    for _ in tl.static_range(5):
        if tile.shape[0] > 1:
            tile = tl.sum(tl.reshape(tile, [2, tile.shape[0] // 2, tile.shape[1]]), 0)
    return tl.reshape(tile, [tile.shape[1]])


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
