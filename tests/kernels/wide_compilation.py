"""Compiles the kernel of many rows for Hopper, with or without a GPU: `python -m tests.kernels.wide_compilation ROWS
OUTPUTS SPLITS GATED`.

A process of its own, since Triton's interpreter is chosen once for a process. Prints what the test asks as JSON.
"""

from __future__ import annotations

import json
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from kernels.linear_wide import BOX, COPYING, REGISTERS, wide_kernel


def compiled(rows: int, outputs: int, splits: int, gated: bool) -> dict[str, object]:
    warps = rows // 16
    sizes = {
        "ROWS": rows, "OUTPUTS": outputs, "BOX": BOX, "SPLITS": splits, "STAGES": 4, "WARPS": warps, "GATED": gated,
        "BIAS": True, "AHEAD": True, "COPYING": COPYING,
    }  # fmt: skip
    layout = "NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)"
    types = dict.fromkeys(wide_kernel.arg_names, "i32") | dict.fromkeys(("bias", "out"), "*bf16")
    types |= {"parts": "*fp32", "arrivals": "*i32"}
    types |= {"x": f"tensordesc<bf16[{rows}, {BOX}],{layout}>"}
    types |= {"weight": f"tensordesc<bf16[{outputs}, {BOX}],{layout}>"} | dict.fromkeys(sizes, "constexpr")
    places = {name: (at,) for at, name in enumerate(wide_kernel.arg_names)}
    aligned = {places[name]: [["tt.divisibility", 16]] for name in ("bias", "out", "parts", "arrivals", "width")}
    source = GluonASTSource(wide_kernel, types, {places[name]: value for name, value in sizes.items()}, aligned)
    options = {"num_warps": warps, "maxnreg": REGISTERS[warps], "launch_pdl": True, "enable_fp_fusion": True}
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    wanted = "wgmma.mma_async", "cp.async.bulk.tensor", "griddepcontrol.wait"
    return {"shared": kernel.metadata.shared, "instructions": [name for name in wanted if name in kernel.asm["ptx"]]}


if __name__ == "__main__":
    height, lines, shares, with_gate = (int(word) for word in sys.argv[1:])
    print(json.dumps(compiled(height, lines, shares, bool(with_gate))))
