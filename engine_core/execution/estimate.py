"""What a model will take of a GPU's memory, before there is a GPU: for planning. Imports no torch.

Weights and cache are exact, by the formulas that an executor uses. What else is on the device an executor measures
(`memory.step_peak`); here it is reckoned from shapes, with factors that make the figures of two models measured on an
H200 (0.6 and 8 billion parameters, 8192 tokens a step, 256 slots) right to 2 %.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.engine_core.models.expert_spec import ExpertSpec
from penstock.engine_core.models.spec import ModelSpec

CONTEXT_BYTES = 960 << 20  # CUDA's context, kernels, what libraries take for themselves
ACTIVATION_SHARE = 1.6  # of a layer's own activations are alive at the worst moment, or kept beside graphs
LOGIT_LINES = 5.4  # fp32 lines of a vocabulary per entry: logits, what sampling makes of them, counts for penalties
DRAFTED = 4  # one row in so many may bring a draft, which is an entry more
FLOAT = 4  # bytes


@dataclass(frozen=True)
class StepShape:
    """The largest step."""

    tokens: int
    max_num_seqs: int
    max_model_len: int
    item_bytes: int


def weights(spec: ModelSpec) -> int:
    """Numbers in all tensors of a model, as `models.decoder` lays them out."""
    queries, pairs = spec.heads * spec.head_dim, 2 * spec.kv_heads * spec.head_dim
    attention = spec.hidden * (queries + pairs) + queries * spec.hidden
    attention += (queries + pairs) * spec.qkv_bias + spec.hidden * spec.output_bias + 2 * spec.head_dim * spec.qk_norm
    mlps = sum(mlp_weights(spec, spec.experts_of(layer)) for layer in range(spec.layers))
    embeddings = spec.vocab_size * spec.hidden * (1 if spec.tied else 2)
    return embeddings + spec.layers * (attention + 2 * spec.hidden) + mlps + spec.hidden


def mlp_weights(spec: ModelSpec, experts: ExpertSpec | None) -> int:
    """Of a layer with these experts and their router, or with one MLP."""
    if experts is not None:
        return experts.count * (spec.hidden + expert_weights(spec, experts))
    return 3 * spec.hidden * spec.intermediate + (2 * spec.intermediate + spec.hidden) * spec.mlp_bias


def expert_weights(spec: ModelSpec, experts: ExpertSpec) -> int:
    """Of one expert."""
    return 3 * spec.hidden * experts.width


def idle_weights(spec: ModelSpec) -> int:
    """Of the experts that a token does not go to, in all layers: the rest is what it is multiplied with."""
    if spec.experts is None:
        return 0
    others = spec.experts.count - spec.experts.chosen
    return sum(spec.experts.layers) * others * expert_weights(spec, spec.experts)


def step_bytes(spec: ModelSpec, step: StepShape) -> int:
    """Bytes that slot tables and the largest step take beyond weights and cache."""
    mlps = {mlp_numbers(spec, spec.experts_of(layer)) for layer in range(spec.layers)}
    widest = max(mlps) + 4 * spec.hidden + (spec.heads + 2 * spec.kv_heads) * spec.head_dim
    activations = step.tokens * widest * step.item_bytes
    lines = (step.max_num_seqs + step.max_num_seqs // DRAFTED) * spec.vocab_size * FLOAT
    tables = step.max_num_seqs * step.max_model_len * FLOAT
    return int(ACTIVATION_SHARE * activations + LOGIT_LINES * lines) + tables


def mlp_numbers(spec: ModelSpec, experts: ExpertSpec | None) -> int:
    """That a token has in a layer's MLP: gate, up and their product, or that product and the result of each expert."""
    return 3 * spec.intermediate if experts is None else experts.chosen * (experts.width + spec.hidden)


def taken_bytes(spec: ModelSpec, step: StepShape) -> int:
    """Bytes that are taken when the cache is made: weights, rotary tables, the context."""
    return weights(spec) * step.item_bytes + step.max_model_len * spec.head_dim * FLOAT + CONTEXT_BYTES
