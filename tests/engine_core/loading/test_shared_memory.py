"""Tensors in a file below /dev/shm: what is read, and what is refused before a byte of it is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
import torch

from penstock.engine_core.loading.shared_memory import FOLDER, opened, share
from penstock.protocol.control import HOST, WeightTensor
from penstock.protocol.errors import ModelError

CPU = torch.device("cpu")


@pytest.fixture
def name() -> Iterator[str]:
    """Of a file of 64 bytes."""
    found = f"penstock-test-{uuid4().hex}"
    (FOLDER / found).write_bytes(torch.arange(16, dtype=torch.float32).numpy().tobytes())
    yield found
    (FOLDER / found).unlink()


def tensor(place: str, handle: str, offset: int = 0, shape: tuple[int, ...] = (2, 3)) -> WeightTensor:
    return WeightTensor("a", "float32", shape, ((place, handle.encode()),), offset)


def test_a_tensor_is_bytes_from_an_offset_on(name: str) -> None:
    with opened([tensor(HOST, name, 8)], CPU) as found:
        assert found["a"].tolist() == [[2, 3, 4], [5, 6, 7]]
    with opened([tensor(HOST, name, 64, (0, 3))], CPU) as found:
        assert found["a"].numel() == 0


@pytest.mark.parametrize(
    ("offset", "shape"), [(44, (2, 3)), (2, (2, 3)), (-4, (1,)), (0, (1 << 40, 3)), (1 << 60, (1,))]
)
def test_what_is_not_in_the_memory_is_refused(name: str, offset: int, shape: tuple[int, ...]) -> None:
    with (
        pytest.raises(ModelError, match="tensor a: its memory has 64 bytes"),
        opened([tensor(HOST, name, offset, shape)], CPU),
    ):
        pass


@pytest.mark.parametrize("handle", ["../../etc/passwd", "/etc/passwd", ".", "..", "", "a/b", "a\0b", "x" * 300])
def test_no_name_leads_out_of_the_folder(handle: str) -> None:
    with pytest.raises(ModelError, match="is no name of a file"), opened([tensor(HOST, handle)], CPU):
        pass


def test_links_folders_pipes_and_empty_files_are_refused(name: str, tmp_path: Path) -> None:
    other = FOLDER / f"{name}-other"
    makers = (lambda: other.symlink_to("/etc/passwd"), other.mkdir, lambda: os.mkfifo(other), other.touch)
    for make in makers:
        make()
        try:
            with pytest.raises(ModelError, match="tensor a: /dev/shm"), opened([tensor(HOST, other.name)], CPU):
                pass
        finally:
            other.rmdir() if other.is_dir() and not other.is_symlink() else other.unlink()
    with pytest.raises(ModelError, match="No such file"), opened([tensor(HOST, other.name)], CPU):
        pass


def test_handles_of_other_devices_are_none_for_this_one(name: str) -> None:
    with (
        pytest.raises(ModelError, match="no handle for cpu; those that there are: GPU-1"),
        opened([tensor("GPU-1", name)], CPU),
    ):
        pass


def test_a_tensor_of_the_host_has_no_handle_of_a_gpu() -> None:
    class Nothing:
        """A driver that is not asked."""

    with pytest.raises(ValueError, match="a contiguous tensor on a GPU is needed"):
        share([("a", torch.zeros(2))], Nothing())  # type: ignore[arg-type]
