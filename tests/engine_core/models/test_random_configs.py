"""Checkpoints of random shapes, of every family: whatever config.json says, logits are those of transformers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tests.engine_core.models.parity import PagedRun, ours, theirs, write_checkpoint

CLASSES: tuple[type[PreTrainedConfig], ...] = (
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
LENGTH = 48  # of a prompt


def random_config(kind: type[PreTrainedConfig], rng: random.Random) -> PreTrainedConfig:
    """Sizes that fit together. Where a family derives the size of heads, it is left out now and then; transformers'
    Mixtral stretches positions only where it stands."""
    kv_heads, group = rng.choice((1, 2, 3)), rng.choice((1, 2, 3, 4))
    heads, head_dim = kv_heads * group, rng.choice((8, 16, 24))
    layers = rng.randint(1, 3)
    values: dict[str, Any] = {
        "vocab_size": rng.randint(40, 200),
        "hidden_size": heads * head_dim,
        "intermediate_size": rng.choice((24, 56, 96)),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": rng.choice((64, 128)),
        "tie_word_embeddings": rng.random() < 0.4,
        "rope_parameters": random_rope(rng),
    }
    if rng.random() < 0.7:
        values["rms_norm_eps"] = rng.choice((1e-6, 1e-5, 1e-3))
    if rng.random() < 0.5 or kind in (Qwen3Config, MixtralConfig):  # heads together are not as wide as the hidden size
        values["head_dim"] = head_dim
        values["hidden_size"] = heads * rng.choice((4, 12, 20))
    return kind(**values, **random_parts(kind, rng, layers))


def random_parts(kind: type[PreTrainedConfig], rng: random.Random, layers: int) -> dict[str, Any]:
    """What one family has and others have not."""
    parts: dict[str, Any] = {}
    if kind in (LlamaConfig, Qwen3Config, Qwen3MoeConfig):
        parts["attention_bias"] = rng.random() < 0.5
    if kind is LlamaConfig:
        parts["mlp_bias"] = rng.random() < 0.5
    if kind in (MistralConfig, MixtralConfig):
        parts["sliding_window"] = rng.choice((None, 1, 7, LENGTH - 1, LENGTH))
    if kind in (Qwen2Config, Qwen3Config, Qwen3MoeConfig):
        parts["use_sliding_window"] = rng.random() < 0.6
        parts["sliding_window"] = rng.choice((1, 7, LENGTH))
        parts["max_window_layers"] = rng.randint(0, layers)
    if kind in (MixtralConfig, Qwen3MoeConfig):
        count = rng.choice((2, 4, 6))
        parts["num_local_experts" if kind is MixtralConfig else "num_experts"] = count
        parts["num_experts_per_tok"] = rng.randint(1, min(count, 4))
    if kind is Qwen3MoeConfig:
        parts["moe_intermediate_size"] = rng.choice((16, 40))
        parts["norm_topk_prob"] = rng.random() < 0.5
        parts["decoder_sparse_step"] = rng.choice((1, 2))
        parts["mlp_only_layers"] = rng.sample(range(layers), rng.randint(0, layers - 1))
    return parts


def random_rope(rng: random.Random) -> dict[str, Any]:
    """Dynamic scaling is left out: its base is that of the served length here, see `models.rope`."""
    kind = rng.choice(("default", "linear", "yarn", "llama3"))
    values: dict[str, Any] = {"rope_type": kind, "rope_theta": rng.choice((100.0, 1e4, 5e5))}
    if kind != "default":
        values["factor"] = rng.choice((1.0, 2.5, 8.0))
    if kind in ("yarn", "llama3"):
        values["original_max_position_embeddings"] = rng.choice((16, 32))
    if kind == "llama3":
        values |= {"low_freq_factor": rng.choice((1.0, 2.0)), "high_freq_factor": 4.0}
    if kind == "yarn":
        values |= rng.choice(({}, {"attention_factor": 0.7}, {"mscale": 0.7, "mscale_all_dim": 1.1}, {"mscale": 0.7}))
        values |= rng.choice(({}, {"beta_fast": 8, "beta_slow": 2}, {"truncate": False}))
    return values


@torch.inference_mode()
def check(kind: type[PreTrainedConfig], seed: int, folder: Path) -> None:
    rng = random.Random(f"{kind.__name__} {seed}")
    config = random_config(kind, rng)
    write_checkpoint(folder, config)
    prompts = [[rng.randrange(config.vocab_size) for _ in range(LENGTH)] for _ in range(2)]
    expected = theirs(folder)(torch.tensor(prompts)).logits
    run = PagedRun(ours(folder, length=LENGTH), prompts, rng.choice((1, 4, 16)), LENGTH)
    cuts = sorted(rng.sample(range(1, LENGTH), 4))
    run.prefill(tuple(end - start for start, end in zip([0, *cuts], [*cuts, LENGTH], strict=True)))
    for sequence, logits in zip(run.sequences, expected, strict=True):
        torch.testing.assert_close(
            torch.cat(sequence.logits),
            logits,
            atol=2e-4,
            rtol=1e-4,
            msg=lambda found: f"seed {seed}: {config}\n{found}",
        )


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.model_type)
def test_logits_of_a_random_shape(kind: type[PreTrainedConfig], tmp_path: Path) -> None:
    for seed in range(3):
        check(kind, seed, tmp_path / str(seed))


@pytest.mark.long
@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.model_type)
def test_logits_of_many_random_shapes(kind: type[PreTrainedConfig], tmp_path: Path) -> None:
    for seed in range(3, 100):
        check(kind, seed, tmp_path / str(seed))
