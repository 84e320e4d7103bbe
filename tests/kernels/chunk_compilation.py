"""Compiles the chunk kernel for Hopper, with or without a GPU.

`python -m tests.kernels.chunk_compilation DIM[,short][,window][,softcap][,sinks][,alone] …` prints what the test asks
as JSON, a line for each. `alone` is one head over expanded latents. A process of its own, since Triton's interpreter is
chosen once for a process.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from penstock.kernels.attention_hopper import BLOCK_M, chunk_kernel, forms_of, split_dim
from penstock.kernels.latent_expansion import BLOCK

BLOCK_SIZE = 16


def compiled(dim: int, options: list[str]) -> dict[str, object]:
    form = forms_of(dim)["short" in options]
    heads, kv_heads, block_size = (1, 1, BLOCK) if "alone" in options else (32, 8, BLOCK_SIZE)
    main, rest = split_dim(dim)
    types = dict.fromkeys(chunk_kernel.arg_names, "i32")
    types |= dict.fromkeys(("tiles", "query_start", "context", "slots", "block_tables"), "*i32")
    for side in ("k", "v"):
        for name, columns in ((f"{side}_desc", 64), (f"{side}_rest_desc", rest)):
            layout = f"NVMMASharedLayout(swizzle_byte_width={2 * columns}, element_bitwidth=16, rank=2)"
            types[name] = f"tensordesc<bf16[{block_size}, {columns}],{layout}>"
    types |= {"q": "*bf16", "out": "*bf16", "scale": "fp32", "inner_scale": "fp32", "sinks": "*fp32"}
    sizes: dict[str, int | bool | None] = {
        "HEADS": heads, "KV_HEADS": kv_heads, "MAIN": main, "REST": rest, "BLOCK_SIZE": block_size,
        "CHUNK_KEYS": block_size,
        "BLOCK_M": BLOCK_M, "BLOCK_N": form.block_n, "K_STAGES": form.k_stages, "V_STAGES": form.v_stages,
        "GROUPS": form.groups, "IN_TURN": form.programs > 0, "PDL": True,
    }  # fmt: skip
    for name, there in (
        ("k_rest_desc", rest), ("v_rest_desc", rest), ("window", "window" in options),
        ("inner_scale", "softcap" in options), ("sinks", "sinks" in options),
    ):  # fmt: skip
        if not there:
            sizes[name] = None
    types |= dict.fromkeys(sizes, "constexpr")
    places = {name: (at,) for at, name in enumerate(chunk_kernel.arg_names)}
    aligned = {places[name]: [["tt.divisibility", 16]] for name in ("q", "out", "q_stride")}
    source = GluonASTSource(chunk_kernel, types, {places[name]: value for name, value in sizes.items()}, aligned)
    settings = {"num_warps": 4, "maxnreg": form.registers, "launch_pdl": True, "enable_fp_fusion": True}
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=settings)
    wanted = "wgmma.mma_async", "cp.async.bulk.tensor", "setmaxnreg"
    return {
        "shared": kernel.metadata.shared,
        "stack": stack(kernel.asm["cubin"]),
        "instructions": [name for name in wanted if name in kernel.asm["ptx"]],
    }


def stack(cubin: bytes) -> int:
    """Bytes of each thread's registers that are kept in memory at some point."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        found = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return int(re.findall(r"STACK:(\d+)", found)[0])


if __name__ == "__main__":
    for asked in sys.argv[1:]:
        size, *names = asked.split(",")
        print(json.dumps(compiled(int(size), names)))
