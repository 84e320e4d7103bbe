"""Encoders with rotary positions against transformers, and as their makers' own code published them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    GteConfig,
    GteForMaskedLM,
    GteForSequenceClassification,
    GteModel,
    JinaEmbeddingsV3Config,
    JinaEmbeddingsV3ForSequenceClassification,
    JinaEmbeddingsV3Model,
    NomicBertConfig,
    NomicBertForSequenceClassification,
    NomicBertModel,
    PreTrainedConfig,
    PreTrainedModel,
)

from penstock.engine_core.loading import load
from penstock.engine_core.models.layers import pack
from penstock.engine_core.models.registry import build
from penstock.engine_core.models.spec import read_spec
from penstock.protocol.errors import ModelError
from tests.engine_core.models.encoder_parity import SIZES, check_scores, check_states, ours, states, texts, write

CASES: dict[str, tuple[type[PreTrainedModel], type[PreTrainedConfig], dict[str, Any]]] = {
    "nomic": (NomicBertModel, NomicBertConfig, {}),
    "gte": (GteModel, GteConfig, {}),
    "gte without types, another activation": (GteModel, GteConfig, {"type_vocab_size": 0, "hidden_act": "silu"}),
    "gte with a head for training": (GteForMaskedLM, GteConfig, {}),
    "jina": (JinaEmbeddingsV3Model, JinaEmbeddingsV3Config, {}),
}
FACTOR = 3.0


@pytest.mark.parametrize("case", CASES)
def test_states(case: str, tmp_path: Path) -> None:
    kind, config, options = CASES[case]
    spec = check_states(tmp_path, kind, config(**{**SIZES, **options})).spec
    assert spec.encoder
    assert spec.headless
    assert spec.max_position == SIZES["max_position_embeddings"]


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (NomicBertForSequenceClassification, NomicBertConfig),
        (GteForSequenceClassification, GteConfig),
        (JinaEmbeddingsV3ForSequenceClassification, JinaEmbeddingsV3Config),
    ],
)
def test_classifiers(kind: type[PreTrainedModel], config: type[PreTrainedConfig], tmp_path: Path) -> None:
    check_scores(tmp_path, kind, config(**SIZES, num_labels=1), typed=config is NomicBertConfig)


def published(folder: Path, **changes: Any) -> None:
    """The same folder as files of a model's own code have it."""
    path = folder / "config.json"
    values = json.loads(path.read_text()) | {"auto_map": {"AutoModel": "modeling.Model"}} | changes
    path.write_text(json.dumps({key: value for key, value in values.items() if value != "left out"}))


def nomic() -> dict[str, Any]:
    """Keys as nomic-embed-text-v1.5 has them."""
    named = {"hidden_size": "n_embd", "intermediate_size": "n_inner", "num_hidden_layers": "n_layer",
             "num_attention_heads": "n_head", "max_position_embeddings": "n_positions"}  # fmt: skip
    found: dict[str, Any] = {theirs: SIZES[ours] for ours, theirs in named.items()}
    found |= dict.fromkeys((*named, "hidden_act", "rope_parameters", "layer_norm_eps", "head_dim"), "left out")
    return found | {
        "activation_function": "swiglu", "causal": False, "fused_bias_fc": True, "layer_norm_epsilon": 1e-12,
        "max_trained_positions": 100, "mlp_fc1_bias": False, "mlp_fc2_bias": False, "parallel_block": False,
        "parallel_block_tied_norm": False, "prenorm": False, "qkv_proj_bias": False, "rotary_emb_base": 1000,
        "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False, "rotary_emb_scale_base": None,
        "rotary_scaling_factor": 2, "scale_attn_weights": True, "use_rms_norm": False, "use_flash_attn": True,
    }  # fmt: skip


@torch.inference_mode()
def test_a_published_nomic(tmp_path: Path) -> None:
    write(tmp_path, NomicBertModel, NomicBertConfig(**SIZES))
    prompts = texts((37, 1, 99))
    expected = states(ours(tmp_path), prompts)
    published(tmp_path, **nomic())
    model = ours(tmp_path)
    assert model.spec.max_position == 100
    for found, state in zip(states(model, prompts), expected, strict=True):
        assert torch.equal(found, state)


@torch.inference_mode()
def test_a_published_gte(tmp_path: Path) -> None:
    """NTK's positions are those of a higher base whose frequencies are divided, and names have a prefix."""
    dim = SIZES["hidden_size"] // SIZES["num_attention_heads"]
    rope = {"rope_type": "linear", "rope_theta": 20000.0 * FACTOR, "factor": FACTOR ** (2 / dim)}
    reference = write(tmp_path, GteModel, GteConfig(**SIZES, rope_parameters=rope))
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({f"new.{name}": tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    published(
        tmp_path, architectures=["NewModel"], model_type="new", rope_parameters="left out", rope_theta=20000,
        rope_scaling={"type": "ntk", "factor": FACTOR}, pack_qkv=True, layer_norm_type="layer_norm",
        position_embedding_type="rope", logn_attention_scale=False,
    )  # fmt: skip
    model = ours(tmp_path)
    assert model.spec.max_position == SIZES["max_position_embeddings"]
    for prompt, found in zip(texts(), states(model, texts()), strict=True):
        expected = reference(torch.tensor([prompt])).last_hidden_state[0]
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("kind", "changes", "word"),
    [
        ("nomic", {"causal": True}, "causal"),
        ("nomic", {"num_experts": 8}, "num_experts"),
        ("nomic", {"qkv_proj_bias": True}, "qkv_proj_bias"),
        ("nomic", {"activation_function": "gelu"}, "activation_function"),
        ("gte", {"layer_norm_type": "rms_norm"}, "layer_norm_type"),
        ("gte", {"logn_attention_scale": True}, "logn_attention_scale"),
        ("gte", {"rope_scaling": {"type": "ntk", "factor": 2.0, "mixed_b": 0.3}}, "mixed_b"),
    ],
)
def test_what_is_refused(kind: str, changes: dict[str, Any], word: str, tmp_path: Path) -> None:
    model, config, _ = CASES[kind]
    write(tmp_path, model, config(**SIZES))
    published(tmp_path, **changes)
    with pytest.raises(ModelError, match=word):
        read_spec(tmp_path)


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["gte", "nomic"])
def test_rounded_weights_stand_in_their_order(kind: str, tmp_path: Path) -> None:
    """GTE's tensor of ups and gates has the ups first."""
    model, config, _ = CASES[kind]
    write(tmp_path, model, config(**SIZES))
    expected = torch.cat(states(ours(tmp_path), texts()))
    rounded = build(read_spec(tmp_path, "int8"), torch.float32, torch.device("cpu"), 130)
    load(rounded, tmp_path)
    pack(rounded.destinations())
    found = torch.cat(states(rounded, texts()))
    assert 0 < (found - expected).norm() < 0.1 * expected.norm()
