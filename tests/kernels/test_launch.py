from __future__ import annotations

import pytest
import torch

from penstock.kernels.launch import num_sms, supports_pdl


def test_without_a_gpu_kernels_run_one_after_the_other() -> None:
    assert not supports_pdl(torch.device("cpu"))
    assert num_sms(torch.device("cpu")) == 1


@pytest.mark.gpu
def test_a_gpu_says_what_it_can() -> None:
    device = torch.device("cuda", 0)
    assert supports_pdl(device) == (torch.cuda.get_device_capability(device)[0] >= 9)
    assert num_sms(device) == torch.cuda.get_device_properties(device).multi_processor_count
