"""Layers of latent attention: quantized expansions, shares of ranks, what their pages are, and what they refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config

from penstock.engine_core.distributed.group import Group
from penstock.engine_core.execution.forward import kv_pages
from penstock.engine_core.loading import load
from penstock.engine_core.models import latent_attention
from penstock.engine_core.models.decoder import Decoder
from penstock.engine_core.models.kv_cache import with_kv_cache
from penstock.engine_core.models.latent_attention import LatentAttention
from penstock.engine_core.models.memory_estimate import block_bytes, weight_bytes
from penstock.engine_core.models.registry import build
from penstock.engine_core.models.sharding import check_ranks, rank_spec
from penstock.engine_core.models.spec import ModelSpec, read_spec
from penstock.protocol.errors import ConfigError
from tests.engine_core.models.families.test_deepseek import LATENT
from tests.engine_core.models.parity import SIZES, PagedRun, ours, random_prompts, write_checkpoint
from tests.engine_core.models.quantized_folders import CONFIGS, write_pair

OPTIONS: dict[str, Any] = {  # of sizes that groups and blocks of 32 divide
    **SIZES, **LATENT, "q_lora_rank": 32, "kv_lora_rank": 64, "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32, "v_head_dim": 32,
    "num_hidden_layers": 2, "first_k_dense_replace": 2,
}  # fmt: skip


def spec_of(folder: Path) -> ModelSpec:
    write_checkpoint(folder, DeepseekV3Config(**OPTIONS))
    return read_spec(folder)


def attention(model: Decoder) -> LatentAttention:
    found = model.blocks[0].attention
    assert isinstance(found, LatentAttention)
    return found


@torch.inference_mode()
@pytest.mark.parametrize("name", ["fp8 blocks", "w4a16 in order"])
def test_a_quantized_expansion_is_held_dense(name: str, tmp_path: Path) -> None:
    """The other matrices round rows of FP8 or not; this one's numbers are those that its checkpoint stands for."""
    quantized, dense = write_pair(tmp_path, DeepseekV3Config(**OPTIONS), CONFIGS[name])
    models = [ours(folder) for folder in (quantized, dense)]
    held = [attention(model).expansion.weight for model in models]
    torch.testing.assert_close(held[0], held[1])
    assert models[0].weight_bytes > held[0].nbytes
    if name.startswith("w4a16"):
        runs = [PagedRun(model, random_prompts(1)) for model in models]
        for run in runs:
            run.prefill()
        found, expected = (torch.cat(run.sequences[0].logits) for run in runs)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_the_expansion_is_not_rounded_while_it_loads(tmp_path: Path) -> None:
    spec_of(tmp_path)
    spec = read_spec(tmp_path, "fp8")
    formats = {name for name, _ in spec.attention.formats}
    assert formats == {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"}


def test_estimates_are_what_is_held(tmp_path: Path) -> None:
    quantized, _ = write_pair(tmp_path, DeepseekV3Config(**OPTIONS), CONFIGS["w4a16"])
    spec = read_spec(quantized)
    expansions = spec.layers * 4 * (32 + 32) * 64
    bare = weight_bytes(spec, 0)
    assert weight_bytes(spec, 2) - bare >= 2 * expansions


def test_ranks_share_heads_and_repeat_latents(tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    check_ranks(spec, 2)
    assert rank_spec(spec, 2).attention.page_numbers == spec.attention.page_numbers == 64 + 16
    with pytest.raises(ConfigError, match="attention heads"):
        check_ranks(spec, 8)
    whole = build(spec, torch.float32, torch.device("cpu"), 64)
    load(whole, tmp_path)
    parts = []
    for rank in range(2):
        part = build(spec, torch.float32, torch.device("cpu"), 64, group=Group(rank, 2))
        load(part, tmp_path)
        parts.append(attention(part).expansion.weight)
    assert torch.equal(torch.cat(parts), attention(whole).expansion.weight)


def test_a_page_has_one_latent_a_token(tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    pages = kv_pages(spec, 3, 16, torch.bfloat16, torch.device("cpu"))
    assert [[part.shape for part in layer] for layer in pages] == [[(4, 16, 80)]] * 2
    assert 4 * block_bytes(spec, 16, 2) == sum(part.nbytes for layer in pages for part in layer)


def test_latents_are_not_cached_in_8_bits(tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    for asked, stored in (("fp8", False), ("auto", True)):
        with pytest.raises(ConfigError, match="latents are cached in the model's type; give bfloat16"):
            with_kv_cache(spec.with_attention(kv_fp8=stored), asked)
    assert with_kv_cache(spec.with_attention(kv_fp8=True), "bfloat16") == spec


@torch.inference_mode()
@pytest.mark.parametrize("invariant", [False, True])
def test_batch_invariant_layers_absorb_all_queries(
    invariant: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How many queries a row has depends on how its prompt was cut."""
    model = build(spec_of(tmp_path), torch.float32, torch.device("cpu"), 256, invariant=invariant)
    load(model, tmp_path)
    calls: list[object] = []
    monkeypatch.setattr(latent_attention, "attend_expanded", lambda *given: calls.append(given))
    PagedRun(model, random_prompts(1), expanded=8).step([9])
    assert len(calls) == (0 if invariant else len(model.blocks))
