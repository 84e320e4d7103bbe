"""Copies between blocks of pages and runs in Triton: a program for each tile of a block's line in each tensor."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.records import BlockLines

TILE = 1024  # words of a program


def launch_copies(blocks: Tensor, memory: BlockLines, runs: Tensor, *, gather: bool) -> None:
    """`kernels.block_copies.gather_blocks`, or the reverse, by the kernel, without waiting for the device."""
    assert blocks.dtype == torch.int32
    assert runs.is_contiguous()
    assert len(blocks) <= len(runs)
    assert runs.shape[1] == memory.run_bytes
    if not len(blocks):
        return
    words = runs.view(memory.word)
    kinds = {torch.int64: tl.int64, torch.int32: tl.int32, torch.uint8: tl.uint8}
    grid = len(blocks), len(memory.lines), triton.cdiv(max(memory.widths), TILE)
    copy_kernel[grid](
        blocks, words, memory.addresses, memory.starts, memory.counts, words.shape[1],
        WORD=kinds[memory.word], GATHER=gather, TILE=TILE, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=("blocks",))
def copy_kernel(
    blocks, runs, addresses, starts, counts, run_words,
    WORD: tl.constexpr, GATHER: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Runs are the first axis of the grid, tensors the second, tiles of a line the third."""
    run = tl.program_id(0)
    tensor = tl.program_id(1)
    count = tl.load(counts + tensor)
    place = tl.program_id(2) * TILE + tl.arange(0, TILE)
    there = place < count
    block = tl.load(blocks + run).to(tl.int64)
    line = tl.load(addresses + tensor).to(tl.pointer_type(WORD)) + block * count + place
    words = runs + run.to(tl.int64) * run_words + tl.load(starts + tensor) + place
    if GATHER:
        tl.store(words, tl.load(line, mask=there), mask=there)
    else:
        tl.store(line, tl.load(words, mask=there), mask=there)
