"""Compiles the chunk kernel for Hopper, with or without a GPU: `python -m tests.kernels.chunk_compilation DIM BLOCK`.

A process of its own, since Triton's interpreter is chosen once for a process. Prints what the test asks as JSON.
"""

from __future__ import annotations

import json
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from penstock.kernels.attention_hopper import BLOCK_M, BLOCK_N, REGISTERS, STAGES, chunk_kernel


def compiled(dim: int, block_size: int) -> dict[str, object]:
    sizes = {
        "HEADS": 32, "KV_HEADS": 8, "DIM": dim, "BLOCK_SIZE": block_size, "CHUNK_KEYS": min(block_size, BLOCK_N),
        "BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N, "STAGES": STAGES, "PDL": True,
    }  # fmt: skip
    layout = "NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)"
    types = dict.fromkeys(chunk_kernel.arg_names, "i32")
    types |= dict.fromkeys(("tiles", "query_start", "context", "slots", "block_tables"), "*i32")
    types |= dict.fromkeys(("k_desc", "v_desc"), f"tensordesc<bf16[{sizes['CHUNK_KEYS']}, 64],{layout}>")
    types |= dict.fromkeys(sizes, "constexpr") | {"q": "*bf16", "out": "*bf16", "scale": "fp32"}
    places = {name: (at,) for at, name in enumerate(chunk_kernel.arg_names)}
    aligned = {places[name]: [["tt.divisibility", 16]] for name in ("q", "out", "q_stride")}
    source = GluonASTSource(chunk_kernel, types, {places[name]: value for name, value in sizes.items()}, aligned)
    options = {"num_warps": 4, "maxnreg": REGISTERS, "launch_pdl": True, "enable_fp_fusion": True}
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    wanted = "wgmma.mma_async", "cp.async.bulk.tensor", "setmaxnreg"
    return {"shared": kernel.metadata.shared, "instructions": [name for name in wanted if name in kernel.asm["ptx"]]}


if __name__ == "__main__":
    print(json.dumps(compiled(int(sys.argv[1]), int(sys.argv[2]))))
