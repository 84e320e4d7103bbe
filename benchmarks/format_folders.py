"""The embedded model in the formats that people download: compressed-tensors, AWQ, GPTQ, and FP8 in blocks.

compressed-tensors writes its own formats, scales included. No library writes the others without a GPU: numbers are
rounded to the nearest as `penstock quantize` does, and are packed here by the formats' descriptions.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils.helpers import calculate_qparams, generate_gparam
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.engine_core.models.config_file import read_json
from penstock.engine_core.models.quantization.rounding import round_matrix
from penstock.engine_core.models.quantization.weight_format import WeightFormat
from penstock.engine_core.models.quantization.writing import copy_others, write_checkpoint, write_json
from penstock.engine_core.models.spec import read_spec
from penstock.engine_core.models.weight_files import SINGLE
from penstock.kernels.quantized import Float8Weight, GroupedWeight, unpacked

MATRIX = re.compile(r"\.layers\.\d+\..*_proj\.weight\Z")
DENSE = ("lm_head", "model.embed_tokens")
GROUP = 64  # divides the inputs of every matrix of the embedded model
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # of a word's numbers, from the lowest
ONES = 0x11111111
QUANTIZE = ("fp8", "int8", "int4")  # what `penstock quantize` writes
Tensors = dict[str, Tensor]  # of one matrix, by what follows its name


class Layout(NamedTuple):
    """A format: what config.json says, and the tensors of a matrix, fp32 [outputs, inputs]."""

    config: Mapping[str, Any]
    tensors: Callable[[Tensor], Tensors]


def write(model: Path, out: Path, name: str) -> Path:
    """Write the embedded model's folder in one of QUANTIZE or LAYOUTS to `out`, which is made."""
    out.mkdir(parents=True)
    if name in QUANTIZE:
        write_checkpoint(model, read_spec(model, name), out, torch.device("cpu"), lambda path: None)
        return out
    layout, stored = LAYOUTS[name], dict[str, Tensor]()
    for key, tensor in load_file(model / SINGLE).items():
        if MATRIX.search(key) is None:
            stored[key] = tensor
            continue
        for suffix, part in layout.tensors(tensor.float()).items():
            stored[key.removesuffix("weight") + suffix] = part.contiguous()
    save_file(stored, out / SINGLE, {"format": "pt"})
    copy_others(model, out)
    write_json(out / "config.json", {**read_json(model / "config.json").values, "quantization_config": layout.config})
    return out


def by_library(packing: str, **weights: Any) -> Layout:
    """As compressed-tensors writes it."""
    arguments = QuantizationArgs(**weights)

    def tensors(matrix: Tensor) -> Tensors:
        groups = matrix.unflatten(-1, (-1, weights.get("group_size") or matrix.shape[-1]))
        low, high = groups.aminmax(dim=-1)
        state = {"weight": matrix}
        if weights["strategy"] == "tensor_group":
            state["weight_global_scale"] = generate_gparam(matrix.min(), matrix.max())
        scales, zeros = calculate_qparams(low, high, arguments, state.get("weight_global_scale"))
        state |= {"weight_scale": scales, "weight_zero_point": zeros.to(torch.int8)}
        scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
        found = BaseCompressor.get_value_from_registry(packing).compress(state, scheme)
        kept = ("weight_zero_point",) if weights["type"] == "float" or weights["symmetric"] else ()
        return {key: value for key, value in found.items() if key not in kept}

    described = json.loads(arguments.model_dump_json())
    group = {"targets": ["Linear"], "weights": described}
    return Layout({"quant_method": "compressed-tensors", "format": packing, "quantization_status": "compressed",
                   "ignore": list(DENSE), "config_groups": {"group_0": group}}, tensors)  # fmt: skip


def packed(numbers: Tensor) -> Tensor:
    """Eight numbers of 4 bits a word, the first in the lowest bits: [..., 8 n] -> int32 [..., n]."""
    words = numbers.long().unflatten(-1, (-1, 8)) << torch.arange(0, 32, 4)
    return words.sum(-1).to(torch.int32)


def grouped(matrix: Tensor, *, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers [outputs, inputs], zero points and scales [outputs, groups], rounded to the nearest."""
    found = round_matrix(WeightFormat(kind="grouped", bits=4, group=GROUP, symmetric=symmetric), matrix)
    assert isinstance(found, GroupedWeight)
    zeros = torch.full(found.scales.shape, 8) if found.zeros is None else found.zeros
    return unpacked(found.values), zeros, found.scales.half()


def awq(matrix: Tensor) -> Tensors:
    numbers, zeros, scales = grouped(matrix, symmetric=False)

    def words(table: Tensor) -> Tensor:
        return packed(table.T.unflatten(-1, (-1, 8))[..., AWQ_COLUMNS].flatten(-2))

    return {"qweight": words(numbers), "qzeros": words(zeros), "scales": scales.T}


def gptq(matrix: Tensor) -> Tensors:
    """In the order of activations: the inputs with the largest weights share groups."""
    order = matrix.square().sum(0).argsort(descending=True)
    numbers, zeros, scales = grouped(matrix[:, order], symmetric=True)
    places = order.argsort()
    return {"qweight": packed(numbers[:, places]).T, "qzeros": packed(zeros.T) - ONES, "scales": scales.T,
            "g_idx": (places // GROUP).int()}  # fmt: skip


def blocks(matrix: Tensor) -> Tensors:
    found = round_matrix(WeightFormat(kind="float8", block=(128, 128), activations="block"), matrix)
    assert isinstance(found, Float8Weight)
    return {"weight": found.values, "weight_scale_inv": found.scales}


GROUPS = {"type": "int", "strategy": "group", "group_size": GROUP}
LAYOUTS: Mapping[str, Layout] = {
    "w8a16": by_library("pack-quantized", num_bits=8, type="int", symmetric=True, strategy="channel"),
    "w4a16": by_library("pack-quantized", num_bits=4, symmetric=True, **GROUPS),
    "w4a16-zeros": by_library("pack-quantized", num_bits=4, symmetric=False, **GROUPS),
    "nvfp4": by_library("nvfp4-pack-quantized", num_bits=4, type="float", symmetric=True, strategy="tensor_group",
                        group_size=16, scale_dtype=torch.float8_e4m3fn),
    "mxfp4": by_library("mxfp4-pack-quantized", num_bits=4, type="float", symmetric=True, strategy="group",
                        group_size=32, scale_dtype=torch.uint8),
    "awq": Layout({"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}, awq),
    "gptq": Layout({"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": True}, gptq),
    "fp8-blocks": Layout({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
                         blocks),
}  # fmt: skip
