"""Shards of a model: a rank's share and a stage's layers, as numbers. Imports no torch: planning reads them, too."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from msgspec.structs import replace

from penstock.engine_core.models.draft_spec import DraftSpec
from penstock.engine_core.models.layer_spec import ExpertSpec, LayerSpec, MlpSpec
from penstock.engine_core.models.memory_estimate import ITEM_BYTES, weight_bytes
from penstock.engine_core.models.quantization.weight_format import Counts, WeightFormat
from penstock.engine_core.models.spec import ModelSpec
from penstock.engine_core.models.tensors import Weight, beside_weights
from penstock.protocol.errors import ConfigError

TENSOR_PARALLEL = "--tensor-parallel-size"
VOCABULARY_STEP = 64  # rows; shares of a vocabulary are multiples, which suits a device's products
PIPELINE_PARALLEL = "--pipeline-parallel-size"


def rank_spec(spec: ModelSpec, size: int) -> ModelSpec:
    """The model as one of `size` ranks has its attention: its share of the heads. Key-value heads are split, or one of
    them repeated where there are fewer than ranks."""
    return spec.with_layers(tuple(rank_layer(layer, size) for layer in spec.blocks))


def rank_layer(layer: LayerSpec, size: int) -> LayerSpec:
    if (own := layer.attention) is not None:
        layer = layer.with_attention(heads=own.heads // size, kv_heads=max(1, own.kv_heads // size))
    return layer if layer.recurrence is None else replace(layer, recurrence=layer.recurrence.share(size))


def vocabulary_share(rows: int, size: int) -> int:
    """Rows of a vocabulary that each of `size` ranks has memory for; those of the last ranks are padded."""
    return rows if size == 1 else -(-rows // (size * VOCABULARY_STEP)) * VOCABULARY_STEP


def part_spec(spec: ModelSpec, size: int) -> ModelSpec:
    """One rank's share as a model of its own, for estimates of weights and activations."""
    layers = tuple(replace(rank_layer(layer, size), mlp=mlp_share(layer.mlp, size)) for layer in spec.blocks)
    rows = vocabulary_share(spec.body.embedding.layer_rows, size)
    embedding = replace(spec.body.embedding, layer_rows=rows)
    body = replace(spec.body, layers=layers, embedding=embedding)
    return replace(spec, body=body, vocab_size=vocabulary_share(spec.vocab_size, size))


def mlp_share(mlp: MlpSpec | ExpertSpec | None, size: int) -> MlpSpec | ExpertSpec | None:
    if mlp is None:
        return None
    if isinstance(mlp, MlpSpec):
        return replace(mlp, width=mlp.width // size)
    shared = mlp.shared and replace(mlp.shared, width=mlp.shared.width // size)
    return replace(mlp, width=mlp.width // size, shared=shared)


def shared(spec: ModelSpec, *, expert_parallel: bool = False) -> list[tuple[str, int]]:
    """What is split evenly over the ranks, in words, and how much of it there is."""
    found = {("attention heads", spec.attention.heads): None}
    found |= {recurrence.split(): None for recurrence in spec.recurrences}
    found |= {("numbers of each MLP's width", mlp.width): None for mlp in spec.dense}
    for experts in spec.sparse:
        whole, width = ("experts", experts.count), ("numbers of each expert's width", experts.width)
        found[whole if expert_parallel else width] = None
    return list(found)


def check_ranks(spec: ModelSpec, size: int, *, expert_parallel: bool = False) -> None:
    """Raise ConfigError with the numbers unless so many ranks can share the model's heads and width, and its experts or
    their width."""
    if expert_parallel and not spec.sparse:
        raise ConfigError("--expert-parallel", True, "the model has no experts")
    sizes = divisors(spec, expert_parallel=expert_parallel)
    for what, count in shared(spec, expert_parallel=expert_parallel):
        if count % size:
            raise ConfigError(TENSOR_PARALLEL, size, f"it must divide the model's {count} {what}: {sizes}")
    for kv_heads in kv_head_counts(spec):
        if kv_heads % size and size % kv_heads:
            few = f"it must divide the model's {kv_heads} key-value heads or be a multiple of them: {sizes}"
            raise ConfigError(TENSOR_PARALLEL, size, few)
    if reason := unfit(spec, size, expert_parallel=expert_parallel):
        raise ConfigError(TENSOR_PARALLEL, size, f"{reason}: {sizes}")


def unfit(spec: ModelSpec, size: int, *, expert_parallel: bool = False) -> str:
    """Which quantized matrix cannot be cut into so many shares, as a clause; empty: all can. Values stand in packs,
    groups and blocks that have something in common, and a share has whole ones."""
    if size == 1:
        return ""
    for layer in dict.fromkeys(spec.blocks):
        for name, form, counts, share in cut_matrices(layer, size, expert_parallel=expert_parallel):
            least = form.multiple(counts)
            if share % least:
                return f"{name} is quantized so that a share of its {counts} must be a multiple of {least}, not {share}"
            if counts == "inputs" and form.ordered:
                return f"{name} is quantized in the order of activations (desc_act), so that its inputs stay together"
    share = vocabulary_share(spec.vocab_size, size)
    if spec.head_form is not None and share % (least := spec.head_form.multiple("outputs")):
        return f"lm_head is quantized so that a share of its outputs must be a multiple of {least}, not {share}"
    return ""


def cut_matrices(
    layer: LayerSpec, size: int, *, expert_parallel: bool
) -> Iterator[tuple[str, WeightFormat, Counts, int]]:
    """The quantized matrices of a layer that ranks share, of each what is cut and how much of it is a share."""
    own = rank_layer(layer, size).attention
    if layer.attention is not None and own is not None:
        whole, shares = layer.attention.matrices(1), own.matrices(1)
        for name, form in own.formats:
            outputs = math.gcd(own.heads, own.kv_heads) * own.head_dim if own.fused else shares[name].outputs
            if name == "o_proj":
                yield name, form, "inputs", shares[name].inputs
            elif shares[name] != whole[name]:
                yield name, form, "outputs", outputs
    if (recurrence := layer.recurrence) is not None:
        part = recurrence.share(size)
        for name, form in recurrence.formats:
            inputs = name == recurrence.output
            yield name, form, "inputs" if inputs else "outputs", part.cut(name)
    mlps = [] if layer.dense is None else [(layer.dense.formats, layer.dense.width)]
    if layer.experts is not None and not expert_parallel:
        mlps.append((layer.experts.formats, layer.experts.width))
    for formats, width in mlps:
        for name, form in formats:
            yield name, form, "inputs" if name == "down_proj" else "outputs", width // size


def kv_head_counts(spec: ModelSpec) -> list[int]:
    """Key-value heads of each kind of layer."""
    return sorted({attention.kv_heads for attention in spec.attentions})


def divisors(spec: ModelSpec, *, expert_parallel: bool = False) -> str:
    """The tensor-parallel sizes that the model allows, in words."""
    found = [size for size in range(1, 65) if shared_evenly(spec, size, expert_parallel=expert_parallel)]
    return "one of " + ", ".join(map(str, found))


def shared_evenly(spec: ModelSpec, size: int, *, expert_parallel: bool = False) -> bool:
    whole = all(kv_heads % size == 0 or size % kv_heads == 0 for kv_heads in kv_head_counts(spec))
    whole = whole and all(count % size == 0 for _, count in shared(spec, expert_parallel=expert_parallel))
    return whole and not unfit(spec, size, expert_parallel=expert_parallel)


def stage_layers(spec: ModelSpec, stages: int, draft: DraftSpec | None = None, ranks: int = 1) -> tuple[range, ...]:
    """The layers of each stage, so that the largest has as few weights as can be: with the embedding before the first
    layer, the output embedding behind the last (a tied one stands in both places), what drafts there, which each of the
    stage's `ranks` has as a whole, and at least one layer each.

    Raises ConfigError where there are fewer layers than stages, or too few before the second for images.
    """
    if spec.encoder and stages > 1:
        why = "the model is an encoder, which is served in one stage; --tensor-parallel-size spreads it over GPUs"
        raise ConfigError(PIPELINE_PARALLEL, stages, why)
    if stages > 1 and (spec.body.embedding.layer_inputs or any(own.kv_shared for own in spec.attentions)):
        why = "layers of the model share keys and values, or an embedding by layer, so that they stay in one stage"
        raise ConfigError(PIPELINE_PARALLEL, stages, why)
    if spec.layers < stages:
        raise ConfigError(PIPELINE_PARALLEL, stages, f"the model has {spec.layers} layers, and each stage needs one")
    bare, item = spec.part(()), ITEM_BYTES["bfloat16"]
    frame, embedding = weight_bytes(bare, item), spec.vocab_size * spec.hidden * item
    sizes = [weight_bytes(spec.part((layer,)), item) - frame for layer in range(spec.layers)]
    sizes[0] += embedding
    sizes[-1] += 0 if spec.headless else embedding if spec.tied else head_bytes(spec, item)
    if draft is not None:
        read_again = draft.head is not None and not (spec.tied or spec.headless)
        sizes[-1] += ranks * draft.weight_bytes(item) + embedding * read_again
    low, high = max(sizes), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(filled(sizes, middle, stages)) <= stages else (middle + 1, high)
    found = filled(sizes, low, stages)
    levels = 0 if spec.vision is None else len(spec.vision.levels)
    if levels > found[0]:
        why = f"the first stage gets {found[0]} of {spec.layers} layers, and images go behind {levels} (DeepStack)"
        raise ConfigError(PIPELINE_PARALLEL, stages, why)
    starts = [sum(found[:stage]) for stage in range(stages + 1)]
    return tuple(range(start, end) for start, end in itertools.pairwise(starts))


def filled(sizes: list[int], most: int, stages: int) -> list[int]:
    """How many layers each stage has if it takes as many as `most` weights allow and leaves one for each stage behind
    it: more stages than there are if that is too little."""
    counts, weight = [0], 0
    for layer, size in enumerate(sizes):
        if counts[-1] and (weight + size > most or len(sizes) - layer <= stages - len(counts)):
            counts.append(0)
            weight = 0
        counts[-1] += 1
        weight += size
    return counts


def stage_spec(spec: ModelSpec, stages: int, stage: int, draft: DraftSpec | None = None, ranks: int = 1) -> ModelSpec:
    return spec.part(stage_layers(spec, stages, draft, ranks)[stage])


def head_bytes(spec: ModelSpec, item_bytes: int) -> int:
    """Memory of an output embedding of its own."""
    return Weight((spec.vocab_size, spec.hidden), spec.head_form).held_bytes(item_bytes)


def held_bytes(
    spec: ModelSpec, item_bytes: int, *, begins: bool, ends: bool, head: bool = False, dequantized: bool = False
) -> int:
    """Memory of these layers, and of what stands before the first stage's and behind the last's, where perhaps an EAGLE
    `head` reads the embedding; its own weights are not among them. The rest as of `weight_bytes`."""
    bare = weight_bytes(spec.part(()), item_bytes, dequantized=dequantized)
    layers = weight_bytes(spec, item_bytes, dequantized=dequantized) - bare
    embedding = spec.vocab_size * spec.hidden * item_bytes
    looked_up = begins or (ends and (spec.tied or spec.headless or head))
    own_head = ends and not (spec.tied or spec.headless)
    norm = spec.hidden * (1 + (spec.norm.centered and spec.norm.bias)) * item_bytes
    beside = sum(weight.held_bytes(item_bytes) for _, weight in beside_weights(spec))
    own = beside * ends + norm * ends
    return layers + embedding * looked_up + head_bytes(spec, item_bytes) * own_head + own
