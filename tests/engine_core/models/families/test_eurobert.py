from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import EuroBertConfig, EuroBertForMaskedLM, EuroBertForSequenceClassification, EuroBertModel

from penstock.engine_core.models.spec import read_spec
from penstock.protocol.errors import ModelError
from tests.engine_core.models import encoder_parity
from tests.engine_core.models.encoder_parity import check_scores, check_states, write

SIZES = {**encoder_parity.SIZES, "pad_token_id": 0}


@pytest.mark.parametrize("options", [{}, {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True}])
def test_states(options: dict[str, Any], tmp_path: Path) -> None:
    assert check_states(tmp_path, EuroBertModel, EuroBertConfig(**SIZES, **options)).spec.encoder


def test_a_head_for_training_is_left_unread(tmp_path: Path) -> None:
    assert check_states(tmp_path, EuroBertForMaskedLM, EuroBertConfig(**SIZES)).spec.headless


@pytest.mark.parametrize("pooling", ["bos", "mean"])
def test_classifiers(pooling: str, tmp_path: Path) -> None:
    check_scores(tmp_path, EuroBertForSequenceClassification, EuroBertConfig(**SIZES, classifier_pooling=pooling))


def test_a_classifier_of_every_token_is_refused(tmp_path: Path) -> None:
    write(tmp_path, EuroBertForSequenceClassification, EuroBertConfig(**SIZES))
    with pytest.raises(ModelError, match="classifier_pooling is 'late'"):
        read_spec(tmp_path)
