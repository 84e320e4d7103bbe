"""The tensors of a model's checkpoint by name and shape, from its spec alone. Imports no torch: planning and the checks
before a start read them, too. `models.decoder` has them in memory; a test holds both to each other.

Names within a model are those of Llama, and of Qwen 2 MoE for experts; a family says what its checkpoints have in
place of parts of them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from penstock.engine_core.models.layer_spec import AttentionSpec, ExpertSpec, LayerSpec, MlpSpec
from penstock.engine_core.models.spec import OUTPUT, ModelSpec
from penstock.engine_core.models.weight_files import LEFTOVER, check_tensors, read_names

PREFIX = "model."
FIRST = "embed_tokens.weight"

Shape = tuple[int, ...]
Value = TypeVar("Value")


def check_weights(folder: Path, spec: ModelSpec) -> None:
    """Raise ModelError unless the files of `folder` hold the weights of the model, by their headers."""
    check_tensors(folder, named_as(read_names(folder), tensor_shapes(spec)), leftover(spec))


def leftover(spec: ModelSpec, others: Collection[str] = ()) -> re.Pattern[str]:
    """Names of tensors that a checkpoint of the model may have and that are not read. others: more patterns of such."""
    unread = [rf"^(model\.)?{re.escape(name)}" for name in spec.unread]
    return re.compile("|".join([LEFTOVER.pattern, *unread, *others]))


def unread_tensors(spec: ModelSpec, names: Collection[str]) -> dict[str, int]:
    """How many of these tensors are part of the checkpoint and not of what is served, by the beginnings of their
    names."""
    found = {start: sum(name.removeprefix(PREFIX).startswith(start) for name in names) for start in spec.unread}
    return {start: count for start, count in found.items() if count}


def stored_name(spec: ModelSpec, name: str) -> str:
    """A tensor's name in the checkpoint."""
    for ours, theirs in spec.names:
        name = name.replace(ours, theirs)
    return name


def named_as(stored: Collection[str], wanted: Mapping[str, Value]) -> Mapping[str, Value]:
    """The same by the names that the files have: embedding models are saved without the prefix of a model that has a
    head, and the text half of a model of text and images has one of its own."""
    prefixes = [name.removesuffix(FIRST) for name in stored if name.endswith(FIRST)]
    prefix, head = prefixes[0] if len(prefixes) == 1 else PREFIX, OUTPUT
    if prefix == PREFIX:
        return wanted
    heads = [name for name in stored if name.endswith(OUTPUT)]
    if len(heads) == 1:
        head = heads[0]
    return {head if name == OUTPUT else prefix + name.removeprefix(PREFIX): value for name, value in wanted.items()}


def tensor_shapes(spec: ModelSpec) -> dict[str, Shape]:
    """Every tensor of the model's checkpoint."""
    found: dict[str, Shape] = {f"{PREFIX}{FIRST}": (spec.vocab_size, spec.hidden)}
    for at, layer in enumerate(spec.blocks):
        found.update((f"{PREFIX}layers.{at}.{name}", shape) for name, shape in layer_shapes(layer, spec.hidden))
    found[f"{PREFIX}norm.weight"] = (spec.hidden,)
    if spec.blocks and spec.norm.centered:
        found[f"{PREFIX}norm.bias"] = (spec.hidden,)
    if not (spec.tied or spec.headless):
        found[OUTPUT] = (spec.vocab_size, spec.hidden)
    return {stored_name(spec, name): shape for name, shape in found.items()}


def layer_shapes(layer: LayerSpec, hidden: int) -> Iterator[tuple[str, Shape]]:
    """Of one layer, by their names within it."""
    norms = layer.norms
    for name in (norms.attention_input, norms.attention_output, norms.mlp_input, norms.mlp_output):
        if name:
            yield f"{name}.weight", (hidden,)
            if layer.norm.centered:
                yield f"{name}.bias", (hidden,)
    yield from attention_shapes(layer.attention, hidden)
    if isinstance(layer.mlp, ExpertSpec):
        yield from expert_shapes(layer.mlp, hidden)
    else:
        yield from mlp_shapes("mlp", layer.mlp, hidden)


def attention_shapes(attention: AttentionSpec, hidden: int) -> Iterator[tuple[str, Shape]]:
    """Of a layer's attention."""
    queries, pairs = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
    parts = (("q_proj", queries), ("k_proj", pairs), ("v_proj", pairs))
    for name, outputs in (("qkv_proj", queries + 2 * pairs),) if attention.fused else parts:
        yield from linear(f"self_attn.{name}", outputs, hidden, bias=attention.qkv_bias)
    yield from linear("self_attn.o_proj", hidden, queries, bias=attention.output_bias)
    if attention.qk_norm and attention.qk_norm != "unit":
        wide = attention.qk_norm == "width"
        yield "self_attn.q_norm.weight", (queries if wide else attention.head_dim,)
        yield "self_attn.k_norm.weight", (pairs if wide else attention.head_dim,)
    if attention.sinks:
        yield "self_attn.sinks", (attention.heads,)


def mlp_shapes(name: str, mlp: MlpSpec, hidden: int) -> Iterator[tuple[str, Shape]]:
    """Of an MLP of this name."""
    if mlp.fused:
        yield from linear(f"{name}.gate_up_proj", 2 * mlp.width, hidden, bias=mlp.bias)
    else:
        for part in ("gate_proj", "up_proj") if mlp.gated else ("up_proj",):
            yield from linear(f"{name}.{part}", mlp.width, hidden, bias=mlp.bias)
    yield from linear(f"{name}.down_proj", hidden, mlp.width, bias=mlp.bias)


def expert_shapes(experts: ExpertSpec, hidden: int) -> Iterator[tuple[str, Shape]]:
    """Of a layer's router and experts."""
    width = experts.width
    yield from linear("mlp.gate", experts.count, hidden, bias=experts.router_bias)
    if experts.routing.bias:
        yield f"mlp.{experts.routing.bias}", (1,) * (experts.routing.bias_dims - 1) + (experts.count,)
    if experts.shared is not None:
        yield from mlp_shapes(f"mlp.{experts.shared_name}", experts.shared, hidden)
    if experts.shared_gate:
        yield f"mlp.{experts.shared_name}_gate.weight", (1, hidden)
    if not experts.stacked:
        for expert in range(experts.count):
            one = MlpSpec(width=width, bias=experts.bias)
            yield from mlp_shapes(f"mlp.experts.{expert}", one, hidden)
        return
    for name, outputs, inputs in (("gate_up_proj", 2 * width, hidden), ("down_proj", hidden, width)):
        matrix = (inputs, outputs) if experts.transposed else (outputs, inputs)
        yield f"mlp.experts.{name}", (experts.count, *matrix)
        if experts.bias:
            yield f"mlp.experts.{name}_bias", (experts.count, outputs)


def linear(name: str, outputs: int, inputs: int, *, bias: bool) -> Iterator[tuple[str, Shape]]:
    """A weight and perhaps a bias."""
    yield f"{name}.weight", (outputs, inputs)
    if bias:
        yield f"{name}.bias", (outputs,)
