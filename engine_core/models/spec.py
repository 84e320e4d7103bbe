"""What config.json says about a mixture of experts (Shazeer et al., 2017). Imports no torch.

Qwen3-MoE has experts in some layers or all of them, Mixtral (Jiang et al., 2024) in all. Their tensors lie one by one
in published checkpoints; transformers 5 can also store those of a layer stacked.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from penstock.engine_core.models.config_file import ConfigFile, read_json, refuse_unread
from penstock.engine_core.models.foreign import beside, foreign
from penstock.engine_core.models.weight_files import read_names
from penstock.protocol.errors import ModelError

QWEN, MIXTRAL = "qwen3_moe", "mixtral"
STACKED = "mlp.experts.gate_up_proj"  # in a checkpoint whose experts are
ARCHITECTURES: Mapping[str, str] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}
BASES: Mapping[str, str] = {  # the same without an output embedding, as embedding models are saved
    "LlamaModel": "llama",
    "MistralModel": "mistral",
    "MixtralModel": "mixtral",
    "Qwen2Model": "qwen2",
    "Qwen3Model": "qwen3",
    "Qwen3MoeModel": "qwen3_moe",
}
# Models of other kinds: a key of config.json or a pattern of the architecture's name, and the kind in words.
FOREIGN: tuple[tuple[str, str, str], ...] = (
    ("audio_config", r"Whisper|Wav2Vec|Speech|Audio|TTS", "a model that hears or speaks"),
    ("vision_config", r"VL|Llava|Vision|CLIP|ViT|Image|Paligemma", "a model that sees images"),
    ("is_encoder_decoder", r"T5|Bart|M2M|Marian|Pegasus", "an encoder and a decoder"),
    ("", r"Bert|BERT|Roberta|MPNet|Electra|XLM|ForMaskedLM", "an encoder"),
    ("", r"ForSequenceClassification|ForTokenClassification|RewardModel", "a classifier"),
)
OUTPUT = "lm_head.weight"
DTYPES = ("float32", "bfloat16", "float16")
LARGE = 1e6  # beyond what any stretching of positions is
ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "llama3")
# What a family assumes where config.json is silent.
FAMILY_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096},
    "qwen3": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096, "head_dim": 128},
    "mixtral": {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
    },
    "qwen3_moe": {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "num_local_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "decoder_sparse_step": 1,
    },
}


class ExpertNames(msgspec.Struct, frozen=True):
    """How the tensors of a layer are called in a checkpoint: of its block, and of one expert's three products."""

    block: str
    gate: str
    up: str
    down: str


NAMES: Mapping[str, ExpertNames] = {
    QWEN: ExpertNames("mlp", "gate_proj", "up_proj", "down_proj"),
    MIXTRAL: ExpertNames("block_sparse_moe", "w1", "w3", "w2"),
}


class ExpertSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Gated MLPs of which a router picks some for each token."""

    count: int
    chosen: int  # for a token
    width: int  # of one expert's gate
    normalised: bool  # the weights of those that are chosen add up to one
    layers: tuple[bool, ...]  # which layers have experts, the others have one MLP
    names: ExpertNames
    stacked: bool = False  # in the checkpoint a layer's experts are one tensor of gates and ups and one of downs


def read_experts(file: ConfigFile, family: str, layers: int) -> ExpertSpec | None:
    """The experts of a family that has some. Raises ModelError naming the file and the key."""
    if family not in NAMES:
        return None
    # Up to version 4 of transformers Qwen's key had a name of its own.
    key = "num_experts" if family == QWEN and "num_experts" in file.values else "num_local_experts"
    count = file.integer(key, low=0 if family == QWEN else 1, high=4096)
    sparse = sparse_layers(file, layers) if family == QWEN else (True,) * layers
    if not count or not any(sparse):
        return None
    return ExpertSpec(
        count=count,
        chosen=file.integer("num_experts_per_tok", high=count),
        width=file.integer("moe_intermediate_size" if family == QWEN else "intermediate_size"),
        normalised=family == MIXTRAL or file.flag("norm_topk_prob"),
        layers=sparse,
        names=NAMES[family],
    )


def sparse_layers(file: ConfigFile, layers: int) -> tuple[bool, ...]:
    """Every so many-th layer, the first of each turn being its last, but those that are to have one MLP alone."""
    step = file.integer("decoder_sparse_step")
    plain = file.get("mlp_only_layers") or []
    if not isinstance(plain, list) or not all(type(layer) is int and 0 <= layer < layers for layer in plain):
        raise file.error("mlp_only_layers", f"a list of layers, 0 to {layers - 1}, is expected")
    return tuple((layer + 1) % step == 0 and layer not in plain for layer in range(layers))


def with_layout(experts: ExpertSpec, names: Collection[str]) -> ExpertSpec:
    """The same for a checkpoint that holds tensors of these names."""
    return msgspec.structs.replace(experts, stacked=any(name.endswith(STACKED) for name in names))


class RopeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary position embedding (Su et al., 2021) and how it is stretched to longer contexts.

    `linear` divides positions (kaiokendev, 2023), `dynamic` raises the base for the served length (NTK-aware, bloc97
    and emozilla, 2023), `yarn` is Peng et al., 2023, `llama3` is the wavelength-dependent division of Llama 3.1.
    """

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position: int = 0  # length that the unstretched frequencies were trained for
    attention_factor: float = 1.0  # yarn: multiplies cosines and sines
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0


class AttentionSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Grouped-query attention over rotary positions."""

    heads: int
    kv_heads: int
    head_dim: int
    rope: RopeSpec
    windows: tuple[int, ...]  # of each layer: a query sees this many latest keys, its own among them; 0: all
    qkv_bias: bool
    output_bias: bool
    qk_norm: bool


class MlpSpec(msgspec.Struct, frozen=True):
    """The gated SiLU MLP of a layer without experts."""

    intermediate: int
    bias: bool


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder-only transformer with RMS norm."""

    family: str
    layers: int
    hidden: int
    attention: AttentionSpec
    mlp: MlpSpec
    vocab_size: int
    norm_eps: float
    tied: bool  # the output embedding is the input embedding
    max_position: int  # length served by default
    longest: int  # length that may be asked for
    dtype: str  # of the checkpoint
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    headless: bool = False  # it has no output embedding, own or tied: it makes vectors alone
    experts: ExpertSpec | None = None  # of the layers that have some

    def experts_of(self, layer: int) -> ExpertSpec | None:
        """The experts of one layer; None: it has one MLP."""
        return self.experts if self.experts is not None and self.experts.layers[layer] else None

    def part(self, kept: Sequence[int]) -> ModelSpec:
        """The same model with these of its layers alone."""
        windows, experts = tuple(self.attention.windows[layer] for layer in kept), self.experts
        if experts is not None:
            experts = msgspec.structs.replace(experts, layers=tuple(experts.layers[layer] for layer in kept))
        attention = msgspec.structs.replace(self.attention, windows=windows)
        return msgspec.structs.replace(self, layers=len(kept), attention=attention, experts=experts)


def read_spec(folder: Path) -> ModelSpec:
    """The model that `folder`/config.json describes.

    Raises ModelError naming the file and the key: unknown architecture, code of the model's own, quantized weights, an
    unknown activation or rope scaling, a missing or impossible size.
    """
    if not (folder / "config.json").exists():
        raise ModelError(f"{folder / 'config.json'}: no such file; {foreign(folder)}")
    file = read_json(folder / "config.json")
    if (found := beside(folder)) is not None:
        raise ModelError(f"{found[0]}: {found[1]}")
    spec, names = decoder_spec(file, read_family(file)), read_names(folder)
    if spec.experts is not None:
        spec = msgspec.structs.replace(spec, experts=with_layout(spec.experts, names))
    if spec.tied or (has_head(file) and OUTPUT in (names or (OUTPUT,))):
        return spec
    return msgspec.structs.replace(spec, headless=True)


def has_head(file: ConfigFile) -> bool:
    """Whether the architecture has an output embedding. Folders may lack its weights all the same."""
    named = file.get("architectures")
    return not (isinstance(named, list) and named and all(name in BASES for name in named))


def decoder_spec(file: ConfigFile, family: str, known: Collection[str] = ()) -> ModelSpec:
    """The same of a file whose family is known. known: keys that the caller reads itself."""
    file = ConfigFile(file.path, file.values, FAMILY_DEFAULTS[family])
    refuse_unsupported(file)
    refuse_unread(file, family, known)
    layers = file.integer("num_hidden_layers", high=4096)
    heads, hidden = file.integer("num_attention_heads"), file.integer("hidden_size")
    kv_heads = file.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise file.error("num_key_value_heads", f"it must divide num_attention_heads ({heads})")
    if file.get("head_dim") is None and hidden % heads:
        raise file.error("num_attention_heads", f"without head_dim it must divide hidden_size ({hidden})")
    head_dim = file.integer("head_dim", hidden // heads)
    rope = read_rope(file)
    if head_dim % 2 or (rope.kind == "dynamic" and head_dim == 2):
        raise file.error("head_dim", f"{rope.kind} rotary positions cannot turn heads of {head_dim}")
    max_position = file.integer("max_position_embeddings")
    if rope.kind == "linear":
        max_position = int(max_position * rope.factor)
    elif rope.kind == "yarn":
        max_position = max(max_position, int(rope.original_max_position * rope.factor))
    attention_bias = file.flag("attention_bias") and family in ("llama", "qwen3", "qwen3_moe")
    return ModelSpec(
        family=family,
        layers=layers,
        hidden=hidden,
        attention=AttentionSpec(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            rope=rope,
            windows=read_windows(file, family, layers),
            qkv_bias=attention_bias or family == "qwen2",
            output_bias=attention_bias,
            qk_norm=family in ("qwen3", "qwen3_moe"),
        ),
        mlp=MlpSpec(file.integer("intermediate_size"), file.flag("mlp_bias") and family == "llama"),
        vocab_size=file.integer("vocab_size"),
        norm_eps=file.number("rms_norm_eps", 1e-6),
        tied=file.flag("tie_word_embeddings"),
        max_position=max_position,
        longest=int(max_position * rope.factor) if rope.kind == "dynamic" else max_position,
        dtype=read_dtype(file),
        bos_token_id=next(iter(file.token_ids("bos_token_id")), None),
        eos_token_ids=file.token_ids("eos_token_id"),
        experts=read_experts(file, family, layers),
    )


def read_family(file: ConfigFile) -> str:
    """The family by `architectures`, or by `model_type` in a file without it."""
    architectures = file.get("architectures")
    if architectures is None and str(file.get("model_type")) in FAMILY_DEFAULTS:
        return str(file.get("model_type"))
    if isinstance(architectures, list):
        for name in architectures:
            if isinstance(name, str) and (family := ARCHITECTURES.get(name) or BASES.get(name)):
                return family
    known = ", ".join(ARCHITECTURES)
    raise file.error("architectures", f"{kind_of(file)}Penstock serves {known}")


def kind_of(file: ConfigFile) -> str:
    """What a model of an architecture that is not served may be, as the beginning of a complaint."""
    named = " ".join(map(str, file.get("architectures") or ())) or str(file.get("model_type"))
    for key, pattern, kind in FOREIGN:
        if (key and file.get(key)) or re.search(pattern, named):
            return f"this is {kind}, and "
    return ""


def refuse_unsupported(file: ConfigFile) -> None:
    """Raise ModelError for what would be served wrongly if it were ignored."""
    if file.get("auto_map"):
        raise file.error("auto_map", "the model needs code of its own, which Penstock never runs")
    for key in ("quantization_config", "quantization"):  # the second is MLX's
        if found := file.get(key):
            method = (
                found.get("quant_method", "MLX" if key == "quantization" else "?") if isinstance(found, dict) else found
            )
            why = "Penstock serves unquantized weights only; take the model's bfloat16 version"
            raise ModelError(f"{file.path}: {key} says that the weights are quantized ({method}), and {why}")
    if file.get("hidden_act") not in (None, "silu", "swish"):
        raise file.error("hidden_act", "Penstock serves silu")
    if file.get("is_causal") is False or file.get("use_bidirectional_attention"):
        raise ModelError(f"{file.path}: the model attends to later tokens (is_causal); Penstock serves causal ones")
    if file.number("partial_rotary_factor", 1.0) != 1.0:
        raise file.error("partial_rotary_factor", "Penstock rotates whole heads (1.0)")


def read_dtype(file: ConfigFile) -> str:
    """The checkpoint's type; `torch_dtype` is the key's name before transformers 5."""
    key = "dtype" if "dtype" in file.values else "torch_dtype"
    name = file.get(key) or "float32"
    if name not in DTYPES:
        raise file.error(key, "one of " + ", ".join(DTYPES))
    return str(name)


def read_windows(file: ConfigFile, family: str, layers: int) -> tuple[int, ...]:
    """Windows per layer: Mistral's, Mixtral's and Qwen3-MoE's is every layer's; that of Qwen's other models follows
    `layer_types` or starts at `max_window_layers`."""
    if family == "llama":
        refuse_windows(file)
        return (0,) * layers
    if file.get("sliding_window") is None:
        return (0,) * layers
    if family in ("mistral", "mixtral"):
        return (file.integer("sliding_window"),) * layers
    if not file.flag("use_sliding_window"):
        return (0,) * layers
    window = file.integer("sliding_window")
    if family == "qwen3_moe":
        return (window,) * layers
    kinds = file.get("layer_types")
    if kinds is None:
        first = file.integer("max_window_layers", 28, low=0)
        return tuple(window if layer >= first else 0 for layer in range(layers))
    sizes = {"full_attention": 0, "sliding_attention": window}
    if not isinstance(kinds, list) or len(kinds) != layers or not all(str(kind) in sizes for kind in kinds):
        raise file.error("layer_types", f"it must name {' or '.join(sizes)} for each of the {layers} layers")
    return tuple(sizes[kind] for kind in kinds)


def refuse_windows(file: ConfigFile) -> None:
    """Raise ModelError for a window that engines disagree about: Llama's code in transformers reads none."""
    window, unused = file.get("sliding_window"), file.get("use_sliding_window") is False
    if window is not None and not unused and file.integer("sliding_window") < file.integer("max_position_embeddings"):
        raise file.error("sliding_window", "Llama models attend to all keys; null is expected")
    kinds = file.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds)):
        raise file.error("layer_types", "layers of Llama models are full_attention")


def read_rope(file: ConfigFile) -> RopeSpec:
    """Rotary settings from `rope_parameters`, or from `rope_theta` and `rope_scaling`.

    Where both stand, `rope_scaling` wins, as it does in transformers. Frequencies themselves are `layers.rope_table`'s.
    """
    values = file.get("rope_scaling") or file.get("rope_parameters") or {}
    if not isinstance(values, dict):
        raise file.error("rope_scaling", "it must be an object")
    rope = ConfigFile(file.path, values)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    theta = rope.number("rope_theta", file.number("rope_theta", 10000.0, low=2.0), low=2.0)
    if any(isinstance(value, dict) for value in values.values()) or kind not in ROPE_KINDS:
        known = ", ".join(ROPE_KINDS)
        raise ModelError(f"{file.path}: rope scaling {values!r} is not known; one rope_type of {known} is expected")
    if rope.number("partial_rotary_factor", 1.0) != 1.0:
        raise rope.error("partial_rotary_factor", "Penstock rotates whole heads (1.0)")
    if kind == "default":
        return RopeSpec(theta=theta)
    if kind in ("linear", "dynamic"):
        return RopeSpec(
            kind=kind,
            theta=theta,
            factor=rope.number("factor", low=1.0, high=LARGE),
            original_max_position=file.integer("max_position_embeddings"),
        )
    original = rope.integer("original_max_position_embeddings", file.integer("max_position_embeddings"))
    original = file.integer("original_max_position_embeddings", original)
    if kind == "llama3":
        low = rope.number("low_freq_factor", low=1e-6)
        high = rope.number("high_freq_factor", low=low)
        if high == low:
            raise rope.error("high_freq_factor", "it must be above low_freq_factor")
        return RopeSpec(
            kind=kind,
            theta=theta,
            factor=rope.number("factor", low=1.0, high=LARGE),
            original_max_position=original,
            low_freq_factor=low,
            high_freq_factor=high,
        )
    factor = rope.number("factor", file.integer("max_position_embeddings") / original, low=1.0, high=LARGE)
    return RopeSpec(
        kind=kind,
        theta=theta,
        factor=factor,
        original_max_position=original,
        attention_factor=read_attention_factor(rope, factor),
        beta_fast=rope.number("beta_fast", 0.0, high=LARGE) or 32.0,
        beta_slow=rope.number("beta_slow", 0.0, high=LARGE) or 1.0,
        truncate=rope.flag("truncate", True),
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
