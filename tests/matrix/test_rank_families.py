"""Every family shared out over ranks says what it says whole: biases, norms of heads, tied embeddings, windows,
experts, vocabularies that nobody divides, key-value heads that several ranks repeat.

Tiny random models, fp32 over gloo.
"""

from __future__ import annotations

import zlib
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from penstock.engine_core.distributed.group import ALONE, Group
from penstock.engine_core.execution.model_runner import Runner, RunnerOptions
from penstock.engine_core.models import registry
from penstock.engine_core.models.decoder import Decoder
from penstock.engine_core.models.spec import ModelSpec
from penstock.protocol.messages import Pooling, Sampling
from penstock.protocol.outputs import Logprobs
from penstock.protocol.steps import StepPlan, StepResult
from tests.engine_core.execution.harness import LENGTH, Life, block_tables, decode, prefill, tiny_spec
from tests.engine_core.models.specs import resized, small_experts
from tests.ranks import Ranks

SIZES = (2, 4)
STEPS = 8
PROMPT = 20
VOCABULARY = 150  # of two ranks one has 128 rows, the other 22; of four the third has 22 and the fourth none
EXPERTS = {"experts": small_experts(8, 3, 24), "sparse": (False, True)}
BIASED = {"qkv_bias": True, "output_bias": True, "mlp_bias": True}
SPECS: dict[str, dict[str, Any]] = {
    "llama with biases": BIASED,
    "llama, four pairs": {"kv_heads": 4, "head_dim": 16},
    "mistral": {"windows": (11, 11), "vocab_size": 97},
    "qwen2, tied": {"qkv_bias": True, "tied": True},
    "qwen3, tied": {"qk_norm": "head", "tied": True},
    "qwen3 with experts": {"qk_norm": "head", **EXPERTS},
    "whole experts": {"qk_norm": "head", **EXPERTS},
}
SAMPLINGS = [
    Sampling(temperature=0.0),
    Sampling(temperature=0.9, top_k=20, top_p=0.9),
    Sampling(temperature=0.0, repetition_penalty=1.3, logprobs=2),
]


def spec_of(name: str) -> ModelSpec:
    return resized(tiny_spec(), **{"vocab_size": VOCABULARY, **SPECS[name]})


def filled(spec: ModelSpec, group: Group, *, whole_experts: bool) -> Decoder:
    """A model whose every tensor is random, norms and biases too; ranks have slices of the same ones."""
    device = torch.device("cpu")
    model = registry.build(spec, torch.float32, device, LENGTH, group=group, expert_parallel=whole_experts)
    for name, place in model.destinations().items():
        random = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        tensor = torch.randn(place.shape, generator=random) * (place.fan_in**-0.5 if place.fan_in else 0.3)
        if place.tensor is not None:
            part = tensor.narrow(place.axis, place.start, place.tensor.shape[place.axis])
            place.tensor.copy_(part + 1.0 if name.endswith("norm.weight") else part)
    return model


def said(group: Group, name: str) -> tuple[list[list[int]], list[float], list[float]]:
    """Outputs of a few requests, log-probabilities of a prompt, and the vector of another."""
    spec = spec_of(name)
    model = filled(spec, group, whole_experts=name == "whole experts")
    options = RunnerOptions(
        device=torch.device("cpu"), dtype=torch.float32, blocks=100, block_size=8, max_model_len=LENGTH,
        max_num_seqs=8, group=group,
    )  # fmt: skip
    with torch.inference_mode():
        runner = Runner(model, spec, options)
        chance, tables = np.random.default_rng(3), block_tables(5, LENGTH // 8)
        prompts = [[int(token) for token in chance.integers(0, spec.vocab_size, PROMPT)] for _ in range(5)]
        lives = [
            Life(prompt=prompts[at], sampling=sampling, seed=at, slot=at, blocks=tables[at])
            for at, sampling in enumerate(SAMPLINGS)
        ]
        prefill(runner, lives, budget=13)
        decode(runner, lives, STEPS)
        scored = Life(prompt=prompts[3], sampling=Sampling(prompt_logprobs=1), slot=3, blocks=tables[3])
        pooled = Life(prompt=prompts[4], slot=4, blocks=tables[4])
        chunks = np.array([(3, 0, PROMPT, 0), (4, 0, PROMPT, 0)], "<i4")
        starts = scored.start(), msgspec.structs.replace(pooled.start(), pooling=Pooling(kind="mean"))
        result = runner.collect(runner.launch(StepPlan(step=0, epoch=0, starts=starts, chunks=chunks.tobytes())))
    return [life.output for life in lives], prompt_values(result), vector(result)


def prompt_values(result: StepResult) -> list[float]:
    (row,) = result.prompt_logprobs
    assert isinstance(row.logprobs, Logprobs)
    return [float(value) for value in np.frombuffer(row.logprobs.values, "<f4")]


def vector(result: StepResult) -> list[float]:
    (row,) = result.vectors
    return [float(value) for value in np.frombuffer(row.values, "<f4")]


@pytest.mark.sweep
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", SPECS)
def test_shares_say_what_the_whole_says(ranks: Ranks, name: str, size: int) -> None:
    torch.set_num_threads(1)
    tokens, scores, pooled = said(ALONE, name)
    assert len({tuple(output) for output in tokens}) == len(tokens)
    for found in ranks.run(size, said, name):
        assert found[0] == tokens
        assert found[1] == pytest.approx(scores, abs=1e-4)
        assert found[2] == pytest.approx(pooled, abs=1e-4)


def test_shares_of_the_vocabulary() -> None:
    spec = spec_of("llama with biases")
    held = {}
    for size in (1, 2, 4):
        models = [filled(spec, Group(rank, size), whole_experts=False) for rank in range(size)]
        held[size] = [model.embedding.part.held for model in models if model.embedding is not None]
        assert all(model.head is not None and model.head.weight.shape[0] == model.embedding.part.share
                   for model in models if model.embedding is not None)  # fmt: skip
    assert held == {1: [150], 2: [128, 22], 4: [64, 64, 22, 0]}
