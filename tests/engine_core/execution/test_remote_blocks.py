"""KV blocks read by NIXL: between agents of one process, and of two, over whatever UCX finds on this machine."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import pytest
import torch

from penstock.engine_core.distributed import nixl
from penstock.engine_core.execution import block_copies, remote_blocks
from penstock.engine_core.execution.block_copies import BlockCopier
from penstock.engine_core.execution.remote_blocks import PublishedBlocks, RemoteBlocks, RemoteRead
from penstock.engine_core.execution.shared_blocks import Layout, SharedBlocks
from penstock.engine_core.models import memory_estimate
from penstock.protocol.messages import BlocksAddress
from penstock.protocol.steps import BlocksCopied, CopyBlocks, copy_stamp
from tests.engine_core.execution.test_block_copies import CPU, HOST, memory, message, run

pytestmark = pytest.mark.skipif(not nixl.installed(), reason=nixl.MISSING)

EPOCH = 1
LIMIT = 60.0


def stamps(*numbers: int) -> list[int]:
    return [copy_stamp(EPOCH, number) for number in numbers]


@pytest.fixture(scope="module", name="agents")
def one_of_each() -> dict[str, nixl.Agent]:
    """An agent of each side, which takes half a second to make. They meet over TCP, as those of two hosts do that have
    no RDMA: UCX reads this when it makes them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UCX_TLS", "tcp")
        return {"reader": nixl.Agent("reader"), "writer": nixl.Agent("writer", served=True)}


class Pair:
    """An executor that shares its blocks, and one that reads them as if it were on another host."""

    def __init__(self, agents: dict[str, nixl.Agent]) -> None:
        self.writer = BlockCopier(memory(), HOST, CPU, label="cpu", shared=True)
        self.reader = BlockCopier([line.zero_() for line in memory()], HOST, CPU, label="cpu")
        assert self.writer.shared is not None
        self.writer.published = PublishedBlocks.make(self.writer.shared, agents["writer"])
        self.remote = self.reader.remote = RemoteBlocks(agents["reader"], self.reader.layout, CPU)

    def ask(self, pairs: list[tuple[int, int]], wanted: list[int], number: int = 7) -> None:
        asked = CopyBlocks(
            number=number, epoch=EPOCH, to_host=False, blocks=np.array(pairs, np.int32).tobytes(), replica=0,
            stamps=np.array(wanted, np.int64).tobytes(), addresses=(self.writer.address,),
        )  # fmt: skip
        self.reader.ask(asked)
        self.reader.iterate()

    def until(self, done: Callable[[], object]) -> None:
        """Iterate as the loop of steps does."""
        deadline = time.monotonic() + LIMIT
        while not done():
            assert time.monotonic() < deadline
            select.select([], [], [], 0.0005)
            self.reader.iterate()

    def answer(self) -> BlocksCopied:
        self.until(lambda: self.reader.answers)
        found = self.reader.answers.popleft()
        assert isinstance(found, BlocksCopied)
        return found

    def same(self, ours: list[int], theirs: list[int]) -> bool:
        lines = zip(self.reader._lines.lines, self.writer._lines.lines, strict=True)
        return all(torch.equal(line[ours], was[theirs]) for line, was in lines)


@pytest.fixture
def pair(agents: dict[str, nixl.Agent]) -> Iterator[Pair]:
    made = Pair(agents)
    yield made
    made.reader.forget()
    wait(lambda: len(made.remote._free) == remote_blocks.CHUNKS)  # nothing holds a chunk


def wait(done: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT
    while not done():
        assert time.monotonic() < deadline
        select.select([], [], [], 0.001)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is given up because this machine is slow."""
    monkeypatch.setattr(block_copies, "PATIENCE", 10 * LIMIT)


def test_blocks_come_as_they_were_written(pair: Pair) -> None:
    run(pair.writer, message(1, [(7, 5), (2, 0), (4, 1)], to_host=True))
    pair.ask([(3, 5), (1, 0), (6, 1)], stamps(1, 1, 1))
    assert not pair.answer().stale
    assert pair.same([3, 1, 6], [7, 2, 4])
    assert pair.reader.statistics().bytes_in == 3 * pair.reader.layout.run_bytes
    assert not pair.reader.busy


def test_more_blocks_than_there_is_room_for_come_one_chunk_after_another(
    agents: dict[str, nixl.Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_estimate, "STAGING", 1)  # a chunk is a block, and the device takes one at a time
    monkeypatch.setattr(remote_blocks, "CHUNKS", 2)
    pair = Pair(agents)
    run(pair.writer, message(1, [(at + 1, HOST - 1 - at) for at in range(HOST)], to_host=True))
    pair.ask([(8 - at, HOST - 1 - at) for at in range(HOST)], stamps(*[1] * HOST))
    assert not pair.answer().stale
    assert pair.same([8 - at for at in range(HOST)], [at + 1 for at in range(HOST)])
    wait(lambda: len(pair.remote._free) == 2)


def test_blocks_are_read_as_they_come(pair: Pair) -> None:
    pair.ask([(3, 0), (1, 5)], stamps(2, 1))
    run(pair.writer, message(1, [(7, 5)], to_host=True))
    pair.until(lambda: pair.reader.statistics().bytes_in == pair.reader.layout.run_bytes)
    assert not pair.reader.answers
    assert pair.same([1], [7])
    run(pair.writer, message(2, [(2, 0)], to_host=True))
    assert not pair.answer().stale
    assert pair.same([3, 1], [2, 7])


def test_blocks_that_have_been_written_again_are_stale(pair: Pair) -> None:
    run(pair.writer, message(1, [(7, 5), (2, 0)], to_host=True), message(2, [(4, 5)], to_host=True))
    pair.ask([(3, 5), (1, 0)], stamps(1, 1))
    assert pair.answer().stale
    pair.ask([(3, 5), (1, 0)], stamps(2, 1), number=8)
    assert not pair.answer().stale


def test_blocks_that_are_written_again_while_they_are_read_are_stale(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, read_chunk = pair.writer.shared, RemoteBlocks._read_chunk
    assert shared is not None
    run(pair.writer, message(1, [(7, 5)], to_host=True))

    def overtaken(self: RemoteBlocks, one: RemoteRead) -> None:
        shared.stamps[5] = -copy_stamp(EPOCH, 2)
        read_chunk(self, one)

    monkeypatch.setattr(RemoteBlocks, "_read_chunk", overtaken)
    pair.ask([(3, 5)], stamps(1))
    assert pair.answer().stale
    assert pair.reader.statistics().bytes_in == 0, "it never came near the device"


def test_what_a_hung_executor_was_to_write_is_waited_for_no_longer_than_of_a_mapped_one(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.ask([(3, 0)], stamps(1))
    pair.until(lambda: pair.remote._asked.empty())
    assert not pair.reader.answers
    monkeypatch.setattr(block_copies, "PATIENCE", 0.0)
    assert pair.answer().stale


def test_a_read_that_never_ends_is_given_up_and_holds_up_no_other(
    pair: Pair, agents: dict[str, nixl.Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(pair.writer, message(1, [(7, 5), (2, 0)], to_host=True))
    ended, hung = nixl.Agent.ended, set[int]()

    def hangs(self: nixl.Agent, read: int) -> bool:
        if not hung:
            hung.add(read)
        return read not in hung and ended(self, read)

    monkeypatch.setattr(nixl.Agent, "ended", hangs)
    pair.ask([(3, 5)], stamps(1))
    pair.until(lambda: hung)
    pair.ask([(1, 0)], stamps(1), number=8)
    answer = pair.answer()
    assert (answer.number, answer.stale) == (8, False)
    monkeypatch.setattr(block_copies, "PATIENCE", 0.0)
    answer = pair.answer()
    assert (answer.number, answer.stale) == (7, True)
    hung.add(0)
    monkeypatch.setattr(nixl.Agent, "ended", ended)


def test_blocks_of_another_kind_are_refused_with_one_warning(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    run(pair.writer, message(1, [(7, 5)], to_host=True))
    found = pair.writer.published
    assert found is not None
    other = msgspec.structs.replace(found.address, label="cuda bfloat16")
    pair.writer.published = PublishedBlocks(found.agent, other)
    for number in (1, 2):
        pair.ask([(3, 5)], stamps(1), number)
        assert pair.answer().stale
    (told,) = [record for record in caplog.records if record.message == "prefill_memory_failed"]
    assert "its blocks are of cuda bfloat16" in told.fields["reason"]  # type: ignore[attr-defined]


def test_without_an_address_they_are_stale_at_once(pair: Pair) -> None:
    pair.writer.published = None
    pair.ask([(3, 5)], stamps(1))
    assert pair.reader.answers.popleft() == BlocksCopied(7, stale=True)


def test_a_new_epoch_forgets_what_is_read(pair: Pair) -> None:
    pair.ask([(3, 0)], stamps(1))
    pair.reader.ask(message(9, [(1, 1)], to_host=True, epoch=EPOCH + 1))
    pair.until(lambda: pair.reader.answers)
    assert [answer.number for answer in pair.reader.answers] == [9]


WRITER = """
import sys
import msgspec, torch
from penstock.engine_core.distributed.nixl import Agent
from penstock.engine_core.execution.remote_blocks import PublishedBlocks
from penstock.engine_core.execution.shared_blocks import Layout, SharedBlocks
layout = msgspec.json.decode(sys.argv[1], type=Layout)
made = SharedBlocks.make(layout, torch.device("cpu"))
made.blocks.fill_(int(sys.argv[2]))
made.stamps[:3] = int(sys.argv[3])
published = PublishedBlocks.make(made, Agent(sys.argv[4], served=True))
sys.stdout.write("address " + msgspec.json.encode(published.address).decode() + "\\n")
sys.stdout.flush()
sys.stdin.read()
"""


def writing(layout: Layout, content: int, name: str) -> tuple[subprocess.Popen[bytes], BlocksAddress]:
    """Another process, whose first three blocks have been written by message 1."""
    words = (msgspec.json.encode(layout).decode(), str(content), str(copy_stamp(EPOCH, 1)), name)
    process = subprocess.Popen([sys.executable, "-c", WRITER, *words], stdin=-1, stdout=-1)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(b"address "):  # UCX may warn there
            return process, msgspec.json.decode(line[8:], type=BlocksAddress)
    raise AssertionError(f"it has ended with {process.wait()}")


def test_a_process_is_killed_and_another_one_takes_its_place(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    """What was asked of the dead one is stale at once, before the time limit, and the next one is met by its own
    metadata."""
    caplog.set_level("INFO")
    own = pair.writer.published
    first, address = writing(pair.reader.layout, 3, "first")
    pair.writer.published = PublishedBlocks(pair.remote._agent, address)
    try:
        pair.ask([(3, 0), (5, 2)], stamps(1, 1))
        assert not pair.answer().stale
        assert pair.reader._lines.lines[0][3].view(torch.uint8).unique().tolist() == [3]
        pair.ask([(4, 1), (6, 4)], stamps(1, 2), number=8)
        pair.until(lambda: pair.reader.statistics().bytes_in == 3 * pair.reader.layout.run_bytes)
        os.kill(first.pid, signal.SIGKILL)
        assert pair.answer().stale
        pair.ask([(4, 1)], stamps(1), number=9)
        assert pair.answer().stale
    finally:
        first.kill()
        first.communicate()
    second, address = writing(pair.reader.layout, 4, "second")
    pair.writer.published = PublishedBlocks(pair.remote._agent, address)
    try:
        pair.ask([(7, 0)], stamps(1), number=10)
        assert not pair.answer().stale
        assert pair.reader._lines.lines[0][7].view(torch.uint8).unique().tolist() == [4]
        pair.writer.published = own  # while the second one still lives
        run(pair.writer, message(1, [(7, 5)], to_host=True))
        pair.ask([(8, 5)], stamps(1), number=11)
        assert not pair.answer().stale
        assert pair.same([8], [7])
    finally:
        second.kill()
        second.communicate()
    events = [record.message for record in caplog.records]
    assert events.count("prefill_memory_failed") == 1, "once for each process"
    assert events[-1] == "prefill_memory"


def test_a_read_that_hangs_is_broken_off(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The executor's process is stopped. What hangs holds its chunk for as long as it may be written, and no longer."""
    process, address = writing(pair.reader.layout, 3, "stopped")
    read_chunk = RemoteBlocks._read_chunk

    def stopped(self: RemoteBlocks, one: RemoteRead) -> None:
        os.kill(process.pid, signal.SIGSTOP)
        read_chunk(self, one)

    pair.writer.published = PublishedBlocks(pair.remote._agent, address)
    try:
        pair.ask([(3, 0)], stamps(1))
        assert not pair.answer().stale
        wait(lambda: len(pair.remote._free) == remote_blocks.CHUNKS)
        monkeypatch.setattr(RemoteBlocks, "_read_chunk", stopped)
        monkeypatch.setattr(remote_blocks, "GRACE", 0.01)
        pair.ask([(4, 1)], stamps(1), number=8)
        pair.until(lambda: len(pair.remote._free) < remote_blocks.CHUNKS)
        monkeypatch.setattr(block_copies, "PATIENCE", 0.0)
        assert pair.answer().stale
        wait(lambda: len(pair.remote._free) == remote_blocks.CHUNKS)
        assert not pair.remote._peers
        monkeypatch.setattr(block_copies, "PATIENCE", 10 * LIMIT)
        monkeypatch.setattr(RemoteBlocks, "_read_chunk", read_chunk)
        os.kill(process.pid, signal.SIGCONT)
        pair.ask([(5, 2)], stamps(1), number=9)
        assert not pair.answer().stale
    finally:
        process.kill()
        process.communicate()


def test_memory_that_is_mapped_is_not_read_by_nixl(pair: Pair) -> None:
    assert pair.writer.shared is not None
    pair.reader.others[0] = SharedBlocks.open(pair.writer.shared.path, pair.reader.layout, CPU)
    run(pair.writer, message(1, [(7, 5)], to_host=True))
    pair.ask([(3, 5)], stamps(1))
    assert not pair.reader.answers.popleft().stale  # type: ignore[union-attr]
    assert not pair.remote._peers
