"""Copies of blocks by block_copies.py and block_copies_triton.py against plain assignments."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.kernels.block_copies import block_lines, gather_blocks, scatter_blocks
from penstock.kernels.records import BlockLines

COUNT = 9  # blocks
SHAPES = {
    "layers of one size": [(torch.bfloat16, (16, 2, 8))] * 4,
    "beyond a tile": [(torch.float32, (16, 5, 64)), (torch.bfloat16, (16, 2, 4))],
    "8-bit floats": [(torch.float8_e4m3fn, (16, 3, 4)), (torch.bfloat16, (16, 6))],
    "odd bytes": [(torch.uint8, (7,)), (torch.uint8, (1025,))],
    "half words": [(torch.bfloat16, (1, 2)), (torch.float32, (3,))],
}
BLOCKS = [[], [0], [3, 8, 1], [8, 7, 6, 5, 4, 3, 2, 1, 0]]


def filled(shape: str, device: str, seed: int) -> list[Tensor]:
    chance = torch.Generator().manual_seed(seed)
    return [
        torch.randint(0, 256, (COUNT, *size, dtype.itemsize), dtype=torch.uint8, generator=chance)
        .view(dtype).view(COUNT, *size).to(device)
        for dtype, size in SHAPES[shape]
    ]  # fmt: skip


def plain_run(memory: list[Tensor], block: int) -> Tensor:
    return torch.cat([tensor[block].contiguous().view(torch.uint8).reshape(-1) for tensor in memory]).cpu()


def by_kernel(blocks: Tensor, memory: BlockLines, runs: Tensor, *, gather: bool) -> None:
    from penstock.kernels.block_copies_triton import launch_copies

    launch_copies(blocks, memory, runs, gather=gather)


def by_reference(blocks: Tensor, memory: BlockLines, runs: Tensor, *, gather: bool) -> None:
    (gather_blocks if gather else scatter_blocks)(blocks, memory, runs)


@pytest.mark.parametrize("copy", [by_kernel, by_reference])
@pytest.mark.parametrize("blocks", BLOCKS, ids=len)
@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_become_runs_and_runs_blocks(shape: str, blocks: list[int], copy, device: str) -> None:  # type: ignore[no-untyped-def]
    source, target = filled(shape, device, 1), filled(shape, device, 2)
    before = [plain_run(target, block) for block in range(COUNT)]
    lines = block_lines(source)
    chosen = torch.tensor(blocks, dtype=torch.int32, device=device)
    runs = torch.full((len(blocks) + 1, lines.run_bytes), 77, dtype=torch.uint8, device=device)
    copy(chosen, lines, runs, gather=True)
    for at, block in enumerate(blocks):
        assert torch.equal(runs[at].cpu(), plain_run(source, block))
    assert bool((runs[-1] == 77).all()), "a run too many"
    others = list(reversed(blocks))  # they come back elsewhere
    copy(chosen.flip(0), block_lines(target), runs, gather=False)
    for block in range(COUNT):
        expected = plain_run(source, blocks[others.index(block)]) if block in others else before[block]
        assert torch.equal(plain_run(target, block), expected)
