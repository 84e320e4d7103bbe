"""The driver's context, where there is a driver."""

from __future__ import annotations

import pytest
import torch

from services.executor.device import LIBRARY, open_device


def test_a_machine_without_the_driver() -> None:
    assert not open_device(0, "libpenstock-has-no-such-driver.so")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the driver finds its GPU")
def test_a_machine_without_a_gpu() -> None:
    assert not open_device(0, LIBRARY)


@pytest.mark.gpu
def test_torch_shares_the_context() -> None:
    assert open_device(0)
    assert torch.zeros(1, device="cuda").item() == 0.0
    assert not open_device(torch.cuda.device_count())
