"""Linear recurrences in Triton, in three launches.

`prepare_kernel` takes each piece of PIECE positions by itself: its scores, and for the delta rule the inverse by which
its pseudo-values follow from the state before it. `scan_kernel` carries a state through a row's pieces, and writes the
snapshots that are kept on the way. Both also fold what steps have left in the ring once it fills a piece, so that a
state has the same bits whatever its tokens came by. `row_kernel` computes single tokens and drafts from the state and
the ring, and leaves every row's entries there. It reads a state and does not write it.

Products are of the inputs' type, with sums and states in fp32. What a step reads of a state is not rounded (three
products of TF32, or fp32 for fp32 inputs); the inverse, which is stored in the inputs' type, is of TF32. How anything
is cut follows from the shapes of heads, never from the batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.chip import chip_of
from penstock.kernels.launch import begin_pdl
from penstock.kernels.states import PIECE, Part, RecurrentCache, StateBatch

COLUMNS = 32  # of a state that a step's program has
SCANNED = 16  # of one that is carried through pieces
TURNS = 4  # programs of the scan for each multiprocessor; they take turns
LENGTH = tl.constexpr(PIECE)
BLOCK = tl.constexpr(16)  # rows of a piece that are solved one by one
BLOCKS = tl.constexpr(PIECE // 16)
ENTRIES = tl.constexpr(32)  # of a ring that are read at once


def recur_rows(part: Part, cache: RecurrentCache, batch: StateBatch, scale: float, skip: Tensor | None) -> Tensor:
    """`kernels.recurrence.recur` by the kernels, without waiting for the device."""
    q, k, v, gates = part
    heads, dim = v.shape[1:]
    rows, key_heads, key_dim = len(batch.slots), k.shape[1], k.shape[2]
    delta, whole, chip = cache.updates is not None, v.dtype == torch.float32, chip_of(v.device)
    assert q.stride(2) == k.stride(2) == v.stride(2) == 1
    assert gates.decay.is_contiguous()
    assert gates.weight.is_contiguous()
    assert cache.states[0].is_contiguous()
    assert cache.keys[0].is_contiguous()
    assert cache.values[0].is_contiguous()
    assert cache.gates[0].is_contiguous()
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    updates = cache.values if cache.updates is None else cache.updates
    assert updates.stride() == cache.values.stride()
    rings = cache.keys, cache.values, cache.gates, updates
    places = batch.query_start, batch.slots, batch.starts, batch.stepping, batch.bases
    strides = *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], cache.keys.stride(0), cache.values.stride(0)
    strides += cache.gates.stride(0), cache.keys.shape[1]
    constants = {
        "HEADS": heads, "GROUP": heads // key_heads, "KEY_DIM": key_dim,
        "KEY_LANES": max(16, triton.next_power_of_2(key_dim)), "DIM": dim, "DELTA": delta,
        "PDL": chip.pdl, "launch_pdl": chip.pdl,
    }  # fmt: skip
    inputs = q, k, v, gates.decay, gates.weight
    if batch.most_pieces:
        mixes, scores = (
            torch.empty((batch.most_pieces, heads, PIECE, PIECE), dtype=v.dtype, device=v.device)
            for _ in range(2)
        )  # fmt: skip
        prepare_kernel[(batch.most_pieces, heads)](
            *inputs, *rings, *places, batch.pieces, mixes, scores, rows, *strides,
            ROWS=triton.next_power_of_2(rows), **constants, PRECISION="IEEE" if whole else "TF32", num_warps=4,
        )  # fmt: skip
        snapshots = cache.states if cache.snapshots is None else cache.snapshots
        kept = batch.slots if batch.kept is None else batch.kept
        assert snapshots.stride() == cache.states.stride()
        scan_kernel[(min(rows * heads * triton.cdiv(dim, SCANNED), TURNS * chip.num_sms),)](
            *inputs, *rings, *places, batch.pieces, batch.busy, mixes, scores, cache.states, kept, snapshots,
            0 if batch.kept is None else len(kept),
            v if skip is None else skip, out, scale, cache.states.stride(0), *strides,
            COLUMNS=SCANNED, SKIP=skip is not None, KEEPS=batch.has_chunks and cache.snapshots is not None,
            **constants,
            num_warps=chip.loop_warps, num_stages=2 if chip.shared_memory > 128 << 10 else 1,
        )  # fmt: skip
    columns = COLUMNS if key_dim <= 128 else COLUMNS // 2  # what registers hold
    span = max(8, triton.next_power_of_2(batch.most_steps))
    row_kernel[(rows, heads, triton.cdiv(dim, columns))](
        *inputs, *rings, *places, cache.states, v if skip is None else skip, out, scale, cache.states.stride(0),
        *strides, COLUMNS=columns, SPAN=span, SKIP=skip is not None,
        PRECISION="IEEE" if whole else "TF32X3", **constants,
        num_warps=4 if span < 32 else chip.loop_warps, num_stages=2,
    )  # fmt: skip
    return out


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
def load_entries(ring, given, position, start, end, length, entry, stride, lane, wanted):
    """Lines `[positions, lanes]`: those before `start` of a slot's ring, those up to `end` of a row's tokens, zeros."""
    held = ring + (position % length * entry)[:, None]
    taken = given + ((position - start).to(tl.int64) * stride)[:, None]
    lines = tl.where((position < start)[:, None], held, taken)
    return tl.load(lines + lane[None, :], mask=(position < end)[:, None] & wanted[None, :], other=0.0)


@triton.jit
def load_gates(ring, given, position, start, end, length, head, HEADS: tl.constexpr, WHICH: tl.constexpr):
    """Decays (WHICH 0) or weights (1) of one head `[positions]`, as above."""
    held = tl.load(ring + (position % length * 2 + WHICH) * HEADS + head, mask=position < start, other=0.0)
    taken = tl.load(
        given + (position - start) * HEADS + head, mask=(position >= start) & (position < end), other=0.0
    )  # fmt: skip
    return tl.where(position < start, held, taken)


@triton.jit
def invert(among, PRECISION: tl.constexpr):
    """The inverse of 1 + among, which is strictly lower triangular `[LENGTH, LENGTH]`: its diagonal blocks row by row,
    then the others by products. A row follows from the rows up to it alone."""
    row = tl.arange(0, LENGTH)[:, None]
    column = tl.arange(0, LENGTH)[None, :]
    wide = tl.reshape(among, [BLOCKS, BLOCK, BLOCKS, BLOCK])
    block = tl.arange(0, BLOCKS)[:, None, None, None]
    same = block == tl.arange(0, BLOCKS)[None, None, :, None]
    small = tl.sum(tl.where(same, wide, 0.0), 2)  # [BLOCKS, BLOCK, BLOCK]
    line = tl.arange(0, BLOCK)[None, :, None]
    unit = tl.where(line == tl.arange(0, BLOCK)[None, None, :], 1.0, 0.0)
    solved = unit + tl.zeros([BLOCKS, BLOCK, BLOCK], tl.float32)
    for at in range(1, BLOCK):
        own = tl.sum(tl.where(line == at, small, 0.0), 1)  # [BLOCKS, BLOCK]
        found = tl.sum(own[:, :, None] * solved, 1)
        solved = tl.where(line == at, solved - found[:, None, :], solved)
    diagonal = tl.reshape(tl.where(same, solved[:, :, None, :], 0.0), [LENGTH, LENGTH])
    below = multiply(diagonal, tl.where(row // BLOCK > column // BLOCK, among, 0.0), PRECISION)
    twice = multiply(below, below, PRECISION)
    series = tl.where(row == column, 1.0, 0.0) - below
    series += multiply(series, twice, PRECISION)
    return multiply(series, diagonal, PRECISION)


@triton.jit(do_not_specialize=("rows",))
def prepare_kernel(
    q, k, v, decay, weight, keys, values, gates, updates, query_start, slots, starts, stepping, bases,
    pieces, mixes, scores, rows,
    q_stride, q_head, k_stride, k_head, v_stride, v_head, key_slot, value_slot, gate_slot, length,
    ROWS: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, KEY_DIM: tl.constexpr, KEY_LANES: tl.constexpr,
    DIM: tl.constexpr, DELTA: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One head of one piece: its scores, each faded, and for the delta rule what its values are multiplied by."""
    begin_pdl(PDL)
    piece, head = tl.program_id(0), tl.program_id(1)
    line = tl.arange(0, ROWS)
    ends = tl.load(pieces + 1 + line, mask=line < rows, other=0x7FFFFFFF)
    row = tl.sum((ends <= piece).to(tl.int32), 0)
    if row < rows:
        token = tl.load(query_start + row).to(tl.int64)
        start = tl.load(starts + row)
        end = start + tl.load(query_start + row + 1) - tl.load(query_start + row)
        slot = tl.load(slots + row).to(tl.int64)
        first = tl.load(bases + row) + (piece - tl.load(pieces + row)) * LENGTH
        place = tl.arange(0, LENGTH)
        position = first + place
        lane = tl.arange(0, KEY_LANES)
        wanted = lane < KEY_DIM
        key_head = head // GROUP
        ring = keys + slot * key_slot + key_head * KEY_DIM
        given = k + token * k_stride + key_head * k_head
        entry: tl.constexpr = HEADS // GROUP * KEY_DIM
        key = load_entries(ring, given, position, start, end, length, entry, k_stride, lane, wanted)
        own = (position >= start) & (position < end)
        asked = q + (token + (position - start)[:, None]) * q_stride + key_head * q_head + lane[None, :]
        query = tl.load(asked, mask=own[:, None] & wanted[None, :], other=0.0)
        gate = gates + slot * gate_slot
        fades = load_gates(gate, decay + token * HEADS, position, start, end, length, head, HEADS, 0)
        passed = tl.cumsum(fades, 0)
        lower = place[:, None] >= place[None, :]
        fade = tl.where(lower, tl.exp(tl.where(lower, passed[:, None] - passed[None, :], 0.0)), 0.0)
        turned = tl.trans(key)
        target = (tl.program_id(0).to(tl.int64) * HEADS + head) * LENGTH * LENGTH
        target += place[:, None] * LENGTH + place[None, :]
        score = tl.dot(query, turned, input_precision="ieee") * fade
        tl.store(scores + target, score.to(scores.dtype.element_ty))
        if DELTA:
            share = load_gates(gate, weight + token * HEADS, position, start, end, length, head, HEADS, 1)
            among = tl.dot(key, turned, input_precision="ieee") * fade * share[:, None]
            mix = invert(tl.where(place[:, None] > place[None, :], among, 0.0), PRECISION) * share[None, :]
            tl.store(mixes + target, mix.to(mixes.dtype.element_ty))


@triton.jit(do_not_specialize=("kept_tokens",))
def scan_kernel(
    q, k, v, decay, weight, keys, values, gates, updates, query_start, slots, starts, stepping, bases,
    pieces, busy, mixes, scores, states, kept, snapshots, kept_tokens, skip, out, scale, state_slot,
    q_stride, q_head, k_stride, k_head, v_stride, v_head, key_slot, value_slot, gate_slot, length,
    COLUMNS: tl.constexpr, SKIP: tl.constexpr, KEEPS: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr, KEY_LANES: tl.constexpr, DIM: tl.constexpr, DELTA: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Columns of one head's state through the pieces of one row, for one such work after the other."""
    begin_pdl(PDL)
    kind = out.dtype.element_ty
    splits: tl.constexpr = (DIM + COLUMNS - 1) // COLUMNS
    place = tl.arange(0, LENGTH)
    lane = tl.arange(0, KEY_LANES)
    wanted = lane < KEY_DIM
    for work in range(tl.program_id(0), tl.load(busy) * HEADS * splits, tl.num_programs(0)):
        row = tl.load(busy + 1 + work // (HEADS * splits))
        head = work // splits % HEADS
        column = work % splits * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < DIM
        token = tl.load(query_start + row).to(tl.int64)
        start = tl.load(starts + row)
        end = start + tl.load(query_start + row + 1) - tl.load(query_start + row)
        stays = tl.where(tl.load(stepping + row) > 0, start, end)
        slot = tl.load(slots + row).to(tl.int64)
        base = tl.load(bases + row)
        piece = tl.load(pieces + row)
        key_head = head // GROUP
        entry: tl.constexpr = HEADS // GROUP * KEY_DIM
        there = wanted[:, None] & inside[None, :]
        own_state = (head * KEY_DIM + lane[:, None]) * DIM + column[None, :]
        held = states + slot * state_slot + own_state
        state = tl.load(held, mask=(lane < tl.where(base > 0, KEY_DIM, 0))[:, None] & inside[None, :], other=0.0)
        for at in range(tl.load(pieces + row + 1) - piece):
            position = base + at * LENGTH + place
            own = (position >= start) & (position < end)
            behind = base + (at + 1) * LENGTH
            if KEEPS:  # asked for early, so that nothing waits for it
                last = token + behind - 1 - start
                number = tl.load(kept + last, mask=(behind > start) & (behind <= end) & (last < kept_tokens), other=-1)
            key = load_entries(
                keys + slot * key_slot + key_head * KEY_DIM, k + token * k_stride + key_head * k_head,
                position, start, end, length, entry, k_stride, lane, wanted,
            )  # fmt: skip
            value = load_entries(
                values + slot * value_slot + head * DIM, v + token * v_stride + head * v_head,
                position, start, end, length, HEADS * DIM, v_stride, column, inside,
            )  # fmt: skip
            asked = q + (token + (position - start)[:, None]) * q_stride + key_head * q_head + lane[None, :]
            query = tl.load(asked, mask=own[:, None] & wanted[None, :], other=0.0)
            gate = gates + slot * gate_slot
            fades = load_gates(gate, decay + token * HEADS, position, start, end, length, head, HEADS, 0)
            passed = tl.cumsum(fades, 0)
            total = tl.sum(fades, 0)
            square = ((piece + at).to(tl.int64) * HEADS + head) * LENGTH * LENGTH
            square += place[:, None] * LENGTH + place[None, :]
            narrow = state.to(kind)
            old = tl.exp(passed)[:, None]
            if DELTA:
                rest = value - old * tl.dot(key, narrow, input_precision="ieee")
                update = tl.dot(tl.load(mixes + square), rest.to(kind), input_precision="ieee")
            else:
                share = load_gates(gate, weight + token * HEADS, position, start, end, length, head, HEADS, 1)
                update = value * share[:, None]
            found = old * tl.dot(query, narrow, input_precision="ieee")
            found += tl.dot(tl.load(scores + square), update.to(kind), input_precision="ieee")
            found *= scale
            if SKIP:
                found += value * tl.load(skip + head)
            target = out + ((token + (position - start))[:, None] * HEADS + head) * DIM + column[None, :]
            tl.store(target, found.to(kind), mask=own[:, None] & inside[None, :])
            # Not in a branch: Triton 3.6 copies the next piece's keys over these before a branch reads them.
            left = (update * tl.exp(total - passed)[:, None]).to(kind)
            after = state * tl.exp(total) + tl.dot(tl.trans(key), left, input_precision="ieee")
            state = tl.where(behind <= stays, after, state)
            if KEEPS:
                asked_for = (lane < tl.where(number >= 0, KEY_DIM, 0))[:, None] & inside[None, :]
                tl.store(snapshots + number.to(tl.int64) * state_slot + own_state, state, mask=asked_for)
            if DELTA:
                line = updates + slot * value_slot + (position % length * HEADS * DIM)[:, None] + head * DIM
                own &= position - place + LENGTH > stays  # a whole piece's are in the state
                tl.store(line + column[None, :], update.to(kind), mask=own[:, None] & inside[None, :])
        if base + LENGTH <= stays:
            tl.store(held, state, mask=there)


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
    if tl.program_id(2) == 0:
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
def row_kernel(
    q, k, v, decay, weight, keys, values, gates, updates, query_start, slots, starts, stepping, bases,
    states, skip, out, scale, state_slot,
    q_stride, q_head, k_stride, k_head, v_stride, v_head, key_slot, value_slot, gate_slot, length,
    COLUMNS: tl.constexpr, SPAN: tl.constexpr, SKIP: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr, KEY_LANES: tl.constexpr, DIM: tl.constexpr, DELTA: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Columns of one head of one row: results of its tokens if it steps, and its entries."""
    begin_pdl(PDL)
    row, head = tl.program_id(0), tl.program_id(1)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < DIM
    lane = tl.arange(0, KEY_LANES)
    wanted = lane < KEY_DIM
    token = tl.load(query_start + row).to(tl.int64)
    count = (tl.load(query_start + row + 1) - token).to(tl.int32)
    start = tl.load(starts + row)
    slot = tl.load(slots + row).to(tl.int64)
    if count > 0:
        if tl.load(stepping + row) > 0:
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
        else:
            position = (start + count) // LENGTH * LENGTH + tl.arange(0, LENGTH)
            there = (position >= start) & (position < start + count)
            keep_entries(
                k, v, decay, weight, keys, values, gates, token, slot, head, position, start, there, column, inside,
                lane, wanted, k_stride, k_head, v_stride, v_head, key_slot, value_slot, gate_slot, length,
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
