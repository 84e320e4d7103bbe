"""What serves a Hopper GPU as its kernels in Gluon fail one after the other: `python -m tests.kernels.gluon_fallback`.

A process of its own, since Triton's interpreter is chosen once for a process. Prints the kernels that are launched, as
JSON: all; with each module given up; where Gluon has other names; and where it cannot be imported.
"""

from __future__ import annotations

import json
import sys

import triton.experimental.gluon

from benchmarks import chip_launches
from penstock.kernels import gluon
from penstock.kernels.chip import CHIPS

CHIP = CHIPS["sm_90"]
MODEL = next(model for model in chip_launches.MODELS if model.name == "Llama-3.1-8B")


def launched() -> list[str]:
    with chip_launches.collected(CHIP) as found:
        chip_launches.products(MODEL)
        chip_launches.attention(MODEL)
        chip_launches.eight_bits(MODEL, CHIP)
        chip_launches.groups(MODEL)
        chip_launches.quantized_experts(CHIP, rows=(1024,), kinds=("fp8_blocks",), groups=())
    return sorted({launch.name for launch in found.values()})


def launched_anew() -> list[str]:
    for module in gluon.MODULES:
        sys.modules.pop(module, None)
    gluon.load.cache_clear()
    return launched()


def main() -> None:
    seen = {"all": launched()}
    for module in sorted(gluon.MODULES):
        gluon.give_up(module, "kernel", RuntimeError("it does not compile"))
        seen[module.rpartition(".")[2]] = launched()
        sys.modules.pop(module)
        gluon.load.cache_clear()
    triton.experimental.gluon.jit = None
    seen["renamed"] = launched_anew()
    sys.modules["triton.experimental.gluon"] = None  # type: ignore[assignment]
    seen["none"] = launched_anew()
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
