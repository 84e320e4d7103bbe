"""Memory that executors share, and copies from there: on a CPU, within one process and across two."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from penstock.engine_core.execution import block_copies
from penstock.engine_core.execution.block_copies import BlockCopier
from penstock.engine_core.execution.shared_blocks import Layout, SharedBlocks, total_bytes
from penstock.protocol.steps import BlocksCopied, CopyBlocks, copy_stamp
from tests.engine_core.execution.test_block_copies import CPU, HOST, memory, message, run

LAYOUT = Layout("cpu float32", 64, 700)
EPOCH = 1


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No copy is given up because a machine is busy, unless a test is about that."""
    monkeypatch.setattr(block_copies, "PATIENCE", 60.0)


def test_another_process_reads_and_writes_the_same_bytes() -> None:
    made = SharedBlocks.make(LAYOUT, CPU)
    made.blocks[699, 3], made.stamps[699] = 42, 1 << 40
    code = f"""
import torch
from penstock.engine_core.execution.shared_blocks import Layout, SharedBlocks
found = SharedBlocks.open({made.path!r}, Layout({LAYOUT.label!r}, {LAYOUT.run_bytes}, 1), torch.device("cpu"))
assert found.blocks.shape == (700, 64)
assert (int(found.blocks[699, 3]), int(found.stamps[699])) == (42, 1 << 40)
assert found.descriptor == -1
found.stamps[0] = 7
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    assert made.stamps[0] == 7


def test_what_a_dead_process_has_written_stays() -> None:
    made = SharedBlocks.make(LAYOUT, CPU)
    found = SharedBlocks.open(made.path, LAYOUT, CPU)
    made.blocks.fill_(5)
    os.close(made.descriptor)
    del made
    assert int(found.blocks.min()) == 5


@pytest.mark.parametrize("other", [Layout("cpu bfloat16", 64, 700), Layout("cpu float32", 32, 700)])
def test_blocks_of_another_kind_are_refused(other: Layout) -> None:
    made = SharedBlocks.make(LAYOUT, CPU)
    with pytest.raises(ValueError, match="its blocks are of cpu float32, 64 bytes each"):
        SharedBlocks.open(made.path, other, CPU)


def test_what_no_executor_shares_is_refused(tmp_path) -> None:  # type: ignore[no-untyped-def]
    plain = os.memfd_create("other", os.MFD_ALLOW_SEALING)
    with pytest.raises(ValueError, match="not what an executor shares"):
        SharedBlocks.open(f"/proc/{os.getpid()}/fd/{plain}", LAYOUT, CPU)
    with pytest.raises(OSError, match="No such file"):
        SharedBlocks.open(str(tmp_path / "missing"), LAYOUT, CPU)
    os.close(plain)


def test_memory_that_cannot_be_had_says_so() -> None:
    with pytest.raises(MemoryError, match="cannot be shared"):
        SharedBlocks.make(Layout("cpu", 1 << 40, 1 << 20), CPU)


def test_it_cannot_be_cut() -> None:
    made = SharedBlocks.make(LAYOUT, CPU)
    for size in (total_bytes(LAYOUT) - 1, total_bytes(LAYOUT) + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(made.descriptor, size)


def apart() -> tuple[BlockCopier, BlockCopier]:
    """An executor that shares its blocks, and one that reads them."""
    writer = BlockCopier(memory(), HOST, CPU, label="cpu", shared=True)
    reader = BlockCopier([line.zero_() for line in memory()], HOST, CPU, label="cpu")
    assert writer.shared is not None
    reader.others[0] = SharedBlocks.open(writer.shared.path, reader.layout, CPU)
    return writer, reader


def ask(reader: BlockCopier, pairs: list[tuple[int, int]], stamps: list[int], number: int = 7) -> None:
    table = np.array(pairs, np.int32).tobytes()
    asked = CopyBlocks(
        number=number, epoch=EPOCH, to_host=False, blocks=table, replica=0, stamps=np.array(stamps, np.int64).tobytes()
    )
    reader.ask(asked)
    reader.iterate()


def fetch(reader: BlockCopier, number: int, pairs: list[tuple[int, int]], stamps: list[int]) -> BlocksCopied:
    ask(reader, pairs, stamps, number)
    while not reader.answers:
        reader.iterate()
    return reader.answers.popleft()


def test_a_replica_reads_what_another_one_has_copied_out() -> None:
    writer, reader = apart()
    assert run(writer, message(1, [(7, 5), (2, 0)], to_host=True)) == [1]
    stamp = copy_stamp(EPOCH, 1)
    answer = fetch(reader, 1, [(3, 5), (1, 0)], [stamp, stamp])
    assert not answer.stale
    for line, was in zip(reader._lines.lines, writer._lines.lines, strict=True):
        assert torch.equal(line[[3, 1]], was[[7, 2]])


def test_blocks_that_have_been_written_again_are_stale() -> None:
    writer, reader = apart()
    run(writer, message(1, [(7, 5), (2, 0)], to_host=True), message(2, [(4, 5)], to_host=True))
    first, second = copy_stamp(EPOCH, 1), copy_stamp(EPOCH, 2)
    assert fetch(reader, 1, [(3, 5), (1, 0)], [first, first]).stale
    assert not fetch(reader, 2, [(3, 5), (1, 0)], [second, first]).stale
    assert fetch(reader, 3, [(3, 5)], [copy_stamp(EPOCH - 1, 2)]).stale, "the same number of another scheduler"


def test_memory_that_is_not_mapped_is_stale_and_leaves_the_device_alone() -> None:
    _, reader = apart()
    reader.others.clear()
    assert fetch(reader, 1, [(3, 5)], [1]).stale
    assert not any(line.any() for line in reader._lines.lines)
    assert reader.statistics().bytes_in == 0


def test_a_block_has_its_stamp_before_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    writer, _ = apart()
    assert writer.shared is not None
    seen: list[int] = []
    stamps = writer.shared.stamps
    monkeypatch.setattr(BlockCopier, "_copy", lambda *_, **__: seen.append(int(stamps[5])))
    run(writer, message(9, [(7, 5)], to_host=True))
    assert seen == [-copy_stamp(EPOCH, 9)]
    assert stamps[5] == copy_stamp(EPOCH, 9)


def test_blocks_are_read_as_they_come() -> None:
    """Those of the first message before those of the second one, whatever their places are."""
    writer, reader = apart()
    first, second = copy_stamp(EPOCH, 1), copy_stamp(EPOCH, 2)
    ask(reader, [(3, 0), (1, 5)], [second, first])
    assert (len(reader.answers), reader.busy, reader.statistics().bytes_in) == (0, True, 0)
    run(writer, message(1, [(7, 5)], to_host=True))
    reader.iterate()
    assert (len(reader.answers), reader.statistics().bytes_in) == (0, reader.layout.run_bytes)
    assert torch.equal(reader._lines.lines[0][1], writer._lines.lines[0][7])
    run(writer, message(2, [(2, 0)], to_host=True))
    reader.iterate()
    assert [answer.stale for answer in reader.answers] == [False]
    for line, was in zip(reader._lines.lines, writer._lines.lines, strict=True):
        assert torch.equal(line[[3, 1]], was[[2, 7]])


def test_what_comes_is_written_again_before_the_rest_is_there() -> None:
    writer, reader = apart()
    run(writer, message(1, [(7, 5)], to_host=True))
    ask(reader, [(3, 0), (1, 5)], [copy_stamp(EPOCH, 3), copy_stamp(EPOCH, 1)])
    run(writer, message(2, [(4, 5)], to_host=True), message(3, [(2, 0)], to_host=True))
    reader.iterate()
    assert [answer.stale for answer in reader.answers] == [True]


def test_what_is_written_again_while_it_is_read_is_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    writer, reader = apart()
    assert writer.shared is not None
    run(writer, message(1, [(7, 5)], to_host=True))
    stamps, again = writer.shared.stamps, np.array([-copy_stamp(EPOCH, 2)])
    monkeypatch.setattr(BlockCopier, "_copy", lambda *_, **__: stamps.__setitem__([5], again))
    ask(reader, [(3, 5)], [copy_stamp(EPOCH, 1)])
    assert [answer.stale for answer in reader.answers] == [True]


def test_a_block_that_is_being_written_for_another_never_comes() -> None:
    writer, reader = apart()
    assert writer.shared is not None
    ask(reader, [(3, 0)], [copy_stamp(EPOCH, 1)])
    assert not reader.answers
    writer.shared.stamps[0] = -copy_stamp(EPOCH, 2)
    reader.iterate()
    assert [answer.stale for answer in reader.answers] == [True]


def test_what_a_dead_executor_was_to_write_never_comes() -> None:
    _, reader = apart()
    ask(reader, [(3, 0)], [copy_stamp(EPOCH, 1)])
    reader.others.clear()
    reader.iterate()
    assert [answer.stale for answer in reader.answers] == [True]
    assert reader.statistics().bytes_in == 0


def test_nothing_is_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    _, reader = apart()
    ask(reader, [(3, 0)], [copy_stamp(EPOCH, 1)])
    monkeypatch.setattr(block_copies, "PATIENCE", 0.0)
    reader.iterate()
    assert [answer.stale for answer in reader.answers] == [True]


READER = """
import sys
import numpy as np, torch
from penstock.engine_core.execution.block_copies import BlockCopier
from penstock.engine_core.execution.shared_blocks import SharedBlocks
from tests.engine_core.execution.test_shared_blocks import fetch
device = torch.device("cuda", torch.cuda.device_count() - 1)
torch.cuda.set_device(device)
lines = [torch.zeros(9, 4, 16, device=device) for _ in range(4)]
reader = BlockCopier(lines, 6, device, label="gpu")
reader.others[0] = SharedBlocks.open(sys.argv[1], reader.layout, device)
answer = fetch(reader, 1, [(3, 5), (1, 0)], [int(sys.argv[2])] * 2)
torch.cuda.synchronize()
assert not answer.stale
for number, line in enumerate(lines):
    assert line[3].eq(100 * number + 7).all() and line[1].eq(100 * number + 2).all() and not line[2].any()
assert fetch(reader, 2, [(3, 5)], [1]).stale
"""


@pytest.mark.gpu
def test_another_process_copies_it_to_its_gpu() -> None:
    """From pinned memory of the first GPU's executor to the last GPU, which may be the same."""
    device = torch.device("cuda", 0)
    lines = [100 * number + torch.arange(9.0, device=device)[:, None, None].expand(9, 4, 16) for number in range(4)]
    writer = BlockCopier([line.contiguous() for line in lines], HOST, device, label="gpu", shared=True)
    writer.ask(message(1, [(7, 5), (2, 0)], to_host=True))
    while not writer.answers:
        writer.iterate()
    assert writer.shared is not None
    stamp = copy_stamp(EPOCH, 1)
    subprocess.run([sys.executable, "-c", READER, writer.shared.path, str(stamp)], check=True)
