"""The threads between the host's memory and the disk: what is asked for is done in order, and ends when it is told to,
whatever the disk does."""

from __future__ import annotations

import errno
import os
import select
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from threading import Event

import numpy as np
import pytest

from penstock.engine_core.execution import storage_copies
from penstock.engine_core.execution.block_files import ENTRY, INDEX_START, BadBlock, BlockFiles, Bytes
from penstock.engine_core.execution.storage_copies import StorageCopier
from penstock.protocol.step_columns import integers
from penstock.protocol.storage_blocks import (
    BlocksFound,
    BlocksListed,
    BlocksMoved,
    FindBlocks,
    ForgetBlocks,
    ListBlocks,
    MoveBlocks,
    StorageAnswer,
    pack_keys,
    unpack_keys,
)

EACH, PLACES, BLOCKS = 300, 20, 12
KEYS = [bytes([number]) * 16 for number in range(1, 40)]
LIMIT = 30.0


@pytest.fixture
def host() -> Bytes:
    return np.random.default_rng(1).integers(0, 256, (BLOCKS, EACH), np.uint8)


@pytest.fixture
def copier(tmp_path: Path, host: Bytes) -> Iterator[StorageCopier]:
    files = BlockFiles(tmp_path, INDEX_START + PLACES * (4096 + ENTRY.size), EACH, bytes(32))
    found = StorageCopier(files, host, threads=3)
    yield found
    found.close()


def move(number: int, rows: list[tuple[int, int]], *, to_storage: bool, epoch: int = 1, first: int = 0) -> MoveBlocks:
    return MoveBlocks(
        number=number, epoch=epoch, to_storage=to_storage, blocks=np.array(rows, np.int32).tobytes(),
        keys=pack_keys(KEYS[first : first + len(rows)]),
    )  # fmt: skip


def answers(copier: StorageCopier, count: int) -> list[StorageAnswer]:
    found: list[StorageAnswer] = []
    while len(found) < count:
        assert select.select([copier.fileno()], [], [], LIMIT)[0], "no answer"
        found += copier.collect()
    return found


def moved(copier: StorageCopier, message: MoveBlocks) -> list[int]:
    """Rows that failed."""
    copier.ask(message)
    (answer,) = answers(copier, 1)
    assert isinstance(answer, BlocksMoved)
    assert answer.number == message.number
    return integers(answer.failed).tolist()


def test_blocks_go_and_come_back_elsewhere(copier: StorageCopier, host: Bytes) -> None:
    before = host.copy()
    assert moved(copier, move(1, [(2, 9), (5, 0), (7, 19)], to_storage=True)) == []
    host[:] = 0
    assert moved(copier, move(2, [(1, 9), (0, 0), (3, 19)], to_storage=False)) == []
    assert np.array_equal(host[[1, 0, 3]], before[[2, 5, 7]])
    assert not host[[2, 4, 5, 6, 7, 8, 9, 10, 11]].any()
    found = copier.statistics()
    assert (found.bytes_out, found.bytes_in, found.failed) == (3 * EACH, 3 * EACH, 0)
    assert min(found.seconds_out, found.seconds_in) > 0


class Elsewhere:
    """A store of another kind, as docs/extending.md describes it."""

    def __init__(self) -> None:
        self.total, self.block_bytes, self.identity = PLACES, EACH, bytes(32)
        self.there: dict[int, tuple[bytes, bytes]] = {}  # by place: key and block
        self.sent: dict[int, bytes] = {}

    def entries(self) -> list[tuple[int, bytes]]:
        return [(place, key) for place, (key, _) in self.there.items()]

    def read(self, place: int, key: bytes, buffer: Bytes) -> None:
        if place == 4:
            raise ConnectionError("the store is gone")
        if self.there.get(place, (b"",))[0] != key:
            raise BadBlock("it holds another")
        buffer[:] = np.frombuffer(self.there[place][1], np.uint8)

    def new_buffer(self) -> Bytes:
        return np.zeros(EACH, np.uint8)

    def missing(self, keys: Sequence[bytes]) -> list[int]:
        there = {key for key, _ in self.there.values()}
        return [number for number, key in enumerate(keys) if key not in there]

    def begin(self, places: Iterable[int], keys: Sequence[bytes] = ()) -> None:
        for place in places:
            self.there.pop(place, None)

    def write(self, place: int, key: bytes, buffer: Bytes) -> int:
        self.sent[place] = buffer.tobytes()
        return 0

    def commit(self, rows: Sequence[tuple[int, bytes, int]]) -> None:
        self.there.update({place: (key, self.sent.pop(place)) for place, key, _ in rows})

    drop = begin

    def wipe(self, identity: bytes) -> None:
        self.there.clear()

    def close(self) -> None:
        self.there.clear()


def test_a_store_of_another_kind_may_stand_there(host: Bytes) -> None:
    copier, before = StorageCopier(Elsewhere(), host, threads=2), host.copy()
    assert moved(copier, move(1, [(2, 9), (5, 0), (7, 4)], to_storage=True)) == []
    assert moved(copier, move(2, [(1, 9), (0, 7), (3, 4)], to_storage=False)) == [1, 2]
    assert np.array_equal(host[[1, 0, 3]], before[[2, 0, 3]])
    copier.ask(ForgetBlocks(1, np.array([9], np.int32).tobytes()))
    copier.ask(ListBlocks(3, 1))
    (listed,) = answers(copier, 1)
    assert isinstance(listed, BlocksListed)
    assert dict(zip(integers(listed.places).tolist(), unpack_keys(listed.keys), strict=True)) == {
        0: KEYS[1],
        4: KEYS[2],
    }
    copier.close()


def test_what_is_not_there_fails_alone(copier: StorageCopier, host: Bytes) -> None:
    moved(copier, move(1, [(0, 3), (1, 4)], to_storage=True))
    before = host.copy()
    assert moved(copier, move(2, [(2, 3), (3, 5), (4, 4)], to_storage=False)) == [1, 2]
    assert np.array_equal(host[2], before[0])
    assert np.array_equal(host[3:], before[3:]), "the memory of what failed is as it was"
    assert copier.statistics().failed == 2


def test_a_list_comes_in_parts(copier: StorageCopier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_copies, "LISTED", 2)
    copier.ask(ListBlocks(1, 1))
    (empty,) = answers(copier, 1)
    assert empty == BlocksListed(number=1, places=b"", keys=b"", last=True)
    moved(copier, move(2, [(number, number + 1) for number in range(5)], to_storage=True))
    copier.ask(ListBlocks(3, 1))
    parts = [part for part in answers(copier, 3) if isinstance(part, BlocksListed)]
    assert [part.last for part in parts] == [False, False, True]
    assert [place for part in parts for place in integers(part.places).tolist()] == [1, 2, 3, 4, 5]
    assert [key for part in parts for key in unpack_keys(part.keys)] == KEYS[:5]


class HangingFiles(BlockFiles):
    """Reads wait until they may go on."""

    def __init__(self, files: BlockFiles) -> None:
        self.__dict__.update(files.__dict__)
        self.reached, self.goes_on = Event(), Event()

    def read(self, place: int, key: bytes, buffer: Bytes) -> None:
        self.reached.set()
        assert self.goes_on.wait(LIMIT)
        super().read(place, key, buffer)


def test_a_disk_that_hangs_gives_the_memory_back(copier: StorageCopier, host: Bytes) -> None:
    """A message that counts no more touches nothing, however late its reads end."""
    moved(copier, move(1, [(0, 3), (1, 4)], to_storage=True))
    hanging = copier.store = HangingFiles(copier.store)
    copier.ask(move(2, [(6, 3), (7, 4)], to_storage=False))
    assert hanging.reached.wait(LIMIT)
    copier.forget()
    host[6:8] = 99
    hanging.goes_on.set()
    copier.ask(move(3, [(8, 3)], to_storage=False))
    assert [answer.number for answer in answers(copier, 1)] == [3]
    assert (host[6:8] == 99).all()
    assert np.array_equal(host[8], host[0])


def test_keys_are_looked_for_while_blocks_are_read(host: Bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    store, reached, goes_on = Elsewhere(), Event(), Event()

    def hangs(*_: object) -> None:
        reached.set()
        assert goes_on.wait(LIMIT)

    monkeypatch.setattr(store, "read", hangs)
    copier = StorageCopier(store, host, threads=1)
    moved(copier, move(1, [(0, 3), (1, 5)], to_storage=True))
    copier.ask(move(2, [(6, 3)], to_storage=False))
    assert reached.wait(LIMIT)
    copier.ask(FindBlocks(3, 1, pack_keys([KEYS[0], KEYS[7], KEYS[1]])))
    assert answers(copier, 1) == [BlocksFound(3, np.array([1], np.int32).tobytes())]
    goes_on.set()
    assert [answer.number for answer in answers(copier, 1)] == [2]
    copier.close()


def test_nothing_waits_for_questions_that_nobody_asks(tmp_path: Path, host: Bytes) -> None:
    """An executor's own files are not asked: the scheduler knows what is in them."""
    for store, asked in ((BlockFiles(tmp_path, LIMIT_BYTES, EACH, bytes(32)), 0), (Elsewhere(), 1)):
        before = set(threading.enumerate())
        copier = StorageCopier(store, host, threads=1)
        begun = [thread.name for thread in threading.enumerate() if thread not in before]
        assert begun.count("storage-keys") == asked
        copier.close()


def test_a_store_that_cannot_be_asked_lacks_everything(
    host: Bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(keys: Sequence[bytes]) -> list[int]:
        raise ConnectionError("nobody answers")

    store = Elsewhere()
    monkeypatch.setattr(store, "missing", fails)
    copier = StorageCopier(store, host, threads=1)
    copier.ask(FindBlocks(1, 1, pack_keys(KEYS[:2])))
    assert answers(copier, 1) == [BlocksFound(1, np.array([0, 1], np.int32).tobytes(), failed=True)]
    assert "store_not_asked" in caplog.text
    copier.close()


@pytest.mark.parametrize("how", ["epoch", "everything"])
def test_what_ends_messages(copier: StorageCopier, host: Bytes, how: str) -> None:
    moved(copier, move(1, [(0, 3), (1, 4)], to_storage=True))
    hanging = copier.store = HangingFiles(copier.store)
    copier.ask(move(2, [(6, 3)], to_storage=False))
    assert hanging.reached.wait(LIMIT)
    epoch = 2 if how == "epoch" else 1
    if how == "everything":
        copier.ask(ForgetBlocks(1, everything=True))
    copier.ask(ListBlocks(3, epoch))
    host[6] = 99
    hanging.goes_on.set()
    (answer,) = answers(copier, 1)
    assert isinstance(answer, BlocksListed)
    assert len(integers(answer.places)) == (2 if how == "epoch" else 0)
    assert (host[6] == 99).all()


def test_what_is_written_meanwhile_does_not_count(copier: StorageCopier, host: Bytes) -> None:
    """A block that was being written when everything was forgotten is not found."""
    copier.ask(move(1, [(0, 3)], to_storage=True))
    copier.forget()
    copier.ask(ForgetBlocks(1, everything=True))
    copier.ask(ListBlocks(2, 1))
    (answer,) = answers(copier, 1)
    assert isinstance(answer, BlocksListed)
    assert answer.places == b""


def test_other_weights_find_nothing_in_another_life(tmp_path: Path, copier: StorageCopier) -> None:
    moved(copier, move(1, [(0, 3)], to_storage=True))
    copier.renew()
    assert moved(copier, move(2, [(6, 3)], to_storage=False)) == [0]
    assert moved(copier, move(3, [(1, 4)], to_storage=True)) == []
    assert moved(copier, move(4, [(1, 4)], to_storage=False)) == []
    assert BlockFiles(tmp_path, LIMIT_BYTES, EACH, bytes(32)).entries() == []


LIMIT_BYTES = INDEX_START + PLACES * (4096 + ENTRY.size)


def test_single_places_are_forgotten(tmp_path: Path, copier: StorageCopier) -> None:
    moved(copier, move(1, [(0, 3), (1, 4)], to_storage=True))
    copier.ask(ForgetBlocks(1, np.array([3], np.int32).tobytes()))
    assert moved(copier, move(2, [(6, 3), (7, 4)], to_storage=False)) == [0]
    assert len(BlockFiles(tmp_path, LIMIT_BYTES, EACH, bytes(32)).entries()) == 1


def test_a_disk_that_fails_at_the_end(
    copier: StorageCopier, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Data that the system could not write is noticed when it is asked to: nothing of the message is there."""

    def fails(file: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", fails)
        assert moved(copier, move(1, [(0, 3), (1, 4)], to_storage=True)) == [0, 1]
    assert moved(copier, move(2, [(0, 3)], to_storage=False)) == [0]
    assert "storage_failed" in caplog.text
    assert copier.statistics().bytes_out == 0
