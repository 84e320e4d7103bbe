"""Memory that ranks share: between processes, in files that stand for a device's memory, and the driver's calls."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from penstock.engine_core.distributed.custom_all_reduce import (
    BLOCK,
    HANDLE_BYTES,
    PROOF_BYTES,
    WORD_BYTES,
    CudaMemory,
    SharedMemory,
    tell,
    this_host,
    together,
)
from penstock.engine_core.distributed.group import Group
from tests.engine_core.execution.file_memory import FileMemory
from tests.ranks import Ranks

SIZE = 4096


def shared(group: Group, folder: Path, failing: dict[int, str], hosts: tuple[str, ...] = ()) -> tuple[str, int, int]:
    """Why a rank has no shared memory, empty where it has; addresses and files that are left in the end."""
    assert group.ranks is not None
    memory = FileMemory(folder, failing.get(group.rank, ""))
    found, reason = SharedMemory(group.ranks, memory, SIZE), ""
    try:
        found.open(hosts[group.rank] if hosts else "")
        reason = use(group, found, memory)
    except OSError as error:
        reason = str(error)
    found.close()
    return reason, len(memory.held), len(memory.freed)


def use(group: Group, found: SharedMemory, memory: FileMemory) -> str:
    """What is wrong with memory that every rank writes to and reads."""
    assert group.ranks is not None
    found.fill(0x80008000)
    if memory.read(found.addresses[group.rank], SIZE) != b"\x00\x80" * (SIZE // 2):
        return "it was not filled"
    together(group.ranks, lambda: None)
    for rank, address in enumerate(found.addresses):
        memory.write(address + group.rank, bytes([10 * rank + group.rank]))
    together(group.ranks, lambda: None)
    own = memory.read(found.addresses[group.rank], group.size)
    together(group.ranks, lambda: None)
    if own != bytes(10 * group.rank + rank for rank in range(group.size)):
        return f"{own!r} arrived"
    return ""


@pytest.mark.parametrize("size", [2, 3])
def test_every_rank_reaches_every_ranks_memory(few_ranks: Ranks, size: int, tmp_path: Path) -> None:
    assert few_ranks.run(size, shared, tmp_path, {}) == [("", 0, 1)] * size
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("step", ["allocate", "handle", "open"])
def test_what_one_rank_cannot_none_can(few_ranks: Ranks, step: str, tmp_path: Path) -> None:
    found = few_ranks.run(3, shared, tmp_path, {1: step})
    assert [reason for reason, _, _ in found] == [f"rank 1: {step}: refused"] * 3
    assert [held for _, held, _ in found] == [0] * 3
    assert not list(tmp_path.iterdir()), "nothing is kept"


def test_writes_that_get_lost_are_found_out(few_ranks: Ranks, tmp_path: Path) -> None:
    reasons = {reason for reason, _, _ in few_ranks.run(2, shared, tmp_path, {0: "lost"})}
    assert reasons == {"rank 0: what rank 0 wrote to it has not arrived"}
    reasons = {reason for reason, _, _ in few_ranks.run(3, shared, tmp_path, {2: "lost"})}
    assert reasons == {"rank 0: what rank 2 wrote to it has not arrived"}


def test_ranks_of_several_hosts_share_none(few_ranks: Ranks, tmp_path: Path) -> None:
    found = few_ranks.run(3, shared, tmp_path, {}, ("a", "b", "a"))
    assert found == [("the ranks are on 2 hosts", 0, 1)] * 3


def words(group: Group, told: list[bytes]) -> list[bytes]:
    assert group.ranks is not None
    return tell(group.ranks, told[group.rank])


def test_words_come_as_they_were_told(few_ranks: Ranks) -> None:
    told = [b"", bytes(range(256)), b"\0" * 5]
    assert few_ranks.run(3, words, told) == [told] * 3
    cut = few_ranks.run(2, words, [b"x" * 1000, b"y"])
    assert cut == [[b"x" * WORD_BYTES, b"y"]] * 2


def stepped(group: Group, wrong: int) -> str:
    assert group.ranks is not None

    def step() -> str:
        if group.rank == wrong:
            raise OSError
        return f"step {group.rank}"

    try:
        return together(group.ranks, step)
    except OSError as error:
        return str(error)


def test_a_step_is_done_by_all_or_none(few_ranks: Ranks) -> None:
    assert few_ranks.run(2, stepped, 5) == ["step 0", "step 1"]
    assert few_ranks.run(2, stepped, 0) == ["rank 0: OSError"] * 2


class Library:
    """Stands for libcuda: memory of this process, and what it was asked."""

    def __init__(self, failing: str = "") -> None:
        self.failing = failing
        self.called: list[str] = []
        self.memory = ctypes.create_string_buffer(4 * BLOCK)
        self.sizes: list[int] = []
        self.flags: list[int] = []

    def __getattr__(self, name: str):
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*arguments) -> int:
            self.called.append(name)
            if name == self.failing:
                return 217
            return getattr(self, f"_{name}")(*arguments) or 0

        return call

    def _cuMemAlloc_v2(self, address, size) -> None:
        self.sizes.append(size.value)
        address._obj.value = ctypes.addressof(self.memory)

    def _cuIpcGetMemHandle(self, handle, address) -> None:
        ctypes.memmove(handle, address.value.to_bytes(8, "little") + b"\0handle", 15)

    def _cuIpcOpenMemHandle_v2(self, address, handle, flags) -> None:
        self.flags.append(flags.value)
        address._obj.value = int.from_bytes(bytes(handle)[:8], "little")

    def _cuMemcpyHtoD_v2(self, address, content, size) -> None:
        ctypes.memmove(address.value, content, size.value)

    def _cuMemcpyDtoH_v2(self, found, address, size) -> None:
        ctypes.memmove(found, address.value, size.value)

    def _cuMemsetD32_v2(self, address, word, count) -> None:
        ctypes.memmove(address.value, word.value.to_bytes(4, "little") * count.value, 4 * count.value)

    def _cuGetErrorName(self, code, word) -> None:
        word._obj.value = b"CUDA_ERROR_PEER_ACCESS_UNSUPPORTED"

    def _cuCtxSynchronize(self) -> None: ...

    def _cuMemFree_v2(self, address) -> None: ...

    def _cuIpcCloseMemHandle(self, address) -> None: ...


def test_calls_to_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    memory = CudaMemory()
    own = memory.allocate(SIZE)
    assert library.sizes == [BLOCK], "a block of its own"
    handle = memory.handle(own)
    assert len(handle) == HANDLE_BYTES
    assert memory.open(handle) == own
    assert library.flags == [1], "access to peers begins when it is opened"
    memory.fill(own, 0x80000000, 4)
    memory.write(own + 4, b"proof")
    assert memory.read(own, 16) == b"\0\0\0\x80proof\0\0\x80\0\0\0\x80"
    memory.close(own)
    memory.free(own)
    assert library.called[-2:] == ["cuIpcCloseMemHandle", "cuMemFree_v2"]
    assert library.called.count("cuCtxSynchronize") == 2, "behind what was written and filled"


def test_the_drivers_word_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library("cuIpcOpenMemHandle_v2"))
    with pytest.raises(OSError, match=r"cuIpcOpenMemHandle_v2: CUDA_ERROR_PEER_ACCESS_UNSUPPORTED \(217\)"):
        CudaMemory().open(bytes(HANDLE_BYTES))


def test_a_machine_without_the_driver() -> None:
    with pytest.raises(OSError):
        CudaMemory("libpenstock-has-no-such-driver.so")


def test_hosts_are_told_apart() -> None:
    assert this_host() == this_host()
    assert HANDLE_BYTES + PROOF_BYTES + len(this_host()) <= WORD_BYTES
