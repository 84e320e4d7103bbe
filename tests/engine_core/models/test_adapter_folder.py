"""Adapter folders: what is served, and a refusal that names file, key and value for everything else."""

from __future__ import annotations

import json
import os
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from peft import LoraConfig
from safetensors.torch import save_file

from penstock.engine_core.models.adapter_folder import (
    UNSERVED,
    AdaptedMatrix,
    adaptable,
    adapter_version,
    place_bytes,
    read_adapter_folder,
)
from penstock.engine_core.models.layer_spec import MlpSpec
from penstock.engine_core.models.spec import ModelSpec
from penstock.protocol.errors import ModelError
from tests.engine_core.models.specs import small_experts, small_spec

SPEC = small_spec(layers=2)  # hidden 32, width 64, 4 heads of 8 and 2 for keys
CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], "bias": "none"}
Q, DOWN = "self_attn.q_proj", "mlp.down_proj"
PREFIX = "base_model.model.model.layers."


def tensors(rank: int = 4) -> dict[str, torch.Tensor]:
    found = {}
    for layer in range(2):
        for name, outputs, inputs in ((Q, 32, 32), (DOWN, 32, 64)):
            found[f"{PREFIX}{layer}.{name}.lora_A.weight"] = torch.ones(rank, inputs)
            found[f"{PREFIX}{layer}.{name}.lora_B.weight"] = torch.ones(outputs, rank)
    return found


def written(folder: Path, held: dict[str, Any] | None = None, **config: Any) -> Path:
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | config))
    given = tensors() | (held or {})
    save_file(
        {name: tensor for name, tensor in given.items() if tensor is not None}, folder / "adapter_model.safetensors"
    )
    return folder


def test_what_is_read(tmp_path: Path) -> None:
    found = read_adapter_folder(written(tmp_path), SPEC, 8)
    assert found.weights == tmp_path / "adapter_model.safetensors"
    names = [f"model.layers.{layer}.{name}" for layer in range(2) for name in (Q, DOWN)]
    assert found.matrices == tuple(AdaptedMatrix(name, f"base_model.model.{name}", 4, 2.0) for name in names)


@pytest.mark.parametrize(
    ("config", "scales"),
    [
        ({"use_rslora": True}, [4.0] * 4),
        ({"lora_alpha": 2.0, "fan_in_fan_out": True, "init_lora_weights": "gaussian", "use_dora": None}, [0.5] * 4),
        ({"alpha_pattern": {r"layers\.1\.self_attn\.q_proj": 1, "q_proj": 4, "proj": 400}}, [1.0, 2.0, 0.25, 2.0]),
    ],
)
def test_scales(config: dict[str, Any], scales: list[float], tmp_path: Path) -> None:
    """Of patterns the first that fits whole parts of a name counts."""
    found = read_adapter_folder(written(tmp_path, **config), SPEC, 8)
    assert [matrix.scale for matrix in found.matrices] == scales


@pytest.mark.parametrize("prefix", ["", "language_model.", "model.language_model."])
def test_classes_of_one_model_have_other_prefixes(prefix: str, tmp_path: Path) -> None:
    held = dict.fromkeys(tensors())
    others = {name.replace("model.model.model.", f"model.model.{prefix}"): tensor for name, tensor in tensors().items()}
    assert len(read_adapter_folder(written(tmp_path, held | others), SPEC, 8).matrices) == 4


HEAD = "base_model.model.lm_head"
HEADS = f"{HEAD}.lora_A.weight", f"{HEAD}.lora_B.weight"
A, B = f"{PREFIX}0.{Q}.lora_A.weight", f"{PREFIX}0.{Q}.lora_B.weight"
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "other method": ({"peft_type": "IA3"}, {}, "peft_type is 'IA3'; adapters of type LORA"),
    "DoRA": ({"use_dora": True}, {}, "use_dora is True; DoRA"),
    "bias": ({"bias": "lora_only"}, {}, "bias is 'lora_only'"),
    "bias of B": ({"lora_bias": True}, {}, "lora_bias is True"),
    "whole modules": ({"modules_to_save": ["lm_head"]}, {}, r"modules_to_save is \['lm_head'\]"),
    "tokens": ({"trainable_token_indices": [1]}, {}, "trainable_token_indices is"),
    "parameters": ({"target_parameters": ["mlp.experts.down_proj"]}, {}, "target_parameters is .*; mlp.experts.down_p"),
    "no parameters": ({"target_parameters": "experts"}, {}, "target_parameters is 'experts'; a list of parameters"),
    "moved base": ({"init_lora_weights": "pissa_niter_16"}, {}, "init_lora_weights is 'pissa_niter_16'; it changed"),
    "rank": ({"r": 9}, {}, r"r is 9; model.layers.0.*_proj has rank 9, and --max-lora-rank is 8"),
    "rank of a pattern": ({"rank_pattern": {"q_proj": 16}}, {}, "rank_pattern is .* has rank 16, and --max-lora-rank"),
    "rank of no number": ({"r": "4"}, {}, "r is '4'; it must be an integer"),
    "pattern of no number": ({"rank_pattern": {"q_proj": 4.5}}, {}, "rank_pattern is .* an object of modules"),
    "pattern of zero": ({"rank_pattern": {"q_proj": 0}}, {}, "rank_pattern is .* 0 of q_proj cannot be"),
    "pattern of no expression": ({"alpha_pattern": {"(": 4}}, {}, "alpha_pattern is .* not a regular expression"),
    "pattern of no object": ({"alpha_pattern": [4]}, {}, "alpha_pattern is .* an object of modules"),
    "unknown target": ({"target_modules": ["q_proj", "c_attn"]}, {}, "target_modules is .*; c_attn names no matrix"),
    "no targets": ({"target_modules": 5}, {}, "target_modules is 5; a list"),
    "target without tensors": ({"target_modules": ["q_proj", "down_proj", "v_proj"]}, {}, "v_proj as a target, and no"),
    "no expression": ({"target_modules": "(q_proj"}, {}, "it is not a regular expression"),
    "tensors without target": ({"target_modules": ["q_proj"]}, {}, rf"{DOWN}.lora_A.weight adapts what is no target"),
    "tensors of other layers": ({"layers_to_transform": 1}, {}, "layers.0.* adapts what is no target of .*layers_to_"),
    "a matrix twice": (
        {}, {name.replace("model.layers", "model.language_model.layers"): torch.ones(shape)
             for name, shape in ((A, (4, 32)), (B, (32, 4)))},
        rf"tensor {A.replace('model.layers', 'model.language_model.layers')} adapts the same matrix as {A}|"
        rf"tensor {A} adapts the same matrix as {A.replace('model.layers', 'model.language_model.layers')}",
    ),
    "layers": ({"layers_to_transform": "all"}, {}, "layers_to_transform is 'all'"),
    "no A": ({}, {A: None}, rf"tensor {A} is missing"),
    "no B": ({}, {B: None}, rf"tensor {B} is missing"),
    "neither": ({}, {A: None, B: None}, "q_proj as a target, and no tensor adapts layers.0.self_attn.q_proj"),
    "shape of A": ({}, {A: torch.ones(4, 33)}, rf"{A} has shape \[4, 33\]; .* ask for \[4, 32\]"),
    "shape of B": ({}, {B: torch.ones(64, 4)}, rf"{B} has shape \[64, 4\]; .* ask for \[32, 4\]"),
    "rank of a tensor": ({}, {A: torch.ones(2, 32)}, rf"{A} has shape \[2, 32\]"),
    "type": ({}, {A: torch.ones(4, 32, dtype=torch.int8)}, rf"tensor {A} is of type I8"),
    "embedding": ({}, {f"{PREFIX[:-7]}embed_tokens.lora_embedding_A": torch.ones(4, 9)}, "adapts an embedding"),
    "saved embedding": ({}, {f"{PREFIX[:-7]}embed_tokens.weight": torch.ones(12, 32)}, r"\[12, 32\]; .* \[9, 32\]"),
    "saved head": ({}, {f"{HEAD}.base_layer.weight": torch.ones(12, 32)}, r"has shape \[12, 32\]; .* another size"),
    "whole head": ({}, {f"{HEAD}.weight": torch.ones(9, 32)}, "lm_head.weight is not an A or a B of LoRA"),
    "shape of a head": ({}, dict(zip(HEADS, (torch.ones(4, 32), torch.ones(12, 4)), strict=True)), r"\[12, 4\]"),
    "DoRA's tensor": ({}, {f"{PREFIX}0.{Q}.lora_magnitude_vector": torch.ones(32)}, "is of DoRA"),
    "whole tensor": ({}, {f"{PREFIX}0.{Q}.weight": torch.ones(32, 32)}, "is not an A or a B of LoRA"),
    "unknown layer": ({}, {f"{PREFIX}2.{Q}.lora_A.weight": torch.ones(4, 32)}, "which is no matrix of the model's"),
    "vision": ({}, {"base_model.model.visual.blocks.0.attn.qkv.lora_A.weight": torch.ones(4, 9)}, "which is no matrix"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str, tmp_path: Path) -> None:
    """Each names the file first."""
    config, held, expected = REFUSED[case]
    tensors_first = "target without tensors", "tensors without target", "tensors of other layers"
    file = "adapter_config.json" if config and case not in tensors_first else "adapter_model.safetensors"
    with pytest.raises(ModelError, match=f"^{re.escape(str(tmp_path / file))}: .*{expected}"):
        read_adapter_folder(written(tmp_path, held, **config), SPEC, 8)


def test_every_variant_of_lora_that_peft_knows_is_refused() -> None:
    """But VeLoRA, which changes the training alone."""
    variants = {field.name for field in fields(LoraConfig) if field.metadata.get("is_lora_variant")}
    assert len(variants) > 5
    assert variants - UNSERVED.keys() == {"velora_config"}


def test_an_adapted_head_comes_with_the_embeddings_of_the_base(tmp_path: Path) -> None:
    """Which peft saves beside it: they are passed over. A model of vectors alone has no head."""
    held = dict(zip(HEADS, (torch.ones(4, 32), torch.ones(9, 4)), strict=True))
    held |= {f"{name}.weight": torch.ones(9, 32) for name in (f"{HEAD}.base_layer", f"{PREFIX[:-7]}embed_tokens")}
    folder = written(tmp_path, held, target_modules=["q_proj", "down_proj", "lm_head"])
    assert read_adapter_folder(folder, SPEC, 8).matrices[-1] == AdaptedMatrix("lm_head", HEAD, 4, 2.0)
    with pytest.raises(ModelError, match=r"lm_head.lora_A.weight adapts lm_head, which is no matrix"):
        read_adapter_folder(folder, structs.replace(SPEC, headless=True), 8)


def test_files_that_are_not_there_or_cut_off(tmp_path: Path) -> None:
    path = written(tmp_path) / "adapter_model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(ModelError, match=r"adapter_model.safetensors: truncated"):
        read_adapter_folder(tmp_path, SPEC, 8)
    path.rename(tmp_path / "adapter_model.bin")
    with pytest.raises(ModelError, match=r"adapter_model.bin: it is pickled"):
        read_adapter_folder(tmp_path, SPEC, 8)
    (tmp_path / "adapter_model.bin").unlink()
    with pytest.raises(ModelError, match=r"adapter_model.safetensors: no such file"):
        read_adapter_folder(tmp_path, SPEC, 8)
    save_file({}, path)
    with pytest.raises(ModelError, match="no tensor of an adapter is in it"):
        read_adapter_folder(tmp_path, SPEC, 8)
    (tmp_path / "adapter_config.json").unlink()
    with pytest.raises(ModelError, match=r"adapter_config.json: no such file"):
        read_adapter_folder(tmp_path, SPEC, 8)


def test_a_version_is_of_what_the_folder_holds(tmp_path: Path) -> None:
    path = written(tmp_path) / "adapter_config.json"
    before, content = adapter_version(tmp_path), path.read_text()
    path.write_text(content + " ")
    assert adapter_version(tmp_path) != before
    path.write_text(content)
    os.utime(tmp_path / "adapter_model.safetensors", ns=(0, 1))
    assert adapter_version(tmp_path) == before, "wherever and whenever it was copied"
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    assert adapter_version(tmp_path) != before
    path.unlink()
    with pytest.raises(ModelError, match=r"adapter_config.json: No such file"):
        adapter_version(tmp_path)


def mixture() -> ModelSpec:
    experts = small_experts(4, 2, 16, shared=MlpSpec(width=24), shared_gate=True)
    return small_spec(layers=1, experts=experts)


EXPERTS = {
    "mlp.experts.0.up_proj": "routed experts, which are served with --lora-experts",
    "mlp.experts": "routed experts, which are served with --lora-experts",
    "mlp.gate": "a router, which is not served",
    "mlp.shared_expert_gate": "a router, which is not served",
}


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_are_refused_by_name(name: str, tmp_path: Path) -> None:
    held = dict.fromkeys(tensors()) | {f"{PREFIX}0.{name}.lora_A.weight": torch.ones(4, 32)}
    with pytest.raises(ModelError, match=f"{name}.lora_A.weight adapts {EXPERTS[name]}"):
        read_adapter_folder(written(tmp_path, held), mixture(), 8)


def test_what_may_be_adapted() -> None:
    shapes = {name.removeprefix("model.layers.0."): shape for name, shape in adaptable(mixture()).items()}
    assert shapes == {
        "self_attn.q_proj": (32, 32), "self_attn.k_proj": (16, 32), "self_attn.v_proj": (16, 32),
        "self_attn.o_proj": (32, 32), "mlp.shared_expert.gate_proj": (24, 32), "mlp.shared_expert.up_proj": (24, 32),
        "mlp.shared_expert.down_proj": (32, 24), "lm_head": (9, 32),
    }  # fmt: skip
    assert place_bytes(mixture(), 8, 2) == 16 * 2 * sum(map(sum, shapes.values()))
    assert place_bytes(mixture(), 8, 2) - place_bytes(mixture(), 8, 2, ends=False) == 16 * 2 * (9 + 32)
