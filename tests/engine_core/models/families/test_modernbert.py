"""ModernBERT against transformers, with files of both ages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import ModernBertConfig, ModernBertForMaskedLM, ModernBertForSequenceClassification, ModernBertModel

from penstock.engine_core.models.spec import read_spec
from penstock.protocol.errors import ModelError
from tests.engine_core.models.encoder_parity import SIZES, check_scores, check_states, write

TOKENS = dict.fromkeys(("pad_token_id", "eos_token_id", "bos_token_id", "cls_token_id", "sep_token_id"), 1)
SMALL: dict[str, Any] = {**SIZES, **TOKENS, "local_attention": 16}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"norm_bias": True, "attention_bias": True, "mlp_bias": True},
        {"local_attention": 40, "num_hidden_layers": 7, "hidden_activation": "gelu_pytorch_tanh"},
    ],
)
def test_states(options: dict[str, Any], tmp_path: Path) -> None:
    check_states(tmp_path, ModernBertModel, ModernBertConfig(**{**SMALL, **options}))


def test_a_head_for_training_is_left_unread(tmp_path: Path) -> None:
    check_states(tmp_path, ModernBertForMaskedLM, ModernBertConfig(**SMALL))


@pytest.mark.parametrize(
    "options",
    [
        {"num_labels": 1},
        {"num_labels": 3, "classifier_pooling": "mean", "classifier_bias": True, "norm_bias": True},
        {"num_labels": 2, "classifier_activation": "silu"},
    ],
)
def test_classifiers(options: dict[str, Any], tmp_path: Path) -> None:
    check_scores(tmp_path, ModernBertForSequenceClassification, ModernBertConfig(**SMALL, **options))


def test_older_files_name_two_bases(tmp_path: Path) -> None:
    write(tmp_path, ModernBertModel, ModernBertConfig(**SMALL))
    path = tmp_path / "config.json"
    expected, values = read_spec(tmp_path), json.loads(path.read_text())
    del values["rope_parameters"], values["layer_types"]
    older = {"global_rope_theta": 160000.0, "local_rope_theta": 10000.0, "global_attn_every_n_layers": 3}
    path.write_text(json.dumps(values | older))
    assert read_spec(tmp_path).blocks == expected.blocks
    path.write_text(json.dumps(values | older | {"global_attn_every_n_layers": 2}))
    windows = [layer.attention.window for layer in read_spec(tmp_path).blocks]
    assert windows == [0, 9, 0, 9]


def test_another_pooling_is_refused(tmp_path: Path) -> None:
    write(tmp_path, ModernBertModel, ModernBertConfig(**SMALL))
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"classifier_pooling": "late"}))
    with pytest.raises(ModelError, match="classifier_pooling"):
        read_spec(tmp_path)
