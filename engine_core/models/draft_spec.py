"""Specs of draft models, EAGLE heads and heads of multi-token prediction. Imports no torch: planning reads them, too.

All run on the last stage of a pipeline, where tokens are sampled, whole on each rank.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import msgspec

from penstock.engine_core.models.config_file import ConfigFile, read_json
from penstock.engine_core.models.families import families
from penstock.engine_core.models.layer_spec import LayerSpec, MtpNames
from penstock.engine_core.models.memory_estimate import weight_bytes, weights
from penstock.engine_core.models.quantization.config import KEY
from penstock.engine_core.models.quantization.online import fitted
from penstock.engine_core.models.quantization.weight_format import WeightFormat
from penstock.engine_core.models.spec import (
    STACKED,
    ModelSpec,
    decoder_spec,
    read_spec,
    stored_name,
    with_experts,
    with_formats,
)
from penstock.engine_core.models.tensors import (
    INNER,
    Weight,
    layer_weights,
    leftover,
    named_as,
    norm_weights,
)
from penstock.engine_core.models.weight_files import WantedTensor, check_tensors, read_names
from penstock.protocol.errors import ModelError
from penstock.protocol.speculation import HEADS

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
        if self.head is None:
            return weight_bytes(self.layers, item_bytes)
        if self.head.mtp is not None:
            return sum(weight.held_bytes(item_bytes) for _, weight in mtp_weights(self.head, self.head.mtp))
        return head_weights(self.head) * item_bytes

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """The model's layers whose inputs an EAGLE-3 head reads."""
        return () if self.head is None else self.head.aux_layers


def read_draft(method: str, folder: Path, target: ModelSpec, names: Collection[str] | None) -> DraftSpec:
    """What `folder` has for a method of protocol.speculation.WITH_MODEL, beside a target as a whole. names: as of
    `read_head`. Raises ModelError naming the file and the key."""
    if target.headless:
        raise ModelError(f"{folder}: the model makes vectors and no text, so there is nothing to draft")
    if method in HEADS:
        head = (read_mtp if method == "mtp" else read_head)(folder, target, names)
        return DraftSpec(layers=head.layers, head=head)
    spec = read_spec(folder)
    if spec.recurrences:
        raise ModelError(f"{folder}: it has recurrent layers; Penstock drafts with models of attention alone")
    return DraftSpec(layers=spec)


class HeadSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A head as its config.json and its tensors' names describe it."""

    version: int = 0  # of EAGLE
    mtp: MtpNames | None = None  # in place of one of EAGLE
    form: WeightFormat | None = None  # of its projection
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


def read_mtp(folder: Path, target: ModelSpec, names: Collection[str] | None) -> HeadSpec:
    """The head of multi-token prediction in the target's own `folder`. names: of the tensors that its files hold; None:
    of random ones.

    Raises ModelError: the family or the checkpoint has no such head.
    """
    file, mtp = read_json(folder / "config.json"), target.body.mtp
    if mtp is None:
        why = f"{target.family} has none by its config.json, or none that Penstock knows"
        raise ModelError(f"{file.path}: method mtp drafts by the model's own head of multi-token prediction; {why}")
    own = mtp.names
    ending = INNER.sub("", f"{own.place}{own.norm}.weight")
    if names is not None and not any(f".{name}".endswith(f".{ending}") for name in names):
        why = "these files were saved without them; take the published ones, or another method"
        raise ModelError(f"{folder}: config.json tells of a head of multi-token prediction, {own.place}*, and {why}")
    spec = msgspec.structs.replace(target.with_layers((mtp.layer,)), unread=())
    if names is not None and mtp.layer.experts is not None:
        stacked = any(name.endswith(f"{own.place}{own.block}{STACKED}") for name in names)
        spec = with_experts(spec, stacked=stacked)
    form, found = None, target.quantization
    if found is not None:
        layer = with_formats(spec, spec.blocks[0], f"{own.place}{own.block}".removesuffix("."), found, file)
        spec, form = spec.with_layers((layer,)), found.format_of(f"{own.place}{own.projection}")
        form = None if form is None else fitted(form, 2 * spec.hidden)
    return HeadSpec(layers=spec, mtp=own, form=form)


def mtp_weights(head: HeadSpec, names: MtpNames) -> Iterator[tuple[str, Weight]]:
    """Of a head of multi-token prediction, by their names in the checkpoint. `models.eagle` has them in memory."""
    spec, hidden = head.layers, head.layers.hidden
    for name in (names.embedding_norm, names.state_norm, names.norm):
        yield from norm_weights(f"{names.place}{name}", spec.norm, hidden)
    yield f"{names.place}{names.projection}.weight", Weight((hidden, 2 * hidden), head.form)
    for name, weight in layer_weights(spec.blocks[0], hidden):
        yield stored_name(spec, f"{names.place}{names.block}{name}"), weight


def check_mtp(folder: Path, head: HeadSpec) -> None:
    """Raise ModelError unless the files of `folder` hold a head of multi-token prediction, if it is one, by their
    headers."""
    if head.mtp is None:
        return
    wanted: dict[str, WantedTensor] = {}
    for name, weight in mtp_weights(head, head.mtp):
        if weight.form is not None and (why := weight.form.complaint(*weight.shape[-2:])):
            raise ModelError(f"{folder}: {name} cannot be quantized as its config.json says: {why}")
        wanted.update(weight.wanted(name))
    found = named_as(head.layers, read_names(folder), wanted)
    check_tensors(folder, found, beside_mtp(head.layers, head.mtp))


def beside_mtp(spec: ModelSpec, names: MtpNames) -> re.Pattern[str]:
    """Names of tensors that a model's checkpoint may have beside its head: the model's own, and copies of them."""
    inner = re.escape(INNER.sub("", names.place))
    copies = "|".join(map(re.escape, names.copies))
    return leftover(spec, (rf"^(?!{INNER.pattern[1:]}{inner})", rf"{INNER.pattern}{inner}({copies})\Z"))
