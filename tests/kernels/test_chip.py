from __future__ import annotations

import re
import sys
from dataclasses import replace

import pytest
import torch

from penstock.kernels.chip import CHIPS, SIMULATED, chip_of, simulated
from penstock.protocol.errors import ConfigError

H200 = CHIPS["sm_90"]


def test_a_cpu_has_one_processor_and_no_triton() -> None:
    chip = chip_of(torch.device("cpu"))
    assert (chip.name, chip.vendor, chip.num_sms, chip.shared_memory) == ("cpu", "cpu", 1, sys.maxsize)
    assert (chip.runs_triton, chip.pdl, chip.tma, chip.wgmma) == (False,) * 4


def test_what_is_no_cuda_device_is_not_served_by_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not chip_of(torch.device("xpu", 0)).runs_triton
    chip_of.cache_clear()
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert chip_of(torch.device("cuda", 0)).vendor == "hip"
    assert not chip_of(torch.device("cuda", 0)).runs_triton
    chip_of.cache_clear()


@pytest.mark.parametrize("name", CHIPS)
def test_reference_chips(name: str) -> None:
    chip = CHIPS[name]
    assert name == f"sm_{chip.capability}"
    assert chip.runs_triton
    assert (chip.pdl, chip.tma) == (chip.capability >= 90,) * 2
    assert chip.wgmma == (chip.capability == 90)
    scales = chip.float8, chip.library_scales, chip.library_blocks
    assert scales == (name not in ("sm_80", "sm_86"), chip.capability >= 90, name == "sm_90")
    assert chip.shared_operands == (name in ("sm_90", "sm_100"))


def test_a_simulated_chip_has_less() -> None:
    assert simulated(H200, "") == H200
    found = simulated(H200, "shared_memory=101376, tma=0,pdl=0,wgmma=0,num_sms=58,name=NVIDIA-L4")
    expected = replace(H200, shared_memory=101376, tma=False, pdl=False, wgmma=False, num_sms=58, name="NVIDIA-L4")
    assert found == expected
    assert simulated(H200, "tma=1,num_sms=132") == H200


@pytest.mark.parametrize(
    "text",
    [
        "tma", "tma=", "tma=2", "tma=-1", "tma=yes", "num_sms=0", "num_sms=133", "shared_memory=0", "name=", "=1",
        "shared_memory=232449", "vendor=1", "capability=90", "runs_triton=0", "shared_memory=99K", "pdl=0;tma=0",
    ],
)  # fmt: skip
def test_what_cannot_be_simulated_is_refused(text: str) -> None:
    expected = f"{SIMULATED}: {text!r} is not allowed; NVIDIA H200 takes name="
    with pytest.raises(ConfigError, match=re.escape(expected)):
        simulated(H200, f"num_sms=131,{text}")


def test_the_error_says_what_the_chip_has() -> None:
    with pytest.raises(ConfigError, match=r"num_sms=1 to 132, shared_memory=1 to 232448, pdl=0 or 1, tma=0, wgmma=0$"):
        simulated(replace(H200, tma=False, wgmma=False), "tma=1")


@pytest.mark.gpu
def test_a_gpu_says_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    real = torch.cuda.get_device_properties(device)
    chip_of.cache_clear()
    chip = chip_of(device)
    assert (chip.name, chip.num_sms, chip.capability) == (
        real.name, real.multi_processor_count, 10 * real.major + real.minor
    )  # fmt: skip
    assert chip.shared_memory == real.shared_memory_per_block_optin
    assert chip == CHIPS.get(f"sm_{chip.capability}", chip) or chip.name not in [one.name for one in CHIPS.values()]
    chip_of.cache_clear()
    monkeypatch.setenv(SIMULATED, "pdl=0,num_sms=1")
    assert chip_of(device) == replace(chip, pdl=False, num_sms=1)
    monkeypatch.setenv(SIMULATED, "num_sms=2")
    assert chip_of(device).num_sms == 1, "it is read once"
    chip_of.cache_clear()
