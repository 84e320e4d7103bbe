"""EAGLE heads from safetensors: what is read, what is left, and what is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from penstock.engine_core.models.decoder import Decoder
from penstock.protocol.errors import ModelError
from tests.engine_core.models import eagle_heads as heads
from tests.engine_core.models.eagle_heads import load_head
from tests.engine_core.models.parity import SIZES, VOCAB, ours, write_checkpoint


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = tmp_path_factory.mktemp("target")
    write_checkpoint(folder, LlamaConfig(**SIZES | {"num_hidden_layers": 8}))
    return ours(folder)


def test_copies_of_the_targets_embeddings_are_left(target: Decoder, tmp_path: Path) -> None:
    weights = heads.first_weights()
    more = {"embed_tokens.weight": torch.zeros(VOCAB, heads.HIDDEN), "lm_head.weight": torch.zeros(3, 3)}
    head = load_head(heads.write_head(tmp_path, heads.head_config(VOCAB), weights | more), target, 64)
    for name, destination in head.destinations().items():
        if "_proj" not in name or name.endswith(("o_proj.weight", "down_proj.weight")):
            assert destination.tensor is not None
            assert torch.equal(destination.tensor, weights[name]), name


def test_the_tokens_that_a_head_knows(target: Decoder, tmp_path: Path) -> None:
    weights = heads.third_weights(VOCAB)
    head = load_head(heads.write_head(tmp_path, heads.head_config(VOCAB, True), weights), target, 64)
    assert head.tokens is not None
    assert torch.equal(head.tokens, weights["t2d"].nonzero()[:, 0])


@pytest.mark.parametrize(
    ("name", "tensor", "said"),
    [
        ("fc.weight", torch.zeros(64, 64), r"fc.weight has shape \[64, 64\]; config.json asks for \[64, 192\]"),
        ("d2t", torch.zeros(heads.KNOWN), "d2t is of type F32; Penstock reads I64, I32"),
        ("fc.weight", torch.zeros(64, 192, dtype=torch.int64), "fc.weight is of type I64; Penstock reads F64"),
        ("d2t", -torch.arange(heads.KNOWN), "d2t does not map to different tokens"),
        ("d2t", torch.full((heads.KNOWN,), VOCAB), "d2t does not map to different tokens of a vocabulary of 160"),
        ("midlayer.extra.weight", torch.zeros(1), "midlayer.extra.weight is not part of the model"),
        ("norm.weight", None, "norm.weight is missing"),
    ],
)
def test_what_does_not_fit_is_named(
    name: str, tensor: torch.Tensor | None, said: str, target: Decoder, tmp_path: Path
) -> None:
    weights = heads.third_weights(VOCAB)
    if tensor is None:
        del weights[name]
    else:
        weights[name] = tensor
    folder = heads.write_head(tmp_path, heads.head_config(VOCAB, True), weights)
    with pytest.raises(ModelError, match=said):
        load_head(folder, target, 64)


def test_pickled_heads_are_refused(target: Decoder, tmp_path: Path) -> None:
    folder = heads.write_head(tmp_path, heads.head_config(VOCAB), {})
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="Penstock reads safetensors only"):
        load_head(folder, target, 64)


def test_a_file_that_is_none_is_named(target: Decoder, tmp_path: Path) -> None:
    folder = heads.write_head(tmp_path, heads.head_config(VOCAB), {})
    (folder / "model.safetensors").write_bytes(b"\x10")
    with pytest.raises(ModelError, match="truncated or not a safetensors file"):
        load_head(folder, target, 64)
