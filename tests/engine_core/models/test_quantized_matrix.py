"""Models with quantized weights say what the same models say with the numbers that these weights stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, PreTrainedConfig, Qwen3MoeConfig

from penstock.engine_core.models.layers import pack
from penstock.engine_core.models.memory_estimate import weight_bytes
from penstock.engine_core.models.tensors import check_weights, tensor_shapes
from tests.engine_core.models.parity import SIZES, PagedRun, ours, random_prompts
from tests.engine_core.models.quantized_folders import CONFIGS, WEIGHTS_ONLY, write_pair

LLAMA: dict[str, Any] = {**SIZES, "intermediate_size": 128}
EXPERTS: dict[str, Any] = {
    **LLAMA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True,
}  # fmt: skip


def spoken(folder: Path) -> tuple[list[list[int]], torch.Tensor]:
    with torch.inference_mode():
        run = PagedRun(ours(folder), random_prompts(2))
        run.prefill()
        logits = torch.stack([torch.cat(sequence.logits) for sequence in run.sequences])
        return run.greedy(16), logits


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("kind", [LlamaConfig(**LLAMA), Qwen3MoeConfig(**EXPERTS)], ids=["dense", "experts"])
def test_layouts_say_what_their_numbers_say(tmp_path: Path, name: str, kind: PreTrainedConfig) -> None:
    if name == "w4a16 in order" and isinstance(kind, Qwen3MoeConfig):
        pytest.skip("refused")
    quantized, dense = write_pair(tmp_path, kind, CONFIGS[name])
    tokens, logits = spoken(quantized)
    expected_tokens, expected = spoken(dense)
    if name in WEIGHTS_ONLY:
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
        assert tokens == expected_tokens
    else:  # rows are rounded, too
        assert (logits - expected).norm() < 0.5 * expected.norm()
        assert not torch.equal(logits, expected)


@pytest.mark.parametrize("name", CONFIGS)
def test_names_and_memory_are_those_of_the_spec(tmp_path: Path, name: str) -> None:
    quantized, _ = write_pair(tmp_path, LlamaConfig(**LLAMA), CONFIGS[name])
    model = ours(quantized)
    check_weights(quantized, model.spec)
    assert tensor_shapes(model.spec) == {name: place.shape for name, place in model.destinations().items()}
    held = model.weight_bytes
    assert held == pytest.approx(weight_bytes(model.spec, 4), rel=0.03)
    pack(model.destinations())
    assert model.weight_bytes > held, "a CPU holds the dequantized weights"
