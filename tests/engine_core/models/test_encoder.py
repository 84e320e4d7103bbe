"""Decoders that became encoders, heads of decoders, and the products behind pooling: `pooling_head.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    Gemma3TextConfig,
    Gemma3TextForSequenceClassification,
    Gemma3TextModel,
    LlamaConfig,
    LlamaForSequenceClassification,
    LlamaModel,
    Qwen2Config,
    Qwen2Model,
    Qwen3Config,
    Qwen3ForSequenceClassification,
    Qwen3Model,
)

from penstock.engine_core.distributed.group import Group
from penstock.engine_core.loading import load
from penstock.engine_core.models.kv_cache import with_kv_cache
from penstock.engine_core.models.memory_estimate import block_bytes, encoder_tokens
from penstock.engine_core.models.registry import build
from penstock.engine_core.models.sharding import stage_layers
from penstock.engine_core.models.spec import read_spec
from penstock.engine_core.models.tensors import check_weights
from penstock.protocol.errors import ConfigError, ModelError
from tests.engine_core.models.encoder_parity import SIZES, check_scores, check_states, write
from tests.engine_core.models.parity import PagedRun, random_prompts

GEMMA: dict[str, Any] = {
    **SIZES, "num_key_value_heads": 1, "head_dim": 32, "sliding_window": 16, "num_hidden_layers": 7,
    "use_bidirectional_attention": True,
}  # fmt: skip
GROUPED: dict[str, Any] = {**SIZES, "num_key_value_heads": 2}


def changed(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_embedding_gemma_sees_both_sides_of_a_window(tmp_path: Path) -> None:
    spec = check_states(tmp_path, Gemma3TextModel, Gemma3TextConfig(**GEMMA)).spec
    assert sorted({layer.attention.window for layer in spec.blocks}) == [0, 9]


def test_qwen_that_is_not_causal(tmp_path: Path) -> None:
    check_states(tmp_path / "two", Qwen2Model, Qwen2Config(**GROUPED, is_causal=False))
    config = Qwen3Config(**GROUPED, head_dim=16, is_causal=False)
    check_states(tmp_path / "three", Qwen3Model, config)


def test_windows_of_such_decoders_are_refused(tmp_path: Path) -> None:
    config = Gemma3TextConfig(**GEMMA | {"use_bidirectional_attention": False})
    write(tmp_path, Gemma3TextModel, config)
    assert not read_spec(tmp_path).encoder
    changed(tmp_path, is_causal=False)
    with pytest.raises(ModelError, match="is_causal"):
        read_spec(tmp_path)


def test_another_family_does_not_see_later_tokens(tmp_path: Path) -> None:
    write(tmp_path, LlamaModel, LlamaConfig(**GROUPED))
    changed(tmp_path, use_bidirectional_attention=True)
    with pytest.raises(ModelError, match="use_bidirectional_attention"):
        read_spec(tmp_path)


def test_a_bidirectional_gemma_classifies(tmp_path: Path) -> None:
    config = Gemma3TextConfig(**GEMMA, num_labels=2, pad_token_id=0)
    check_scores(tmp_path, Gemma3TextForSequenceClassification, config)


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (Qwen3ForSequenceClassification, Qwen3Config(**GROUPED, head_dim=16, num_labels=1, pad_token_id=0)),
        (LlamaForSequenceClassification, LlamaConfig(**GROUPED, num_labels=3, pad_token_id=0)),
    ],
)
@torch.inference_mode()
def test_heads_of_decoders_read_the_last_state(kind: Any, config: Any, tmp_path: Path) -> None:
    reference = write(tmp_path, kind, config)
    spec = read_spec(tmp_path)
    assert spec.headless
    assert not spec.encoder
    check_weights(tmp_path, spec)
    model = build(spec, torch.float32, torch.device("cpu"), 130)
    load(model, tmp_path)
    prompts = [prompt[:40] for prompt in random_prompts(2)]
    found: list[torch.Tensor] = []
    forward = model.forward
    model.forward = lambda *arguments: found.append(forward(*arguments)) or found[-1]  # type: ignore[func-returns-value, method-assign]
    run = PagedRun(model, prompts)
    run.step([17, 17])
    run.step([23, 23])
    states = found[-1].view(2, 23, -1)[:, -1]
    torch.testing.assert_close(
        model.pooled(states, classify=True), reference(torch.tensor(prompts)).logits, atol=1e-5, rtol=1e-5
    )


def test_dense_modules_stand_behind_pooling(tmp_path: Path) -> None:
    """As EmbeddingGemma has two of them, in folders of their own."""
    write(tmp_path, Gemma3TextModel, Gemma3TextConfig(**GEMMA))
    modules = ["Transformer", "Pooling", "Dense", "Dense", "Normalize"]
    lines = [
        {"idx": at, "name": str(at), "path": f"{at}_{name}" if at else "",
         "type": f"sentence_transformers.models.{name}"}
        for at, name in enumerate(modules)
    ]  # fmt: skip
    (tmp_path / "modules.json").write_text(json.dumps(lines))
    torch.manual_seed(0)
    first, second, bias = torch.randn(96, 64), torch.randn(32, 96), torch.randn(32)
    for path, sizes, tensors, more in (
        ("2_Dense", (64, 96), {"linear.weight": first}, {"bias": False, "activation_function": "torch.nn.Identity"}),
        ("3_Dense", (96, 32), {"linear.weight": second, "linear.bias": bias}, {"activation_function": "torch.nn.Tanh"}),
    ):  # fmt: skip
        (tmp_path / path).mkdir()
        (tmp_path / path / "config.json").write_text(
            json.dumps({"in_features": sizes[0], "out_features": sizes[1], **more})
        )
        save_file(tensors, tmp_path / path / "model.safetensors")
    spec = read_spec(tmp_path)
    assert spec.vector == 32
    check_weights(tmp_path, spec)
    model = build(spec, torch.float32, torch.device("cpu"), 130)
    load(model, tmp_path)
    x = torch.randn(3, 64)
    expected = torch.tanh(x @ first.T @ second.T + bias)
    torch.testing.assert_close(model.pooled(x, classify=False), expected)
    (tmp_path / "3_Dense" / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="3_Dense"):
        check_weights(tmp_path, spec)


def test_an_encoder_has_no_cache_and_room_for_its_longest_text(tmp_path: Path) -> None:
    write(tmp_path, Qwen2Model, Qwen2Config(**GROUPED))
    assert block_bytes(read_spec(tmp_path), 16, 2) > 0
    assert encoder_tokens(read_spec(tmp_path), 100, 130) == 100
    changed(tmp_path, is_causal=False)
    spec = read_spec(tmp_path)
    assert block_bytes(spec, 16, 2) == 0
    assert encoder_tokens(spec, 100, 130) == 130
    assert encoder_tokens(spec, 512, 130) == 512


def test_a_type_of_the_cache_is_refused(tmp_path: Path) -> None:
    write(tmp_path, Qwen2Model, Qwen2Config(**GROUPED, is_causal=False))
    with pytest.raises(ConfigError, match="no KV cache"):
        with_kv_cache(read_spec(tmp_path), "fp8")


def test_stages_are_refused(tmp_path: Path) -> None:
    write(tmp_path, Qwen2Model, Qwen2Config(**GROUPED, is_causal=False))
    with pytest.raises(ConfigError, match="encoder"):
        stage_layers(read_spec(tmp_path), 2)


def test_only_the_last_stage_has_a_classifier(tmp_path: Path) -> None:
    write(tmp_path, LlamaForSequenceClassification, LlamaConfig(**GROUPED, num_labels=3, pad_token_id=0))
    spec = read_spec(tmp_path)
    for stage in (0, 1):
        group = Group(stages=2, stage=stage)
        model = build(spec, torch.float32, torch.device("cpu"), 130, group=group)
        place = model.destinations()["score.weight"]
        assert (place.tensor is not None) == (stage == 1)
        load(model, tmp_path)
