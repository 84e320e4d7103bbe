"""The ranks' small all-reduce, fused with the residual addition and the norm behind it, over shared GPU memory.

The memory is shared by the CUDA driver's handles. A handle is opened for the opener's own GPU, so it does not matter
whether that process can see the GPU that the memory is on. Whether ranks can share memory is found out by trying, one
step after the other, each on all ranks at once: all of them have it or none has. Handles travel over the ranks' process
group, as bytes. Source: CUDA driver API, 6.13: cuIpcGetMemHandle, cuIpcOpenMemHandle.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.kernels.exchange import Inboxes, empty_word, inbox_bytes

LIBRARY = "libcuda.so.1"
HANDLE_BYTES = 64
LAZY_PEER_ACCESS = 1  # the flag that opening asks for
BLOCK = 2 << 20  # bytes; smaller allocations share one, which would be opened as a whole
WORD_BYTES = 256  # of one message of a rank to the others
PROOF_BYTES = 16
MAX_ROWS = 4096  # of all ranks together, in half of an inbox: a rank reads as many per exchange
FEWEST_PROOFS = 4096  # bytes, in which the ranks prove that they reach the memory
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

Result = TypeVar("Result")


class DeviceMemory(Protocol):
    """A device driver's functions for memory. All raise OSError with the driver's error."""

    def allocate(self, size: int) -> int:
        """Address of so many bytes."""
        ...

    def free(self, address: int) -> None: ...

    def handle(self, address: int) -> bytes:
        """The handle by which another process opens this memory: HANDLE_BYTES."""
        ...

    def open(self, handle: bytes) -> int:
        """Address of another process's memory, in this one."""
        ...

    def close(self, address: int) -> None: ...

    def extent(self, address: int) -> tuple[int, int]:
        """Address and bytes of the allocation that it lies in."""
        ...

    def write(self, address: int, content: bytes) -> None: ...

    def read(self, address: int, size: int) -> bytes: ...

    def fill(self, address: int, word: int, words: int) -> None:
        """Fill so many words of 32 bits, before it returns."""
        ...


class Handle(ctypes.Structure):
    """CUipcMemHandle, which is passed by value."""

    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


class CudaMemory:
    """The memory of the GPU that is current in this thread."""

    def __init__(self, library: str = LIBRARY) -> None:
        self._driver = ctypes.CDLL(library)

    def allocate(self, size: int) -> int:
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(-(-size // BLOCK) * BLOCK))
        return address.value

    def free(self, address: int) -> None:
        self._call("cuMemFree_v2", ctypes.c_uint64(address))

    def handle(self, address: int) -> bytes:
        found = Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(found), ctypes.c_uint64(address))
        return bytes(memoryview(found))

    def open(self, handle: bytes) -> int:
        address = ctypes.c_uint64()
        given = Handle.from_buffer_copy(handle)
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), given, ctypes.c_uint(LAZY_PEER_ACCESS))
        return address.value

    def close(self, address: int) -> None:
        self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def extent(self, address: int) -> tuple[int, int]:
        start, size = ctypes.c_uint64(), ctypes.c_size_t()
        self._call("cuMemGetAddressRange_v2", ctypes.byref(start), ctypes.byref(size), ctypes.c_uint64(address))
        return start.value, size.value

    def write(self, address: int, content: bytes) -> None:
        self._call("cuMemcpyHtoD_v2", ctypes.c_uint64(address), content, ctypes.c_size_t(len(content)))
        self._call("cuCtxSynchronize")

    def read(self, address: int, size: int) -> bytes:
        found = ctypes.create_string_buffer(size)
        self._call("cuMemcpyDtoH_v2", found, ctypes.c_uint64(address), ctypes.c_size_t(size))
        return found.raw

    def fill(self, address: int, word: int, words: int) -> None:
        self._call("cuMemsetD32_v2", ctypes.c_uint64(address), ctypes.c_uint(word), ctypes.c_size_t(words))
        self._call("cuCtxSynchronize")

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._driver, name)(*arguments)
        if code:
            word = ctypes.c_char_p()
            self._driver.cuGetErrorName(code, ctypes.byref(word))
            raise OSError(f"{name}: {(word.value or b'error').decode()} ({code})")


class SharedMemory:
    """One rank's part in memory of `size` bytes on each rank, which it frees when nobody has it open any more. Who ends
    without closing leaves that to the driver, which ends with the process."""

    def __init__(self, ranks: dist.ProcessGroup, memory: DeviceMemory, size: int) -> None:
        self._ranks = ranks
        self._memory = memory
        self._size = size
        self._rank = dist.get_rank(ranks)
        self._addresses: dict[int, int] = {}  # by rank, of the memory that is open by now

    @property
    def addresses(self) -> Sequence[int]:
        """Of each rank's memory, in this process."""
        return [self._addresses[rank] for rank in range(dist.get_world_size(self._ranks))]

    def open(self, host: str = "") -> None:
        """Allocate, and open the others'. Raises OSError on every rank when one of them cannot; close it then, too.

        `host`: what tells this host from others, if not its boot does."""
        handle = together(self._ranks, self._allocate)
        host = together(self._ranks, lambda: host or this_host())
        proof = os.urandom(PROOF_BYTES)
        told = tell(self._ranks, handle + proof + host.encode())
        hosts = {word[HANDLE_BYTES + PROOF_BYTES :] for word in told}
        if len(hosts) > 1:
            raise OSError(f"the ranks are on {len(hosts)} hosts")
        together(self._ranks, lambda: self._open([word[:HANDLE_BYTES] for word in told]))
        together(self._ranks, lambda: self._prove(proof))
        together(self._ranks, lambda: self._check([word[HANDLE_BYTES:][:PROOF_BYTES] for word in told]))

    def fill(self, word: int) -> None:
        """Fill every rank's memory with this word of 32 bits, before it returns on any rank."""
        together(self._ranks, lambda: self._memory.fill(self._addresses[self._rank], word, self._size // 4))

    def close(self) -> None:
        """Have nothing any more. Every rank closes, once; none may still use the memory."""
        own = self._addresses.pop(self._rank, None)
        together(self._ranks, self._close)
        if own is not None:
            self._memory.free(own)

    def _allocate(self) -> bytes:
        own = self._addresses[self._rank] = self._memory.allocate(self._size)
        return self._memory.handle(own)

    def _open(self, handles: Sequence[bytes]) -> None:
        for rank, handle in enumerate(handles):
            if rank != self._rank:
                self._addresses[rank] = self._memory.open(handle)

    def _prove(self, proof: bytes) -> None:
        """Write a proof of this rank to every other."""
        for address in self._addresses.values():
            self._memory.write(address + self._rank * PROOF_BYTES, proof)

    def _check(self, proofs: Sequence[bytes]) -> None:
        """Check the proofs: opened memory may still be out of reach, where a bus silently drops writes between
        devices."""
        written = self._memory.read(self._addresses[self._rank], len(proofs) * PROOF_BYTES)
        for rank, proof in enumerate(proofs):
            if written[rank * PROOF_BYTES :][:PROOF_BYTES] != proof:
                raise OSError(f"what rank {rank} wrote to it has not arrived")

    def _close(self) -> None:
        while self._addresses:
            self._memory.close(self._addresses.popitem()[1])


def together(ranks: dist.ProcessGroup, step: Callable[[], Result]) -> Result:
    """The result of a step that every rank does. Raises OSError on all of them where it fails on one."""
    result, reason = [], ""
    try:
        result.append(step())
    except OSError as error:
        reason = str(error) or type(error).__name__
    for rank, told in enumerate(tell(ranks, reason.encode())):
        if told:
            raise OSError(f"rank {rank}: {told.decode(errors='replace')}")
    return result[0]


def tell(ranks: dist.ProcessGroup, word: bytes) -> list[bytes]:
    """Every rank's word in the order of ranks, cut to WORD_BYTES."""
    word = word[:WORD_BYTES]
    sent = torch.zeros(4 + WORD_BYTES, dtype=torch.uint8)
    sent[: 4 + len(word)] = torch.tensor([*len(word).to_bytes(4, "little"), *word], dtype=torch.uint8)
    received = [torch.empty_like(sent) for _ in range(dist.get_world_size(ranks))]
    dist.all_gather(received, sent, group=ranks)
    found = [bytes(line.tolist()) for line in received]
    return [line[4:][: int.from_bytes(line[:4], "little")] for line in found]


def this_host() -> str:
    """An identity of this boot of this machine."""
    return BOOT_ID.read_text().strip()


@dataclass(frozen=True, eq=False)
class Exchange:
    """An all-reduce with residual and norm, which every rank enqueues on one stream, all in the same order. The kernel
    is `kernels/exchange_triton.py`.

    The memory stays as long as a launch or a graph may use it; a process that ends gives it back by ending.
    """

    inboxes: Inboxes
    memory: SharedMemory
    rows: int  # of the inboxes', that are taken

    def takes(self, partial: Tensor) -> bool:
        """Whether this takes a partial sum `[tokens, width]`: every rank decides the same."""
        tokens, width = partial.shape
        return 0 < tokens <= self.rows and width == self.inboxes.width and partial.dtype == self.inboxes.dtype

    def add(self, partial: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """The norm of residual + all ranks' partial sums, and that sum, which is the next residual: `[tokens, width]`
        each, the same bits on every rank."""
        from penstock.kernels.exchange_triton import exchange_rows

        return exchange_rows(partial, residual, weight, eps, self.inboxes)

    def up_to(self, rows: int) -> Exchange:
        """The same for as many rows."""
        assert rows <= self.inboxes.rows
        return replace(self, rows=rows)

    def close(self) -> None:
        """Give the memory back, every rank at once, when none has anything enqueued."""
        self.memory.close()


def open_exchange(
    ranks: dist.ProcessGroup,
    width: int,
    dtype: torch.dtype,
    device: torch.device,
    memory: DeviceMemory,
    host: str = "",
) -> Exchange:
    """An exchange of rows of this width and type, every rank at once. Raises OSError on all of them with the reason
    when they cannot share memory."""
    count = dist.get_world_size(ranks)
    rows = MAX_ROWS // count
    shared = SharedMemory(ranks, memory, max(FEWEST_PROOFS, inbox_bytes(count, rows, width, dtype)))
    try:
        shared.open(host)
        shared.fill(empty_pair(dtype))
    except OSError:
        shared.close()
        raise
    addresses = torch.tensor(shared.addresses, dtype=torch.int64, device=device)
    turns = torch.zeros(rows, dtype=torch.int32, device=device)
    return Exchange(Inboxes(addresses, turns, dist.get_rank(ranks), width, dtype), shared, rows)


def empty_pair(dtype: torch.dtype) -> int:
    """32 bits of empty words."""
    word = empty_word(dtype).to_bytes(dtype.itemsize, "little", signed=True)
    return int.from_bytes(word * (4 // dtype.itemsize), "little")
