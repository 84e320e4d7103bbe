"""The chip that tensors lie on, as a record: kernels are chosen and cut by it, and nothing else asks the driver.

`PENSTOCK_SIMULATED_CHIP` takes away from every GPU what a smaller one lacks, which is for tests and benchmarks:
`shared_memory=101376,tma=0,pdl=0,wgmma=0` serves as an L4 would. It is read once for each device.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Any

import torch

from penstock.protocol.errors import ConfigError

SIMULATED = "PENSTOCK_SIMULATED_CHIP"
COUNTS = ("num_sms", "shared_memory")
FEATURES = ("pdl", "tma", "wgmma")


@dataclass(frozen=True)
class Chip:
    """What a kernel's choice may depend on."""

    name: str  # as the driver names it: "NVIDIA H200"; "cpu"
    vendor: str  # "nvidia", "cpu"; of devices that are not served torch's name: "hip", "xpu", "mps"
    capability: int  # 90 of sm_90; 0 of any other vendor's
    num_sms: int  # 1 of a CPU, which is what Triton's interpreter has
    shared_memory: int  # bytes that one program may take; no limit in the interpreter
    pdl: bool  # programmatic dependent launch, see `kernels.launch`
    tma: bool
    wgmma: bool

    @cached_property
    def runs_triton(self) -> bool:
        """Whether Triton's kernels serve it; else the plain-torch references do."""
        return self.vendor == "nvidia"

    @property
    def float8(self) -> bool:
        """Whether it converts to 8-bit floats and multiplies them."""
        return self.capability >= 89

    @property
    def library_scales(self) -> bool:
        """Whether cuBLAS multiplies 8-bit floats that have a scale for each row and column."""
        return self.capability >= 90

    @property
    def library_blocks(self) -> bool:
        """Whether it does where scales are of blocks."""
        return self.capability == 90

    @property
    def shared_operands(self) -> bool:
        """Whether matrix units read from shared memory, which they keep until a product is done (WGMMA, tcgen05)."""
        return 90 <= self.capability < 120

    @property
    def loop_warps(self) -> int:
        """Warps of a kernel with small products in a loop: too few for WGMMA where there is one, which Triton 3.6 gets
        wrong in loops of one stage and with 16 columns (seen on an H200)."""
        return 2 if self.wgmma else 4


@lru_cache(maxsize=64)
def chip_of(device: torch.device) -> Chip:
    """The chip of a device. Raises ConfigError where the variable asks for what it has not."""
    if device.type != "cuda" or torch.version.hip:
        vendor = "hip" if device.type == "cuda" else device.type
        return Chip(device.type, vendor, 0, 1, sys.maxsize, pdl=False, tma=False, wgmma=False)
    found: Any = torch.cuda.get_device_properties(device)  # torch's stub lacks some fields
    chip = nvidia(
        found.name, 10 * found.major + found.minor, found.multi_processor_count, found.shared_memory_per_block_optin
    )
    return simulated(chip, os.environ.get(SIMULATED, ""))


def uuid_of(device: torch.device) -> str:
    """By which every process knows a GPU, whatever its number is there."""
    return str(torch.cuda.get_device_properties(device).uuid).removeprefix("GPU-")


def nvidia(name: str, capability: int, num_sms: int, shared_memory: int) -> Chip:
    """A GPU with what its compute capability has (CUDA programming guide). WGMMA is sm_90's alone."""
    later = capability >= 90
    return Chip(name, "nvidia", capability, num_sms, shared_memory, pdl=later, tma=later, wgmma=capability == 90)


def simulated(chip: Chip, text: str) -> Chip:
    """The chip with some fields replaced by less: `field=value,…`. Raises ConfigError."""
    for part in filter(None, text.replace(" ", "").split(",")):
        name, _, value = part.partition("=")
        if name == "name" and value:
            chip = replace(chip, name=value)
            continue
        most = getattr(chip, name) if name in COUNTS + FEATURES else -1
        if not value.isdecimal() or not (name in FEATURES or int(value)) or int(value) > most:
            limits = [f"{field}=1 to {getattr(chip, field)}" for field in COUNTS]
            limits += [f"{field}=0" + (" or 1" if getattr(chip, field) else "") for field in FEATURES]
            raise ConfigError(SIMULATED, part, f"{chip.name} takes name=, {', '.join(limits)}")
        given: Any = int(value) if name in COUNTS else value == "1"
        chip = replace(chip, **{name: given})
    return chip


# A chip of each architecture, by the name that compilers have for it.
CHIPS: Mapping[str, Chip] = MappingProxyType({
    "sm_80": nvidia("NVIDIA A100-SXM4-80GB", 80, 108, 163 << 10),
    "sm_86": nvidia("NVIDIA A10", 86, 72, 99 << 10),
    "sm_89": nvidia("NVIDIA L4", 89, 58, 99 << 10),
    "sm_90": nvidia("NVIDIA H200", 90, 132, 227 << 10),
    "sm_100": nvidia("NVIDIA B200", 100, 148, 227 << 10),
    "sm_120": nvidia("NVIDIA GeForce RTX 5090", 120, 170, 99 << 10),
})  # fmt: skip
