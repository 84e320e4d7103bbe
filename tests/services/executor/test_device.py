"""The driver's context, where there is a driver."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from penstock.services.executor import device as driver
from penstock.services.executor.device import (
    LIBRARY,
    begin_device,
    is_device_error,
    is_group_error,
    open_device,
)


def test_a_machine_without_the_driver() -> None:
    assert not open_device(0, "libpenstock-has-no-such-driver.so")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the driver finds its GPU")
def test_a_machine_without_a_gpu() -> None:
    assert not open_device(0, LIBRARY)


@pytest.mark.parametrize("found", [True, False])
def test_without_a_gpu_nothing_is_compiled_for_it(found: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    monkeypatch.setattr(driver, "open_device", lambda index: found)
    monkeypatch.setattr(driver, "open_compiler", lambda: called.append("compiler"))
    begin_device(0)
    assert called == ["compiler"] * found


def test_tritons_driver_is_imported_without_torch() -> None:
    """Two threads that import from each other's halves would wait for one another."""
    script = "import sys, triton.backends.nvidia.driver; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.gpu
def test_torch_shares_the_context() -> None:
    assert open_device(0)
    assert torch.zeros(1, device="cuda").item() == 0.0
    assert not open_device(torch.cuda.device_count())


def test_what_the_device_reported_stays_with_its_process() -> None:
    accelerator = type("AcceleratorError", (RuntimeError,), {})
    assert is_device_error(accelerator("an illegal memory access was encountered"))
    assert is_device_error(RuntimeError("CUDA error: device-side assert triggered"))
    assert not is_device_error(RuntimeError("shapes do not match"))
    assert not is_device_error(MemoryError())


def test_a_lost_members_errors_are_told_apart() -> None:
    assert is_group_error(RuntimeError("[third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer"))
    assert is_group_error(torch.distributed.DistBackendError("NCCL error"))
    assert not is_group_error(RuntimeError("shapes do not match"))
    assert not is_group_error(ValueError("gloo"))
