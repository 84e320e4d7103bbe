"""What drafts beside a model, told from its folder before there is a device."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.engine_core.embedded import demo_folder, draft_folder, eagle_folder
from penstock.engine_core.models.draft_spec import FIRST, DraftSpec, head_weights, read_draft
from penstock.engine_core.models.memory_estimate import weights
from penstock.engine_core.models.spec import read_spec
from penstock.engine_core.models.weight_files import stored_names
from penstock.protocol.errors import ModelError
from tests.engine_core.models.eagle_heads import head_config, write_head

TARGET = read_spec(demo_folder())


def test_a_draft_model_is_a_model() -> None:
    found = read_draft("draft_model", draft_folder(), TARGET, None)
    assert found == DraftSpec(layers=read_spec(draft_folder()))
    assert found.weight_bytes(1) == weights(read_spec(draft_folder()))
    assert found.aux_layers == ()


def test_a_head_is_its_targets() -> None:
    found = read_draft("eagle", eagle_folder(), TARGET, stored_names(eagle_folder()))
    assert found.head is not None
    assert found.head.version == FIRST
    assert found.layers == found.head.layers
    assert found.weight_bytes(1) == head_weights(found.head)
    assert found.aux_layers == ()


def test_a_head_that_listens(tmp_path: Path) -> None:
    config = head_config(TARGET.vocab_size, True, hidden_size=TARGET.hidden, eagle_aux_hidden_state_layer_ids=[1, 3, 5])
    assert read_draft("eagle", write_head(tmp_path, config, {}), TARGET, None).aux_layers == (1, 3, 5)


def test_what_is_none(tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        read_draft("eagle", draft_folder(), TARGET, None)
    with pytest.raises(ModelError):
        read_draft("draft_model", tmp_path, TARGET, None)
