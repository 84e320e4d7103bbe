"""Gemma 3's vision encoder (2025): SigLIP (Zhai et al., 2023) over pictures of one size, averaged cell by cell."""

from __future__ import annotations

import math

from penstock.engine_core.images.processor_spec import FixedSize
from penstock.engine_core.models.layer_spec import NormSpec
from penstock.engine_core.models.reading import ModelFile
from penstock.engine_core.models.vision_config import read_sizes, read_token, text_settings
from penstock.engine_core.models.vision_kinds import (
    BlockNames,
    Processor,
    Shapes,
    VisionKind,
    block,
    norm,
)
from penstock.engine_core.models.vision_spec import COLORS, ProjectionSpec, VisionSpec

PLACE = "vision_tower.vision_model."
PROJECTOR = "multi_modal_projector."
PATCHES, POSITIONS = "embeddings.patch_embedding", "embeddings.position_embedding"
LAYERS, LAST_NORM = "encoder.layers.", "post_layernorm"
PROJECTION, PROJECTION_NORM = "mm_input_projection_weight", "mm_soft_emb_norm"
NAMES = BlockNames(
    attention_norm="layer_norm1",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    output="self_attn.out_proj",
    mlp_norm="layer_norm2",
    up=("mlp.fc1",),
    down="mlp.fc2",
)


def shapes(spec: VisionSpec) -> Shapes:
    """The encoder's tensors, and those of the projection, whose matrix has outputs last."""
    yield f"{PLACE}{PATCHES}.weight", (spec.hidden, COLORS, spec.patch, spec.patch)
    yield f"{PLACE}{PATCHES}.bias", (spec.hidden,)
    yield f"{PLACE}{POSITIONS}.weight", (spec.positions**2, spec.hidden)
    for layer in range(spec.layers):
        yield from block(f"{PLACE}{LAYERS}{layer}.", spec, NAMES)
    yield from norm(f"{PLACE}{LAST_NORM}", spec.hidden, spec.norm)
    yield f"{PROJECTOR}{PROJECTION}", (spec.hidden, spec.outputs)
    yield f"{PROJECTOR}{PROJECTION_NORM}.weight", (spec.hidden,)


def read(file: ModelFile, outer: ModelFile, processor: Processor) -> VisionSpec:
    """Pictures are of `image_size`, and `mm_tokens_per_image` is the number of their rows."""
    sizes, side, rows = read_sizes(file), file.integer("image_size"), outer.integer("mm_tokens_per_image", 256)
    patch, eps = sizes["patch"], file.number("layer_norm_eps")
    if side % patch:
        raise file.error("image_size", f"patches of {patch} pixels do not fill it")
    patches, lines = side // patch, math.isqrt(rows)
    if lines**2 != rows or patches % lines:
        raise outer.error("mm_tokens_per_image", f"the square of a divisor of {patches} is expected")
    found = processor(patch)
    if found.resize != FixedSize(height=side, width=side):
        raise file.error("image_size", f"the image processor makes another of pictures: {found.resize}")
    return VisionSpec(
        **sizes,
        kind="siglip",
        places=("vision_tower.", PROJECTOR),
        aliases=((PLACE, "vision_tower."),),
        token_id=read_token(outer, 262144),
        processor=found,
        merge=patches // lines,
        pooled=rows,
        activation=file.activation(served=("gelu_tanh", "gelu")),
        norm=NormSpec(eps=eps, centered=True),
        positions=patches,
        outputs=text_settings(outer, {"hidden_size": 2304}).integer("hidden_size"),
        projection=ProjectionSpec(norm=NormSpec(eps=eps, offset=1.0)),
        mutual=True,
    )


KINDS = (
    VisionKind(
        wrappers=("Gemma3ForConditionalGeneration",),
        types=("siglip_vision_model",),
        read=read,
        defaults={
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "image_size": 224,
            "patch_size": 16,
            "layer_norm_eps": 1e-6,
        },
    ),
)
