"""Copies of KV blocks on a CPU: what an executor does when `CopyBlocks` asks for it."""

from __future__ import annotations

import select
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from penstock.engine_core.execution import block_copies
from penstock.engine_core.execution.block_copies import BlockCopier
from penstock.engine_core.execution.block_files import BlockFiles
from penstock.engine_core.execution.shared_blocks import spans
from penstock.engine_core.execution.storage_copies import StorageCopier
from penstock.engine_core.models import memory_estimate
from penstock.protocol.steps import BlocksCopied, CopyBlocks
from penstock.protocol.storage_blocks import BlocksListed, ListBlocks, MoveBlocks, pack_keys

BLOCKS, HOST = 9, 6
CPU = torch.device("cpu")


def memory(seed: int = 0) -> list[Tensor]:
    """Two layers' keys and values, and what a head keeps."""
    chance = torch.Generator().manual_seed(seed)
    shapes = [(4, 2, 8), (4, 2, 8), (4, 2, 8), (4, 2, 8), (4, 16)]
    return [torch.randn(BLOCKS, *shape, generator=chance) for shape in shapes]


def message(number: int, pairs: list[tuple[int, int]], *, to_host: bool, epoch: int = 1) -> CopyBlocks:
    return CopyBlocks(number=number, epoch=epoch, to_host=to_host, blocks=np.array(pairs, np.int32).tobytes())


def run(copier: BlockCopier, *messages: CopyBlocks) -> list[int]:
    for one in messages:
        copier.ask(one)
    copier.iterate()
    answers = [answer.number for answer in copier.answers]
    copier.answers.clear()
    return answers


def test_blocks_go_and_come_back_elsewhere() -> None:
    lines = memory()
    before = [line.clone() for line in lines]
    copier = BlockCopier(lines, HOST, CPU)
    out = [(7, 5), (2, 0), (4, 1), (8, 3)]
    assert run(copier, message(1, out, to_host=True)) == [1]
    for line in lines:
        line.zero_()
    assert run(copier, message(2, [(1, 5), (3, 0), (5, 3)], to_host=False)) == [2]
    for line, was in zip(lines, before, strict=True):
        assert torch.equal(line[[1, 3, 5]], was[[7, 2, 8]])
        assert not line[[0, 2, 4, 6, 7, 8]].any()
    counts = copier.statistics()
    assert (counts.bytes_out, counts.bytes_in) == (4 * copier.host.shape[1], 3 * copier.host.shape[1])


def test_pieces_of_the_staging_memory_are_no_limit(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    lines = memory()
    each = sum(line[0].nbytes for line in lines)
    monkeypatch.setattr(memory_estimate, "STAGING", 2 * each + 1)
    monkeypatch.setattr(block_copies, "MOST_BYTES", each)
    before = [line.clone() for line in lines]
    copier = BlockCopier(lines, HOST, CPU)
    assert run(copier, message(1, [(at + 1, at) for at in range(HOST)], to_host=True)) == [1]
    for line in lines:
        line.zero_()
    assert run(copier, message(2, [(at + 1, at) for at in range(HOST)], to_host=False)) == [2]
    for line, was in zip(lines, before, strict=True):
        assert torch.equal(line[1 : HOST + 1], was[1 : HOST + 1])


def test_a_new_epoch_and_a_new_scheduler_hear_nothing_of_the_one_before() -> None:
    copier = BlockCopier(memory(), HOST, CPU)
    copier.ask(message(1, [(1, 1)], to_host=True))
    copier.ask(message(2, [(2, 2)], to_host=True, epoch=2))
    assert run(copier) == [2]
    copier.ask(message(3, [(2, 2)], to_host=True, epoch=2))
    assert copier.busy
    copier.forget()
    assert not copier.busy
    assert run(copier) == []


def test_neighbours_in_the_hosts_memory_go_together() -> None:
    assert list(spans(np.array([2, 3, 4, 7, 9, 10], np.int32), 9)) == [(0, 3), (3, 4), (4, 6)]
    assert list(spans(np.arange(5, dtype=np.int32), 2)) == [(0, 2), (2, 4), (4, 5)]
    assert list(spans(np.zeros(0, np.int32), 2)) == []


def test_a_disk_behind_the_hosts_memory(tmp_path: Path) -> None:
    """A new epoch of copies ends no job of the disk, which has ended by itself those before; a lost scheduler does."""
    copier = BlockCopier(memory(), HOST, CPU)
    each = copier.host.shape[1]
    copier.storage = StorageCopier(BlockFiles(tmp_path, 1 << 20, each, bytes(32)), copier.host.numpy(), threads=1)
    assert run(copier, message(1, [(7, 5)], to_host=True)) == [1]
    copier.ask(moving(2, to_storage=True))
    copier.ask(ListBlocks(3, 2))
    copier.ask(message(4, [(7, 4)], to_host=True, epoch=2))
    until_answered(copier, 2)
    assert {type(answer) for answer in copier.answers} == {BlocksCopied, BlocksListed}
    copier.ask(moving(5, to_storage=True, epoch=2))
    until_answered(copier, 3)
    assert copier.statistics().storage is not None
    copier.forget()
    assert not copier.busy
    copier.storage.close()


def moving(number: int, *, to_storage: bool, epoch: int = 1) -> MoveBlocks:
    table = np.array([(5, 0)], np.int32).tobytes()
    return MoveBlocks(number=number, epoch=epoch, to_storage=to_storage, blocks=table, keys=pack_keys([bytes(16)]))


def until_answered(copier: BlockCopier, count: int) -> None:
    assert copier.storage is not None
    copier.iterate()
    while len(copier.answers) < count:
        assert select.select([copier.storage.fileno()], [], [], 30.0)[0]
        copier.iterate()
    assert copier.busy
