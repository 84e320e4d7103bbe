"""KV blocks in files: what is written is found again in another life, and whatever has happened to it is noticed."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.engine_core.execution import block_files
from penstock.engine_core.execution.block_files import (
    ENTRY,
    INDEX_START,
    BadBlock,
    BlockFiles,
    Bytes,
    places_in,
    stride_of,
)

EACH = 5000  # bytes of a block: no multiple of a page
LIMIT = INDEX_START + 6 * (2 * 4096 + ENTRY.size) + 100
MINE, OTHER = bytes(32), bytes(31) + b"1"
KEYS = [bytes([number]) * 16 + (b"\2" if number % 2 else b"") for number in range(1, 9)]


@pytest.fixture
def files(tmp_path: Path) -> Iterator[BlockFiles]:
    found = opened(tmp_path)
    yield found
    found.close()


def opened(folder: Path, identity: bytes = MINE, limit: int = LIMIT, each: int = EACH) -> BlockFiles:
    return BlockFiles(folder, limit, each, identity)


def content(number: int) -> Bytes:
    return np.random.default_rng(number).integers(0, 256, EACH, np.uint8)


def store(files: BlockFiles, *numbers: int, first: int = 0) -> None:
    """Blocks with these numbers' keys in places from `first` on."""
    places = range(first, first + len(numbers))
    files.begin(places)
    written = []
    for place, number in zip(places, numbers, strict=True):
        written.append((place, KEYS[number], files.write(place, KEYS[number], filled(files, number))))
    files.commit(written)


def filled(files: BlockFiles, number: int) -> Bytes:
    buffer = files.new_buffer()
    buffer[:EACH] = content(number)
    return buffer


def holds(files: BlockFiles, place: int, number: int) -> bool:
    found = files.new_buffer()
    try:
        files.read(place, KEYS[number], found)
    except BadBlock:
        return False
    assert np.array_equal(found[:EACH], content(number)), "another block, or one that has changed"
    return True


def test_blocks_are_found_in_another_life_in_their_order(tmp_path: Path, files: BlockFiles) -> None:
    assert files.total == 6
    store(files, 3, 4, first=4)
    store(files, 1, 2)
    files.close()
    again = opened(tmp_path)
    assert again.entries() == [(4, KEYS[3]), (5, KEYS[4]), (0, KEYS[1]), (1, KEYS[2])]
    assert all(holds(again, place, number) for place, number in ((4, 3), (5, 4), (0, 1), (1, 2)))
    assert not holds(again, 4, 4)
    assert not holds(again, 3, 3)
    store(again, 5, first=5)
    assert again.entries()[-1] == (5, KEYS[5])


def test_the_files_take_no_more_than_they_may(tmp_path: Path, files: BlockFiles) -> None:
    store(files, *range(6))
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= LIMIT
    assert places_in(LIMIT, EACH) == 6
    assert places_in(INDEX_START + stride_of(EACH), EACH) == 0
    assert places_in(0, EACH) == 0


def test_closing_twice_closes_nobody_elses_files(tmp_path: Path, files: BlockFiles) -> None:
    files.close()
    again = opened(tmp_path)  # its descriptors have the numbers of those before
    files.close()
    store(again, 1)
    assert holds(again, 0, 1)
    again.close()


def test_only_the_owner_reads_them(tmp_path: Path, files: BlockFiles) -> None:
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}


def test_less_room_than_before(tmp_path: Path, files: BlockFiles) -> None:
    store(files, *range(6))
    smaller = opened(tmp_path, limit=INDEX_START + 2 * (8192 + ENTRY.size))
    assert smaller.entries() == [(0, KEYS[0]), (1, KEYS[1])]
    assert holds(smaller, 1, 1)
    assert (tmp_path / "blocks").stat().st_size == 2 * 8192
    smaller.close()
    assert len(opened(tmp_path).entries()) == 2, "those that were cut off are not there again"


@pytest.mark.parametrize(("identity", "each"), [(OTHER, EACH), (MINE, EACH - 1)])
def test_another_identity_finds_nothing(tmp_path: Path, files: BlockFiles, identity: bytes, each: int) -> None:
    store(files, 1, 2)
    assert opened(tmp_path, identity, each=each).entries() == []
    assert (tmp_path / "blocks").stat().st_size == 0, "the room is given back"
    assert opened(tmp_path).entries() == [], "and nobody finds it again"


def test_every_bit_of_a_block_is_watched(tmp_path: Path, files: BlockFiles) -> None:
    store(files, 1, 2)
    for at in (0, EACH // 2, EACH - 1):
        flip(tmp_path / "blocks", 8192 + at)
        assert not holds(files, 1, 2)
        assert holds(files, 0, 1)
        flip(tmp_path / "blocks", 8192 + at)
    assert holds(files, 1, 2)


def test_every_byte_of_the_index_is_watched(tmp_path: Path, files: BlockFiles) -> None:
    store(files, 1, 2)
    for at in range(INDEX_START + ENTRY.size, INDEX_START + 2 * ENTRY.size):
        flip(tmp_path / "index", at)
        assert opened(tmp_path).entries() == [(0, KEYS[1])]
        flip(tmp_path / "index", at)
    assert len(opened(tmp_path).entries()) == 2
    data = (tmp_path / "index").read_bytes()
    moved = data[: INDEX_START + ENTRY.size] + data[INDEX_START : INDEX_START + ENTRY.size]
    (tmp_path / "index").write_bytes(moved)
    assert opened(tmp_path).entries() == [(0, KEYS[1])], "an entry belongs to its place"
    flip(tmp_path / "index", 20)
    assert opened(tmp_path).entries() == []


def test_a_short_file(tmp_path: Path, files: BlockFiles) -> None:
    store(files, 1, 2, 3)
    os.truncate(tmp_path / "blocks", 2 * 8192 + EACH - 1)
    assert not holds(files, 2, 3)
    assert holds(files, 1, 2)
    assert len(opened(tmp_path).entries()) == 2
    os.truncate(tmp_path / "blocks", 0)
    assert opened(tmp_path).entries() == []


def test_a_crash_between_block_and_entry(tmp_path: Path, files: BlockFiles) -> None:
    """The old entry is still there, and its block is another one by now."""
    store(files, 1)
    files.begin([0])
    files.write(0, KEYS[2], filled(files, 2))
    assert not holds(files, 0, 1)
    again = opened(tmp_path)
    assert again.entries() == [(0, KEYS[1])]
    assert not holds(again, 0, 1)


def test_what_is_dropped_is_found_in_no_other_life(tmp_path: Path, files: BlockFiles) -> None:
    store(files, 1, 2)
    files.drop([0])
    assert not holds(files, 0, 1)
    assert opened(tmp_path).entries() == [(1, KEYS[2])]


def test_a_disk_that_is_full(files: BlockFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was begun is gone, what was there before is not."""
    store(files, 1, 2)
    real, room = os.pwrite, [8192 + 4096]

    def full(file: int, data: Any, at: int) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        part = data[: room[0]]
        room[0] -= len(part)
        return real(file, part, at)

    monkeypatch.setattr(block_files.os, "pwrite", full)
    with pytest.raises(OSError, match="No space"):
        store(files, 3, 4, first=1)
    assert holds(files, 0, 1)
    assert not any(holds(files, 1, number) for number in (2, 3))


def test_nothing_is_written_behind_a_failed_wipe(
    tmp_path: Path, files: BlockFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entries of other weights below the old header would be found in another life."""
    store(files, 1)

    def fails(file: int, size: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(block_files.os, "ftruncate", fails)
        with pytest.raises(OSError, match="Input"):
            files.wipe(OTHER)
        assert files.entries() == []
        with pytest.raises(OSError, match="Input"):
            store(files, 2)
    assert opened(tmp_path).entries() == [(0, KEYS[1])], "what is there is still of the old identity"
    store(files, 2)
    assert opened(tmp_path, OTHER).entries() == [(0, KEYS[2])]


@pytest.mark.parametrize("refuses", ["open", "preadv"])
def test_a_file_system_without_direct_access(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuses: str) -> None:
    real_open = os.open

    def plain(path: Path, flags: int, mode: int) -> int:
        if refuses == "open" and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_open(path, flags, mode)

    def sectors(file: int, buffers: object, at: int) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    with monkeypatch.context() as patch:
        patch.setattr(block_files.os, "open", plain)
        if refuses == "preadv":
            patch.setattr(block_files.os, "preadv", sectors)
        found = opened(tmp_path)
    store(found, 1, 2)
    assert holds(found, 0, 1)
    assert holds(found, 1, 2)
    found.close()
    assert len(opened(tmp_path).entries()) == 2


def flip(path: Path, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))
