"""Folders with quantized weights that somebody damaged, mixed up or described wrongly: each is one sentence.

What headers show is refused before a tensor is read; scales and orders that are no numbers of a matrix, before the
matrix is made.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig

from penstock.engine_core.models.spec import read_spec
from penstock.engine_core.models.tensors import check_weights
from penstock.engine_core.models.weight_files import SINGLE
from penstock.protocol.errors import ModelError
from tests.engine_core.models.parity import SIZES, ours
from tests.engine_core.models.quantized_folders import CONFIGS, write_pair

Q = "model.layers.1.self_attn.q_proj"
FIRST = "model.layers.0.mlp.down_proj"  # of the file
WEIGHTS = "config_groups.group_0.weights"
SAME = "are both of the same model?"
MISSING = "missing; is config.json of the same model?"
INFINITE, ZERO = "has scales that are not finite; download it again", "has no scale but zero; download it again"
Change = Callable[[Tensor], Tensor | None]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A model in each of CONFIGS, written when it is first asked for."""
    found: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in found:
            place = tmp_path_factory.mktemp("quantized")
            found[name], _ = write_pair(place, LlamaConfig(**{**SIZES, "intermediate_size": 128}), CONFIGS[name])
        return found[name]

    return folder


def written(folder: Path, out: Path, tensors: Mapping[str, Change] | None = None, **config: Any) -> Path:
    """A copy with other tensors of Q (None: without), and other values of `quantization_config`, by their paths."""
    shutil.copytree(folder, out)
    found = load_file(out / SINGLE)
    for suffix, change in (tensors or {}).items():
        changed = change(found.pop(f"{Q}.{suffix}", torch.zeros(1)))
        if changed is not None:
            found[f"{Q}.{suffix}"] = changed.contiguous()
    save_file(found, out / SINGLE, {"format": "pt"})
    values = json.loads((out / "config.json").read_bytes())
    for path, value in config.items():
        *parents, key = path.split(".")
        section = values["quantization_config"]
        for parent in parents:
            section = section[parent]
        section[key] = value
    (out / "config.json").write_text(json.dumps(values))
    return out


def gone(tensor: Tensor) -> None:
    return None


def twice(tensor: Tensor) -> Tensor:
    return torch.cat([tensor, tensor], 1)


def one(value: float) -> Change:
    """The same with one other number."""
    return lambda tensor: tensor.clone().index_fill_(0, torch.tensor([1]), value)


def shaped(name: str, found: list[int], asked: list[int]) -> str:
    return f"tensor {name} has shape {found}; config.json asks for {asked}; {SAME}"


def foreign(name: str) -> str:
    return f"tensor {name} is not part of the model that config.json describes; {SAME}"


def typed(found: str, read: str) -> str:
    return (
        f"tensor {Q}.weight is of type {found}; Penstock reads {read}, so take a version of the model in one of these"
    )


HEADERS: tuple[tuple[str, str, dict[str, Change], dict[str, Any], str], ...] = (
    ("scales of blocks cut off", "fp8 blocks", {"weight_scale_inv": lambda t: t[:1]}, {},
     shaped(f"{Q}.weight_scale_inv", [1, 2], [2, 2])),
    ("scales of outputs cut off", "int8", {"weight_scale": lambda t: t[:32]}, {},
     shaped(f"{Q}.weight_scale", [32, 1], [64, 1])),
    ("no scale", "fp8 channels", {"weight_scale": gone}, {}, f"tensor {Q}.weight_scale is {MISSING}"),
    ("no scale of AWQ", "awq", {"scales": gone}, {}, f"tensor {Q}.scales is {MISSING}"),
    ("no scale of activations", "fp8 static", {"input_scale": gone}, {}, f"tensor {Q}.input_scale is {MISSING}"),
    ("no zero points", "gptq", {"qzeros": gone}, {}, f"tensor {Q}.qzeros is {MISSING}"),
    ("no order", "w4a16 in order", {"weight_g_idx": gone}, {}, f"tensor {Q}.weight_g_idx is {MISSING}"),
    ("packed twice as wide", "w4a16", {"weight_packed": twice}, {},
     shaped(f"{Q}.weight_packed", [64, 16], [64, 8])),
    ("AWQ packed twice as wide", "awq", {"qweight": twice}, {}, shaped(f"{Q}.qweight", [64, 16], [64, 8])),
    ("other bits", "gptq", {}, {"bits": 8}, shaped(f"{FIRST}.qweight", [16, 64], [32, 64])),
    ("other bits, packed", "w4a16", {}, {f"{WEIGHTS}.num_bits": 8},
     shaped(f"{FIRST}.weight_packed", [64, 16], [64, 32])),
    ("a larger group", "w4a16", {}, {f"{WEIGHTS}.group_size": 64}, shaped(f"{FIRST}.weight_scale", [64, 4], [64, 2])),
    ("a smaller group", "awq", {}, {"group_size": 16}, shaped(f"{FIRST}.qzeros", [4, 8], [8, 8])),
    ("smaller blocks", "fp8 blocks", {}, {"weight_block_size": [16, 16]},
     shaped(f"{FIRST}.weight_scale_inv", [2, 4], [4, 8])),
    ("zero points that the config denies", "w4a16 with zero points", {}, {f"{WEIGHTS}.symmetric": True},
     foreign(f"{FIRST}.weight_zero_point")),
    ("zero points that only the config knows", "w4a16", {}, {f"{WEIGHTS}.symmetric": False},
     f"tensor model.layers.0.self_attn.q_proj.weight_zero_point and 20 more are {MISSING}"),
    ("an order that the config denies", "w4a16 in order", {}, {f"{WEIGHTS}.actorder": None},
     foreign(f"{FIRST}.weight_g_idx")),
    ("one dense matrix that the list does not name", "fp8 channels",
     {"weight_scale": gone, "weight": lambda t: t.bfloat16()}, {}, typed("BF16", "F8_E4M3")),
    ("one matrix of another type", "fp8 channels", {"weight": lambda t: t.view(torch.int8)}, {},
     typed("I8", "F8_E4M3")),
    ("a tensor of another format", "w4a16", {"qzeros": lambda t: t}, {}, foreign(f"{Q}.qzeros")),
)  # fmt: skip


@pytest.mark.parametrize(("name", "tensors", "config", "sentence"), [case[1:] for case in HEADERS],
                         ids=[case[0] for case in HEADERS])  # fmt: skip
def test_headers_that_contradict_the_config(
    name: str, tensors: dict[str, Change], config: dict[str, Any], sentence: str,
    folders: Callable[[str], Path], tmp_path: Path,
) -> None:  # fmt: skip
    folder = written(folders(name), tmp_path / "model", tensors, **config)
    with pytest.raises(ModelError) as caught:
        check_weights(folder, read_spec(folder))
    assert str(caught.value) == f"{folder / SINGLE}: {sentence}"


@pytest.mark.parametrize(("files", "config", "sentence"), [
    ("int8", "fp8 channels",
     f"tensor {FIRST}.weight is of type I8; Penstock reads F8_E4M3, so take a version of the model in one of these"),
    ("gptq", "awq", shaped(f"{FIRST}.qweight", [16, 64], [128, 8])),
    ("awq", "gptq", shaped(f"{FIRST}.qweight", [128, 8], [16, 64])),
    ("awq", "w4a16", foreign(f"{FIRST}.qweight")),
    ("w4a16", "fp8 channels", foreign(f"{FIRST}.weight_packed")),
    ("w4a16", "w8a16", shaped(f"{FIRST}.weight_packed", [64, 16], [64, 32])),
])  # fmt: skip
def test_files_of_another_format(
    files: str, config: str, sentence: str, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(folders(files), tmp_path / "model")
    shutil.copyfile(folders(config) / "config.json", folder / "config.json")
    with pytest.raises(ModelError) as caught:
        check_weights(folder, read_spec(folder))
    assert str(caught.value) == f"{folder / SINGLE}: {sentence}"


NUMBERS: tuple[tuple[str, str, str, Change, str], ...] = (
    ("a scale that is none", "fp8 channels", "weight_scale", one(float("nan")), INFINITE),
    ("an infinite scale", "awq", "scales", one(float("inf")), INFINITE),
    ("a block's scale that is none", "fp8 blocks", "weight_scale_inv", lambda t: t * float("nan"), INFINITE),
    ("an infinite scale of activations", "fp8 static", "input_scale", lambda t: t / 0, INFINITE),
    ("scales that nobody filled", "int8", "weight_scale", torch.zeros_like, ZERO),
    ("scales of groups that nobody filled", "w4a16", "weight_scale", torch.zeros_like, ZERO),
    ("a scale of activations of zero", "fp8 static", "input_scale", torch.zeros_like, ZERO),
    ("an order from 1", "w4a16 in order", "weight_g_idx", lambda t: t + 1,
     "names groups 1 to 2, and the matrix has 2, the first is 0"),
    ("groups of another matrix", "w4a16 in order", "weight_g_idx", lambda t: (torch.arange(64) // 32 + 7).int(),
     "names groups 7 to 8, and the matrix has 2, the first is 0"),
    ("an order from -1", "w4a16 in order", "weight_g_idx", lambda t: t - 1,
     "names groups -1 to 0, and the matrix has 2, the first is 0"),
)  # fmt: skip


@pytest.mark.parametrize(("name", "suffix", "change", "why"), [case[1:] for case in NUMBERS],
                         ids=[case[0] for case in NUMBERS])  # fmt: skip
def test_scales_and_orders_that_make_no_numbers(
    name: str, suffix: str, change: Change, why: str, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = written(folders(name), tmp_path / "model", {suffix: change})
    check_weights(folder, read_spec(folder))  # which reads no numbers
    with pytest.raises(ModelError) as caught:
        ours(folder)
    assert str(caught.value) == f"{folder / SINGLE}: tensor {Q}.{suffix} {why}"


def test_zero_points_that_are_not_the_middle_of_symmetric_weights(
    folders: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = written(folders("gptq"), tmp_path / "model", sym=True)
    with pytest.raises(ModelError) as caught:
        ours(folder)
    why = "its zero points are not those of symmetric weights, which the config says"
    assert str(caught.value) == f"{folder / SINGLE}: {FIRST}: {why}"


@pytest.mark.parametrize(("name", "tensors", "config"), [
    ("fp8 channels", {"weight_scale": one(0.0)}, {}),  # an output of zeros
    ("fp8 channels", {}, {"ignore": ["lm_head", "model.layers.9.mlp", "re:.*vision.*"]}),  # names of other parts
    ("w4a16", {"weight_packed": gone, "weight_scale": gone, "weight": lambda t: torch.ones(64, 64)}, {}),
    ("w4a16", {}, {"ignore": ["lm_head", Q]}),  # the files say that it is quantized
], ids=["an output of zeros", "names of nothing", "a dense matrix", "a quantized one that is named"])  # fmt: skip
def test_what_the_files_decide_is_served(
    name: str, tensors: dict[str, Change], config: dict[str, Any], folders: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = written(folders(name), tmp_path / "model", tensors, **config)
    check_weights(folder, read_spec(folder))
    assert ours(folder).spec.quantization is not None
