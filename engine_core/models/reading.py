"""Parts of layers as config.json tells them, in words that several families share. Complaints name file and key."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from msgspec import structs

from penstock.engine_core.models.config_file import ConfigFile
from penstock.engine_core.models.layer_spec import (
    AttentionSpec,
    Body,
    ExpertSpec,
    LayerSpec,
    MlpSpec,
    MtpNames,
    MtpSpec,
    NormNames,
    NormSpec,
    RopeSpec,
    RoutingSpec,
)
from penstock.engine_core.models.pooler import MODULE_ACTIVATIONS
from penstock.engine_core.models.recurrence_spec import RecurrenceSpec
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

Mixer: TypeAlias = AttentionSpec | RecurrenceSpec


class ModelFile(ConfigFile, frozen=True):
    """The config.json of a language model."""

    @property
    def num_layers(self) -> int:
        """Those of the model itself, without what predicts further tokens."""
        return self.integer("num_hidden_layers", high=4096)

    def body(
        self,
        mixers: Mixer | Sequence[Mixer],
        mlps: MlpSpec | ExpertSpec | Sequence[MlpSpec | ExpertSpec],
        norm: NormSpec | None = None,
        norms: NormNames | None = None,
        **options: Any,
    ) -> Body:
        """The layers: what mixes tokens and the MLP are those of every layer, or given layer by layer. norm: None: an
        RMS norm, as `norm` reads it. options: of Body, or of every LayerSpec."""
        count, norm = self.num_layers, norm or self.norm()
        each = {name: options.pop(name) for name in LayerSpec.__struct_fields__ if name in options}
        own = mixers if isinstance(mixers, Sequence) else [mixers] * count
        others = mlps if isinstance(mlps, Sequence) else [mlps] * count
        layers = tuple(
            LayerSpec(
                attention=mixer if isinstance(mixer, AttentionSpec) else None,
                recurrence=mixer if isinstance(mixer, RecurrenceSpec) else None,
                mlp=mlp, norm=norm, norms=norms or NormNames(), **each,
            )
            for mixer, mlp in zip(own, others, strict=True)
        )  # fmt: skip
        return Body(layers=layers, **options)

    def attention(self, rope: RopeSpec | None = None, *, bias: str = "", **options: Any) -> AttentionSpec:
        """Heads and their size by the keys that all families have. rope: None: the file's. bias: the key that says
        whether the products have biases; empty: `options` do, which are of the spec."""
        if bias:
            options |= dict.fromkeys(("qkv_bias", "output_bias"), self.flag(bias))
        heads, hidden = self.integer("num_attention_heads"), self.integer("hidden_size")
        kv_heads = self.integer("num_key_value_heads", heads)
        if heads % kv_heads:
            raise self.error("num_key_value_heads", f"it must divide num_attention_heads ({heads})")
        if self.get("head_dim") is None and hidden % heads:
            raise self.error("num_attention_heads", f"without head_dim it must divide hidden_size ({hidden})")
        head_dim = self.integer("head_dim", hidden // heads)
        rope = self.rope() if rope is None else rope
        if head_dim % 2 or (rope.kind == "dynamic" and head_dim == 2):
            raise self.error("head_dim", f"{rope.kind} rotary positions cannot turn heads of {head_dim}")
        return AttentionSpec(heads=heads, kv_heads=kv_heads, head_dim=head_dim, rope=rope, **options)

    def windowed(
        self, full: AttentionSpec, sliding: AttentionSpec | None = None, *, slides: Callable[[int], object]
    ) -> list[AttentionSpec]:
        """Of each layer: `full`, or `sliding`, which is the same where it is not given, with a window. slides: whether
        a layer has one, as of `kinds`."""
        found, sliding = self.kinds(SLIDING, slides), sliding or full
        if not sliding.window:
            sliding = structs.replace(sliding, window=self.integer("sliding_window"))
        return [sliding if slid else full for slid in found]

    def kinds(self, other: str, silent: Callable[[int], object]) -> list[bool]:
        """Whether each layer is of the `other` kind, not FULL: by `layer_types`, or the family's rule where the file is
        `silent`."""
        layers, kinds = self.num_layers, self.get("layer_types")
        if kinds is None:
            kinds = [other if silent(layer) else FULL for layer in range(layers)]
        if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in (FULL, other) for kind in kinds):
            raise self.error("layer_types", f"it must name {FULL} or {other} for each of the {layers} layers")
        return [kind == other for kind in kinds]

    def attending(self, other: str, silent: Callable[[int], object]) -> list[bool]:
        """Whether each layer of a hybrid attends, as of `kinds`."""
        found = self.kinds(other, silent)
        if all(found):
            raise self.error("layer_types", "Penstock serves models of which at least one layer attends")
        return [not one for one in found]

    def turned(self) -> list[bool]:
        """Whether each layer has positions: `no_rope_layers` has a zero where there are none."""
        layers, given = self.num_layers, self.get("no_rope_layers")
        turn = self.integer("no_rope_layer_interval", 4)
        if given is None:
            return [(layer + 1) % turn != 0 for layer in range(layers)]
        if not isinstance(given, list) or len(given) < layers or not all(value in (0, 1) for value in given):
            raise self.error("no_rope_layers", f"a list of 0 or 1 for each of the {layers} layers is expected")
        return [bool(value) for value in given[:layers]]

    def mlp(self, key: str = "intermediate_size", **options: Any) -> MlpSpec:
        """options: of the spec; without an activation the file may name none but silu."""
        if "activation" not in options:
            options["activation"] = self.activation()
        return MlpSpec(width=self.integer(key), **options)

    def activation(self, key: str = "hidden_act", served: tuple[str, ...] = ("silu",)) -> str:
        """The activation that the file names, the first of `served` where it is silent."""
        named = self.get(key)
        found = served[0] if named is None else ACTIVATIONS.get(named) if isinstance(named, str) else None
        if found not in served:
            names = " or ".join(name for name, kind in ACTIVATIONS.items() if kind in served)
            raise self.error(key, f"Penstock serves {names} in this family")
        return found

    def norm(self, key: str = "rms_norm_eps", default: float = 1e-6, **options: Any) -> NormSpec:
        """The model's norm, by the key of what is added to variances. options: of the spec."""
        return NormSpec(eps=self.number(key, default), **options)

    def experts(
        self, count: str, width: str, chosen: str = "num_experts_per_tok", *, silent: tuple[int, int] | None = None,
        grouped: bool = False, **routing: Any,
    ) -> ExpertSpec:  # fmt: skip
        """A layer's experts by the keys of their number, of their width and of how many a token goes to. silent: the
        first and the last of these where the file is silent. grouped: they may be in groups, as DeepSeek-V3 has them.
        routing: options of RoutingSpec."""
        usual = silent or (None, None)
        number = self.integer(count, usual[0], high=4096)
        own = RoutingSpec(chosen=self.integer(chosen, usual[1], high=number), **routing)
        if grouped:
            own = structs.replace(own, **self.groups(number))
        return ExpertSpec(count=number, width=self.integer(width), routing=own)

    def with_shared(self, experts: ExpertSpec, number: int, name: str = "shared_experts", **options: Any) -> ExpertSpec:
        """With an MLP for all tokens that is as wide as so many experts. options: of the MLP."""
        one = self.mlp("moe_intermediate_size")
        shared = structs.replace(one, width=number * one.width, **options)
        return structs.replace(experts, shared=shared, shared_name=name)

    def routed_experts(self, silent: tuple[int, int] | None = None, *, normalised: bool = True) -> ExpertSpec:
        """Experts as DeepSeek-V3 has them. silent: as of `experts`. normalised: what the family assumes."""
        found = self.experts(
            "n_routed_experts", "moe_intermediate_size", silent=silent, grouped=True, scores="sigmoid",
            normalised=self.flag("norm_topk_prob", normalised), bias="gate.e_score_correction_bias",
            scale=self.number("routed_scaling_factor", 1.0),
        )  # fmt: skip
        return self.with_shared(found, self.integer("n_shared_experts", 1))

    def groups(self, count: int) -> dict[str, Any]:
        """Groups of experts as DeepSeek-V3 has them, as options of RoutingSpec."""
        groups = self.integer("n_group", 1, high=count)
        if count % groups or (groups > 1 and count < 2 * groups):
            raise self.error("n_group", f"groups must be of equal size, at least two of the {count} experts each")
        top = self.integer("topk_group", 1, high=groups)
        if self.integer("num_experts_per_tok", 8) > count // groups * top:
            raise self.error("topk_group", f"so few groups have fewer than num_experts_per_tok of the {count} experts")
        return {"groups": groups, "top_groups": top, "group_best": 2} if groups > 1 else {}

    def dense_until(self, first: int, experts: ExpertSpec) -> list[MlpSpec | ExpertSpec]:
        """The MLPs of layers of which the first so many have no experts."""
        return [self.mlp() if layer < first else experts for layer in range(self.num_layers)]

    def dense_first(self, silent: int = 1) -> list[bool]:
        """Which layers have experts: those that `mlp_layer_types` calls sparse, or all but the first ones."""
        layers, kinds = self.num_layers, self.get("mlp_layer_types")
        dense = self.integer("first_k_dense_replace", silent, low=0)
        if kinds is None:
            return [layer >= dense for layer in range(layers)]
        if not isinstance(kinds, list) or len(kinds) != layers or any(one not in ("dense", "sparse") for one in kinds):
            raise self.error("mlp_layer_types", f"it must name dense or sparse for each of the {layers} layers")
        return [kind == "sparse" for kind in kinds]

    def sparse_layers(self) -> list[bool]:
        """Which layers have experts: every so many-th, the first of each turn being its last, but those that are to
        have one MLP alone."""
        layers, step = self.num_layers, self.integer("decoder_sparse_step")
        plain = self.get("mlp_only_layers") or []
        if not isinstance(plain, list) or not all(type(layer) is int and 0 <= layer < layers for layer in plain):
            raise self.error("mlp_only_layers", f"a list of layers, 0 to {layers - 1}, is expected")
        return [(layer + 1) % step == 0 and layer not in plain for layer in range(layers)]

    def next_layers(self) -> tuple[str, ...]:
        """What names of the tensors of layers begin with that stand behind the last one and predict further tokens."""
        more = self.integer("num_nextn_predict_layers", 0, low=0, high=64)
        return tuple(f"layers.{layer}." for layer in range(self.num_layers, self.num_layers + more))

    def with_mtp(self, body: Body) -> Body:
        """The same where the first of such layers, which is like the last of the model, drafts."""
        unread, names = self.next_layers(), MtpNames(place=f"model.layers.{self.num_layers}.")
        mtp = MtpSpec(layer=body.layers[-1], names=names) if unread else None
        return structs.replace(body, unread=unread, mtp=mtp)

    def labels(self) -> tuple[tuple[str, ...], str]:
        """A classifier's labels, and the activation of its logits: what sentence-transformers wrote down for its
        cross-encoders, else by the kind of the problem; one label is scored by the sigmoid."""
        names, count = self.get("id2label"), self.integer("num_labels", LABELS)
        if isinstance(names, dict):
            count = len(names)
            if not count or set(names) != set(map(str, range(count))):
                raise self.error("id2label", "a name for each of the labels, from 0 on, is expected")
        else:
            names = {}
        labels = tuple(str(names.get(str(number), f"LABEL_{number}")) for number in range(count))
        own, kind = self.get("sentence_transformers"), self.get("problem_type")
        named = own.get("activation_fn") if isinstance(own, dict) else self.get("sbert_ce_default_activation_function")
        if named is not None:
            module = str(named).rsplit(".", 1)[-1]
            if module not in ("Identity", "Sigmoid"):
                key = "sentence_transformers" if isinstance(own, dict) else "sbert_ce_default_activation_function"
                raise self.error(key, "Penstock serves Identity and Sigmoid as its activation")
            return labels, MODULE_ACTIVATIONS[module]
        if kind == "regression":
            return labels, ""
        return labels, "softmax" if count > 1 and kind != "multi_label_classification" else "sigmoid"

    def ropes(self, local: str = "rope_theta") -> tuple[RopeSpec, RopeSpec]:
        """The rotary positions of full and of sliding layers. In files without settings by kind those of sliding layers
        are not stretched, and have the base of the key `local`."""
        settings = self.get("rope_parameters")
        if isinstance(settings, dict) and FULL in settings and self.get("rope_scaling") is None:
            base = self.number(local, 10000.0, low=2.0)
            sliding = self.rope(SLIDING) if isinstance(settings.get(SLIDING), dict) else RopeSpec(theta=base)
            return self.rope(FULL), sliding
        return self.rope(), RopeSpec(theta=self.number(local, 10000.0, low=2.0))

    def rope(self, kind: str = "", partial: float | None = None, *, interleaved: bool = False) -> RopeSpec:
        """Rotary settings from `rope_parameters`, or from `rope_theta` and `rope_scaling`.

        Where both stand, `rope_scaling` wins, as it does in transformers. Frequencies are `rope.rope_table`'s.
        kind: of the layers, for families that have settings by kind. partial: the share of a head that is turned where
        the file is silent; None: the family turns whole heads.
        """
        values = self.get("rope_scaling") or self.get("rope_parameters") or {}
        if not isinstance(values, dict):
            raise self.error("rope_scaling", "it must be an object")
        values = values.get(kind, values) if kind else values
        rope = ConfigFile(self.path, values)
        name = rope.get("rope_type") or rope.get("type") or "default"
        if name == "su" or (name == "yarn" and rope.get("long_factor")):  # what longrope was called first
            name = "longrope"
        if any(isinstance(value, dict) for value in values.values()) or name not in ROPE_KINDS:
            known = ", ".join(ROPE_KINDS)
            raise ModelError(f"{self.path}: rope scaling {values!r} is not known; one rope_type of {known} is expected")
        theta = rope.number("rope_theta", self.number("rope_theta", 10000.0, low=2.0), low=2.0)
        common: dict[str, Any] = {"kind": name, "theta": theta, "interleaved": interleaved}
        if name == "proportional":
            share = rope.number("partial_rotary_factor", 1.0, high=1.0)
            return RopeSpec(**common, share=share, factor=rope.number("factor", 1.0, low=1.0, high=LARGE))
        share = self.number("partial_rotary_factor", 1.0 if partial is None else partial, high=1.0)
        share = rope.number("partial_rotary_factor", share, high=1.0)
        if share != 1.0:
            if partial is None:
                where = rope if rope.get("partial_rotary_factor") is not None else self
                raise where.error("partial_rotary_factor", "Penstock rotates whole heads (1.0) in this family")
            common["dim"] = self.rotated(share)
        if beta := rope.number("llama_4_scaling_beta", 0.0):
            common |= {"temperature": beta, "temperature_length": rope.integer("original_max_position_embeddings")}
        if name == "default":
            return RopeSpec(**common)
        if name in ("linear", "dynamic"):
            original = self.integer("max_position_embeddings")
            factor = rope.number("factor", low=1.0, high=LARGE)
            return RopeSpec(**common, factor=factor, original_max_position=original)
        original = rope.integer("original_max_position_embeddings", self.integer("max_position_embeddings"))
        original = self.integer("original_max_position_embeddings", original)
        common["original_max_position"] = original
        if name == "llama3":
            low = rope.number("low_freq_factor", low=1e-6)
            high = rope.number("high_freq_factor", low=low)
            if high == low:
                raise rope.error("high_freq_factor", "it must be above low_freq_factor")
            factor = rope.number("factor", low=1.0, high=LARGE)
            return RopeSpec(**common, factor=factor, low_freq_factor=low, high_freq_factor=high)
        stretch = self.integer("max_position_embeddings") / original
        if name == "longrope":
            return self.longrope(rope, common, stretch)
        factor = rope.number("factor", stretch, low=1.0, high=LARGE)
        return RopeSpec(
            **common,
            factor=factor,
            attention_factor=read_attention_factor(rope, factor),
            beta_fast=rope.number("beta_fast", 0.0, high=LARGE) or 32.0,
            beta_slow=rope.number("beta_slow", 0.0, high=LARGE) or 1.0,
            truncate=rope.flag("truncate", True),
        )

    def rotated(self, share: float) -> int:
        """Numbers of a head that a share of it comes to. They are turned in pairs."""
        head_dim = self.integer("head_dim", self.integer("hidden_size") // self.integer("num_attention_heads"))
        dim = int(head_dim * share)
        if dim < 2 or dim % 2:
            why = f"it leaves {dim} of {head_dim} numbers of a head to turn in pairs"
            raise self.error("partial_rotary_factor", why)
        return dim

    def longrope(self, rope: ConfigFile, common: Mapping[str, Any], stretch: float) -> RopeSpec:
        """A factor for each frequency, and the temperature of Ding et al., 2024 where none is given."""
        pairs = (common.get("dim") or self.rotated(1.0)) // 2
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
