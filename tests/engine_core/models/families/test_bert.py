"""BERT and its kin against transformers: states, classifiers, checkpoints with and without a prefix, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    CamembertConfig,
    CamembertModel,
    DistilBertConfig,
    DistilBertForMaskedLM,
    DistilBertForSequenceClassification,
    DistilBertModel,
    ElectraConfig,
    ElectraForSequenceClassification,
    ElectraModel,
    PreTrainedConfig,
    PreTrainedModel,
    RobertaConfig,
    RobertaForSequenceClassification,
    RobertaModel,
    XLMRobertaConfig,
    XLMRobertaForSequenceClassification,
    XLMRobertaModel,
)

from penstock.engine_core.models.spec import read_spec
from penstock.engine_core.models.tensors import check_weights, unread_tensors
from penstock.engine_core.models.weight_files import read_names
from penstock.protocol.errors import ModelError
from tests.engine_core.models.encoder_parity import SIZES, check_scores, check_states, ours, states, write

CASES: dict[str, tuple[type[PreTrainedModel], type[PreTrainedConfig], dict[str, Any]]] = {
    "bert": (BertModel, BertConfig, {}),
    "bert, another epsilon": (BertModel, BertConfig, {"layer_norm_eps": 1e-3}),
    "bert, tanh gelu, one layer": (BertModel, BertConfig, {"hidden_act": "gelu_new", "num_hidden_layers": 1}),
    "bert with a head for training": (BertForMaskedLM, BertConfig, {}),
    "roberta": (RobertaModel, RobertaConfig, {}),
    "roberta, another padding": (RobertaModel, RobertaConfig, {"pad_token_id": 0}),
    "distilbert": (DistilBertModel, DistilBertConfig, {}),
    "distilbert with a head for training": (DistilBertForMaskedLM, DistilBertConfig, {}),
    "camembert": (CamembertModel, CamembertConfig, {"type_vocab_size": 1}),
    "electra": (ElectraModel, ElectraConfig, {"embedding_size": 64}),
    "xlm-roberta": (XLMRobertaModel, XLMRobertaConfig, {"type_vocab_size": 1}),
}


@pytest.mark.parametrize("case", CASES)
def test_states(case: str, tmp_path: Path) -> None:
    kind, config, options = CASES[case]
    options = {**SIZES, **options}
    if config is DistilBertConfig:
        options["hidden_dim"] = options.pop("intermediate_size")
    spec = check_states(tmp_path, kind, config(**options)).spec
    assert spec.encoder
    assert spec.headless
    assert spec.classifier is None


@pytest.mark.parametrize(
    ("kind", "config", "options"),
    [
        (BertForSequenceClassification, BertConfig, {"num_labels": 1}),
        (BertForSequenceClassification, BertConfig, {"num_labels": 3}),
        (DistilBertForSequenceClassification, DistilBertConfig, {"num_labels": 2, "hidden_dim": 96}),
        (ElectraForSequenceClassification, ElectraConfig, {"num_labels": 1, "embedding_size": 64}),
        (RobertaForSequenceClassification, RobertaConfig, {"num_labels": 2}),
        (XLMRobertaForSequenceClassification, XLMRobertaConfig, {"num_labels": 1, "type_vocab_size": 1}),
    ],
)
def test_classifiers(
    kind: type[PreTrainedModel], config: type[PreTrainedConfig], options: dict[str, Any], tmp_path: Path
) -> None:
    check_scores(tmp_path, kind, config(**SIZES, **options), typed=kind is BertForSequenceClassification)


def test_the_length_is_that_of_the_rows_behind_padding(tmp_path: Path) -> None:
    write(tmp_path, RobertaModel, RobertaConfig(**SIZES))
    assert read_spec(tmp_path).max_position == SIZES["max_position_embeddings"] - 2
    write(tmp_path, BertModel, BertConfig(**SIZES))
    assert read_spec(tmp_path).max_position == SIZES["max_position_embeddings"]


def test_types_of_a_table_with_one_row_change_nothing(tmp_path: Path) -> None:
    write(tmp_path, XLMRobertaModel, XLMRobertaConfig(**SIZES, type_vocab_size=1))
    model = ours(tmp_path)
    (plain,), (typed,) = states(model, [[5, 6, 7]]), states(model, [[5, 6, 7]], [[0, 1, 1]])
    assert torch.equal(plain, typed)


def test_buffers_and_poolers_are_left_unread(tmp_path: Path) -> None:
    write(tmp_path, BertModel, BertConfig(**SIZES))
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "embeddings.position_ids": torch.arange(130)[None]}, tmp_path / "model.safetensors")
    spec = ours(tmp_path).spec
    assert unread_tensors(spec, read_names(tmp_path)) == {"embeddings.position_ids": 1, "pooler.": 2}
    write(tmp_path, BertForSequenceClassification, BertConfig(**SIZES))
    assert unread_tensors(read_spec(tmp_path), read_names(tmp_path)) == {}


def test_another_tensor_is_refused(tmp_path: Path) -> None:
    write(tmp_path, BertModel, BertConfig(**SIZES))
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "encoder.adapter.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="adapter"):
        check_weights(tmp_path, read_spec(tmp_path))


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"is_decoder": True}, "is_decoder"),
        ({"hidden_act": "silu"}, "hidden_act"),
        ({"attention_window": [512]}, "attention_window"),
        ({"architectures": ["ElectraModel"], "embedding_size": 32}, "embedding_size"),
        ({"architectures": ["BertForTokenClassification"]}, "another head"),
        ({"architectures": ["DebertaV2Model"]}, "an encoder of another kind"),
        ({"architectures": ["BertForSequenceClassification"], "id2label": {"1": "a"}}, "id2label"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], word: str, tmp_path: Path) -> None:
    write(tmp_path, BertModel, BertConfig(**SIZES))
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ModelError, match=word):
        read_spec(tmp_path)
