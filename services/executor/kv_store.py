"""KV blocks in a Mooncake store, which servers of the same model share, and the process through which it is reached.

A block's key is PREFIX/identity/key: the identity covers what its bytes depend on beside the scheduler's key, this
executor's share included. Behind the block is a checksum of both. So no block of another model, rank or version is
ever read, and bytes that were damaged on their way are found out. It is CRC-32, as on disk: it is there against
mistakes, not against those who may write to the store.

Weights are told apart by their contents, since times of files differ among hosts.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Event, Thread

import msgspec
import numpy as np

from penstock.engine_core.execution.block_copies import BlockCopier
from penstock.engine_core.execution.block_files import BadBlock, Bytes
from penstock.engine_core.execution.storage_copies import THREADS, StorageCopier
from penstock.engine_core.loading.checksums import published_hashes
from penstock.engine_core.models.weight_files import find_files
from penstock.protocol.config import Config
from penstock.protocol.errors import ConfigError, ModelError
from penstock.protocol.kv_store import OPTION, MooncakeSettings, read_store
from penstock.services.executor.kv_disk import Served
from penstock.services.executor.mooncake_client import MISSING, Call, Channel
from penstock.services.supervisor import logs

log = logging.getLogger(__name__)

PREFIX = "penstock"
LOG_LEVEL = "MC_LOG_LEVEL"  # Mooncake's own; without it failures are told by their codes alone
CHECKSUM = 4  # bytes behind a block
REMEMBERED = 2  # blocks of the store that the scheduler remembers, for each of the host's memory
ANSWER_SECONDS = 90.0  # for a call; Mooncake itself gives up after 30
FIRST_REST, LONGEST_REST = 1.0, 64.0  # seconds before the process is started again
OUT_OF_ROOM = -200  # Mooncake's code
MEANINGS: Mapping[int, str] = {
    OUT_OF_ROOM: "it has no room", -600: "the block has another size", MISSING: "the block is not there",
    -800: "the host that has the block does not answer", -900: "the master does not answer",
    -901: "the master does not answer in time",
}  # fmt: skip


def attach_store(config: Config, copies: BlockCopier | None, served: Served) -> None:
    """Give the copier of blocks the shared store, which is met beside everything else. Raises ConfigError."""
    url = config.executor.kv_store
    if served.spec.encoder:
        raise ConfigError(OPTION, url, "the model is an encoder, which keeps no KV blocks")
    if copies is None:  # a stage whose layers are all recurrent has no blocks
        return
    layout = copies.layout.label

    def identity() -> bytes:
        return served.identity(config, layout, weights_digest(config, served))

    store = MooncakeBlocks(read_store(url), REMEMBERED * len(copies.host), copies.host.shape[1], identity)
    copies.storage = StorageCopier(store, copies.host.numpy())
    store.start()


def weights_digest(config: Config, served: Served) -> bytes:
    """Of the contents of weight files. Raises OSError and ModelError. Published hashes are taken for what files hold if
    they are verified at the start."""
    digest = hashlib.sha256()
    for folder in served.folders if config.model.load_format != "dummy" else ():
        files = find_files(folder)
        known = published_hashes(folder, files) if config.model.verify_weights else {}
        for path in files:
            with path.open("rb") as file:
                found = known.get(path) or hashlib.file_digest(file, "sha256").hexdigest()
            digest.update(f"{path.name}\0{found}\0".encode())
    return digest.digest()


@dataclass(frozen=True, eq=False)
class Client:
    """A process that runs mooncake_client.py."""

    process: subprocess.Popen[bytes]
    first: Channel
    links: SimpleQueue[Channel]  # that no thread uses

    @staticmethod
    def start(settings: MooncakeSettings, memory: int, count: int) -> Client:
        """count: calls at once. Raises OSError."""
        ours, theirs = zip(*[socket.socketpair() for _ in range(count + 1)], strict=True)
        words = [msgspec.json.encode(settings).decode(), str(memory), *(str(link.fileno()) for link in theirs)]
        process = subprocess.Popen(
            [sys.executable, "-m", "penstock.services.executor.mooncake_client", *words],
            stdin=subprocess.DEVNULL, pass_fds=[memory, *(link.fileno() for link in theirs)],
            stderr=None if LOG_LEVEL in os.environ else subprocess.DEVNULL,
        )  # fmt: skip
        for link in theirs:
            link.close()
        links: SimpleQueue[Channel] = SimpleQueue()
        for end in ours[1:]:
            links.put(Channel(end, ANSWER_SECONDS))
        return Client(process, Channel(ours[0]), links)

    def hear(self) -> str | None:
        """What the process says next; None: it has ended."""
        try:
            return self.first.receive().decode()
        except (EOFError, OSError):
            return None

    def call(self, call: Call) -> list[int]:
        """Raises OSError where no answer comes."""
        link = self.links.get()
        try:
            link.send(msgspec.msgpack.encode(call))
            return msgspec.msgpack.decode(link.receive(), type=list[int])
        except TimeoutError:
            self.process.kill()
            raise TimeoutError(f"Mooncake's client has not answered for {ANSWER_SECONDS:g} s") from None
        except EOFError:
            raise ConnectionError("Mooncake's client has ended") from None
        finally:
            self.links.put(link)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


class MooncakeBlocks:
    """A store of blocks, as `StorageCopier` uses it. total: blocks that the scheduler remembers. identity: asked for in
    a thread, before anything is read or written; may raise OSError and ModelError."""

    def __init__(
        self, settings: MooncakeSettings, total: int, block_bytes: int, identity: Callable[[], bytes],
        threads: int = THREADS,
    ) -> None:  # fmt: skip
        self.total, self.block_bytes = total, block_bytes
        self.identity = b""  # none yet
        self._settings, self._find_identity = settings, identity
        self._stride = -(-(block_bytes + CHECKSUM) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._memory = os.memfd_create("kv-store")
        os.ftruncate(self._memory, threads * self._stride)
        self._bytes = np.frombuffer(mmap.mmap(self._memory, 0), np.uint8)
        self._buffers: SimpleQueue[Bytes] = SimpleQueue()
        for first in range(0, len(self._bytes), self._stride):
            self._buffers.put(self._bytes[first : first + self._stride])
        self._links = threads + 2  # and those of the threads that find and forget
        self._client: Client | None = None
        self._closed = Event()

    def start(self) -> None:
        Thread(target=self._keep, name="kv-store", daemon=True).start()

    def _keep(self) -> None:
        """Have a process run, for as long as this one does: the kernel ends it with this thread."""
        try:
            found = self._find_identity()
        except (OSError, ModelError) as error:
            logs.warning(log, "kv_store_unused", error=str(error))
            return
        self.identity = self.identity or found
        rest = FIRST_REST
        while not self._closed.is_set():
            began, reason = time.monotonic(), "Mooncake's client has ended"
            try:
                client = Client.start(self._settings, self._memory, self._links)
            except OSError as error:
                reason = str(error)
            else:
                if (told := client.hear()) == "":
                    self._client, rest = client, FIRST_REST
                    logs.info(log, "kv_store", master=self._settings.master_server_address,
                              segment_bytes=self._settings.segment_bytes,
                              seconds=round(time.monotonic() - began, 3))  # fmt: skip
                    client.hear()
                    self._client = None
                reason = told or reason
                client.end()
            if not self._closed.is_set():
                logs.warning(log, "kv_store_lost", master=self._settings.master_server_address, reason=reason,
                             instead="prompts are computed", again_in=rest)  # fmt: skip
                self._closed.wait(rest)
                rest = min(2 * rest, LONGEST_REST)

    def _call(self, method: str, names: list[str], buffer: Bytes | None = None) -> list[int]:
        client = self._client
        if client is None:
            raise ConnectionError("Mooncake is not connected")
        at = 0 if buffer is None else buffer.ctypes.data - self._bytes.ctypes.data
        return client.call(Call(method, names, at, self.block_bytes + CHECKSUM))

    def _name(self, key: bytes) -> str:
        return f"{PREFIX}/{self.identity.hex()}/{key.hex()}"

    def entries(self) -> list[tuple[int, bytes]]:
        """None: blocks are found by their keys."""
        return []

    def missing(self, keys: Sequence[bytes]) -> list[int]:
        codes = self._call("exist", [self._name(key) for key in keys])
        if failed := [code for code in codes if code < 0]:
            raise OSError(meaning(failed[0]))
        return [number for number, code in enumerate(codes) if not code]

    def new_buffer(self) -> Bytes:
        return self._buffers.get_nowait()

    def read(self, place: int, key: bytes, buffer: Bytes) -> None:
        name = self._name(key)
        (code,) = self._call("get", [name], buffer)
        if code == MISSING:
            raise BadBlock(meaning(code))
        if code < 0:
            raise OSError(meaning(code))
        data, own = buffer[: self.block_bytes], buffer[self.block_bytes : self.block_bytes + CHECKSUM]
        if code != self.block_bytes + CHECKSUM or checksum(name, data) != own.tobytes():
            self._call("remove", [name])  # or it would be found again, and never be replaced
            raise BadBlock("its checksum is wrong")

    def begin(self, places: Iterable[int]) -> None:
        if self._client is None:
            raise ConnectionError("Mooncake is not connected")

    def write(self, place: int, key: bytes, buffer: Bytes) -> int:
        """What is there already stays."""
        name = self._name(key)
        own = checksum(name, buffer[: self.block_bytes])
        buffer[self.block_bytes : self.block_bytes + CHECKSUM] = np.frombuffer(own, np.uint8)
        (code,) = self._call("put", [name], buffer)
        if code:
            raise OSError(meaning(code))
        return int.from_bytes(own, "little")

    def commit(self, rows: Sequence[tuple[int, bytes, int]]) -> None:
        """Mooncake has them."""

    def drop(self, places: Iterable[int], keys: Sequence[bytes] = ()) -> None:
        codes = self._call("remove", [self._name(key) for key in keys])
        if failed := [code for code in codes if code not in (0, MISSING)]:
            raise OSError(meaning(failed[0]))

    def wipe(self, identity: bytes) -> None:
        """Of another identity nothing is there, and blocks of this one are of use to others. If blocks of the same one
        cannot be removed, this executor leaves the others: it reads and writes under an identity of its own."""
        if identity != self.identity:
            self.identity = identity
            return
        try:
            (code,) = self._call("remove_matching", [f"^{PREFIX}/{identity.hex()}/"])
            if code < 0:
                raise OSError(meaning(code))
        except OSError:
            self.identity = os.urandom(32)
            raise

    def close(self) -> None:
        self._closed.set()
        if (client := self._client) is not None:
            with suppress(OSError):
                client.first.send(b"")


def checksum(name: str, data: Bytes) -> bytes:
    """Of a block and what it is found by."""
    return zlib.crc32(data.data, zlib.crc32(name.encode())).to_bytes(CHECKSUM, "little")


def meaning(code: int) -> str:
    return f"Mooncake's code {code}: {MEANINGS[code]}" if code in MEANINGS else f"Mooncake's code {code}"
