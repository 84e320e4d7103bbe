"""Mixtures whose experts are quantized, each by itself or stacked, on ranks that share them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GptOssConfig, PreTrainedConfig, Qwen3MoeConfig

from penstock.engine_core.distributed.group import Group
from penstock.engine_core.loading import load
from penstock.engine_core.models.decoder import Decoder
from penstock.engine_core.models.mlp import SparseMlp
from penstock.engine_core.models.registry import build
from penstock.engine_core.models.spec import read_spec
from tests.engine_core.models.parity import SIZES, ours
from tests.engine_core.models.quantized_folders import CONFIGS, write_pair
from tests.engine_core.models.test_quantized_matrix import EXPERTS, spoken

OSS: dict[str, Any] = {
    **SIZES, "intermediate_size": 64, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 16,
}  # fmt: skip
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router",
                                                             "model.embed_tokens", "lm_head"]}  # fmt: skip
MODELS: dict[str, tuple[PreTrainedConfig, dict[str, Any]]] = {
    "stacked": (GptOssConfig(**OSS), MXFP4),
    "single": (Qwen3MoeConfig(**EXPERTS), CONFIGS["w4a16"]),
}


def test_stacked_experts_say_what_their_numbers_say(tmp_path: Path) -> None:
    quantized, dense = write_pair(tmp_path, *MODELS["stacked"])
    (tokens, logits), (expected_tokens, expected) = spoken(quantized), spoken(dense)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    assert tokens == expected_tokens


def sparse(model: Decoder) -> SparseMlp:
    found = model.blocks[0].mlp
    assert isinstance(found, SparseMlp)
    return found


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("whole", [False, True])
def test_shares_add_up(tmp_path: Path, name: str, whole: bool) -> None:
    quantized, _ = write_pair(tmp_path, *MODELS[name])
    spec, device = read_spec(quantized), torch.device("cpu")
    x = torch.randn(5, spec.hidden, generator=torch.Generator().manual_seed(2))
    total = torch.zeros_like(x)
    for rank in range(2):
        model = build(spec, torch.float32, device, 64, group=Group(rank, 2), expert_parallel=whole)
        load(model, quantized)
        total += sparse(model).forward(x)
    torch.testing.assert_close(total, sparse(ours(quantized)).forward(x), atol=1e-5, rtol=0)
