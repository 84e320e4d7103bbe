"""What a machine has available, with and without a control group's limit, and what its GPUs have."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from penstock.services.executor.device import Gpu, available_memory, find_gpus, foreign_accelerator

MEMINFO = "MemTotal:       1000 kB\nMemFree:         300 kB\nMemAvailable:    600 kB\nHugePages_Total:       0\n"


@pytest.mark.parametrize(
    ("limit", "current", "expected"),
    [(None, None, 600 << 10), ("max", "5", 600 << 10), ("500000", "100000", 400_000), ("10", "20", 0)],
)
def test_available(tmp_path: Path, limit: str | None, current: str | None, expected: int) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(MEMINFO)
    if limit is not None and current is not None:
        (tmp_path / "memory.max").write_text(limit + "\n")
        (tmp_path / "memory.current").write_text(current + "\n")
    assert available_memory(meminfo, tmp_path) == expected


def test_cached_files_are_not_taken(tmp_path: Path) -> None:
    """The weights that a server has read stay in the group's cache until somebody wants the memory."""
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(MEMINFO)
    (tmp_path / "memory.max").write_text("500000\n")
    (tmp_path / "memory.current").write_text("490000\n")
    assert available_memory(meminfo, tmp_path) == 10_000
    stat = "anon 90000\nfile 370000\nactive_file 50000\ninactive_file 300000\nshmem 20000\nslab_reclaimable 5000\n"
    (tmp_path / "memory.stat").write_text(stat)
    assert available_memory(meminfo, tmp_path) == 365_000
    (tmp_path / "memory.current").write_text("100\n")
    assert available_memory(meminfo, tmp_path) == 500_000


def test_this_machine_has_memory() -> None:
    assert available_memory() > 1 << 20


def test_a_machine_without_a_driver_has_no_gpu() -> None:
    assert find_gpus("libpenstock-has-no-such-driver.so") == ()


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("hip: Optional[str] = None\nxpu: Optional[str] = None\n", ""),
        ("cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n", ""),
        ("cuda: Optional[str] = None\nhip: Optional[str] = '6.4.43482'\n", "ROCm"),
        ("hip = '6.2'\n", "ROCm"),
        ("hip: Optional[str] = None\nxpu: Optional[str] = '20250301'\n", "XPU"),
        ("", ""),
    ],
)
def test_what_torch_was_built_for(lines: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "version.py").write_text(f"__version__ = '2.13.0'\n{lines}")
    assert foreign_accelerator(tmp_path) == expected


def test_this_torch_is_served() -> None:
    assert foreign_accelerator() == ""
    assert torch.version.hip is None
    assert torch.version.xpu is None


@pytest.mark.gpu
def test_the_driver_describes_gpus_as_torch_does() -> None:
    described = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    expected = [Gpu(found.total_memory, 10 * found.major + found.minor, found.name) for found in described]
    assert list(find_gpus()) == expected
