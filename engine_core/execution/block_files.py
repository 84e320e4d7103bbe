"""KV blocks of one executor in files of its own: numbered places, each with a block, and an index of what they hold.

`blocks` has the places one behind the other. `index` begins with a header, whose identity covers everything that
determines what a block holds beside its key: weights, layout, types, this executor's share. Where it is another one,
the files are emptied. An entry of the index has the key and a checksum of key and block. It is written once the block
is on the disk. So a block that was written halfway, one that was overwritten behind an old entry, and one that has
rotted are found out by their checksums, and nothing has to be undone after a crash. There are no temporary files.

The checksum is CRC-32, as file systems have it: it is there against mistakes, not against those who may write the
files. zlib has it at several GB/s without a dependency. Blocks go past the page cache (O_DIRECT) where the file system
lets them: the host's memory is the cache. Eight threads read 2 MiB blocks of a virtual disk at 1.2 GB/s so, and at 0.7
to 1.0 through the page cache. Elsewhere they are dropped from it.
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.protocol.storage_blocks import pack_keys, unpack_keys

MAGIC = b"penstock KV v1\0\0"
HEADER = struct.Struct("<16s32sQI")  # magic, identity, bytes of a block, checksum of these
ENTRY = struct.Struct("<Q17s3xI28xI")  # number of the write, key, checksum of the block, checksum of these
PAGE = 4096
INDEX_START = 4096
Bytes = NDArray[np.uint8]


class BadBlock(Exception):
    """A place does not hold what it should. The cause is its text."""


class Entry(msgspec.Struct, frozen=True, gc=False):
    """What a place holds."""

    write: int  # number: later writes have larger ones
    key: bytes
    checksum: int

    def packed(self, place: int) -> bytes:
        head = ENTRY.pack(self.write, pack_keys((self.key,)), self.checksum, 0)[:-4]
        return head + zlib.crc32(head, place).to_bytes(4, "little")


def places_in(limit: int, block_bytes: int) -> int:
    """Blocks that so many bytes of a disk have room for, with all that the files have beside them."""
    return max(0, limit - INDEX_START) // (stride_of(block_bytes) + ENTRY.size)


def too_small(block_bytes: int) -> str:
    """Why there is no place in too few bytes."""
    least = INDEX_START + stride_of(block_bytes) + ENTRY.size
    return f"a KV block takes {block_bytes} bytes, and {least} with what is kept about it; give as many at least"


def stride_of(block_bytes: int) -> int:
    """Bytes from place to place."""
    return -(-block_bytes // PAGE) * PAGE


class BlockFiles:
    """The files of a folder that nobody else uses. One thread calls what changes entries; any may read and write blocks
    of different places. All raise OSError. lock: a descriptor that says whose the folder is, closed with the files."""

    def __init__(self, folder: Path, limit: int, block_bytes: int, identity: bytes, lock: int | None = None) -> None:
        assert len(identity) == 32
        self.total = places_in(limit, block_bytes)
        self.block_bytes, self.identity = block_bytes, identity
        self._stride = stride_of(block_bytes)
        self._index = os.open(folder / "index", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self._blocks, self._direct = open_blocks(folder / "blocks")
        self._descriptors = [file for file in (self._index, self._blocks, lock) if file is not None]
        self._entries: dict[int, Entry] = {}
        self._writes = 0
        self._emptied = True  # whether the last `wipe` came to its end
        self._open()

    def _open(self) -> None:
        header = os.pread(self._index, HEADER.size, 0)
        if header != self._header():
            self.wipe(self.identity)
            return
        os.ftruncate(self._index, INDEX_START + self.total * ENTRY.size)
        os.ftruncate(self._blocks, min(os.fstat(self._blocks).st_size, self.total * self._stride))
        there = (os.fstat(self._blocks).st_size - self.block_bytes) // self._stride + 1  # written to their ends
        data = os.pread(self._index, self.total * ENTRY.size, INDEX_START)
        for place in range(max(0, min(there, len(data) // ENTRY.size))):
            packed = data[place * ENTRY.size : (place + 1) * ENTRY.size]
            write, key, checksum, own = ENTRY.unpack(packed)
            if write and own == zlib.crc32(packed[:-4], place):
                self._entries[place] = Entry(write, unpack_keys(key)[0], checksum)
        self._writes = max([entry.write for entry in self._entries.values()], default=0)

    def _header(self) -> bytes:
        head = HEADER.pack(MAGIC, self.identity, self.block_bytes, 0)[:-4]
        return head + zlib.crc32(head).to_bytes(4, "little")

    def entries(self) -> list[tuple[int, bytes]]:
        """Places that hold something, with its keys, in the order in which they were written."""
        found = sorted(self._entries.items(), key=lambda one: one[1].write)
        return [(place, entry.key) for place, entry in found]

    def read(self, place: int, key: bytes, buffer: Bytes) -> None:
        """Raises BadBlock if the place does not hold this block, whole and as it was written. buffer: `new_buffer`."""
        entry = self._entries.get(place)
        if entry is None or entry.key != key:
            raise BadBlock("its place holds another block, or none")
        start = place * self._stride
        if os.preadv(self._blocks, [buffer.data], start) < self.block_bytes:
            raise BadBlock("the file ends before it does")
        if not self._direct:
            os.posix_fadvise(self._blocks, start, self._stride, os.POSIX_FADV_DONTNEED)
        if self.checksum(key, buffer) != entry.checksum:
            raise BadBlock("its checksum is wrong")

    def new_buffer(self) -> Bytes:
        """Memory for a block, as the system wants it, behind which there is some to spare."""
        return np.frombuffer(mmap.mmap(-1, self._stride), np.uint8)

    def checksum(self, key: bytes, buffer: Bytes) -> int:
        """Of a block and its key."""
        return zlib.crc32(buffer[: self.block_bytes].data, zlib.crc32(key))

    def begin(self, places: Iterable[int]) -> None:
        """What these places hold is about to be overwritten."""
        if not self._emptied:
            self.wipe(self.identity)
        for place in places:
            self._entries.pop(place, None)

    def write(self, place: int, key: bytes, buffer: Bytes) -> int:
        """It counts for nothing before `commit`, which is told the checksum. buffer: `new_buffer`, with the block in
        front."""
        assert place not in self._entries
        view, at = buffer.data, place * self._stride
        while len(view):
            done = os.pwrite(self._blocks, view, at)
            view, at = view[done:], at + done
        return self.checksum(key, buffer)

    def commit(self, rows: Sequence[tuple[int, bytes, int]]) -> None:
        """These places, of which each has its key and its checksum, have been written."""
        os.fdatasync(self._blocks)
        for place, key, own in rows:
            if not self._direct:
                os.posix_fadvise(self._blocks, place * self._stride, self._stride, os.POSIX_FADV_DONTNEED)
            self._writes += 1
            entry = Entry(self._writes, key, own)
            os.pwrite(self._index, entry.packed(place), INDEX_START + place * ENTRY.size)
            self._entries[place] = entry

    def drop(self, places: Iterable[int], keys: Sequence[bytes] = ()) -> None:
        """What these places hold will not be found any more, in a later life neither. keys: of a shared store."""
        for place in places:
            self._entries.pop(place, None)
            os.pwrite(self._index, bytes(ENTRY.size), INDEX_START + place * ENTRY.size)
        os.fdatasync(self._index)

    def wipe(self, identity: bytes) -> None:
        """Empty the files. What is written from now on is of this identity."""
        self._entries.clear()
        self.identity, self._emptied = identity, False
        os.ftruncate(self._index, 0)
        os.ftruncate(self._blocks, 0)
        os.pwrite(self._index, self._header(), 0)
        os.ftruncate(self._index, INDEX_START + self.total * ENTRY.size)
        os.fdatasync(self._index)
        self._emptied = True

    def close(self) -> None:
        while self._descriptors:  # a number that was closed before may be another file's by now
            os.close(self._descriptors.pop())


def open_blocks(path: Path) -> tuple[int, bool]:
    """The file, and whether it is read and written past the page cache. Raises OSError."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        found = os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags, 0o600), False
    try:
        os.preadv(found, [mmap.mmap(-1, PAGE)], 0)
    except OSError as error:
        os.close(found)
        if error.errno != errno.EINVAL:  # of a drive whose sectors are larger than a page
            raise
        return os.open(path, flags, 0o600), False
    return found, True
