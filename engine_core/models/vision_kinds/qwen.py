"""The vision encoders of Qwen2.5-VL (2025), Qwen3-VL (2025) and Qwen 3.5 (2026)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from penstock.engine_core.models.layer_spec import NormSpec
from penstock.engine_core.models.reading import ModelFile
from penstock.engine_core.models.vision_config import MOST, check_head_dim, read_theta
from penstock.engine_core.models.vision_kinds import BlockNames, Processor, Shapes, VisionKind, block, linear, norm
from penstock.engine_core.models.vision_spec import COLORS, VisionSpec

RMS = NormSpec(eps=1e-6)
PATCHES = "patch_embed.proj"
GATED = BlockNames("norm1", ("attn.qkv",), "attn.proj", "norm2", ("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj")
PLAIN = BlockNames("norm1", ("attn.qkv",), "attn.proj", "norm2", ("mlp.linear_fc1",), "mlp.linear_fc2")
MERGED = ("merger.ln_q", "merger.mlp.0", "merger.mlp.2")  # its norm, and the products of a cell
MERGER = ("merger.norm", "merger.linear_fc1", "merger.linear_fc2")


def level_names(level: int) -> tuple[str, str, str]:
    """The same of a DeepStack level, whose norm is of a cell."""
    norm, first, last = (f"deepstack_merger_list.{level}.{name.removeprefix('merger.')}" for name in MERGER)
    return norm, first, last


def shapes(spec: VisionSpec) -> Shapes:
    """The encoder's tensors."""
    for name, shape in tensors(spec):
        yield f"visual.{name}", shape


def tensors(spec: VisionSpec) -> Shapes:
    """By names within the encoder."""
    yield f"{PATCHES}.weight", (spec.hidden, COLORS, spec.frames, spec.patch, spec.patch)
    if not spec.gated:
        yield f"{PATCHES}.bias", (spec.hidden,)
        yield "pos_embed.weight", (spec.positions**2, spec.hidden)
    for layer in range(spec.layers):
        yield from block(f"blocks.{layer}.", spec, GATED if spec.gated else PLAIN)
    joined = spec.hidden * spec.merge**2
    mergers = [(MERGED if spec.gated else MERGER, spec.hidden)]
    mergers += [(level_names(level), joined) for level in range(len(spec.levels))]
    for names, width in mergers:
        yield from norm(names[0], width, spec.norm)
        yield from linear(names[1], joined, joined, bias=True)
        yield from linear(names[2], spec.outputs, joined, bias=True)


def read_qwen2_5(file: ModelFile, outer: ModelFile, processor: Processor) -> VisionSpec:
    """Windows, but for some layers, RMS norms, and MLPs with a gate."""
    common = read_common(file, outer, processor, ("silu", "gelu_tanh", "gelu"))
    cell, window = common["patch"] * common["merge"], file.integer("window_size")
    if window < cell:
        raise file.error("window_size", f"it must be at least the {cell} pixels that become a row")
    full = read_indexes(file, "fullatt_block_indexes", common["layers"])
    return VisionSpec(**common, gated=True, norm=RMS, window=window, full=full)


def read_qwen3(file: ModelFile, outer: ModelFile, processor: Processor) -> VisionSpec:
    """Learned positions, and DeepStack."""
    common = read_common(file, outer, processor, ("gelu_tanh", "gelu", "silu"))
    levels = read_indexes(file, "deepstack_visual_indexes", common["layers"])
    return VisionSpec(**common, positions=read_side(file), levels=levels)


def read_qwen3_5(file: ModelFile, outer: ModelFile, processor: Processor) -> VisionSpec:
    """The same without DeepStack."""
    if file.get("deepstack_visual_indexes"):
        raise file.error("deepstack_visual_indexes", "Penstock serves none in this family, as transformers has it")
    return VisionSpec(**read_common(file, outer, processor, ("gelu_tanh", "gelu", "silu")), positions=read_side(file))


def read_common(
    file: ModelFile, outer: ModelFile, processor: Processor, activations: tuple[str, ...]
) -> dict[str, Any]:
    """What all of them have."""
    patch, merge = file.integer("patch_size", high=MOST), file.integer("spatial_merge_size", high=MOST)
    hidden, heads = file.integer("hidden_size"), file.integer("num_heads")
    if hidden % heads or hidden // heads % 4:
        raise file.error("num_heads", f"heads must share the hidden_size of {hidden} in multiples of 4 numbers")
    check_head_dim(file, hidden // heads)
    if file.integer("in_channels", COLORS) != COLORS:
        raise file.error("in_channels", "Penstock serves images of three")
    return {
        "kind": "qwen",
        "token_id": outer.integer("image_token_id", file.get("image_token_id"), low=0),
        "processor": processor(patch * merge),
        "patch": patch,
        "merge": merge,
        "frames": file.integer("temporal_patch_size", high=MOST),
        "layers": file.integer("depth", high=4096),
        "hidden": hidden,
        "heads": heads,
        "width": file.integer("intermediate_size"),
        "activation": file.activation(served=activations),
        "outputs": file.integer("out_hidden_size"),
        "theta": read_theta(file),
        "mrope": True,
    }


def read_indexes(file: ModelFile, key: str, layers: int) -> tuple[int, ...]:
    """A list of layers."""
    found = file.get(key)
    if found is None:
        found = []
    whole = isinstance(found, list | tuple) and all(type(layer) is int and 0 <= layer < layers for layer in found)
    if not whole or len(set(found)) < len(found):
        raise file.error(key, f"a list of different numbers of the {layers} layers is expected")
    return tuple(found)


def read_side(file: ModelFile) -> int:
    """Of the square of learned positions."""
    count = file.integer("num_position_embeddings")
    if math.isqrt(count) ** 2 != count:
        raise file.error("num_position_embeddings", "it must be the square of a number")
    return math.isqrt(count)


COMMON: Mapping[str, Any] = {"in_channels": 3, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_heads": 16,
                             "out_hidden_size": 3584}  # fmt: skip
QWEN3: Mapping[str, Any] = {**COMMON, "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "patch_size": 16,
                            "num_position_embeddings": 2304, "image_token_id": 151655}  # fmt: skip
KEYS: Mapping[str, str] = {"num_attention_heads": "num_heads", "num_hidden_layers": "depth"}
KINDS = (
    VisionKind(
        wrappers=("Qwen2_5_VLForConditionalGeneration",),
        types=("qwen2_5_vl", "qwen2_5_vl_vision"),
        read=read_qwen2_5,
        keys=KEYS,
        defaults={**COMMON, "depth": 32, "hidden_size": 3584, "intermediate_size": 3420, "patch_size": 14,
                  "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31], "image_token_id": 151655},
        sections=(16, 24, 24),
    ),
    VisionKind(
        wrappers=("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"),
        types=("qwen3_vl", "qwen3_vl_vision", "qwen3_vl_moe", "qwen3_vl_moe_vision"),
        read=read_qwen3,
        keys=KEYS,
        defaults={**QWEN3, "deepstack_visual_indexes": [8, 16, 24]},
        sections=(24, 20, 20),
        sections_alternate=True,
    ),
    VisionKind(
        wrappers=("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"),
        types=("qwen3_5", "qwen3_5_vision", "qwen3_5_moe", "qwen3_5_moe_vision"),
        read=read_qwen3_5,
        keys=KEYS,
        defaults={**QWEN3, "image_token_id": 248056},
        sections=(11, 11, 10),
        sections_alternate=True,
    ),
)  # fmt: skip
