"""The vision encoder of Mistral 3 (2025): Pixtral's (Agrawal et al., 2024), with cells of patches merged to one row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.engine_core.models.layer_spec import NormSpec
from penstock.engine_core.models.reading import ModelFile
from penstock.engine_core.models.vision_config import (
    MOST,
    THETA,
    check_head_dim,
    read_sizes,
    read_theta,
    read_token,
    text_settings,
)
from penstock.engine_core.models.vision_kinds import (
    BlockNames,
    Processor,
    Shapes,
    VisionKind,
    block,
    linear,
    norm,
)
from penstock.engine_core.models.vision_spec import COLORS, ProjectionSpec, VisionSpec

PLACE = "vision_tower."
PROJECTOR = "multi_modal_projector."
PATCHES, FIRST_NORM, LAYERS = "patch_conv", "ln_pre", "transformer.layers."
PROJECTION_NORM, MERGER, UP, DOWN = "norm", "patch_merger.merging_layer", "linear_1", "linear_2"
NAMES = BlockNames(
    attention_norm="attention_norm",
    qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    output="attention.o_proj",
    mlp_norm="ffn_norm",
    up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
)
NORM = NormSpec(eps=1e-5)
ACTIVATIONS = ("gelu", "silu", "gelu_tanh")
EPS: Mapping[str, Any] = {"mistral": 1e-6, "ministral3": 1e-5}  # of norms, where a text half is silent
HIDDEN = 4096


def shapes(spec: VisionSpec) -> Shapes:
    """The encoder's tensors, and those of the projection."""
    assert spec.projection is not None, "its reader makes one"
    bias = spec.projection.bias
    yield f"{PLACE}{PATCHES}.weight", (spec.hidden, COLORS, spec.patch, spec.patch)
    yield from norm(f"{PLACE}{FIRST_NORM}", spec.hidden, spec.norm)
    for layer in range(spec.layers):
        yield from block(f"{PLACE}{LAYERS}{layer}.", spec, NAMES)
    yield from norm(f"{PROJECTOR}{PROJECTION_NORM}", spec.hidden, spec.projection.norm)
    yield from linear(f"{PROJECTOR}{MERGER}", spec.hidden, spec.hidden * spec.merge**2, bias=False)
    yield from linear(f"{PROJECTOR}{UP}", spec.outputs, spec.hidden, bias=bias)
    yield from linear(f"{PROJECTOR}{DOWN}", spec.outputs, spec.outputs, bias=bias)


def read(file: ModelFile, outer: ModelFile, processor: Processor) -> VisionSpec:
    """Norms of the projection are as those of the text half."""
    sizes, merge = read_sizes(file), outer.integer("spatial_merge_size", 2, high=MOST)
    head_dim = sizes["hidden"] // sizes["heads"]
    if head_dim % 4:
        raise file.error("num_attention_heads", f"heads are of {head_dim} numbers, and a multiple of 4 is expected")
    check_head_dim(file, head_dim)
    text = text_settings(outer, {"hidden_size": HIDDEN})
    eps = EPS.get(str(text.get("model_type")), EPS["mistral"])
    return VisionSpec(
        **sizes,
        kind="pixtral",
        places=(PLACE, PROJECTOR),
        token_id=read_token(outer, 10),
        processor=processor(sizes["patch"] * merge),
        merge=merge,
        activation=file.activation(served=ACTIVATIONS),
        gated=True,
        norm=NORM,
        bias=False,
        theta=read_theta(file, file.number("rope_theta", THETA, low=2.0)),  # where transformers 4 has it
        taken=read_taken(outer, sizes["layers"]),
        outputs=text.integer("hidden_size"),
        projection=ProjectionSpec(
            norm=text.norm(default=eps),
            activation=outer.activation("projector_hidden_act", ACTIVATIONS),
            bias=outer.flag("multimodal_projector_bias"),
        ),
    )


def read_taken(outer: ModelFile, layers: int) -> int:
    """Behind how many layers `vision_feature_layer` takes the patches' states."""
    key = "vision_feature_layer"
    given = outer.get(key)
    if isinstance(given, list) and len(given) == 1:
        given = given[0]
    at = -1 if given is None else given
    if type(at) is not int or not (-layers <= at <= -1 or 1 <= at <= layers):
        raise outer.error(key, f"a layer of 1 to {layers} is expected, or from the end of -1 to -{layers}")
    return at if at > 0 else layers + 1 + at


KINDS = (
    VisionKind(
        wrappers=("Mistral3ForConditionalGeneration",),
        types=("pixtral",),
        read=read,
        defaults={
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "patch_size": 16,
        },
    ),
)
