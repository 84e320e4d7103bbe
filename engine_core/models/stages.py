"""Which layers each stage of a pipeline has, as numbers. Imports no torch: planning asks, too."""

from __future__ import annotations

import itertools

from penstock.engine_core.execution.estimate import weights
from penstock.engine_core.models.draft_spec import DraftSpec
from penstock.engine_core.models.spec import ModelSpec
from penstock.protocol.errors import ConfigError

FLAG = "--pipeline-parallel-size"


def stage_layers(spec: ModelSpec, stages: int, draft: DraftSpec | None = None, ranks: int = 1) -> tuple[range, ...]:
    """The layers of each stage, so that the largest has as few weights as can be: with the embedding before the first
    layer, the output embedding behind the last (a tied one stands in both places), what drafts there, which each of the
    stage's `ranks` has as a whole, and at least one layer each.

    Raises ConfigError where there are fewer layers than stages.
    """
    if spec.layers < stages:
        raise ConfigError(FLAG, stages, f"the model has {spec.layers} layers, and each stage needs one")
    frame, embedding = weights(spec.part(())), spec.vocab_size * spec.hidden
    sizes = [weights(spec.part((layer,))) - frame for layer in range(spec.layers)]
    sizes[0] += embedding
    sizes[-1] += embedding if not spec.headless else 0
    if draft is not None:
        read_again = draft.head is not None and not (spec.tied or spec.headless)
        sizes[-1] += ranks * draft.weights + embedding * read_again
    low, high = max(sizes), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(filled(sizes, middle, stages)) <= stages else (middle + 1, high)
    found = filled(sizes, low, stages)
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
    """The model with the layers of one stage alone."""
    return spec.part(stage_layers(spec, stages, draft, ranks)[stage])


def stage_weights(spec: ModelSpec, stages: int, stage: int) -> int:
    """Numbers in the tensors of one stage, as `models.decoder` lays them out."""
    return held_weights(stage_spec(spec, stages, stage), begins=stage == 0, ends=stage == stages - 1)


def held_weights(spec: ModelSpec, *, begins: bool, ends: bool, head: bool = False) -> int:
    """Numbers in the tensors of these layers, and of what stands before the first stage's and behind the last's, where
    perhaps an EAGLE `head` reads the embedding; its own are not among them."""
    embedding, layers = spec.vocab_size * spec.hidden, weights(spec) - weights(spec.part(()))
    looked_up = begins or (ends and (spec.tied or spec.headless or head))
    own_head = ends and not (spec.tied or spec.headless)
    return layers + embedding * (looked_up + own_head) + spec.hidden * ends
