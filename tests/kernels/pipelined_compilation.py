"""Compiles the pipelined kernel for Hopper, GPU or not: `python -m tests.kernels.pipelined_compilation 0 1 0`.

The numbers say whether it is GATED, multiplies EIGHT bits, and adds what adapters do.
A process of its own, since Triton's interpreter is chosen once for a process. Prints what the test asks as JSON.
"""

from __future__ import annotations

import json
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from penstock.kernels.chip import CHIPS
from penstock.kernels.linear_hopper import K_TILES, pipelined_kernel
from penstock.kernels.linear_tilings import pipelined_tiling


def compiled(gated: bool, eight: bool, adapted: bool) -> dict[str, object]:
    kind, tile_k = ("fp8e4nv", 128) if eight else ("bf16", 64)
    tiling = pipelined_tiling(14336 if gated else 4096, 4096, CHIPS["sm_90"], gated=gated)
    outputs = 16 * tiling.warps
    sizes = {
        "ROWS": tiling.rows, "OUTPUTS": outputs, "TILE_K": tile_k, "K_TILES": K_TILES, "STAGES": tiling.stages,
        "WARPS": tiling.warps, "EACH": "row" if eight else "", "GATED": gated, "BIAS": True, "PDL": True,
        "SHARES": 8 * adapted, "RANK": 16 * adapted,
    }  # fmt: skip
    layout = f"NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth={1024 // tile_k}, rank=2)"
    types = dict.fromkeys(pipelined_kernel.arg_names, "i32") | dict.fromkeys(("bias", "out", "b"), "*bf16")
    types |= dict.fromkeys(("x_scales", "scales", "partials"), "*fp32") | {"places": "*i32"}
    types |= {"x": f"tensordesc<{kind}[{tiling.rows}, {tile_k}],{layout}>"}
    types |= {"weight": f"tensordesc<{kind}[{outputs}, {tile_k}],{layout}>"} | dict.fromkeys(sizes, "constexpr")
    places = {name: (at,) for at, name in enumerate(pipelined_kernel.arg_names)}
    aligned = {places[name]: [["tt.divisibility", 16]] for name in ("bias", "out", "width")}
    source = GluonASTSource(pipelined_kernel, types, {places[name]: value for name, value in sizes.items()}, aligned)
    options = {"num_warps": tiling.warps, "launch_pdl": True, "enable_fp_fusion": True}
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    wanted = "mma.sync", "cp.async.bulk.tensor", "griddepcontrol.wait"
    return {"shared": kernel.metadata.shared, "instructions": [name for name in wanted if name in kernel.asm["ptx"]]}


if __name__ == "__main__":
    print(json.dumps(compiled(*(bool(int(each)) for each in sys.argv[1:]))))
