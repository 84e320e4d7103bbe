"""The tensors of a model's checkpoint by name and shape, from its spec alone. Imports no torch: planning and the checks
before a start read them, too. `models.decoder` has them in memory; a test holds both to each other.

Names within a model are those of Llama, and of Qwen 2 MoE for experts; a family says what its checkpoints have in
place of parts of them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Set
from pathlib import Path
from typing import NamedTuple, TypeVar

from penstock.engine_core.models.layer_spec import (
    APART_NORMS,
    EXPANSION,
    AttentionSpec,
    ExpertSpec,
    LayerSpec,
    MlpSpec,
    NormSpec,
)
from penstock.engine_core.models.pooler import DenseSpec
from penstock.engine_core.models.quantization.weight_format import Formats, WeightFormat, format_of
from penstock.engine_core.models.recurrence_spec import RecurrenceSpec
from penstock.engine_core.models.spec import OUTPUT, ModelSpec, stored_name
from penstock.engine_core.models.vision_kinds import vision_shapes
from penstock.engine_core.models.weight_files import FREQUENCIES, LEFTOVER, WantedTensor, check_tensors, read_names
from penstock.protocol.errors import ModelError

PREFIX = "model."
FIRST = "embed_tokens.weight"
INNER = re.compile(
    r"^((model|bert|roberta|distilbert|electra|mpnet|new|gte|nomic_bert)\.)?"
)  # what a model's names begin with

Shape = tuple[int, ...]
Value = TypeVar("Value")


class Weight(NamedTuple):
    """Numbers of a model, in one tensor unless they are quantized."""

    shape: Shape
    form: WeightFormat | None = None
    dense: bool = False  # it is dequantized while it loads

    def wanted(self, name: str) -> Iterator[tuple[str, WantedTensor]]:
        """The tensors that hold them. name: of the one, if they were not quantized."""
        if self.form is None:
            yield name, WantedTensor(self.shape)
            return
        experts, outputs, inputs = (1, *self.shape)[-3:]
        for part in self.form.stored(stacked=len(self.shape) > 2):
            full = name.removesuffix(".weight") + part.suffix
            yield full, WantedTensor(part.shape(outputs, inputs, experts), part.dtypes, part.optional)

    def held_bytes(self, item_bytes: int) -> int:
        """Memory that they take. item_bytes: of a number that is not quantized."""
        if self.form is None or self.dense:
            return math.prod(self.shape) * item_bytes
        return math.prod(self.shape[:-2]) * self.form.held_bytes(*self.shape[-2:])


def check_weights(folder: Path, spec: ModelSpec) -> None:
    """Raise ModelError unless the files of `folder` hold the weights of the model, by their headers."""
    for name, weight in model_weights(spec):
        if weight.form is not None and (why := weight.form.complaint(*weight.shape[-2:])):
            matrix = stored_name(spec, name).removesuffix(".weight")
            raise ModelError(f"{folder}: {matrix} cannot be quantized as its config.json says: {why}")
    refuse_quantized_vision(folder, spec)
    check_tensors(folder, named_as(spec, read_names(folder), wanted_tensors(spec)), leftover(spec))
    for dense in spec.projection:
        found = {name: WantedTensor(weight.shape) for name, weight in dense_weights(dense)}
        check_tensors(folder / dense.folder, found)


def refuse_quantized_vision(folder: Path, spec: ModelSpec) -> None:
    """Raise ModelError naming a matrix of the vision encoder that is quantized."""
    if spec.quantization is None:
        return
    for name in vision_tensors(spec):
        module = name.removesuffix(".weight")
        if module != name and spec.quantization.format_of(module) is not None:
            why = (
                "Penstock serves vision encoders that are not; --limit-mm-per-prompt image=0 serves the text half alone"
            )
            raise ModelError(f"{folder}: {module} is quantized as its config.json says, and {why}")


def vision_tensors(spec: ModelSpec) -> dict[str, WantedTensor]:
    """Those of the vision encoder, by names without the `model.` that may stand before them."""
    if spec.vision is None:
        return {}
    return {name: WantedTensor(shape) for name, shape in vision_shapes(spec.vision).items()}


def leftover(spec: ModelSpec, others: Collection[str] = ()) -> re.Pattern[str]:
    """Names of tensors that a checkpoint of the model may have and that are not read. others: more patterns of such."""
    unread = [rf"{INNER.pattern}{re.escape(name)}" for name in spec.unread]
    if (found := spec.quantization) is not None:
        unread += found.unread
        if (scheme := found.kv_scheme) is not None:  # of a cache that may be in another type
            unread += [rf"\.{re.escape(name)}\Z" for name in (scheme.keys, scheme.values)]
    first = LEFTOVER if spec.head_form is None else FREQUENCIES  # beside quantized numbers others would be passed over
    return re.compile("|".join([first.pattern, *unread, *others]))


def unread_tensors(spec: ModelSpec, names: Set[str]) -> dict[str, int]:
    """How many of these tensors are part of the checkpoint and not of what is served, by the beginnings of their
    names."""
    left = names - named_as(spec, names, wanted_tensors(spec)).keys()
    found = {start: sum(INNER.sub("", name).startswith(start) for name in left) for start in spec.unread}
    return {start: count for start, count in found.items() if count}


def named_as(spec: ModelSpec, stored: Collection[str], wanted: Mapping[str, Value]) -> Mapping[str, Value]:
    """The same by the names that the files have: embedding models are saved without the prefix of a model that has a
    head, and the text half of a model of text and images has one of its own, as an encoder has in a classifier. A
    vision encoder is part of the model, or stands beside it."""
    found = text_named_as(spec, stored, wanted)
    own = next((name for name in vision_tensors(spec) if name in found), None)
    if (vision := spec.vision) is None or own is None:
        return found
    forms = [(prefix, aliases) for prefix in ("", PREFIX) for aliases in ((), vision.aliases)]
    form = next((form for form in forms if renamed(own, *form) in stored), forms[0])
    return {renamed(name, *form) if name.startswith(vision.places) else name: value for name, value in found.items()}


def renamed(name: str, prefix: str, aliases: Collection[tuple[str, str]]) -> str:
    """The name behind a prefix, with another beginning where an alias has its own."""
    for first, other in aliases:
        if name.startswith(first):
            name = other + name.removeprefix(first)
    return prefix + name


def text_named_as(spec: ModelSpec, stored: Collection[str], wanted: Mapping[str, Value]) -> Mapping[str, Value]:
    """The same but for a vision encoder."""
    first = stored_name(spec, FIRST)
    prefixes = [name.removesuffix(first) for name in stored if name.endswith(first) and ".layers." not in name]
    prefix, head = prefixes[0] if len(prefixes) == 1 else PREFIX, OUTPUT
    if prefix == PREFIX:
        return wanted
    heads = [name for name in stored if name.endswith(OUTPUT)]
    if len(heads) == 1:
        head = heads[0]
    return {
        head if name == OUTPUT else prefix + name.removeprefix(PREFIX) if name.startswith(PREFIX) else name: value
        for name, value in wanted.items()
    }


def wanted_tensors(spec: ModelSpec) -> dict[str, WantedTensor]:
    """Every tensor of the model's checkpoint."""
    found = (pair for name, weight in model_weights(spec) for pair in weight.wanted(name))
    return {stored_name(spec, name): wanted for name, wanted in found} | vision_tensors(spec)


def model_weights(spec: ModelSpec) -> Iterator[tuple[str, Weight]]:
    """By their names in a Llama."""
    yield f"{PREFIX}{FIRST}", Weight((spec.vocab_size, spec.hidden))
    for at, layer in enumerate(spec.blocks):
        for name, weight in layer_weights(layer, spec.hidden):
            yield f"{PREFIX}layers.{at}.{name}", weight
    if spec.blocks:
        yield from norm_weights(f"{PREFIX}norm", spec.norm, spec.hidden)
    else:
        yield f"{PREFIX}norm.weight", Weight((spec.hidden,))
    yield from beside_weights(spec)
    if not (spec.tied or spec.headless):
        yield OUTPUT, Weight((spec.vocab_size, spec.hidden), spec.head_form)


def beside_weights(spec: ModelSpec) -> Iterator[tuple[str, Weight]]:
    """Of an encoder's embedding beside that of tokens, and of a classifier."""
    embedding = spec.body.embedding
    for name, rows in (("embed_positions", embedding.positions), ("embed_types", embedding.types)):
        if rows:
            yield f"{PREFIX}{name}.weight", Weight((rows, spec.hidden))
    if embedding.layer_inputs:
        yield f"{PREFIX}embed_tokens_per_layer.weight", Weight((embedding.layer_rows, embedding.layer_inputs))
        yield f"{PREFIX}per_layer_model_projection.weight", Weight((embedding.layer_inputs, spec.hidden))
        if spec.blocks:
            yield f"{PREFIX}per_layer_projection_norm.weight", Weight((spec.blocks[0].layer_input,))
    if embedding.norm is not None:
        yield from norm_weights(f"{PREFIX}embed_norm", embedding.norm, spec.hidden)
    for dense in spec.classifier.layers if spec.classifier is not None else ():
        yield from dense_weights(dense)


def dense_weights(dense: DenseSpec) -> Iterator[tuple[str, Weight]]:
    """Of a product behind pooling, and of its norm."""
    yield f"{dense.name}.weight", Weight((dense.outputs, dense.inputs))
    if dense.bias:
        yield f"{dense.name}.bias", Weight((dense.outputs,))
    if dense.norm:
        norm = NormSpec(eps=dense.norm_eps, centered=True, bias=dense.norm_bias)
        yield from norm_weights(dense.norm, norm, dense.outputs)


def norm_weights(name: str, norm: NormSpec, width: int) -> Iterator[tuple[str, Weight]]:
    yield f"{name}.weight", Weight((width,))
    if norm.centered and norm.bias:
        yield f"{name}.bias", Weight((width,))


def layer_weights(layer: LayerSpec, hidden: int) -> Iterator[tuple[str, Weight]]:
    """Of one layer, by their names within it."""
    norms = layer.norms
    for name in (norms.attention_input, norms.attention_output, norms.mlp_input, norms.mlp_output):
        if name:
            yield from norm_weights(name, layer.norm, hidden)
    if layer.attention is not None:
        yield from attention_weights(layer.attention, hidden)
    if layer.recurrence is not None:
        yield from recurrence_weights(layer.recurrence, hidden)
    if isinstance(layer.mlp, ExpertSpec):
        yield from mixture_weights(layer.mlp, hidden)
    elif layer.mlp is not None:
        yield from mlp_weights("mlp", layer.mlp, hidden)
    if layer.layer_input:
        yield "per_layer_input_gate.weight", Weight((layer.layer_input, hidden))
        yield "per_layer_projection.weight", Weight((hidden, layer.layer_input))
        yield "post_per_layer_input_norm.weight", Weight((hidden,))
    if layer.scaled:
        yield "layer_scalar", Weight((1,))


def attention_weights(attention: AttentionSpec, hidden: int) -> Iterator[tuple[str, Weight]]:
    """Of a layer's attention."""
    for name, (outputs, inputs, bias) in attention.matrices(hidden).items():
        yield from linear("self_attn", name, outputs, inputs, bias=bias, formats=attention.formats)
    if (latent := attention.latent) is not None:
        yield "self_attn.kv_a_layernorm.weight", Weight((latent.rank,))
        if latent.q_rank:
            yield "self_attn.q_a_layernorm.weight", Weight((latent.q_rank,))
    for name, heads in (("q_norm", attention.heads), ("k_norm", 0 if attention.kv_shared else attention.kv_heads)):
        if not heads:
            continue
        if attention.qk_norm_tensors:
            for head in range(heads):
                yield f"self_attn.{name}.{head}.weight", Weight((attention.head_dim,))
        elif shape := {"head": (attention.head_dim,), "width": (heads * attention.head_dim,),
                       "heads": (heads, attention.head_dim)}.get(attention.qk_norm):  # fmt: skip
            yield f"self_attn.{name}.weight", Weight(shape)
    if attention.sinks:
        yield "self_attn.sinks", Weight((attention.heads,))


def recurrence_weights(spec: RecurrenceSpec, hidden: int) -> Iterator[tuple[str, Weight]]:
    """Of a recurrence."""
    for name, shape in spec.products(hidden).items():
        yield f"{spec.place}.{name}.weight", Weight(shape, format_of(spec.formats, name))
    for name, whole in spec.others().items():
        yield f"{spec.place}.{name}", Weight(whole)


def mlp_weights(name: str, mlp: MlpSpec, hidden: int) -> Iterator[tuple[str, Weight]]:
    """Of an MLP of this name."""
    if mlp.fused:
        yield from linear(name, "gate_up_proj", 2 * mlp.width, hidden, bias=mlp.bias, formats=mlp.formats)
    else:
        for part in ("gate_proj", "up_proj") if mlp.gated else ("up_proj",):
            yield from linear(name, part, mlp.width, hidden, bias=mlp.bias, formats=mlp.formats)
    yield from linear(name, "down_proj", hidden, mlp.width, bias=mlp.bias or mlp.down_bias, formats=mlp.formats)


def mixture_weights(experts: ExpertSpec, hidden: int) -> Iterator[tuple[str, Weight]]:
    """Of a layer's router and experts."""
    width = experts.width
    yield from linear("mlp", "gate", experts.count, hidden, bias=experts.router_bias)
    if experts.routing.bias:
        yield f"mlp.{experts.routing.bias}", Weight((1,) * (experts.routing.bias_dims - 1) + (experts.count,))
    if experts.shared is not None:
        yield from mlp_weights(f"mlp.{experts.shared_name}", experts.shared, hidden)
    if experts.apart:
        yield from ((f"mlp.{name}.weight", Weight((hidden,))) for name in APART_NORMS)
        yield "mlp.share", Weight((experts.count,))
    if experts.shared_gate:
        yield f"mlp.{experts.shared_name}_gate.weight", Weight((1, hidden))
    if not experts.stacked:
        for expert in range(experts.count):
            one = MlpSpec(width=width, bias=experts.bias, gated=experts.gated, formats=experts.formats)
            yield from mlp_weights(f"mlp.experts.{expert}", one, hidden)
        return
    for name, outputs, inputs in (("gate_up_proj", 2 * width, hidden), ("down_proj", hidden, width)):
        form = format_of(experts.formats, name)
        matrix = (
            (inputs, outputs) if experts.transposed and (form is None or form.packing == "dense") else (outputs, inputs)
        )
        yield f"mlp.experts.{name}", Weight((experts.count, *matrix), form)
        if experts.bias:
            yield f"mlp.experts.{name}_bias", Weight((experts.count, outputs))


def linear(
    place: str, name: str, outputs: int, inputs: int, *, bias: bool, formats: Formats = ()
) -> Iterator[tuple[str, Weight]]:
    """A weight and perhaps a bias."""
    yield f"{place}.{name}.weight", Weight((outputs, inputs), format_of(formats, name), name == EXPANSION)
    if bias:
        yield f"{place}.{name}.bias", Weight((outputs,))
