"""What a machine has available, with and without a control group's limit, and what its GPUs have."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from penstock.services.executor.device import available_memory, gpu_memory

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
    assert gpu_memory("libpenstock-has-no-such-driver.so") == ()


@pytest.mark.gpu
def test_the_driver_counts_gpus_and_bytes_as_torch_does() -> None:
    counted = [torch.cuda.get_device_properties(index).total_memory for index in range(torch.cuda.device_count())]
    assert list(gpu_memory()) == counted
