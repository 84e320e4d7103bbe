"""Tiny random models twice: with quantized weights, and with the very numbers that these stand for."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedConfig

from penstock.engine_core.models.quantization.convert import read_matrix
from penstock.engine_core.models.quantization.weight_format import Role, StoredPart, WeightFormat
from penstock.engine_core.models.spec import read_spec, stored_name
from penstock.engine_core.models.tensors import Weight, model_weights
from penstock.engine_core.models.weight_files import SINGLE
from penstock.kernels.quantized import GroupedWeight
from tests.engine_core.models.parity import write_checkpoint


def compressed(weights: Mapping[str, Any], activations: Mapping[str, Any] | None, packing: str) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {"quant_method": "compressed-tensors", "format": packing, "config_groups": {"group_0": group},
            "ignore": ["lm_head"]}  # fmt: skip


def integers(bits: int, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, **more}


ROWS = {"num_bits": 8, "strategy": "token", "dynamic": True}
CHANNELS = {"num_bits": 8, "strategy": "channel", "symmetric": True}
# What config.json says, of formats of each layout and packing. Groups and blocks suit small models.
CONFIGS: Mapping[str, dict[str, Any]] = {
    "fp8 blocks": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32],
                   "modules_to_not_convert": ["lm_head"]},
    "fp8 channels": compressed({**CHANNELS, "type": "float"}, {**ROWS, "type": "float"}, "float-quantized"),
    "fp8 static": {"quant_method": "fp8", "activation_scheme": "static"},
    "int8": compressed({**CHANNELS, "type": "int"}, {**ROWS, "type": "int"}, "int-quantized"),
    "w4a16": compressed(integers(4), None, "pack-quantized"),
    "w4a16 with zero points": compressed(integers(4, symmetric=False), None, "pack-quantized"),
    "w8a16": compressed(integers(8, strategy="channel", group_size=None), None, "pack-quantized"),
    "w4a16 in order": compressed(integers(4, actorder="group"), None, "pack-quantized"),
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False},
}  # fmt: skip
WEIGHTS_ONLY = tuple(name for name in CONFIGS if name not in ("fp8 blocks", "fp8 channels", "fp8 static", "int8"))


def write_pair(place: Path, config: PreTrainedConfig, quantization: Mapping[str, Any]) -> tuple[Path, Path]:
    """Folders of the model with quantized weights and of the same without."""
    quantized, dense = place / "quantized", place / "dense"
    write_checkpoint(dense, config)
    quantized.mkdir()
    values = json.loads((dense / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps({**values, "quantization_config": quantization}))
    spec = read_spec(quantized)
    found = load_file(dense / SINGLE)
    stored = dict(found)
    random = torch.Generator().manual_seed(11)
    for name, weight in model_weights(spec):
        if weight.form is None:
            continue
        raw = raw_tensors(weight.form, weight, random)
        full = stored_name(spec, name)
        made = read_matrix(weight.form, {part.role: tensor for part, tensor in raw}, name)
        numbers = made.dequantized(torch.float32)
        if isinstance(made, GroupedWeight) and made.order is not None:
            numbers = torch.empty_like(numbers).index_copy_(1, made.order.long(), numbers)
        if numbers.dim() > 2 and spec.sparse[0].transposed:
            numbers = numbers.transpose(1, 2).contiguous()
        assert found[full].shape == numbers.shape
        found[full] = numbers
        del stored[full]
        stored |= {full.removesuffix(".weight") + part.suffix: tensor for part, tensor in raw}
    save_file(found, dense / SINGLE, {"format": "pt"})
    save_file(stored, quantized / SINGLE, {"format": "pt"})
    return quantized, dense


def raw_tensors(form: WeightFormat, weight: Weight, random: torch.Generator) -> list[tuple[StoredPart, Tensor]]:
    """Random tensors of one matrix, of a scale at which its products are about as large as what they multiply."""
    experts, outputs, inputs = (1, *weight.shape)[-3:]
    found = []
    for part in form.stored(stacked=len(weight.shape) > 2):
        if not part.optional:
            shape = part.shape(outputs, inputs, experts)
            found.append((part, raw_tensor(form, part.role, part.dtypes[0], shape, inputs, random)))
    return found


def raw_tensor(
    form: WeightFormat, role: Role, dtype: str, shape: tuple[int, ...], inputs: int, random: torch.Generator
) -> Tensor:
    size = (
        inputs**-0.5
        / {"float8": 1.0, "int8": 60.0, "float4": 2.0, "grouped": 4.0 * 16 ** (form.bits // 4 - 1)}[form.kind]
    )
    if role == "groups":
        return (torch.randperm(shape[0], generator=random) // (form.group or shape[0])).int()
    if role in ("input_scale", "factor"):
        return torch.tensor(0.02 if role == "input_scale" else 2.0)
    if role == "scales" and dtype in ("U8", "F8_E8M0"):
        return torch.full(shape, 127 + round(math.log2(size)), dtype=torch.uint8)
    if role == "scales":
        scales = size * (0.5 + torch.rand(shape, generator=random))
        kind = {"float4": torch.float8_e4m3fn, "grouped": torch.bfloat16}.get(form.kind, torch.float32)
        return scales.to(kind)
    if dtype == "F8_E4M3":
        return torch.randn(shape, generator=random).to(torch.float8_e4m3fn)
    low, high, kind = {
        "I8": (-127, 128, torch.int8), "I32": (-(2**31), 2**31, torch.int32), "U8": (0, 256, torch.uint8),
    }[dtype]  # fmt: skip
    return torch.randint(low, high, shape, generator=random, dtype=kind)
