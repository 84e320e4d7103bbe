"""What one layer of a model computes, as data. Imports no torch: planning and preflight read it, too."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple, TypeAlias

import msgspec

from penstock.engine_core.models.pooler import ClassifierSpec
from penstock.engine_core.models.quantization.weight_format import Formats, format_of
from penstock.engine_core.models.recurrence_spec import RecurrenceSpec

EXPANSION = "kv_b_proj"  # of latents to keys and values; it is held dense, since its halves are multiplied apart


class RopeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary position embedding (Su et al., 2021) and how it is stretched to longer contexts.

    `linear` divides positions (kaiokendev, 2023), `dynamic` raises the base for the served length (NTK-aware, bloc97
    and emozilla, 2023), `yarn` is Peng et al., 2023, `llama3` is the wavelength-dependent division of Llama 3.1,
    `longrope` divides each frequency by a factor of its own (Ding et al., 2024). `proportional` turns the fastest pairs
    of whole heads alone (Gemma 4, 2026). `none` turns nothing (NoPE: Kazemnejad et al., 2023).
    """

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position: int = 0  # length that the unstretched frequencies were trained for
    attention_factor: float = 1.0  # yarn, longrope: multiplies cosines and sines
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    short_factor: tuple[float, ...] = ()  # longrope: of each frequency, served up to the original length
    long_factor: tuple[float, ...] = ()  # the same, served beyond it
    dim: int = 0  # leading numbers of a head that are turned, the others pass; 0: all of them
    share: float = 1.0  # proportional: of a head's pairs, the fastest, that are turned
    interleaved: bool = False  # number 2 i pairs with 2 i + 1 in the checkpoint, else i with i + dim / 2
    # M-RoPE (Qwen2-VL, 2024): how many of the pairs turn by a token's time, line and column; (): all by its position.
    sections: tuple[int, ...] = ()
    sections_alternate: bool = False  # they take turns, pair by pair (Qwen3-VL, 2025), else they follow each other
    # A query at position p is multiplied with 1 + temperature * log(1 + floor((p + temperature_shift) / length)).
    temperature: float = 0.0
    temperature_length: int = 1
    temperature_shift: int = 0


NO_ROPE = RopeSpec(kind="none")


class Matrix(NamedTuple):
    """A matrix of a layer as the checkpoint has it."""

    outputs: int
    inputs: int
    bias: bool


class LatentSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Multi-head latent attention (MLA: DeepSeek-V2, 2024). A token's keys and values are made from one latent, which
    the cache has, beside one turned key that all heads share."""

    rank: int  # numbers of the latent
    rope_dim: int  # numbers of the shared key, and of each query, that are turned
    nope_dim: int  # numbers of each head's key and query that are not
    value_dim: int  # numbers of each head's value
    q_rank: int = 0  # numbers of the latent that queries are made from; 0: they come from the residual stream

    @property
    def query_dim(self) -> int:
        """Numbers of a query before it is absorbed."""
        return self.nope_dim + self.rope_dim


PageKind: TypeAlias = tuple[int, int, int]


class AttentionSpec(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Grouped-query attention (Ainslie et al., 2023), or latent attention, whose cached key of `head_dim` numbers is
    the latent and what is turned."""

    heads: int
    kv_heads: int
    head_dim: int
    rope: RopeSpec
    window: int = 0  # a query sees this many latest keys, its own among them; 0: all
    scale: float = 0.0  # of the scores; 0: head_dim**-0.5
    softcap: float = 0.0  # cap * tanh(scores / cap); 0: none
    sinks: bool = False  # a learned logit for each head joins the softmax's sum
    qkv_bias: bool = False
    output_bias: bool = False
    # Of queries and keys: "head" by head, the same without a weight ("unit"), over the "width", or a LayerNorm of its
    # own for each of the "heads", with a tensor for all or for each.
    qk_norm: str = ""
    qk_norm_tensors: bool = False
    qk_norm_turned: bool = False  # behind the rotation; not over the width
    value_norm: bool = False  # of each head's values, without a weight
    values_of_keys: bool = False  # values are what keys are before their norm and rotation
    fused: bool = False  # queries, keys and values are one tensor in the checkpoint
    gated: bool = False  # what was attended is multiplied with the sigmoid of a product of what attention reads
    gate_in_queries: bool = False  # `gated`, and the gates of a head stand behind its queries in their tensor
    kv_fp8: bool = False  # keys and values are cached in e4m3
    kv_scales: str = ""  # that the checkpoint has for that: of a "layer", or of each "head"
    kv_shared: bool = False  # it reads the keys and values of the last layer of its `page_kind` that has its own
    kv_group: int = 0  # whose blocks hold its keys and values, see models/kv_groups.py
    bidirectional: bool = False  # a query sees later keys, too: all, or on both sides those less than `window` away
    latent: LatentSpec | None = None
    formats: Formats = ()

    @cached_property
    def rotary(self) -> tuple[RopeSpec, int]:
        """What its rotary table follows from: positions, and the numbers of a head that it is made for."""
        return self.rope, self.head_dim if self.latent is None else self.latent.rope_dim

    @property
    def page_numbers(self) -> int:
        """Numbers that the layer's pages have for a token."""
        return 2 * self.kv_heads * self.head_dim if self.latent is None else self.head_dim

    @property
    def page_kind(self) -> PageKind:
        """What layers that share keys and values have in common."""
        return self.window, self.kv_heads, self.head_dim

    @property
    def attended(self) -> int:
        """Numbers that the output projection reads."""
        return self.heads * (self.head_dim if self.latent is None else self.latent.value_dim)

    @property
    def activations(self) -> int:
        """Numbers of a token between the projections."""
        if self.latent is None:
            return (self.heads + 2 * self.kv_heads) * self.head_dim
        absorbed = self.latent.query_dim + self.head_dim + self.latent.rank + self.latent.value_dim
        return self.heads * absorbed + self.latent.q_rank + self.head_dim

    def matrices(self, hidden: int) -> dict[str, Matrix]:
        """By their names within the attention."""
        bias = self.qkv_bias
        queries, pairs = self.heads * self.head_dim, self.kv_heads * self.head_dim
        if (latent := self.latent) is not None:
            queries, pairs = self.heads * latent.query_dim, self.heads * (latent.nope_dim + latent.value_dim)
            found = {"q_proj": Matrix(queries, hidden, bias)}
            if latent.q_rank:
                found = {"q_a_proj": Matrix(latent.q_rank, hidden, bias)}
                found["q_b_proj"] = Matrix(queries, latent.q_rank, False)
            found["kv_a_proj_with_mqa"] = Matrix(self.head_dim, hidden, bias)
            found[EXPANSION] = Matrix(pairs, latent.rank, False)
        elif self.fused:
            found = {"qkv_proj": Matrix(queries + 2 * pairs, hidden, bias)}
        else:
            found = {"q_proj": Matrix(queries * (1 + self.gate_in_queries), hidden, bias)}
            own = 0 if self.kv_shared else 2 - self.values_of_keys
            found |= {name: Matrix(pairs, hidden, bias) for name in ("k_proj", "v_proj")[:own]}
        if self.gated and not self.gate_in_queries:
            found["gate_proj"] = Matrix(queries, hidden, bias)
        return found | {"o_proj": Matrix(hidden, self.attended, self.output_bias)}


class NormSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The norm that a model has everywhere."""

    eps: float
    offset: float = 0.0  # added to the checkpoint's weight
    centered: bool = False  # LayerNorm, in place of an RMS norm
    bias: bool = True  # of a LayerNorm


class EmbeddingSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What is added to the embedding of a token, and the norm of the sum, which an encoder may have (BERT: Devlin et
    al., 2018), or stands beside it."""

    positions: int = 0  # rows of a learned table; 0: there is none
    first_position: int = 0  # row of the first token (RoBERTa)
    types: int = 0  # rows of a table of first and second texts; 0: there is none
    norm: NormSpec | None = None
    layer_inputs: int = 0  # numbers of the embeddings by layer, of all layers, see `LayerSpec.layer_input`
    layer_rows: int = 0  # of their table

    @property
    def joined(self) -> bool:
        """Whether something is added to a token's embedding, or the sum has a norm."""
        return bool(self.positions or self.types or self.norm is not None)


class NormNames(msgspec.Struct, frozen=True, kw_only=True):
    """Norms of a layer by their names in the checkpoint, empty where there is none: on what attention and MLP read, and
    on what they add to the residual stream."""

    attention_input: str = "input_layernorm"
    attention_output: str = ""
    mlp_input: str = "post_attention_layernorm"
    mlp_output: str = ""


class MlpSpec(msgspec.Struct, frozen=True, kw_only=True):
    """down(activation(gate(x)) * up(x)), or without a gate down(activation(up(x)))."""

    width: int
    bias: bool = False
    down_bias: bool = False  # of the last product, where the others may have none
    activation: str = "silu"  # of kernels.activation.KINDS
    slope: float = 1.0  # of silu, as of `kernels.records.Activation`
    gated: bool = True
    fused: bool = False  # gate and up are one tensor in the checkpoint
    up_first: bool = False  # in that tensor
    formats: Formats = ()


class RoutingSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How a router chooses experts, and the shares with which it adds them up."""

    chosen: int  # experts of a token
    scores: str = "softmax"  # or "sigmoid" of the router's logits
    normalised: bool = False  # shares of the chosen add up to one, before `scale`
    bias: str = ""  # the tensor of the MLP that is added to the scores for the choice alone; empty: none
    bias_dims: int = 1  # of that tensor, the last of which counts experts
    scale: float = 1.0
    scales_inputs: bool = False  # the share of the one that is chosen scales what the expert reads
    groups: int = 1  # of experts, from the best `top_groups` of which a token's are
    top_groups: int = 1
    group_best: int = 1  # a group counts as much as the sum of its best so many


class GateSpec(msgspec.Struct, frozen=True, kw_only=True):
    """activation(gate) * (up + shift), as of `kernels.records.Activation`."""

    kind: str = "silu"
    slope: float = 1.0
    limit: float = 0.0
    shift: float = 0.0


# Of `ExpertSpec.apart`: on what the router reads and what the experts read, on what both parts give.
APART_NORMS = ("router_norm", "experts_norm", "dense_output_norm", "experts_output_norm")


class ExpertSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A mixture of MLPs (Shazeer et al., 2017) of which a router picks some for each token."""

    count: int
    width: int  # of one expert's gate
    routing: RoutingSpec
    gate: GateSpec = GateSpec()
    gated: bool = True  # else an expert is down(activation(up(x))); not where experts are stacked
    bias: bool = False  # of the experts' products
    router_bias: bool = False
    stacked: bool = False  # in the checkpoint a layer's experts are one tensor of gates and ups and one of downs
    transposed: bool = False  # these are `[experts, inputs, outputs]`
    interleaved: bool = False  # in these gates and ups take turns, else all gates come first
    shared: MlpSpec | None = None  # an MLP that every token goes through, too
    shared_name: str = "shared_expert"
    shared_gate: bool = False  # its result is multiplied with the sigmoid of a product of the token
    # The MLP for every token is a part of its own, as experts are, each with a norm of what it gives. Experts read a
    # norm of their own of the stream, the router one more. Shares are multiplied with a number for each expert.
    apart: bool = False
    formats: Formats = ()  # of all experts' matrices alike

    @property
    def parts(self) -> tuple[str, ...]:
        """Of an expert's first product, whose matrices are one behind the other."""
        return ("gate_proj", "up_proj") if self.gated else ("up_proj",)

    @property
    def joins(self) -> bool:
        """Whether the MLP for every token can be one of the experts: it is like them, in memory, too. A given scale of
        what experts read would become one for both."""
        own, routed = self.shared, dict(self.formats)
        if own is None or self.apart or self.routing.scales_inputs:
            return False
        gate = GateSpec(kind=own.activation, slope=own.slope)
        alike = own.width == self.width and own.gated and self.gated and gate == self.gate
        plain = not (own.bias or own.down_bias or own.fused or self.bias or (self.router_bias and self.shared_gate))
        first = routed.get("gate_up_proj")  # where experts are stacked
        forms = {name: routed.get(name, first) for name in (*self.parts, "down_proj")}
        same = all(format_of(own.formats, name) == form for name, form in forms.items())
        given = any(form.activations == "static" for form in routed.values())
        return alike and plain and same and not given


class MtpNames(msgspec.Struct, frozen=True, kw_only=True):
    """Tensors of a multi-token prediction head, as DeepSeek-V3 has them."""

    place: str  # what all their names begin with
    block: str = ""  # behind that, what those of its layer do
    embedding_norm: str = "enorm"
    state_norm: str = "hnorm"
    projection: str = "eh_proj"  # of the embedding's norm, then the state's
    norm: str = "shared_head.norm"
    copies: tuple[str, ...] = ("embed_tokens.weight", "shared_head.head.weight")  # of the model's own tensors


class MtpSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A head in the model's checkpoint that predicts the token after next: one layer behind a projection of the norms
    of an embedding and of the model's hidden state (DeepSeek-V3, 2024, section 2.2)."""

    layer: LayerSpec
    names: MtpNames


class LayerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A layer: attention, a recurrence or the sum of both, then an MLP or experts, each added to the residual stream.

    Every option with its source, a paper or the family that brought it:

    - attention.window: Mistral 7B (Jiang et al., 2023); by layer in turns: Gemma 2 (2024), Olmo 3, Exaone 4 (2025)
    - attention.scale: Granite 3 `attention_multiplier`, Gemma 2 `query_pre_attn_scalar`
    - attention.softcap: Gemma 2; attention.sinks: gpt-oss (2025), Xiao et al., 2023
    - attention.qkv_bias, output_bias: Qwen 2, Llama in transformers, Starcoder 2, Seed-OSS
    - attention.qk_norm by head: Qwen 3, Gemma 3, Exaone 4 (Dehghani et al., 2023); over the width: OLMo 2, OLMoE
    - attention.qk_norm of heads: Command R+ (2024); qk_norm_tensors: StableLM 2 12B (2024)
    - attention.qk_norm_turned: Hunyuan (2025); "unit": Llama 4 (2025)
    - attention.fused, mlp.fused: Phi 3, GLM 4; mlp.up_first, down_bias: GTE (2024)
    - rope.dim: GPT-NeoX, Phi 4 mini, GLM 4; rope.interleaved: GPT-J, GLM 4, ERNIE 4.5; none by layer: SmolLM 3
    - rope of another base by layer: Gemma 3; stretched in some layers alone: Olmo 3
    - rope.temperature: Llama 4 (Nakanishi, 2025), Ministral 3; rope.kind: see RopeSpec
    - rope.sections: Qwen2-VL (2024), Qwen2.5-VL; sections_alternate: Qwen3-VL (2025)
    - norms: before each part: GPT-2, Llama; behind it: OLMo 2, Exaone 4; on both sides: Gemma 2, GLM 4
    - norm.offset: Gemma; norm.centered (LayerNorm: Ba et al., 2016): Starcoder 2; without a bias: Cohere, ModernBERT
    - attention.bidirectional: BERT (Devlin et al., 2018); with a window: ModernBERT (2024), EmbeddingGemma (2025)
    - attention.value_norm, values_of_keys, kv_shared, rope.share, scaled, layer_input: Gemma 4 (2026)
    - attention.gated: AFMoE (Arcee, 2025), Qiu et al., 2025; gate_in_queries: Qwen3-Next (2025)
    - attention.latent: DeepSeek-V2 (2024), V3, Kimi K2 (2025), GLM 4.7 Flash (2026)
    - parallel: GPT-J (2021), Cohere; recurrence in place of attention: Qwen3-Next, LFM2, Bamba;
      beside it, with mixer_scales: Falcon-H1 (2025); one part alone: Nemotron-H (2025)
    - mlp.activation, gated (GLU variants: Shazeer, 2020): GeGLU of Gemma; without a gate: Starcoder 2; exact: BERT;
      squared above zero: Nemotron-4 (So et al., 2021); mlp.slope: Falcon-H1
    - experts.routing: softmax then choice: Qwen MoE; scores of the chosen alone, the same as normalised: Mixtral,
      Granite MoE; sigmoid with a selection bias and a scale: DeepSeek-V3 (2024), GLM 4.5, MiniMax M2;
      scales_inputs: Llama 4; groups, of which top_groups by their best expert: DeepSeek-V2 (2024), by the best two
      (group_best): DeepSeek-V3
    - experts.gate clamped and shifted, bias, router_bias, transposed, interleaved: gpt-oss
    - experts.gated, not: Nemotron 3 (2025)
    - experts.shared: DeepSeekMoE (Dai et al., 2024), GLM 4.5; shared_gate: Qwen 2 MoE; apart: Gemma 4
    """

    attention: AttentionSpec | None = None
    recurrence: RecurrenceSpec | None = None
    # Of attention and the recurrence of a layer with both, in place of the model's residual scale.
    mixer_scales: tuple[float, float] = (1.0, 1.0)
    mlp: MlpSpec | ExpertSpec | None = None
    norm: NormSpec
    norms: NormNames = NormNames()
    parallel: bool = False  # the MLP reads what attention reads
    layer_input: int = 0  # numbers of an embedding of its own that it adds a product of; 0: there is none
    scaled: bool = False  # the residual stream behind it is multiplied with a number of the checkpoint

    def with_attention(self, **fields: object) -> LayerSpec:
        """The same with these fields of its attention, if it has one."""
        replace = msgspec.structs.replace
        return self if self.attention is None else replace(self, attention=replace(self.attention, **fields))

    @property
    def experts(self) -> ExpertSpec | None:
        return self.mlp if isinstance(self.mlp, ExpertSpec) else None

    @property
    def dense(self) -> MlpSpec | None:
        """The MLP that every token goes through: the layer's, or the one beside its experts."""
        return self.mlp.shared if isinstance(self.mlp, ExpertSpec) else self.mlp


class Body(msgspec.Struct, frozen=True, kw_only=True):
    """What a family makes of a config.json: the layers, and what stands before and behind them."""

    layers: tuple[LayerSpec, ...]
    residual_scale: float = 1.0  # of what attention and MLP add to the residual stream (Granite 3)
    embedding_scale: float = 1.0  # Gemma, Granite 3
    logit_scale: float = 1.0  # Granite 3
    logit_softcap: float = 0.0  # cap * tanh(logits / cap), 0: none (Gemma 2)
    max_position: int = 0  # length served by default; 0: as the file and its rotary settings say
    unread: tuple[str, ...] = ()  # beginnings of names of tensors that belong to no layer, as those of an MTP head
    embedding: EmbeddingSpec = EmbeddingSpec()
    post_norm: bool = False  # norms are of the residual stream, which goes on from their results (BERT)
    classifier: ClassifierSpec | None = None  # of the family's architecture for classification; None: that of decoders
    mtp: MtpSpec | None = None  # its tensors are among `unread`, since the model itself does without
