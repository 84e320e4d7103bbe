"""Which type the cache has, what follows for its bytes and pages, and the GPUs that cannot write it."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config

from penstock.engine_core.distributed.group import ALONE, Group
from penstock.engine_core.execution.forward import kv_pages
from penstock.engine_core.loading import load
from penstock.engine_core.models.draft_spec import DraftSpec, HeadSpec
from penstock.engine_core.models.kv_cache import check_kv_cache, kv_label, with_draft_cache, with_kv_cache
from penstock.engine_core.models.memory_estimate import block_bytes, drafting_bytes
from penstock.engine_core.models.registry import build
from penstock.engine_core.models.sharding import rank_spec
from penstock.engine_core.models.spec import ModelSpec, read_spec
from penstock.protocol.errors import ConfigError, ModelError
from tests.engine_core.execution.harness import tiny_spec
from tests.engine_core.models.parity import SIZES, write_checkpoint


def in_fp8(spec: ModelSpec) -> list[bool]:
    return [layer.attention.kv_fp8 for layer in spec.blocks]


def test_every_layer_has_the_type_that_is_asked_for() -> None:
    spec = tiny_spec()
    assert with_kv_cache(spec, "auto") == spec
    found = with_kv_cache(spec, "fp8")
    assert in_fp8(found) == [True] * spec.layers
    assert (kv_label(found), kv_label(spec)) == ("fp8_e4m3", "")
    assert with_kv_cache(found, "auto") == found
    assert with_kv_cache(found, "bfloat16") == spec


def test_pages_and_blocks_are_of_a_byte_a_number() -> None:
    spec = with_kv_cache(tiny_spec(), "fp8")
    assert block_bytes(spec, 16, 4) * 4 == block_bytes(tiny_spec(), 16, 4)
    states = 16 * spec.hidden * 2
    assert drafting_bytes(spec, 16, 2, states=True) == block_bytes(spec, 16, 2) + states
    pages = kv_pages(rank_spec(spec, 1), 3, 16, torch.float32, torch.device("cpu"))
    assert {side.dtype for pair in pages for side in pair} == {torch.float8_e4m3fn}
    assert sum(side.nbytes for pair in pages for side in pair) == 4 * block_bytes(spec, 16, 4)
    assert not any(side.view(torch.uint8).any() for pair in pages for side in pair)


def test_drafts_have_the_same_type() -> None:
    spec = tiny_spec()
    assert with_draft_cache(None, "fp8") is None
    model = with_draft_cache(DraftSpec(layers=spec), "fp8")
    head = with_draft_cache(DraftSpec(layers=spec, head=HeadSpec(version=1, layers=spec)), "fp8")
    assert model is not None
    assert model.head is None
    assert all(in_fp8(model.layers))
    assert head is not None
    assert head.head is not None
    assert all(in_fp8(head.head.layers))
    assert msgspec.structs.asdict(head)["layers"] == head.head.layers


def test_a_gpu_without_8_bit_floats_is_refused() -> None:
    spec = with_kv_cache(tiny_spec(), "fp8")
    why = r"--kv-cache-dtype.*fp8.*need compute capability 8\.9 or newer, which A100 has not; give bfloat16"
    with pytest.raises(ConfigError, match=why):
        check_kv_cache(spec, "fp8", "A100", writes=False)
    check_kv_cache(tiny_spec(), "auto", "A100", writes=False)
    check_kv_cache(spec, "fp8", "another", writes=True)


def checkpoint(folder: Path, scales: dict[str, torch.Tensor], strategy: str = "tensor") -> Path:
    """A tiny model with two layers and two key-value heads, whose folder asks for a cache in e4m3."""
    write_checkpoint(folder, Qwen3Config(**{**SIZES, "head_dim": 16}))
    config = json.loads((folder / "config.json").read_text())
    scheme = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": scheme,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    file = folder / "model.safetensors"
    save_file({**load_file(file), **{name: scale.clone() for name, scale in scales.items()}}, file)
    return folder


def scales_of(folder: Path, group: Group = ALONE, asked: str = "auto") -> list[list[list[float]] | None]:
    """Of each layer's keys and values."""
    spec = with_kv_cache(read_spec(folder), asked)
    model = build(spec, torch.float32, torch.device("cpu"), 64, group=group)
    load(model, folder)
    found = [block.attention.options.kv_scales for block in model.blocks]
    return [None if scales is None else scales.tolist() for scales in found]


def named(layer: int, key: torch.Tensor, value: torch.Tensor, beside: str = "") -> dict[str, torch.Tensor]:
    """beside: of the projections, in modelopt's checkpoints."""
    place = f"model.layers.{layer}.self_attn."
    own = ("k_proj.", "v_proj.") if beside else ("", "")
    return {f"{place}{own[0]}k_scale": key, f"{place}{own[1]}v_scale": value}


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("beside", ["", "modelopt"])
def test_the_checkpoints_scales_of_layers_are_those_of_all_heads(
    shape: tuple[int, ...], beside: str, tmp_path: Path
) -> None:
    own = {}
    for layer in range(SIZES["num_hidden_layers"]):
        own.update(named(layer, torch.full(shape, 0.5 + layer), torch.full(shape, 0.25), beside))
    folder = checkpoint(tmp_path, own)
    heads = SIZES["num_key_value_heads"]
    expected = [[[0.5 + layer] * heads, [0.25] * heads] for layer in range(SIZES["num_hidden_layers"])]
    assert scales_of(folder) == expected
    assert scales_of(folder, asked="bfloat16") == [None] * len(expected)


def test_the_checkpoints_scales_of_heads_are_split_like_the_heads(tmp_path: Path) -> None:
    heads = SIZES["num_key_value_heads"]
    keys, values = torch.arange(1.0, heads + 1), torch.arange(1.0, heads + 1) / 8
    own = {}
    for layer in range(SIZES["num_hidden_layers"]):
        own.update(named(layer, keys.view(-1, 1, 1), values.view(-1, 1, 1).bfloat16()))
    folder = checkpoint(tmp_path, own, "attn_head")
    assert scales_of(folder)[-1] == [keys.tolist(), values.tolist()]
    half = heads // 2
    for rank in range(2):
        assert scales_of(folder, Group(rank, 2))[0] == [
            keys[rank * half : (rank + 1) * half].tolist(), values[rank * half : (rank + 1) * half].tolist()
        ]  # fmt: skip


def test_scales_that_are_not_there_are_one_and_counted(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, named(0, torch.tensor(0.5), torch.tensor(0.25)))
    found = scales_of(folder)
    assert found[0] == [[0.5] * SIZES["num_key_value_heads"], [0.25] * SIZES["num_key_value_heads"]]
    assert found[1] == [[1.0] * SIZES["num_key_value_heads"]] * 2
    model = build(read_spec(folder), torch.float32, torch.device("cpu"), 64)
    load(model, folder)
    assert model.missing_kv_scales == 2 * (SIZES["num_hidden_layers"] - 1)


@pytest.mark.parametrize("wrong", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_is_none_is_refused_by_its_tensor(wrong: float, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, named(1, torch.tensor(0.5), torch.tensor(wrong)))
    with pytest.raises(ModelError, match=r"model\.layers\.1\.self_attn\.v_scale: scales .* must be positive"):
        scales_of(folder)


def test_scales_of_another_shape_are_refused(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, named(0, torch.ones(3), torch.ones(3)))
    with pytest.raises(ModelError, match=r"k_scale has shape \[3\]"):
        scales_of(folder)
