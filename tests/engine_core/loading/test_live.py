"""Weights of another folder in a live model: it computes what a fresh model computes, or is left as it is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    DeepseekV3Config,
    Gemma3TextConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from penstock.engine_core.distributed.group import Group
from penstock.engine_core.loading import load
from penstock.engine_core.loading.digests import MASK, checksum
from penstock.engine_core.loading.live import LiveWeights
from penstock.engine_core.models.decoder import Decoder
from penstock.engine_core.models.layers import pack
from penstock.engine_core.models.registry import build
from penstock.engine_core.models.spec import read_spec
from penstock.engine_core.models.weight_files import SINGLE
from penstock.protocol.control import WeightTensor
from penstock.protocol.errors import ModelError
from tests.engine_core.models.parity import SIZES, PagedRun, random_prompts, write_checkpoint
from tests.engine_core.models.quantized_folders import CONFIGS, write_pair

SMALL = {**SIZES, "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
CASES: dict[str, PreTrainedConfig] = {
    "plain": LlamaConfig(**SMALL),
    "tied": LlamaConfig(**SMALL, tie_word_embeddings=True, attention_bias=True),
    "norms with an offset, scaled rows": Gemma3TextConfig(**SMALL, head_dim=16, sliding_window=11),
    "experts": Qwen3MoeConfig(**SMALL, **EXPERTS, head_dim=16),
    "latents": DeepseekV3Config(
        **{**SMALL, "num_key_value_heads": 4}, kv_lora_rank=16, q_lora_rank=24, qk_rope_head_dim=8, qk_nope_head_dim=12,
        v_head_dim=20, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, n_group=1, topk_group=1,
        first_k_dense_replace=1, pad_token_id=0,
    ),
    "recurrent": Qwen3NextConfig(
        **SMALL, **EXPERTS, head_dim=16, shared_expert_intermediate_size=24, linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
        layer_types=["linear_attention", "full_attention"],
    ),
}  # fmt: skip
Change = Callable[[dict[str, Tensor]], None]


def altered(folder: Path, out: Path, change: Change | None = None, **config: Any) -> Path:
    """The same model with all tensors turned around, which are then changed, and other values in config.json."""
    shutil.copytree(folder, out)
    tensors = {name: tensor.flip(0) if tensor.dim() else tensor for name, tensor in load_file(out / SINGLE).items()}
    if change is not None:
        change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, out / SINGLE, {"format": "pt"})
    values = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(values | config))
    return out


def loaded(
    folder: Path, quantization: str = "none", dtype: torch.dtype = torch.float32, group: Group | None = None
) -> Decoder:
    spec = read_spec(folder, quantization)
    with torch.inference_mode():
        model = build(spec, dtype, torch.device("cpu"), 64, **({} if group is None else {"group": group}))
        load(model, folder)
        pack(model.destinations())
    return model


def live(model: Decoder, folder: Path, quantization: str = "none", *, dummy: bool = False) -> LiveWeights:
    return LiveWeights(model, None, folder, partial(read_spec, quantization=quantization), dummy=dummy)


@torch.inference_mode()
def logits(model: Decoder) -> Tensor:
    run = PagedRun(model, random_prompts(2, 20), room=64)
    run.prefill((17, 1, 2))
    return torch.cat([part for sequence in run.sequences for part in sequence.logits])


def check_update(first: Path, second: Path, quantization: str = "none") -> None:
    model = loaded(first, quantization)
    before, weights = logits(model), live(model, first, quantization)
    for folder in (second, first, second):
        weights.check(folder)
        assert torch.equal(logits(model), before), "a check changes nothing"
        weights.write(folder)
        found = logits(model)
        assert torch.equal(found, logits(loaded(folder, quantization)))
        assert not torch.equal(found, before)
        before = found


@pytest.mark.parametrize("case", CASES)
def test_a_live_model_computes_what_a_fresh_one_does(case: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "a", CASES[case])
    check_update(tmp_path / "a", altered(tmp_path / "a", tmp_path / "b"))


@pytest.mark.parametrize("name", ["fp8 blocks", "int8", "w4a16 with zero points", "w4a16 in order"])
def test_quantized_weights_on_a_cpu(name: str, tmp_path: Path) -> None:
    config = LlamaConfig(**{**SIZES, "num_hidden_layers": 2, "intermediate_size": 128})
    quantized, _ = write_pair(tmp_path, config, CONFIGS[name])

    def keep(tensors: dict[str, Tensor]) -> None:
        kept = load_file(quantized / SINGLE)
        tensors |= {name: tensor for name, tensor in kept.items() if name.endswith("g_idx")}

    check_update(quantized, altered(quantized, tmp_path / "b", keep))


@pytest.mark.parametrize("config", [
    LlamaConfig(**SMALL), Qwen3MoeConfig(**SMALL, **EXPERTS, head_dim=16), CASES["latents"], CASES["recurrent"],
])  # fmt: skip
def test_weights_that_are_rounded_while_they_are_read(config: PreTrainedConfig, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "a", config)
    check_update(tmp_path / "a", altered(tmp_path / "a", tmp_path / "b"), "fp8")


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_reads_its_share(rank: int, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "a", LlamaConfig(**{**SMALL, "vocab_size": 161}))
    second = altered(tmp_path / "a", tmp_path / "b")
    model, fresh = (loaded(folder, group=Group(rank, 2)) for folder in (tmp_path / "a", second))
    live(model, tmp_path / "a").write(second)
    x = torch.randn(3, 32)
    for own, other in zip(model.blocks, fresh.blocks, strict=True):
        assert own.attention is not None
        assert other.attention is not None
        assert torch.equal(own.attention.qkv.forward(x), other.attention.qkv.forward(x))
    assert model.head is not None
    assert fresh.head is not None
    assert torch.equal(model.head.forward(x), fresh.head.forward(x)), "padding too"


def lacking(tensors: dict[str, Tensor]) -> None:
    del tensors["model.norm.weight"]


def cut(tensors: dict[str, Tensor]) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1]


REFUSALS: Mapping[str, tuple[Change | None, dict[str, Any], str]] = {
    "another size": (None, {"intermediate_size": 96}, "it describes another model than the one that is served"),
    "another model": (None, {"rope_theta": 5.0, "rope_parameters": None}, "it describes another model than"),
    "a tensor less": (lacking, {}, "tensor model.norm.weight is missing"),
    "another shape": (cut, {}, r"tensor model.norm.weight has shape \[31\]; config.json asks for \[32\]"),
    "a tensor more": (lambda tensors: tensors.update(x=torch.zeros(1)), {}, "tensor x is not part of the model"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_another_folder_is_refused_before_anything_is_written(case: str, tmp_path: Path) -> None:
    change, config, message = REFUSALS[case]
    write_checkpoint(tmp_path / "a", LlamaConfig(**SMALL))
    model = loaded(tmp_path / "a")
    before = logits(model)
    with pytest.raises(ModelError, match=message):
        live(model, tmp_path / "a").check(altered(tmp_path / "a", tmp_path / "b", change, **config))
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize("damage", [b"", b"{}", b"version https://git-lfs.github.com/spec/v1\n"])
def test_files_that_are_none_are_refused(damage: bytes, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "a", LlamaConfig(**SMALL))
    second = altered(tmp_path / "a", tmp_path / "b")
    (second / SINGLE).write_bytes(damage)
    with pytest.raises(ModelError, match=SINGLE):
        live(loaded(tmp_path / "a"), tmp_path / "a").check(second)


def test_random_weights_are_not_updated(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "a", LlamaConfig(**SMALL))
    with pytest.raises(ModelError, match="--load-format dummy"):
        live(loaded(tmp_path / "a"), tmp_path / "a", dummy=True).check(tmp_path / "a")


def test_quantized_weights_that_graphs_read_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are converted into new memory."""
    write_checkpoint(tmp_path / "a", LlamaConfig(**SMALL))
    model = loaded(tmp_path / "a", "fp8")
    weights = live(model, tmp_path / "a", "fp8")

    class Elsewhere:
        device = torch.device("cuda", 0)
        group = model.placement.group

    monkeypatch.setattr(model, "placement", Elsewhere())
    with pytest.raises(ModelError, match=r"tensor model.layers.0.self_attn.q_proj.weight is quantized"):
        weights.check(tmp_path / "a")


def listed(tensors: Mapping[str, Tensor], **fields: Any) -> tuple[WeightTensor, ...]:
    """As a trainer tells of them."""
    return tuple(
        WeightTensor(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), **fields)
        for name, tensor in tensors.items()
    )


@pytest.mark.parametrize("case", CASES)
def test_tensors_that_come_in_parts(case: str, tmp_path: Path) -> None:
    """In any order, and with what a checkpoint has beside what is read."""
    write_checkpoint(tmp_path / "a", CASES[case])
    second = altered(tmp_path / "a", tmp_path / "b")
    model = loaded(tmp_path / "a")
    weights, tensors = live(model, tmp_path / "a"), load_file(second / SINGLE)
    if case == "tied":
        tensors["lm_head.weight"] = torch.zeros(3)
    for name in sorted(tensors, reverse=True):
        part = {name: tensors[name]}
        weights.check_tensors(listed(part), shared=False)
        weights.receive(listed(part), lambda *_, found=tensors[name]: found)
    assert torch.equal(logits(model), logits(loaded(second)))
    for digest in weights.digests():
        held = tensors[digest.name].to(getattr(torch, digest.dtype)) + digest.offset
        assert digest.value == checksum(held), digest.name


def test_sums_of_slices_add_up_and_places_count(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "a", LlamaConfig(**{**SMALL, "vocab_size": 161}))
    found = [live(loaded(tmp_path / "a", group=Group(rank, 2)), tmp_path / "a").digests() for rank in range(2)]
    tensors = load_file(tmp_path / "a" / SINGLE)
    slices = {(each.name, each.place): each.value for digests in found for each in digests}
    for name, tensor in tensors.items():
        assert sum(value for (one, _), value in slices.items() if one == name) & MASK == checksum(tensor.float()), name
    swapped = tensors["model.norm.weight"] + torch.arange(32.0)
    assert checksum(swapped) != checksum(swapped.flip(0))


WRONG: Mapping[str, tuple[tuple[WeightTensor, ...], str]] = {
    "unknown": (listed({"model.layers.9.x": torch.zeros(2)}), "tensor model.layers.9.x is not part of the model"),
    "twice": (listed({"model.norm.weight": torch.zeros(32)}) * 2, "tensor model.norm.weight is there twice"),
    "shape": (listed({"model.norm.weight": torch.zeros(31)}), r"has shape \[31\]; the model's has \[32\]"),
    "type": (listed({"model.norm.weight": torch.zeros(32, dtype=torch.int64)}), "is of int64; it may be of"),
    "no type": ((WeightTensor("model.norm.weight", "complex64", (32,)),), r"complex64 \[32\] is none of"),
}


@pytest.mark.parametrize("case", WRONG)
def test_tensors_that_are_refused_by_name(case: str, tmp_path: Path) -> None:
    tensors, message = WRONG[case]
    write_checkpoint(tmp_path / "a", LlamaConfig(**SMALL))
    with pytest.raises(ModelError, match=message):
        live(loaded(tmp_path / "a"), tmp_path / "a").check_tensors(tensors, shared=False)


def test_tensors_of_a_quantized_model_are_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "a", LlamaConfig(**SMALL))
    tensors = listed({"model.layers.0.self_attn.q_proj.weight": torch.zeros(32, 32)})
    with pytest.raises(ModelError, match="is quantized in the model that is served"):
        live(loaded(tmp_path / "a", "fp8"), tmp_path / "a", "fp8").check_tensors(tensors, shared=False)
