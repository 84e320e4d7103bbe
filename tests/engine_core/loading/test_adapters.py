"""Adapters that peft wrote, served beside each other and the base model: every option, the tokens that peft gives."""

from __future__ import annotations

import itertools
import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import (
    DeepseekV3Config,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from penstock.engine_core.execution.model_runner import Runner, RunnerOptions
from penstock.engine_core.loading import adapters
from penstock.engine_core.loading.adapters import read_adapter
from penstock.engine_core.models.adapters import AdapterPlaces
from penstock.engine_core.models.decoder import Decoder
from penstock.engine_core.models.layers import pack
from penstock.engine_core.models.registry import build
from penstock.engine_core.models.spec import read_spec
from penstock.protocol.errors import ModelError
from penstock.protocol.steps import StepPlan
from tests.engine_core.execution.harness import Life, block_tables, column, decode, prefill
from tests.engine_core.models.lora_folders import changed, greedy, write_adapter
from tests.engine_core.models.parity import SIZES, ours, theirs, write_checkpoint

COUNT = 8
PROMPTS = ([5, 9, 31, 77, 8, 12], [5, 9, 31], [90, 4, 4, 17, 33, 2, 60], [5, 9, 31, 77, 8, 12], [101])


def served(model: Decoder, places: int = 2, rank: int = 8) -> Runner:
    pack(model.destinations())
    options = RunnerOptions(
        device=torch.device("cpu"), dtype=torch.float32, blocks=64, block_size=8, max_model_len=64, max_num_seqs=8,
        adapters=AdapterPlaces(model, model.spec, places, rank, experts=bool(model.spec.sparse)),
    )  # fmt: skip
    return Runner(model, model.spec, options)


def load(runner: Runner, *folders: Path) -> None:
    """Adapters 100, 101, … go to places 1, 2, …"""
    slots = runner.adapters
    assert slots is not None
    pairs = []
    for at, folder in enumerate(folders):
        slots.loaded[100 + at] = read_adapter(folder, slots.places)
        pairs += [100 + at, 1 + at]
    runner.launch(StepPlan(step=0, epoch=0, adapters=column(*pairs)))


def answers(runner: Runner, adapters: list[int], **options: Any) -> list[list[int]]:
    """What each prompt gets from the adapter in its place, all in one batch."""
    tables = block_tables(len(adapters), 4)
    lives = [
        Life(prompt, slot=slot, blocks=table, adapter=place)
        for slot, (prompt, table, place) in enumerate(zip(PROMPTS, tables, adapters, strict=False))
    ]
    prefill(runner, lives, **options)
    decode(runner, lives, COUNT - 1)
    return [life.output for life in lives]


LLAMA: Callable[[], Any] = lambda: LlamaConfig(**SIZES)  # noqa: E731
EXPERTS = {"moe_intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2}
QWEN_MOE = {**EXPERTS, "shared_expert_intermediate_size": 32}
DEEPSEEK = {
    "moe_intermediate_size": 48, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 2, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 16, "num_key_value_heads": 4,
}  # fmt: skip
GPT_OSS = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
SHARED = r".*(o_proj|shared_experts\.\w+_proj)"
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
CASES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "seven": (LLAMA, {}),
    "all-linear": (LLAMA, {"target_modules": "all-linear", "use_rslora": True}),
    "expression": (LLAMA, {"target_modules": r".*layers\.[12]\.(self_attn\.[qv]_proj|mlp\.down_proj)"}),
    "patterns": (
        LLAMA,
        {
            "rank_pattern": {r"layers\.0\.self_attn\.q_proj": 7, "v_proj": 2},
            "alpha_pattern": {"^model.layers.1.mlp.up_proj": 32},
        },
    ),
    "some layers": (LLAMA, {"layers_to_transform": [0, 2], "layers_pattern": "layers"}),
    "output embedding": (LLAMA, {"target_modules": ["v_proj", "lm_head"]}),
    "output embedding alone": (LLAMA, {"target_modules": ["lm_head"], "use_rslora": True}),
    "tied embeddings": (lambda: LlamaConfig(**SIZES, tie_word_embeddings=True), {"target_modules": ["lm_head"]}),
    "one layer": (LLAMA, {"target_modules": ["q_proj", "o_proj"], "layers_to_transform": 1}),
    "excluded": (LLAMA, {"exclude_modules": ["model.layers.1.mlp.up_proj"]}),
    "biases": (lambda: Qwen2Config(**SIZES), {}),
    "fused": (lambda: Phi3Config(**SIZES, pad_token_id=0), {"target_modules": ["qkv_proj", "gate_up_proj", "o_proj"]}),
    "shared expert": (
        lambda: Qwen2MoeConfig(**SIZES, **QWEN_MOE),
        {"target_modules": r".*(self_attn\.\w+|shared_expert\.\w+)_proj"},
    ),
    "shared experts": (lambda: DeepseekV3Config(**{**SIZES, **DEEPSEEK}), {"target_modules": SHARED}),
    "experts": (lambda: Qwen3MoeConfig(**SIZES, **EXPERTS), {"target_modules": ["q_proj"], "target_parameters": BOTH}),
    "gates and ups of experts": (
        lambda: Qwen3MoeConfig(**SIZES, **EXPERTS),
        {"target_modules": ["q_proj"], "target_parameters": BOTH[:1], "rank_pattern": {".*gate_up_proj": 7}},
    ),
    "downs of experts": (
        lambda: Qwen3MoeConfig(**SIZES, **EXPERTS), {"target_modules": [], "target_parameters": BOTH[1:]}
    ),
    "experts beside a shared one": (
        lambda: Qwen2MoeConfig(**SIZES, **QWEN_MOE),
        {"target_modules": r".*shared_expert\.\w+_proj", "target_parameters": BOTH, "use_rslora": True},
    ),
    "other names of experts": (
        lambda: MixtralConfig(**SIZES, num_local_experts=4), {"target_modules": ["v_proj"], "target_parameters": BOTH}
    ),
    "interleaved experts": (
        lambda: GptOssConfig(**SIZES, **GPT_OSS), {"target_modules": ["o_proj"], "target_parameters": BOTH}
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_pefts(case: str, tmp_path: Path) -> None:
    """Of two adapters, one of them plain, and the base model in one batch; prompts in pieces."""
    config, options = CASES[case]
    base = tmp_path / "base"
    write_checkpoint(base, config())
    models = [theirs(base), write_adapter(base, tmp_path / "1", 1, **options)]
    models.append(write_adapter(base, tmp_path / "2", 2, target_modules=["o_proj"], r=8))
    runner = served(ours(base))
    load(runner, tmp_path / "1", tmp_path / "2")
    order = [1, 0, 2, 0, 1]
    expected = [greedy(models[place], prompt, COUNT) for place, prompt in zip(order, PROMPTS, strict=True)]
    assert answers(runner, order, budget=4) == expected
    assert expected[0] != expected[3]  # the same prompt


SINGLE: dict[str, tuple[Callable[[], Any], str, tuple[str, str, str], int]] = {
    "qwen3_moe": (lambda: Qwen3MoeConfig(**SIZES, **EXPERTS), "mlp", ("gate_proj", "up_proj", "down_proj"), 48),
    "mixtral": (lambda: MixtralConfig(**SIZES, num_local_experts=4), "block_sparse_moe", ("w1", "w3", "w2"), 96),
}


@pytest.mark.parametrize("family", SINGLE)
def test_adapters_of_single_experts_are_those_that_peft_converts(family: str, tmp_path: Path) -> None:
    """As peft wrote them when experts were modules: each has a rank of its own in the file, here the same."""
    config, place, names, width = SINGLE[family]
    base, folder, hidden, rank = tmp_path / "base", tmp_path / "1", SIZES["hidden_size"], 3
    write_checkpoint(base, config())
    torch.manual_seed(1)
    tensors = {}
    for layer, expert, name in itertools.product(range(3), range(4), names):
        outputs, inputs = (hidden, width) if name == names[2] else (width, hidden)
        stem = f"base_model.model.model.layers.{layer}.{place}.experts.{expert}.{name}"
        tensors[f"{stem}.lora_A.weight"] = torch.randn(rank, inputs) / 2 / inputs**0.5
        tensors[f"{stem}.lora_B.weight"] = torch.randn(outputs, rank) / 2 / rank**0.5
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 6,
        "target_modules": list(names),
        "task_type": "CAUSAL_LM",
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = PeftModel.from_pretrained(theirs(base), str(folder)).eval()
    runner = served(ours(base))
    load(runner, folder)
    expected = [greedy(each, PROMPTS[0], COUNT) for each in (theirs(base), model)]
    tables = block_tables(2, 4)
    lives = [Life(PROMPTS[0], slot=slot, blocks=tables[slot], adapter=slot) for slot in range(2)]
    prefill(runner, lives, budget=4)
    decode(runner, lives, COUNT - 1)
    assert [life.output for life in lives] == expected
    assert expected[0] != expected[1]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    write_checkpoint(folder, LLAMA())
    return folder


def test_a_place_takes_another_adapter(base: Path, tmp_path: Path) -> None:
    """Nothing stays of the one before, which adapted more matrices; a slot's next request is the base model's."""
    write_adapter(base, tmp_path / "1", 1)
    second = write_adapter(base, tmp_path / "2", 2, target_modules=["v_proj"], r=2)
    runner = served(ours(base))
    load(runner, tmp_path / "1")
    answers(runner, [1, 1])
    load(runner, tmp_path / "2")
    assert answers(runner, [1, 1]) == [greedy(second, prompt, COUNT) for prompt in PROMPTS[:2]]
    assert answers(runner, [0, 0]) == [greedy(theirs(base), prompt, COUNT) for prompt in PROMPTS[:2]]


def test_a_step_without_adapters_does_what_it_did(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel of theirs, and no column."""
    runner = served(ours(base))
    expected = answers(runner, [0, 0, 0])
    monkeypatch.setattr("penstock.engine_core.models.low_rank.LowRankInputs", None)
    monkeypatch.setattr("penstock.engine_core.models.adapters.adapter_rows", None)
    slots = runner.adapters
    assert slots is not None
    monkeypatch.setattr(slots, "of_tokens", None)
    monkeypatch.setattr(slots, "_upload", None)
    assert answers(runner, [0, 0, 0]) == expected


@pytest.mark.parametrize("own", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_numbers_are_rounded_once(base: Path, tmp_path: Path, stored: torch.dtype, own: torch.dtype) -> None:
    """Whatever types file and model have, B being times the scale; ranks that differ are padded by zeros."""
    write_adapter(base, tmp_path, 1, r=6, lora_alpha=10, rank_pattern={"q_proj": 16})
    file = load_file(tmp_path / "adapter_model.safetensors")
    changed(tmp_path, {name: tensor.to(stored) for name, tensor in file.items()})
    spec = read_spec(base)
    places = AdapterPlaces(build(spec, own, torch.device("cpu"), 64), spec, 1, 20)
    memory = read_adapter(tmp_path, places)
    count = 0
    for name, tensor in file.items():
        matrix, _, half = name.removesuffix(".weight").removeprefix("base_model.model.").rpartition(".lora_")
        rank = 16 if "q_proj" in name else 6
        found = dict(places.destinations(memory, matrix, rank))[half].tensor
        expected = tensor.to(stored).float() * (10 / rank if half == "B" else 1.0)
        assert torch.equal(found, expected.to(own))
        count += found.count_nonzero()
    assert memory.count_nonzero() == count


def test_a_file_that_is_cut_off_while_it_is_read(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused, and ends no process."""
    write_adapter(base, tmp_path, 1)
    runner, path = served(ours(base)), tmp_path / "adapter_model.safetensors"
    assert runner.adapters is not None

    def cut(*given: Any) -> Any:
        os.truncate(path, path.stat().st_size // 2)
        return plain(*given)

    plain = adapters.read_tensors
    monkeypatch.setattr(adapters, "read_tensors", cut)
    with pytest.raises(ModelError, match=r"adapter_model.safetensors: truncated: tensor .* is not there as a whole"):
        read_adapter(tmp_path, runner.adapters.places)


def test_numbers_that_are_not_finite_are_refused(base: Path, tmp_path: Path) -> None:
    write_adapter(base, tmp_path, 1)
    name = "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"
    changed(tmp_path, {name: torch.full((SIZES["intermediate_size"], 4), torch.inf)})
    runner = served(ours(base))
    assert runner.adapters is not None
    with pytest.raises(ModelError, match=r"adapter_model.safetensors: tensor .*up_proj.lora_B.weight has numbers that"):
        read_adapter(tmp_path, runner.adapters.places)
