"""Parts of layers as config.json tells them, in words that several families share. Complaints name file and key."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import structs

from penstock.engine_core.models.config_file import ConfigFile
from penstock.engine_core.models.layer_spec import (
    AttentionSpec,
    ExpertSpec,
    LayerSpec,
    MlpSpec,
    NormNames,
    NormSpec,
    RopeSpec,
    RoutingSpec,
)
from penstock.engine_core.models.pooler import MODULE_ACTIVATIONS
from penstock.protocol.errors import ModelError

LARGE = 1e6  # beyond what any stretching of positions is
ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional")
FULL, SLIDING = "full_attention", "sliding_attention"
ACTIVATIONS: Mapping[str, str] = {  # transformers' names and those of kernels.activation
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu": "gelu",
    "relu2": "relu2",
}
LABELS = 2  # of a classifier whose file names none, as transformers has it


def read_attention(file: ConfigFile, rope: RopeSpec | None = None, **options: Any) -> AttentionSpec:
    """Heads and their size by the keys that all families have. rope: None: the file's. options: of the spec."""
    heads, hidden = file.integer("num_attention_heads"), file.integer("hidden_size")
    kv_heads = file.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise file.error("num_key_value_heads", f"it must divide num_attention_heads ({heads})")
    if file.get("head_dim") is None and hidden % heads:
        raise file.error("num_attention_heads", f"without head_dim it must divide hidden_size ({hidden})")
    head_dim = file.integer("head_dim", hidden // heads)
    rope = read_rope(file) if rope is None else rope
    if head_dim % 2 or (rope.kind == "dynamic" and head_dim == 2):
        raise file.error("head_dim", f"{rope.kind} rotary positions cannot turn heads of {head_dim}")
    return AttentionSpec(heads=heads, kv_heads=kv_heads, head_dim=head_dim, rope=rope, **options)


def read_mlp(file: ConfigFile, key: str = "intermediate_size", **options: Any) -> MlpSpec:
    """options: of the spec; without an activation the file may name none but silu."""
    if "activation" not in options:
        options["activation"] = read_activation(file)
    return MlpSpec(width=file.integer(key), **options)


def read_activation(file: ConfigFile, key: str = "hidden_act", served: tuple[str, ...] = ("silu",)) -> str:
    """The activation that the file names, the first of `served` where it is silent."""
    named = file.get(key)
    found = served[0] if named is None else ACTIVATIONS.get(named) if isinstance(named, str) else None
    if found not in served:
        names = " or ".join(name for name, kind in ACTIVATIONS.items() if kind in served)
        raise file.error(key, f"Penstock serves {names} in this family")
    return found


def read_norm(file: ConfigFile, key: str = "rms_norm_eps", default: float = 1e-6, **options: Any) -> NormSpec:
    return NormSpec(eps=file.number(key, default), **options)


def read_labels(file: ConfigFile) -> tuple[tuple[str, ...], str]:
    """A classifier's labels, and the activation of its logits: what sentence-transformers wrote down for its
    cross-encoders, else by the kind of the problem; one label is scored by the sigmoid."""
    names, count = file.get("id2label"), file.integer("num_labels", LABELS)
    if isinstance(names, dict):
        count = len(names)
        if not count or set(names) != set(map(str, range(count))):
            raise file.error("id2label", "a name for each of the labels, from 0 on, is expected")
    else:
        names = {}
    labels = tuple(str(names.get(str(number), f"LABEL_{number}")) for number in range(count))
    own, kind = file.get("sentence_transformers"), file.get("problem_type")
    named = own.get("activation_fn") if isinstance(own, dict) else file.get("sbert_ce_default_activation_function")
    if named is not None:
        module = str(named).rsplit(".", 1)[-1]
        if module not in ("Identity", "Sigmoid"):
            key = "sentence_transformers" if isinstance(own, dict) else "sbert_ce_default_activation_function"
            raise file.error(key, "Penstock serves Identity and Sigmoid as its activation")
        return labels, MODULE_ACTIVATIONS[module]
    if kind == "regression":
        return labels, ""
    return labels, "softmax" if count > 1 and kind != "multi_label_classification" else "sigmoid"


def read_layers(file: ConfigFile) -> int:
    return file.integer("num_hidden_layers", high=4096)


def alike(
    file: ConfigFile,
    attention: AttentionSpec | Iterable[AttentionSpec],
    mlp: MlpSpec | Iterable[MlpSpec | ExpertSpec],
    norm: NormSpec,
    norms: NormNames | None = None,
) -> tuple[LayerSpec, ...]:
    """The layers: attention and MLP are those of every layer, or given layer by layer."""
    count = read_layers(file)
    attentions = [attention] * count if isinstance(attention, AttentionSpec) else list(attention)
    mlps = [mlp] * count if isinstance(mlp, MlpSpec) else list(mlp)
    return tuple(
        LayerSpec(attention=one, mlp=other, norm=norm, norms=norms or NormNames())
        for one, other in zip(attentions, mlps, strict=True)
    )


def read_kinds(file: ConfigFile, default: Iterable[str]) -> list[str]:
    """FULL or SLIDING for each layer: `layer_types`, or the family's rule where the file is silent."""
    layers, found = read_layers(file), file.get("layer_types")
    kinds = list(default) if found is None else found
    if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in (FULL, SLIDING) for kind in kinds):
        raise file.error("layer_types", f"it must name {FULL} or {SLIDING} for each of the {layers} layers")
    return kinds


def read_turned(file: ConfigFile) -> list[bool]:
    """Whether each layer has positions: `no_rope_layers` has a zero where there are none."""
    layers, given = read_layers(file), file.get("no_rope_layers")
    turn = file.integer("no_rope_layer_interval", 4)
    if given is None:
        return [(layer + 1) % turn != 0 for layer in range(layers)]
    if not isinstance(given, list) or len(given) < layers or not all(value in (0, 1) for value in given):
        raise file.error("no_rope_layers", f"a list of 0 or 1 for each of the {layers} layers is expected")
    return [bool(value) for value in given[:layers]]


def by_kind(kinds: Iterable[str], full: AttentionSpec, sliding: AttentionSpec) -> list[AttentionSpec]:
    """The attention of layers of these kinds."""
    return [sliding if kind == SLIDING else full for kind in kinds]


def read_ropes(file: ConfigFile, local: str = "rope_theta") -> tuple[RopeSpec, RopeSpec]:
    """The rotary positions of full and of sliding layers. In files without settings by kind those of sliding layers are
    not stretched, and have the base of the key `local`."""
    settings = file.get("rope_parameters")
    if isinstance(settings, dict) and FULL in settings and file.get("rope_scaling") is None:
        base = file.number(local, 10000.0, low=2.0)
        sliding = read_rope(file, SLIDING) if isinstance(settings.get(SLIDING), dict) else RopeSpec(theta=base)
        return read_rope(file, FULL), sliding
    return read_rope(file), RopeSpec(theta=file.number(local, 10000.0, low=2.0))


def sparse_layers(file: ConfigFile, layers: int) -> tuple[bool, ...]:
    """Which layers have experts: every so many-th, the first of each turn being its last, but those that are to have
    one MLP alone."""
    step = file.integer("decoder_sparse_step")
    plain = file.get("mlp_only_layers") or []
    if not isinstance(plain, list) or not all(type(layer) is int and 0 <= layer < layers for layer in plain):
        raise file.error("mlp_only_layers", f"a list of layers, 0 to {layers - 1}, is expected")
    return tuple((layer + 1) % step == 0 and layer not in plain for layer in range(layers))


def read_routed_experts(file: ConfigFile, **silent: Any) -> ExpertSpec:
    """Experts as DeepSeek-V3 has them. silent: what the family assumes where the file is silent."""
    count = file.integer("n_routed_experts", silent.get("count"), high=4096)
    routing = RoutingSpec(
        chosen=file.integer("num_experts_per_tok", silent.get("chosen"), high=count),
        scores="sigmoid",
        normalised=file.flag("norm_topk_prob", silent.get("normalised", True)),
        bias="gate.e_score_correction_bias",
        scale=file.number("routed_scaling_factor", 1.0),
        **read_groups(file, count),
    )
    one, number = read_mlp(file, "moe_intermediate_size"), file.integer("n_shared_experts", silent.get("shared", 1))
    return ExpertSpec(
        count=count,
        width=one.width,
        routing=routing,
        shared=structs.replace(one, width=number * one.width),
        shared_name="shared_experts",
    )


def read_groups(file: ConfigFile, count: int) -> dict[str, Any]:
    """Groups of experts as DeepSeek-V3 has them, as options of RoutingSpec."""
    groups = file.integer("n_group", 1, high=count)
    if count % groups or (groups > 1 and count < 2 * groups):
        raise file.error("n_group", f"groups must be of equal size, at least two of the {count} experts each")
    top = file.integer("topk_group", 1, high=groups)
    if file.integer("num_experts_per_tok", 8) > count // groups * top:
        raise file.error("topk_group", f"so few groups have fewer than num_experts_per_tok of the {count} experts")
    return {"groups": groups, "top_groups": top, "group_best": 2} if groups > 1 else {}


def dense_first(file: ConfigFile) -> list[bool]:
    """Which layers have experts: those that `mlp_layer_types` calls sparse, or all but the first."""
    layers, kinds = read_layers(file), file.get("mlp_layer_types")
    dense = file.integer("first_k_dense_replace", 1, low=0)
    if kinds is None:
        return [layer >= dense for layer in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in ("dense", "sparse") for kind in kinds):
        raise file.error("mlp_layer_types", f"it must name dense or sparse for each of the {layers} layers")
    return [kind == "sparse" for kind in kinds]


def read_rope(file: ConfigFile, kind: str = "", partial: float | None = None, *, interleaved: bool = False) -> RopeSpec:
    """Rotary settings from `rope_parameters`, or from `rope_theta` and `rope_scaling`.

    Where both stand, `rope_scaling` wins, as it does in transformers. Frequencies themselves are `rope.rope_table`'s.
    kind: of the layers, for families that have settings by kind. partial: the share of a head that is turned where the
    file is silent; None: the family turns whole heads.
    """
    values = file.get("rope_scaling") or file.get("rope_parameters") or {}
    if not isinstance(values, dict):
        raise file.error("rope_scaling", "it must be an object")
    values = values.get(kind, values) if kind else values
    rope = ConfigFile(file.path, values)
    name = rope.get("rope_type") or rope.get("type") or "default"
    if name == "su" or (name == "yarn" and rope.get("long_factor")):  # what longrope was called first
        name = "longrope"
    if any(isinstance(value, dict) for value in values.values()) or name not in ROPE_KINDS:
        known = ", ".join(ROPE_KINDS)
        raise ModelError(f"{file.path}: rope scaling {values!r} is not known; one rope_type of {known} is expected")
    theta = rope.number("rope_theta", file.number("rope_theta", 10000.0, low=2.0), low=2.0)
    common: dict[str, Any] = {"kind": name, "theta": theta, "interleaved": interleaved}
    if name == "proportional":
        share = rope.number("partial_rotary_factor", 1.0, high=1.0)
        return RopeSpec(**common, share=share, factor=rope.number("factor", 1.0, low=1.0, high=LARGE))
    share = file.number("partial_rotary_factor", 1.0 if partial is None else partial, high=1.0)
    share = rope.number("partial_rotary_factor", share, high=1.0)
    if share != 1.0:
        if partial is None:
            where = rope if rope.get("partial_rotary_factor") is not None else file
            raise where.error("partial_rotary_factor", "Penstock rotates whole heads (1.0) in this family")
        common["dim"] = rotated(file, share)
    if beta := rope.number("llama_4_scaling_beta", 0.0):
        common |= {"temperature": beta, "temperature_length": rope.integer("original_max_position_embeddings")}
    if name == "default":
        return RopeSpec(**common)
    if name in ("linear", "dynamic"):
        original = file.integer("max_position_embeddings")
        factor = rope.number("factor", low=1.0, high=LARGE)
        return RopeSpec(**common, factor=factor, original_max_position=original)
    original = rope.integer("original_max_position_embeddings", file.integer("max_position_embeddings"))
    original = file.integer("original_max_position_embeddings", original)
    common["original_max_position"] = original
    if name == "llama3":
        low = rope.number("low_freq_factor", low=1e-6)
        high = rope.number("high_freq_factor", low=low)
        if high == low:
            raise rope.error("high_freq_factor", "it must be above low_freq_factor")
        factor = rope.number("factor", low=1.0, high=LARGE)
        return RopeSpec(**common, factor=factor, low_freq_factor=low, high_freq_factor=high)
    stretch = file.integer("max_position_embeddings") / original
    if name == "longrope":
        return read_longrope(file, rope, common, stretch)
    factor = rope.number("factor", stretch, low=1.0, high=LARGE)
    return RopeSpec(
        **common,
        factor=factor,
        attention_factor=read_attention_factor(rope, factor),
        beta_fast=rope.number("beta_fast", 0.0, high=LARGE) or 32.0,
        beta_slow=rope.number("beta_slow", 0.0, high=LARGE) or 1.0,
        truncate=rope.flag("truncate", True),
    )


def rotated(file: ConfigFile, share: float) -> int:
    """Numbers of a head that a share of it comes to. They are turned in pairs."""
    head_dim = file.integer("head_dim", file.integer("hidden_size") // file.integer("num_attention_heads"))
    dim = int(head_dim * share)
    if dim < 2 or dim % 2:
        raise file.error("partial_rotary_factor", f"it leaves {dim} of {head_dim} numbers of a head to turn in pairs")
    return dim


def read_longrope(file: ConfigFile, rope: ConfigFile, common: Mapping[str, Any], stretch: float) -> RopeSpec:
    """A factor for each frequency, and the temperature of Ding et al., 2024 where none is given."""
    pairs = (common.get("dim") or rotated(file, 1.0)) // 2
    lists: dict[str, Any] = {}
    for key in ("short_factor", "long_factor"):
        value = rope.get(key)
        if (
            not isinstance(value, list)
            or len(value) != pairs
            or not all(type(one) in (int, float) and 0 < one < LARGE for one in value)
        ):
            raise rope.error(key, f"a list of {pairs} numbers above 0 is expected")
        lists[key] = tuple(map(float, value))
    factor = rope.number("factor", stretch, low=1.0, high=LARGE)
    original = common["original_max_position"]
    inferred = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
    return RopeSpec(
        **common, **lists, factor=factor, attention_factor=rope.number("attention_factor", inferred, high=LARGE)
    )


def read_attention_factor(rope: ConfigFile, factor: float) -> float:
    """Yarn's temperature on the cosines and sines (Peng et al., section 3.4), with the mscale variants."""

    def scale(multiplier: float) -> float:
        return 1.0 if factor <= 1.0 else 0.1 * multiplier * math.log(factor) + 1.0

    inferred = scale(1.0)
    numerator, denominator = (rope.number(key, 0.0, high=LARGE) for key in ("mscale", "mscale_all_dim"))
    if numerator and denominator:
        inferred = scale(numerator) / scale(denominator)
    return rope.number("attention_factor", inferred, high=LARGE)
