"""Names of tensors from headers, and what they say about a model without an output embedding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.engine_core import loading
from penstock.engine_core.embedded import demo_folder
from penstock.engine_core.models import registry
from penstock.engine_core.models.spec import read_spec
from penstock.engine_core.models.weight_files import INDEX, SINGLE, read_names
from penstock.protocol.errors import ModelError
from penstock.protocol.messages import Pooling
from tests.matrix.engine import Cell, Engine
from tests.matrix.test_pooling import Asked


def copied(path: Path, *, prefix: bool = False, head: bool = False, **changes: Any) -> Path:
    """The embedded model in another form: without the prefix of its names, or with an output embedding of its own."""
    config = json.loads((demo_folder() / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))
    tensors = {}
    for file in demo_folder().glob("*.safetensors"):
        tensors |= load_file(file)
    found = {name if prefix else name.removeprefix("model."): tensor.contiguous() for name, tensor in tensors.items()}
    found.pop("lm_head.weight", None)
    if head:
        found["lm_head.weight"] = found["model.embed_tokens.weight" if prefix else "embed_tokens.weight"].clone()
    save_file(found, path / SINGLE)
    return path


def test_names_of_the_one_file_and_of_an_index(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1), "b": torch.zeros(2)}, tmp_path / SINGLE)
    assert {"a", "b"} <= read_names(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"c": "x.safetensors"}}))
    assert read_names(tmp_path) == {"c"}


@pytest.mark.parametrize(
    "content",
    [b"", b"abc", b"\xff" * 9, (5).to_bytes(8, "little") + b"{]   ", (9999).to_bytes(8, "little") + b'{"a":' * 2000],
    ids=["nothing", "no size", "too large", "no JSON", "too deep"],
)
def test_a_broken_file_names_nothing(tmp_path: Path, content: bytes) -> None:
    assert read_names(tmp_path) == frozenset()
    (tmp_path / SINGLE).write_bytes(content)
    assert read_names(tmp_path) == frozenset()


@pytest.mark.parametrize(
    ("form", "headless"),
    [
        ({"tie_word_embeddings": True}, False),
        ({"tie_word_embeddings": False}, True),
        ({"tie_word_embeddings": False, "head": True}, False),
        ({"tie_word_embeddings": False, "prefix": True}, True),
        ({"tie_word_embeddings": False, "architectures": ["Qwen3Model"], "head": True}, True),
        ({"tie_word_embeddings": True, "architectures": ["Qwen3Model"]}, False),
    ],
)
def test_who_has_an_output_embedding(tmp_path: Path, form: dict[str, Any], headless: bool) -> None:
    assert read_spec(copied(tmp_path, **form)).headless == headless


def test_a_folder_without_weights_has_one_unless_its_architecture_says_otherwise(tmp_path: Path) -> None:
    config = json.loads((demo_folder() / "config.json").read_text()) | {"tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert not read_spec(tmp_path).headless
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3Model"]}))
    assert read_spec(tmp_path).headless


@pytest.mark.parametrize("form", [{"tie_word_embeddings": True}, {"tie_word_embeddings": False}])
def test_an_embedding_models_checkpoint_gives_the_same_vectors(tmp_path: Path, form: dict[str, Any]) -> None:
    cells = [Asked(Engine(Cell(), folder)) for folder in (demo_folder(), copied(tmp_path, **form))]
    for cell in cells:
        cell.submit(1, [32, 2962, 13], Pooling(kind="mean"))
        cell.run()
    assert np.array_equal(cells[0].vectors[1], cells[1].vectors[1])


def test_a_tensor_that_is_missing_is_named_as_the_file_would_name_it(tmp_path: Path) -> None:
    path = copied(tmp_path)
    tensors = load_file(path / SINGLE)
    del tensors["norm.weight"]
    save_file(tensors, path / SINGLE)
    model = registry.build(read_spec(path), torch.float32, torch.device("cpu"), 64)
    with pytest.raises(ModelError, match=r"tensor norm\.weight is missing"):
        loading.load(model, path)


def test_a_model_that_sees_later_tokens_is_an_encoder(tmp_path: Path) -> None:
    spec = read_spec(copied(tmp_path, is_causal=False))
    assert (spec.encoder, spec.headless, spec.tied) == (True, True, False)
