"""Linear recurrences in Triton, in three launches for a step of single tokens, one more with chunks, one with drafts.

`prepare_kernel` takes each piece of PIECE positions by itself: its scores, and for the delta rule the inverse by which
its pseudo-values follow from the state before it. `scan_kernel` carries a state through a row's pieces, and writes the
snapshots that are kept on the way. Both also fold what steps have left in the ring once it fills a piece, so that a
state has the same bits whatever its tokens came by. Steps are in `recurrence_steps_triton`.

Products are of the inputs' type, with sums and states in fp32; the inverse, which is stored in the inputs' type, is of
TF32. How anything is cut follows from the shapes of heads, never from the batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.chip import Chip, chip_of
from penstock.kernels.launch import begin_pdl
from penstock.kernels.recurrence_steps_triton import draft_kernel, entry_kernel, multiply, token_kernel
from penstock.kernels.states import PIECE, Part, RecurrentCache, StateBatch

WIDE = 128  # columns of a head that a single token's program has, of which a thread has four
RESIDENT = 8  # such programs of a multiprocessor that have as many registers as they can use
COLUMNS = 32  # of a state that a program of a row with drafts has
SCANNED = 16  # of one that is carried through pieces
TURNS = 4  # programs of the scan for each multiprocessor; they take turns
PROGRAMS = 8  # of what comes before it, likewise, in a step without chunks
LENGTH = tl.constexpr(PIECE)
BLOCK = tl.constexpr(16)  # rows of a piece that are solved one by one
BLOCKS = tl.constexpr(PIECE // 16)


def recur_rows(part: Part, cache: RecurrentCache, batch: StateBatch, scale: float, skip: Tensor | None) -> Tensor:
    """`kernels.recurrence.recur` by the kernels, without waiting for the device."""
    q, k, v, gates = part
    heads, dim = v.shape[1:]
    rows, key_heads, key_dim = len(batch.slots), k.shape[1], k.shape[2]
    delta, whole, chip = cache.updates is not None, v.dtype == torch.float32, chip_of(v.device)
    assert q.stride(2) == k.stride(2) == v.stride(2) == 1
    held = cache.states[0], cache.keys[0], cache.values[0], cache.gates[0]
    assert all(x.is_contiguous() for x in (*gates, *held))
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
        works, looped = batch.most_pieces * heads, not batch.has_chunks  # few rows of steps fill a piece at a time
        prepare_kernel[(min(works, PROGRAMS * chip.num_sms) if looped else works,)](
            *inputs, *rings, *places, batch.pieces, mixes, scores, rows, *strides,
            ROWS=triton.next_power_of_2(rows), LOOPED=looped, **constants, PRECISION="IEEE" if whole else "TF32",
            num_warps=4, num_stages=1,
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
    given = *inputs, *rings, *places, cache.states, v if skip is None else skip, out, scale, cache.states.stride(0)
    form = token_form(rows * heads, constants["KEY_LANES"], dim, chip)
    token_kernel[(triton.cdiv(dim, form["COLUMNS"]), heads, rows)](
        *given, *strides, SKIP=skip is not None, **form, **constants, num_warps=1, num_stages=1
    )
    columns = COLUMNS if key_dim <= 128 else COLUMNS // 2  # what registers hold
    if batch.most_steps > 1:
        span = max(8, triton.next_power_of_2(batch.most_steps))
        draft_kernel[(triton.cdiv(dim, columns), heads, rows)](
            *given, *strides, COLUMNS=columns, SPAN=span, SKIP=skip is not None,
            PRECISION="IEEE" if whole else "TF32X3", **constants,
            num_warps=4 if span < 32 else chip.loop_warps, num_stages=2,
        )  # fmt: skip
    if batch.has_chunks:
        entry_kernel[(triton.cdiv(dim, columns), heads, rows)](
            *inputs, *rings, *places, *strides, COLUMNS=columns, **constants, num_warps=4
        )
    return out


def token_form(heads: int, key_lanes: int, dim: int, chip: Chip) -> dict[str, int]:
    """How single tokens of so many heads are cut: into as few columns as leave all programs resident, which then load
    twice as much ahead. A result's bits are those of any form."""
    wide = min(WIDE, triton.next_power_of_2(dim))
    columns = max(wide // 4, 1)
    while columns < wide and heads * triton.cdiv(dim, columns) > RESIDENT * chip.num_sms:
        columns *= 2
    loads, registers = (32, 255) if columns < wide else (16, 128)
    return {"COLUMNS": columns, "AHEAD": min(loads * WIDE // columns, key_lanes),
            "PARTS": min(4 * WIDE // wide, 32, key_lanes), "maxnreg": registers}  # fmt: skip


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
    DIM: tl.constexpr, DELTA: tl.constexpr, LOOPED: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One head of one piece: its scores, each faded, and for the delta rule what its values are multiplied by. LOOPED:
    of several, one after the other."""
    begin_pdl(PDL)
    line = tl.arange(0, ROWS)
    ends = tl.load(pieces + 1 + line, mask=line < rows, other=0x7FFFFFFF)
    place = tl.arange(0, LENGTH)
    lane = tl.arange(0, KEY_LANES)
    wanted = lane < KEY_DIM
    works = tl.load(pieces + rows) * HEADS
    for turn in range(tl.cdiv(works - tl.program_id(0), tl.num_programs(0)) if LOOPED else 1):
        work = tl.program_id(0) + turn * tl.num_programs(0)
        if work < works:
            piece, head = work // HEADS, work % HEADS
            row = tl.sum((ends <= piece).to(tl.int32), 0)
            token = tl.load(query_start + row).to(tl.int64)
            start = tl.load(starts + row)
            end = start + tl.load(query_start + row + 1) - tl.load(query_start + row)
            slot = tl.load(slots + row).to(tl.int64)
            first = tl.load(bases + row) + (piece - tl.load(pieces + row)) * LENGTH
            position = first + place
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
            target = (place.to(tl.int64) + work * LENGTH)[:, None] * LENGTH + place[None, :]
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
            key = load_entries(keys + slot * key_slot + key_head * KEY_DIM, k + token * k_stride + key_head * k_head,
                               position, start, end, length, entry, k_stride, lane, wanted)  # fmt: skip
            value = load_entries(values + slot * value_slot + head * DIM, v + token * v_stride + head * v_head,
                                 position, start, end, length, HEADS * DIM, v_stride, column, inside)  # fmt: skip
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
