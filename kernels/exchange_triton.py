"""The exchange of `kernels/exchange.py` in Triton: leave, wait, add, norm, in one launch.

A word in an inbox says by itself whether it has arrived: until then it is minus zero, which nobody sends (minus zeros
go as zeros). So nothing is ordered behind a flag or a fence, and a row has arrived one way after it was sent. These
make it right:

- Words. A word is read by volatile loads, which go to memory that the senders' stores reach, until it is not empty; a
  store of 16 or 32 bits is never seen in part. No word's arrival says anything of another's.
- Turns. Who has read a row empties it at once, and uses the other half of the inbox next time. Another rank writes to
  this half again in its exchange after the next, which it begins when it has read what we sent in the next; we sent
  that in a launch behind the one that emptied this half, and a launch's stores are done when it ends. So two halves
  are enough, ranks are never further apart than one exchange, and no barrier is needed.
- Waiting. A program sends all its rows before it waits for any, and programs are at most as many as the GPU has
  registers for at once: what ran before ends without us, what may be started ahead of our end (`kernels/launch.py`)
  starts when all our programs have, so all of them get their place and send. Then whoever waits is waiting for what is
  sent already or by a launch that the other rank's stream has yet to reach. Other streams must not wait for this one
  meanwhile with all of a GPU taken.
- Replays. The half that is next stands in the device's memory, for each row by itself, so that a launch in a graph
  continues where the last one has ended, whichever graph that was in and however many rows it had. Every rank has to
  launch the same exchanges in the same order.
- Bits. Parts are added in the order of ranks, our own as the others see it, and rounded before the residual is added:
  the same on every rank, whatever the batch, and what the sum and the norm are one after the other.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.chip import chip_of
from penstock.kernels.exchange import TURNS, Inboxes, empty_word
from penstock.kernels.launch import begin_pdl

PER_THREAD = 16  # elements of a row: as in the norm's kernel, so that a row's sum of squares has the same bits
REGISTERS = 1 << 16  # of a multiprocessor, of which Volta and every GPU since has so many
FEW, FEW_REGISTERS, MANY_REGISTERS = 4, 64, 128  # bytes of others' words by an element, a thread's registers for them


def exchange_rows(
    partial: Tensor, residual: Tensor, weight: Tensor, eps: float, inboxes: Inboxes
) -> tuple[Tensor, Tensor]:
    """`kernels.exchange.add_parts` of all ranks' partial sums, of which this is ours: `[tokens, width]` of the inboxes'
    width and type, at most as many tokens as they have rows. Returns the norm and the next residual."""
    tokens, width = partial.shape
    assert 0 < tokens <= inboxes.rows
    assert width == inboxes.width
    assert partial.dtype == residual.dtype == inboxes.dtype
    assert partial.stride(1) == residual.stride(1) == 1
    normed, total = (torch.empty(partial.shape, dtype=partial.dtype, device=partial.device) for _ in range(2))
    tile = triton.next_power_of_2(width)
    warps = min(16, max(4, tile // (32 * PER_THREAD)))
    registers = FEW_REGISTERS if (inboxes.ranks - 1) * partial.dtype.itemsize <= FEW else MANY_REGISTERS
    pdl = chip_of(partial.device).pdl
    exchange_kernel[(programs(tokens, places(warps, registers, partial.device)),)](
        partial, residual, weight, normed, total, inboxes.addresses, inboxes.turns, tokens,
        partial.stride(0), residual.stride(0), eps,
        WIDTH=width, TILE=tile, RANK=inboxes.rank, RANKS=inboxes.ranks, ROWS=inboxes.rows, TURNS=TURNS,
        WORD=tl.int32 if partial.dtype.itemsize == 4 else tl.int16, EMPTY=empty_word(partial.dtype), PDL=pdl,
        num_warps=warps, maxnreg=registers, launch_pdl=pdl,
    )  # fmt: skip
    return normed, total


def places(warps: int, registers: int, device: torch.device) -> int:
    """Programs of so many warps, of so many registers a thread, that a GPU has at once when it has nothing else."""
    return chip_of(device).num_sms * max(1, REGISTERS // (32 * warps * registers))


def programs(tokens: int, most: int) -> int:
    """As many as there are places for at most, with as few rows each as that allows."""
    each = -(-tokens // most)
    return -(-tokens // each)


@triton.jit(do_not_specialize=["tokens"])
def exchange_kernel(
    partial, residual, weight, normed, total, addresses, turns, tokens, partial_stride, residual_stride, eps,
    WIDTH: tl.constexpr, TILE: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr,
    TURNS: tl.constexpr, WORD: tl.constexpr, EMPTY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Every program has each so-manieth row."""
    places = tl.arange(0, TILE)
    there = places < WIDTH
    weights = tl.load(weight + places, mask=there, other=0.0).to(tl.float32)
    begin_pdl(PDL)
    for row in range(tl.program_id(0), tokens, tl.num_programs(0)):
        words = sent_words(partial + row * partial_stride, places, there, WORD, EMPTY)
        line = (tl.load(turns + row) * RANKS + RANK) * ROWS + row
        for other in tl.static_range(RANKS):
            if other != RANK:
                tl.store(inbox(addresses, other, line, WIDTH, WORD) + places, words, mask=there)
    tl.debug_barrier()  # nor does the compiler put off what is sent
    for row in range(tl.program_id(0), tokens, tl.num_programs(0)):
        turn = tl.load(turns + row)
        own = sent_words(partial + row * partial_stride, places, there, WORD, EMPTY)
        added = tl.load(residual + row * residual_stride + places, mask=there, other=0.0)
        lines = inbox(addresses, RANK, turn * RANKS * ROWS + row, WIDTH, WORD) + places
        words = standing_words(lines, there, RANK, RANKS, ROWS * WIDTH)
        while lacking(words, TILE, EMPTY) > 0:
            words = standing_words(lines, there, RANK, RANKS, ROWS * WIDTH)
        values = tl.zeros([TILE], tl.float32)
        for other in tl.static_range(RANKS):
            if other == RANK:
                part = own
            else:
                part = words[other - (other > RANK)]
                tl.store(lines + other * ROWS * WIDTH, tl.full([TILE], EMPTY, WORD), mask=there)  # all threads saw it
            values += part.to(partial.dtype.element_ty, bitcast=True).to(tl.float32)
        values = values.to(total.dtype.element_ty).to(tl.float32) + added.to(tl.float32)
        rounded = values.to(total.dtype.element_ty)
        tl.store(total + row * WIDTH + places, rounded, mask=there)
        values = rounded.to(tl.float32)
        gain = tl.rsqrt(tl.sum(values * values, 0) / WIDTH + eps)
        found = (values * gain * weights).to(normed.dtype.element_ty)
        tl.store(normed + row * WIDTH + places, found, mask=there)
        tl.store(turns + row, (turn + 1) % TURNS)


@triton.jit
def standing_words(lines, there, RANK: tl.constexpr, RANKS: tl.constexpr, APART: tl.constexpr):
    """What stands in the lines of the other ranks by now."""
    found = ()
    for other in tl.static_range(RANKS):
        if other != RANK:
            line = tl.load(lines + other * APART, mask=there, other=0, volatile=True)
            found += (line,)  # type: ignore[assignment]
    return found


@triton.jit
def lacking(lines, TILE: tl.constexpr, EMPTY: tl.constexpr):
    """Whether a word of any of the lines has not arrived."""
    empty = tl.zeros([TILE], tl.int32)
    for line in tl.static_range(len(lines)):
        empty |= (lines[line] == EMPTY).to(tl.int32)
    return tl.max(empty, 0)


@triton.jit
def sent_words(row, places, there, WORD: tl.constexpr, EMPTY: tl.constexpr):
    """A row's words as they are sent: none of them looks empty."""
    words = tl.load(row + places, mask=there, other=0.0).to(WORD, bitcast=True)
    return tl.where(words == EMPTY, tl.zeros_like(words), words)


@triton.jit
def inbox(addresses, rank: tl.constexpr, line, WIDTH: tl.constexpr, WORD: tl.constexpr):
    """Where a line of a rank's inbox begins; it is whole lines of 16 bytes into memory that is."""
    words = tl.load(addresses + rank).to(tl.pointer_type(WORD))
    return tl.multiple_of(words, 16) + line * WIDTH
