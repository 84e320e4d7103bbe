"""Names in adapters' files: routed experts, one by one and all at once, and what is wrong with them by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.engine_core.models.adapted_modules import canonical
from penstock.engine_core.models.adapter_folder import read_adapter_folder
from penstock.protocol.errors import ModelError
from tests.engine_core.models.specs import small_experts, small_spec
from tests.engine_core.models.test_adapter_folder import PREFIX, mixture, tensors, written

ROUTED = f"{PREFIX}0.mlp.experts"
STACKS = ("gate_up_proj", "down_proj")
UP, DOWN_7 = f"{ROUTED}.base_layer", f"{ROUTED}.7.down_proj"


def stacked(prefix: str = ROUTED) -> dict[str, torch.Tensor]:
    """Of the mixture's four experts of rank 4."""
    return {
        f"{prefix}.base_layer.lora_A.weight": torch.ones(16, 32),
        f"{prefix}.base_layer.lora_B.weight": torch.ones(32, 16),
        f"{prefix}.lora_A.weight": torch.ones(16, 16),
        f"{prefix}.lora_B.weight": torch.ones(32, 16),
    }  # fmt: skip


def single(*experts: int) -> dict[str, torch.Tensor]:
    return {
        f"{ROUTED}.{expert}.{name}.lora_{half}.weight": torch.ones(*shape)
        for expert in experts
        for name, outputs, inputs in (("gate_proj", 16, 32), ("up_proj", 16, 32), ("down_proj", 32, 16))
        for half, shape in (("A", (4, inputs)), ("B", (outputs, 4)))
    }


def expert_folder(folder: Path, held: dict[str, Any], **config: Any) -> Path:
    return written(folder, dict.fromkeys(tensors()) | held, **{"target_modules": None, **config})


@pytest.mark.parametrize("wrapper", ["", "language_model."])
def test_experts_in_one_tensor(wrapper: str, tmp_path: Path) -> None:
    """The inner of both has gates and ups; one alone is the one that is asked for. Patterns name the parameters."""
    prefix = ROUTED.replace("model.model.model.", f"model.model.{wrapper}model.")
    targets = [f"experts.{name}" for name in STACKS]
    folder = expert_folder(tmp_path, stacked(prefix), target_parameters=targets, alpha_pattern={".*gate_up_proj": 16})
    found = read_adapter_folder(folder, mixture(), 8, experts=True).matrices
    assert [(matrix.name, matrix.stored, matrix.scale, matrix.experts) for matrix in found] == [
        ("model.layers.0.mlp.experts.gate_up_proj", f"{prefix}.base_layer", 4.0, 4),
        ("model.layers.0.mlp.experts.down_proj", prefix, 2.0, 4),
    ]
    for name, inputs in zip(STACKS, (32, 16), strict=True):
        alone = {f"{ROUTED}.lora_A.weight": torch.ones(16, inputs), f"{ROUTED}.lora_B.weight": torch.ones(32, 16)}
        expert_folder(tmp_path, alone, target_parameters=[name])
        (matrix,) = read_adapter_folder(tmp_path, mixture(), 8, experts=True).matrices
        assert matrix.name == f"model.layers.0.mlp.experts.{name}"


def test_experts_one_by_one(tmp_path: Path) -> None:
    folder = expert_folder(tmp_path, single(*range(4)), target_modules=["gate_proj", "up_proj", "down_proj"])
    with pytest.raises(ModelError, match=r"no tensor adapts layers.0.mlp.shared_expert.gate_proj"):
        read_adapter_folder(folder, mixture(), 8, experts=True)
    targets = [f"experts.{expert}.{name}" for expert in range(4) for name in ("gate_proj", "up_proj", "down_proj")]
    expert_folder(tmp_path, single(*range(4)), target_modules=targets)
    found = read_adapter_folder(folder, mixture(), 8, experts=True).matrices
    assert {matrix.name for matrix in found} == {f"model.layers.0.mlp.{target}" for target in targets}
    assert {matrix.experts for matrix in found} == {0}


BOTH = {"target_parameters": list(STACKS)}
EXPERT_DEFECTS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "shape of A": (BOTH, {f"{UP}.lora_A.weight": torch.ones(12, 32)}, r"\[12, 32\]; .* ask for \[16, 32\]"),
    "shape of B": (BOTH, {f"{ROUTED}.lora_B.weight": torch.ones(32, 4)}, r"\[32, 4\]; .* ask for \[32, 16\]"),
    "no A": (BOTH, {f"{UP}.lora_A.weight": None}, "experts.base_layer.lora_A.weight is missing"),
    "rank of a pattern": ({**BOTH, "rank_pattern": {"down_proj": 9}}, {}, "experts.down_proj has rank 9, and --max"),
    "a parameter without tensors": (
        BOTH, {f"{UP}.lora_A.weight": None, f"{UP}.lora_B.weight": None},
        "layers.0.mlp.experts.gate_up_proj as a target, and no tensor adapts it",
    ),
    "a router": ({"target_parameters": ["mlp.gate.weight"]}, {}, "mlp.gate.weight names no parameter of the model's"),
    "no such expert": ({"target_modules": "x"}, {f"{DOWN_7}.lora_A.weight": torch.ones(4, 16)}, "the model has not"),
    "both ways": ({"target_modules": "x"}, single(1), "experts are adapted one by one and all at once"),
}  # fmt: skip


@pytest.mark.parametrize("case", EXPERT_DEFECTS)
def test_defects_of_experts(case: str, tmp_path: Path) -> None:
    config, held, expected = EXPERT_DEFECTS[case]
    with pytest.raises(ModelError, match=expected):
        read_adapter_folder(expert_folder(tmp_path, stacked() | held, **config), mixture(), 8, experts=True)


def test_an_expert_that_is_left_out(tmp_path: Path) -> None:
    targets = [f"experts.{expert}.up_proj" for expert in range(4)]
    folder = expert_folder(tmp_path, single(0, 1, 3), target_modules=targets)
    with pytest.raises(ModelError, match=r"experts.2.up_proj as a target, and no tensor adapts layers.0.mlp.experts.2"):
        read_adapter_folder(folder, mixture(), 8, experts=True)


def test_experts_are_asked_for_and_stored_as_peft_takes_them(tmp_path: Path) -> None:
    """Whose inputs come first it takes for the other way round, but where transformers says so."""
    folder = expert_folder(tmp_path, stacked(), **BOTH)
    with pytest.raises(
        ModelError, match=r"target_parameters is .*; adapters of routed experts are served with --lora-"
    ):
        read_adapter_folder(folder, mixture(), 8)
    turned = small_spec(layers=1, experts=small_experts(4, 2, 16, stacked=True, transposed=True))
    with pytest.raises(
        ModelError, match=r"target_parameters is .*; the model's experts are stored the other way round"
    ):
        read_adapter_folder(folder, turned, 8, experts=True)


@pytest.mark.parametrize("prefix", ["", "model.", "language_model.model.", "model.language_model."])
def test_what_names_begin_with_is_the_class_it_was_loaded_by(prefix: str) -> None:
    assert canonical(f"{prefix}layers.0.mlp.up_proj.weight") == "layers.0.mlp.up_proj"
