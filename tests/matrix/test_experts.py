"""Mixtures of experts in the matrix: the same tokens alone and in company, by chunks, from cached prefixes, after
preemption, over blocks of several sizes. fp32 on a CPU, random checkpoints of both families."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen3MoeConfig

from tests.matrix.engine import Answers, Cell, Engine
from tests.matrix.test_same_tokens import BASE, label, workload

SIZES: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.2, "bos_token_id": 1,
    "eos_token_id": 0,
}  # fmt: skip
CONFIGS = {
    "qwen3_moe": Qwen3MoeConfig(
        **SIZES, num_experts=16, num_experts_per_tok=4, moe_intermediate_size=32, norm_topk_prob=True, head_dim=16,
        mlp_only_layers=[1], tie_word_embeddings=True,
    ),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4),
}  # fmt: skip
CELLS = [
    Cell(depth=2, budget=64),
    Cell(depth=1, budget=16, block_size=8, max_num_seqs=16),
    Cell(depth=2, block_size=8, blocks=24, max_model_len=192, expected_share=0.0),
]


@pytest.fixture(scope="module", params=CONFIGS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(7)
    path = tmp_path_factory.mktemp(str(request.param))
    AutoModelForCausalLM.from_config(CONFIGS[request.param]).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def expected(folder: Path) -> Answers:
    return Engine(BASE, folder).answer(workload(8), together=False)


@pytest.mark.parametrize("cell", CELLS, ids=label)
def test_every_cell_gives_the_same_tokens(cell: Cell, folder: Path, expected: Answers) -> None:
    assert Engine(cell, folder).answer(workload(8)) == expected
