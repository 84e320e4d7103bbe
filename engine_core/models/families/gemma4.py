"""The text half of Gemma 4 (2026): windows and global layers with heads of two sizes, a norm of values, positions that
turn the fastest pairs of global layers alone, and a stream that every layer scales. The last layers of E2B and E4B
share keys and values of earlier ones, and each of their layers adds an embedding of its own.

Images and audio are left unread. Tokens of text see earlier ones alone, also where those of images would not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import structs

from penstock.engine_core.models.families import Family
from penstock.engine_core.models.families.gemma import SANDWICH
from penstock.engine_core.models.layer_spec import AttentionSpec, Body, EmbeddingSpec, ExpertSpec, GateSpec, MlpSpec
from penstock.engine_core.models.reading import FULL, SLIDING, ModelFile

PLACES = ("", "language_model.", "language_model.model.")  # of layers, in names of tensors
HEADS = ("head_dim", "num_key_value_heads")  # what `per_layer_config` says of global layers


def read_gemma4(file: ModelFile) -> Body:
    """Every sixth layer sees all keys, and the last."""
    count = file.num_layers
    slid = [*file.kinds(SLIDING, lambda layer: (layer + 1) % 6)[:-1], False]
    if file.get("use_bidirectional_attention") not in (None, "vision"):
        raise file.error("use_bidirectional_attention", "Penstock serves Gemma 4 as a decoder: null or vision")
    mlp = file.mlp(activation=file.activation("hidden_activation", ("gelu_tanh",)))
    first, width = read_shared(file, slid), file.integer("hidden_size_per_layer_input", low=0)
    wide = structs.replace(mlp, width=2 * mlp.width) if file.flag("use_double_wide_mlp") else mlp
    mlps: list[MlpSpec | ExpertSpec] = [mlp if layer < first else wide for layer in range(count)]
    if file.flag("enable_moe_block"):
        mlps = [structs.replace(read_experts(file), shared=own) for own in mlps]
    full, sliding = read_attentions(file, slid)
    attentions = [sliding if own else full for own in slid]
    attentions[first:] = [
        structs.replace(own, kv_shared=True, value_norm=False, values_of_keys=False) for own in attentions[first:]
    ]
    inputs: dict[str, Any] = (
        {"layer_inputs": count * width, "layer_rows": file.integer("vocab_size_per_layer_input")} if width else {}
    )
    return file.body(
        attentions,
        mlps,
        norms=SANDWICH,
        scaled=True,
        layer_input=width,
        embedding=EmbeddingSpec(**inputs),
        unread=tuple(
            f"{place}layers.{layer}.self_attn.{name}"
            for place in PLACES
            for layer in range(first, count)
            for name in ("k_", "v_")
        ),
        embedding_scale=file.integer("hidden_size") ** 0.5,
        logit_softcap=file.number("final_logit_softcapping", 0.0),
        max_position=file.integer("max_position_embeddings"),
    )


def read_shared(file: ModelFile, slid: list[bool]) -> int:
    """The first layer of those that share the keys and values of an earlier one; their count if there is none."""
    first = len(slid) - file.integer("num_kv_shared_layers", 0, low=0, high=len(slid))
    if set(slid[:first]) != set(slid):
        raise file.error("num_kv_shared_layers", "a layer of each kind must have keys and values of its own")
    return first


def read_attentions(file: ModelFile, slid: list[bool]) -> tuple[AttentionSpec, AttentionSpec]:
    """Of global layers and of those with a window. Scores are not scaled: norms of queries and keys have learned it."""
    same = file.flag("attention_k_eq_v")
    common: dict[str, Any] = {"bias": "attention_bias", "scale": 1.0, "qk_norm": "head", "value_norm": True}
    sliding = file.attention(file.rope(SLIDING), window=file.integer("sliding_window"), **common)
    own = structs.replace(file, values={**file.values, **global_heads(file, slid, same=same)})
    return own.attention(own.rope(FULL), values_of_keys=same, **common), sliding


def read_experts(file: ModelFile) -> ExpertSpec:
    """Experts beside the MLP of every layer (26B-A4B)."""
    found = file.experts("num_experts", "moe_intermediate_size", "top_k_experts", normalised=True)
    return structs.replace(found, gate=GateSpec(kind="gelu_tanh"), stacked=True, shared_name="dense", apart=True)


def global_heads(file: ModelFile, slid: list[bool], *, same: bool) -> Mapping[str, Any]:
    """Size and number of the key-value heads of global layers: by keys of their own, or, as transformers writes files
    now, layer by layer. same: values are made of keys, without which the number is that of all layers."""
    found, few = file.get("per_layer_config"), file.get("num_global_key_value_heads")
    if found is None:
        return {"head_dim": file.integer("global_head_dim"), **({HEADS[1]: few} if same and few is not None else {})}
    expected = {str(layer) for layer, own in enumerate(slid) if not own}
    values = list(found.values()) if isinstance(found, dict) and set(found) == expected else [None]
    if not isinstance(values[0], dict) or any(one != values[0] for one in values) or set(values[0]) - set(HEADS):
        raise file.error("per_layer_config", f"{' and '.join(HEADS)} of all {FULL} layers alike are expected")
    return dict(values[0])


NAMES = (
    ("mlp.dense.", "mlp."),
    ("mlp.gate.", "router.proj."),
    ("mlp.router_norm.weight", "router.scale"),
    ("mlp.share", "router.per_expert_scale"),
    ("mlp.experts.", "experts."),
    ("mlp.experts_norm.", "pre_feedforward_layernorm_2."),
    ("mlp.dense_output_norm.", "post_feedforward_layernorm_1."),
    ("mlp.experts_output_norm.", "post_feedforward_layernorm_2."),
)
DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262144,
    "sliding_window": 512,
    "max_position_embeddings": 131072,
    "vocab_size": 262144,
    "tie_word_embeddings": True,
    "rope_parameters": {
        SLIDING: {"rope_type": "default", "rope_theta": 1e4},
        FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    },
}
FAMILIES = (
    Family(
        name="gemma4_text",
        architecture="Gemma4ForCausalLM",
        read=read_gemma4,
        defaults=DEFAULTS,
        names=NAMES,
        ignored=("vocab_size_per_layer_input",),  # where there is no such embedding
        wrappers=("Gemma4ForConditionalGeneration",),
    ),
    Family(
        name="gemma4_unified_text",
        architecture="Gemma4UnifiedForCausalLM",
        read=read_gemma4,
        defaults={
            **DEFAULTS,
            "hidden_size_per_layer_input": 0,
            "sliding_window": 1024,
            "max_position_embeddings": 262144,
        },
        wrappers=("Gemma4UnifiedForConditionalGeneration",),
    ),
)
