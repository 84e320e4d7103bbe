"""The tensors of a model's checkpoint by name and shape, from its spec alone. Imports no torch: planning and the checks
before a start read them, too. `models.decoder` has them in memory; a test holds both to each other."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from penstock.engine_core.models.spec import OUTPUT, ExpertSpec, ModelSpec
from penstock.engine_core.models.weight_files import check_tensors, read_names

PREFIX = "model."
FIRST = "embed_tokens.weight"

Shape = tuple[int, ...]
Value = TypeVar("Value")


def check_weights(folder: Path, spec: ModelSpec) -> None:
    """Raise ModelError unless the files of `folder` hold the weights of the model, by their headers."""
    check_tensors(folder, named_as(read_names(folder), tensor_shapes(spec)))


def named_as(stored: Collection[str], wanted: Mapping[str, Value]) -> Mapping[str, Value]:
    """The same by the names that the files have: embedding models are saved without the prefix of a model that has a
    head."""
    if f"{PREFIX}{FIRST}" in stored or FIRST not in stored:
        return wanted
    return {name.removeprefix(PREFIX): value for name, value in wanted.items()}


def tensor_shapes(spec: ModelSpec) -> dict[str, Shape]:
    """Every tensor of the model's checkpoint."""
    found: dict[str, Shape] = {f"{PREFIX}{FIRST}": (spec.vocab_size, spec.hidden)}
    for layer in range(spec.layers):
        found.update((f"{PREFIX}layers.{layer}.{name}", shape) for name, shape in layer_shapes(spec, layer))
    found[f"{PREFIX}norm.weight"] = (spec.hidden,)
    if not (spec.tied or spec.headless):
        found[OUTPUT] = (spec.vocab_size, spec.hidden)
    return found


def layer_shapes(spec: ModelSpec, layer: int) -> Iterator[tuple[str, Shape]]:
    """Of one layer, by their names within it."""
    attention, hidden = spec.attention, spec.hidden
    queries, pairs = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
    yield "input_layernorm.weight", (hidden,)
    for name, outputs in (("q_proj", queries), ("k_proj", pairs), ("v_proj", pairs)):
        yield from linear(f"self_attn.{name}", outputs, hidden, bias=attention.qkv_bias)
    yield from linear("self_attn.o_proj", hidden, queries, bias=attention.output_bias)
    for name in ("q_norm", "k_norm") if attention.qk_norm else ():
        yield f"self_attn.{name}.weight", (attention.head_dim,)
    yield "post_attention_layernorm.weight", (hidden,)
    experts = spec.experts_of(layer)
    if experts is not None:
        yield from expert_shapes(experts, hidden)
        return
    for name in ("gate_proj", "up_proj"):
        yield from linear(f"mlp.{name}", spec.mlp.intermediate, hidden, bias=spec.mlp.bias)
    yield from linear("mlp.down_proj", hidden, spec.mlp.intermediate, bias=spec.mlp.bias)


def expert_shapes(experts: ExpertSpec, hidden: int) -> Iterator[tuple[str, Shape]]:
    """Of a layer's router and experts."""
    names, width = experts.names, experts.width
    block = "mlp" if experts.stacked else names.block
    yield f"{block}.gate.weight", (experts.count, hidden)
    if experts.stacked:
        yield f"{block}.experts.gate_up_proj", (experts.count, 2 * width, hidden)
        yield f"{block}.experts.down_proj", (experts.count, hidden, width)
        return
    for expert in range(experts.count):
        yield f"{block}.experts.{expert}.{names.gate}.weight", (width, hidden)
        yield f"{block}.experts.{expert}.{names.up}.weight", (width, hidden)
        yield f"{block}.experts.{expert}.{names.down}.weight", (hidden, width)


def linear(name: str, outputs: int, inputs: int, *, bias: bool) -> Iterator[tuple[str, Shape]]:
    """A weight and perhaps a bias."""
    yield f"{name}.weight", (outputs, inputs)
    if bias:
        yield f"{name}.bias", (outputs,)
