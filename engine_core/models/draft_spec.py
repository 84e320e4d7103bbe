"""Specs of draft models and EAGLE heads. Imports no torch: planning reads them, too.

Both run on the last stage of a pipeline, where tokens are sampled, whole on each rank.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import msgspec

from penstock.engine_core.models.config_file import ConfigFile, read_json
from penstock.engine_core.models.families import families
from penstock.engine_core.models.layer_spec import LayerSpec
from penstock.engine_core.models.memory_estimate import weight_bytes, weights
from penstock.engine_core.models.quantization.config import KEY
from penstock.engine_core.models.spec import ModelSpec, decoder_spec, read_spec
from penstock.protocol.errors import ModelError

FIRST, THIRD = 1, 3  # versions; the second is the first with trees of drafts
ARCHITECTURES: Mapping[str, int] = {
    "LlamaForCausalLM": FIRST,  # how most heads name themselves, of either version: a draft vocabulary tells
    "EagleLlamaForCausalLM": FIRST,
    "LlamaForCausalLMEagle": FIRST,
    "Eagle3LlamaForCausalLM": THIRD,
    "LlamaForCausalLMEagle3": THIRD,
}
DEPTHS = 3  # of the target's residual stream
# Keys that would change what the head computes.
READ = ("draft_vocab_size", "target_hidden_size", "eagle_config", "eagle_aux_hidden_state_layer_ids", "bias")
UNKNOWN = ("norm_before_residual", "norm_before_fc", "fc_norm", "parallel_drafting")


class DraftSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A draft model's layers, or a head's own. A head needs the model's embedding on its stage."""

    layers: ModelSpec
    head: HeadSpec | None = None

    def weight_bytes(self, item_bytes: int) -> int:
        """Memory of all its weights. item_bytes: of a number that is not quantized."""
        return weight_bytes(self.layers, item_bytes) if self.head is None else head_weights(self.head) * item_bytes

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """The model's layers whose inputs an EAGLE-3 head reads."""
        return () if self.head is None else self.head.aux_layers


def read_draft(method: str, folder: Path, target: ModelSpec, names: Collection[str] | None) -> DraftSpec:
    """What `folder` has for a method of protocol.speculation.WITH_MODEL, beside a target as a whole. names: as of
    `read_head`. Raises ModelError naming the file and the key."""
    if target.headless:
        raise ModelError(f"{folder}: the model makes vectors and no text, so there is nothing to draft")
    if method == "eagle":
        head = read_head(folder, target, names)
        return DraftSpec(layers=head.layers, head=head)
    return DraftSpec(layers=read_spec(folder))


class HeadSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A head as its config.json and its tensors' names describe it."""

    version: int
    layers: ModelSpec  # its own
    aux_layers: tuple[int, ...] = ()  # EAGLE-3: the target's layers whose inputs it reads
    fc_bias: bool = False
    vocabulary: int = 0  # of its own output embedding; 0: it has the target's


def read_head(folder: Path, target: ModelSpec, names: Collection[str] | None) -> HeadSpec:
    """The head in `folder`, for a target. names: of the tensors that its files hold; None: of random ones.

    Raises ModelError naming the file and the key: no EAGLE head, one of another shape than the target, one that
    computes something that is not known here.
    """
    file = read_json(folder / "config.json")
    version = read_version(file)
    spec = decoder_spec(file, families()["llama"], (*UNKNOWN, *READ))
    if file.get(KEY):
        raise file.error(KEY, "heads are served unquantized; a quantized model takes such a head, too")
    for key, value, wanted in (
        ("hidden_size", spec.hidden, target.hidden),
        ("vocab_size", spec.vocab_size, target.vocab_size),
        ("target_hidden_size", file.integer("target_hidden_size", target.hidden), target.hidden),
    ):
        if value != wanted:
            raise file.error(key, f"the model that the head drafts for has {wanted}")
    for key in UNKNOWN:
        if file.get(key):
            raise file.error(key, "such heads are not known")
    bias = names is not None and "fc.bias" in names
    if names is not None and any(name.endswith("self_attn.q_proj.bias") for name in names):
        spec = spec.with_layers(tuple(map(with_bias, spec.blocks)))  # heads of Qwen models say so nowhere else
    if version == FIRST:
        return HeadSpec(version=version, layers=spec, fc_bias=bias)
    if spec.layers != 1:
        raise file.error("num_hidden_layers", "a head of EAGLE-3 has one layer")
    vocabulary = file.integer("draft_vocab_size", spec.vocab_size, high=spec.vocab_size)
    if vocabulary == spec.vocab_size and names is not None and "lm_head.weight" not in names:
        vocabulary = 0
    aux_layers = read_aux_layers(file, target)
    return HeadSpec(version=version, layers=spec, aux_layers=aux_layers, fc_bias=bias, vocabulary=vocabulary)


def with_bias(layer: LayerSpec) -> LayerSpec:
    """The same layer with biases of queries, keys and values."""
    return layer.with_attention(qkv_bias=True)


def read_version(file: ConfigFile) -> int:
    """By `architectures`, and by a draft vocabulary, which the first version has not."""
    named = file.get("architectures")
    versions = [ARCHITECTURES[name] for name in named or () if isinstance(name, str) and name in ARCHITECTURES]
    if not versions:
        raise file.error("architectures", f"EAGLE heads are known as {', '.join(ARCHITECTURES)}")
    return THIRD if file.get("draft_vocab_size") is not None else versions[0]


def read_aux_layers(file: ConfigFile, target: ModelSpec) -> tuple[int, ...]:
    """The target's layers whose inputs the head reads: as given, or the third, the middle one and the last but two."""
    key = "eagle_aux_hidden_state_layer_ids"
    nested, given = file.get("eagle_config"), file.get(key)
    if given is None and isinstance(nested, dict):
        given = nested.get(key)
    found = (2, target.layers // 2, target.layers - 3) if given is None else given
    if not isinstance(found, (list, tuple)) or not all(type(at) is int and 0 <= at < target.layers for at in found):
        raise file.error(key, f"three of the target's {target.layers} layers are expected")
    if len(set(found)) != DEPTHS or list(found) != sorted(found):
        raise file.error(key, f"three different layers, ascending, are expected; without the key they are {found}")
    return tuple(found)


def head_weights(spec: HeadSpec) -> int:
    """Numbers in all tensors of a head, as `models.eagle` lays them out; its target's are not among them."""
    layers, hidden = spec.layers, spec.layers.hidden
    blocks = weights(layers) - weights(layers.part(()))
    joined = 2 if spec.version == FIRST else DEPTHS
    found = blocks + joined * hidden * hidden + hidden * spec.fc_bias
    if spec.version == FIRST:
        return found - hidden  # the first layer has one norm
    wider = hidden * layers.attention.activations  # attention reads embedding and state
    return found + wider + 2 * hidden + spec.vocabulary * hidden
