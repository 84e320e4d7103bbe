"""EAGLE heads that fit their target, and what is said of those that do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.engine_core.models import registry
from penstock.engine_core.models.draft_spec import FIRST, THIRD, head_weights, read_head
from penstock.engine_core.models.eagle import build_head
from penstock.protocol.errors import ModelError
from tests.engine_core.models.eagle_heads import HIDDEN, KNOWN, first_weights, head_config, third_weights, write_head
from tests.engine_core.models.specs import resized, small_spec

VOCAB = 160
TARGET = small_spec(
    family="qwen3", layers=12, hidden=HIDDEN, head_dim=16, intermediate=96, vocab_size=VOCAB, tied=True, qk_norm="head",
    max_position=256, longest=256, dtype="bfloat16",
)  # fmt: skip


def folder_of(place: Path, third: bool = False, **more: Any) -> Path:
    return write_head(place, head_config(VOCAB, third, **more), {})


def test_versions_by_architecture_and_by_draft_vocabulary(tmp_path: Path) -> None:
    for at, (more, version) in enumerate((
        ({}, FIRST),
        ({"architectures": ["EagleLlamaForCausalLM"]}, FIRST),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, THIRD),
        ({"architectures": ["Eagle3LlamaForCausalLM"]}, THIRD),
        ({"draft_vocab_size": 40}, THIRD),  # the name that heads of both versions have
    )):  # fmt: skip
        assert read_head(folder_of(tmp_path / str(at), **more), TARGET, None).version == version


def test_what_names_of_tensors_say(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    assert not read_head(folder, TARGET, first_weights()).fc_bias
    assert read_head(folder, TARGET, first_weights(bias=True)).fc_bias
    assert not read_head(folder, TARGET, first_weights()).layers.attention.qkv_bias
    assert read_head(folder, TARGET, [*first_weights(), "layers.0.self_attn.q_proj.bias"]).layers.attention.qkv_bias


def test_vocabularies_of_the_third_version(tmp_path: Path) -> None:
    names = third_weights(VOCAB)
    small = read_head(folder_of(tmp_path / "small", True), TARGET, names)
    assert small.vocabulary == KNOWN
    whole = folder_of(tmp_path / "whole", True, draft_vocab_size=VOCAB)
    assert read_head(whole, TARGET, names).vocabulary == VOCAB
    assert read_head(whole, TARGET, set(names) - {"lm_head.weight"}).vocabulary == 0  # the target's own


def test_where_the_third_version_listens(tmp_path: Path) -> None:
    assert read_head(folder_of(tmp_path / "0", True), TARGET, None).aux_layers == (2, 6, 9)
    given = {"eagle_aux_hidden_state_layer_ids": [1, 2, 11]}
    assert read_head(folder_of(tmp_path / "1", True, **given), TARGET, None).aux_layers == (1, 2, 11)
    assert read_head(folder_of(tmp_path / "2", True, eagle_config=given), TARGET, None).aux_layers == (1, 2, 11)


@pytest.mark.parametrize(
    ("third", "more", "said"),
    [
        (False, {"architectures": ["Qwen2ForCausalLM"]}, "architectures is ['Qwen2ForCausalLM']; EAGLE heads"),
        (False, {"architectures": "LlamaForCausalLM"}, "EAGLE heads are known as"),
        (False, {"architectures": None}, "EAGLE heads are known as"),
        (False, {"hidden_size": 128}, "hidden_size is 128; the model that the head drafts for has 64"),
        (False, {"vocab_size": 161}, "vocab_size is 161; the model that the head drafts for has 160"),
        (True, {"target_hidden_size": 128}, "target_hidden_size is 128"),
        (True, {"norm_before_residual": True}, "norm_before_residual is True; such heads are not known"),
        (True, {"num_hidden_layers": 2}, "num_hidden_layers is 2; a head of EAGLE-3 has one layer"),
        (True, {"draft_vocab_size": 161}, "draft_vocab_size is 161"),
        (True, {"eagle_aux_hidden_state_layer_ids": [1, 2]}, "three different layers"),
        (True, {"eagle_aux_hidden_state_layer_ids": [1, 2, 12]}, "three of the target's 12 layers"),
        (True, {"eagle_aux_hidden_state_layer_ids": "low"}, "three of the target's 12 layers"),
        (True, {"eagle_aux_hidden_state_layer_ids": [3, 2, 1]}, "ascending"),
        (False, {"quantization_config": {"bits": 4}}, "quantization_config"),
        (False, {"auto_map": {"AutoModel": "x.y"}}, "auto_map"),
    ],
)
def test_what_does_not_fit_is_named(third: bool, more: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        read_head(folder_of(tmp_path, third, **more), TARGET, None)
    assert said in str(caught.value)
    assert "config.json" in str(caught.value)


def test_a_target_too_shallow_for_three_depths_is_told_the_key(tmp_path: Path) -> None:
    shallow = resized(TARGET, layers=6)
    with pytest.raises(ModelError, match=r"eagle_aux_hidden_state_layer_ids.*\(2, 3, 3\)"):
        read_head(folder_of(tmp_path, True), shallow, None)


@pytest.mark.parametrize(
    ("third", "names", "more"),
    [
        (False, first_weights(), {}),
        (False, first_weights(2, bias=True), {"num_hidden_layers": 2}),
        (True, third_weights(VOCAB), {}),
        (True, {name for name in third_weights(VOCAB) if name != "lm_head.weight"}, {"draft_vocab_size": VOCAB}),
    ],
)
def test_a_heads_tensors_are_as_many_as_reckoned(third: bool, names: Any, more: Any, tmp_path: Path) -> None:
    spec = read_head(folder_of(tmp_path, third, **more), TARGET, names)
    target = registry.build(TARGET, torch.float32, torch.device("cpu"), 64)
    floats = [
        found.tensor.numel()
        for found in build_head(spec, target, 64).destinations().values()
        if found.tensor is not None and found.tensor.is_floating_point()
    ]
    assert head_weights(spec) == sum(floats)
