"""Blocks of pages, whose layers lie apart, as runs of bytes in one piece each, and back.

The memory of a block is a line of each of several tensors: keys and values of each layer, for the most part. A run has
them one behind the other, as copies to other memory want them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.kernels.chip import chip_of
from penstock.kernels.records import BlockLines

WORDS = (torch.int64, torch.int32, torch.uint8)


def block_lines(memory: Sequence[Tensor]) -> BlockLines:
    """Of tensors of any type that are [blocks, ...] and contiguous. At least one."""
    lines = [tensor.view(torch.uint8).view(len(tensor), -1) for tensor in memory]
    word = next(word for word in WORDS if all(line.shape[1] % word.itemsize == 0 for line in lines))
    widths = tuple(line.shape[1] // word.itemsize for line in lines)
    starts = [sum(widths[:at]) for at in range(len(widths))]
    device = lines[0].device
    return BlockLines(
        lines,
        widths,
        torch.tensor([line.data_ptr() for line in lines], dtype=torch.int64, device=device),
        torch.tensor(starts, dtype=torch.int32, device=device),
        torch.tensor(widths, dtype=torch.int32, device=device),
        word,
    )


def gather_blocks(blocks: Tensor, memory: BlockLines, runs: Tensor) -> None:
    """Copy blocks to runs. # int32 [count] → uint8 [at least count, run_bytes], contiguous

    One launch on a GPU, which waits for nothing.
    """
    if chip_of(runs.device).runs_triton:
        from penstock.kernels.block_copies_triton import launch_copies

        launch_copies(blocks, memory, runs, gather=True)
        return
    at = 0
    for line in memory.lines:
        runs[: len(blocks), at : at + line.shape[1]] = line[blocks]
        at += line.shape[1]


def scatter_blocks(blocks: Tensor, memory: BlockLines, runs: Tensor) -> None:
    """The reverse: copy runs to blocks, none of them twice."""
    if chip_of(runs.device).runs_triton:
        from penstock.kernels.block_copies_triton import launch_copies

        launch_copies(blocks, memory, runs, gather=False)
        return
    at = 0
    for line in memory.lines:
        line[blocks] = runs[: len(blocks), at : at + line.shape[1]]
        at += line.shape[1]
