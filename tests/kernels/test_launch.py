from __future__ import annotations

import pytest
import torch

from penstock.kernels.launch import overlaps, processors


def test_without_a_gpu_kernels_run_one_after_the_other() -> None:
    assert not overlaps(torch.device("cpu"))
    assert processors(torch.device("cpu")) == 1


@pytest.mark.gpu
def test_a_gpu_says_what_it_can() -> None:
    device = torch.device("cuda", 0)
    assert overlaps(device) == (torch.cuda.get_device_capability(device)[0] >= 9)
    assert processors(device) == torch.cuda.get_device_properties(device).multi_processor_count
