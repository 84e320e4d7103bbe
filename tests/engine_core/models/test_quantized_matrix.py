"""Models with quantized weights say what the same models say with the numbers that these weights stand for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GlmConfig, LlamaConfig, PreTrainedConfig, Qwen2MoeConfig, Qwen3MoeConfig

from penstock.engine_core.distributed.group import Group
from penstock.engine_core.loading import load
from penstock.engine_core.models import quantized_matrix
from penstock.engine_core.models.decoder import Decoder
from penstock.engine_core.models.layers import Linear, pack
from penstock.engine_core.models.memory_estimate import weight_bytes
from penstock.engine_core.models.mlp import SparseMlp
from penstock.engine_core.models.parts import Placement, whole
from penstock.engine_core.models.quantization.rounding import round_matrix
from penstock.engine_core.models.quantization.weight_format import WeightFormat
from penstock.engine_core.models.registry import build
from penstock.engine_core.models.sharding import check_ranks
from penstock.engine_core.models.spec import read_spec
from penstock.engine_core.models.tensors import check_weights
from penstock.engine_core.models.weight_files import SINGLE
from penstock.kernels.chip import CHIPS
from penstock.protocol.errors import ConfigError, ModelError
from tests.engine_core.models.parity import SIZES, PagedRun, ours, random_prompts, write_checkpoint
from tests.engine_core.models.quantized_folders import CONFIGS, WEIGHTS_ONLY, write_pair
from tests.engine_core.models.specs import tensor_shapes

LLAMA: dict[str, Any] = {**SIZES, "intermediate_size": 128}
EXPERTS: dict[str, Any] = {
    **LLAMA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True,
}  # fmt: skip


def spoken(model: Path | Decoder) -> tuple[list[list[int]], torch.Tensor]:
    """Tokens and logits of a model, or of a folder's."""
    with torch.inference_mode():
        run = PagedRun(ours(model) if isinstance(model, Path) else model, random_prompts(2))
        run.prefill()
        logits = torch.stack([torch.cat(sequence.logits) for sequence in run.sequences])
        return run.greedy(16), logits


@pytest.mark.sweep
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("kind", [LlamaConfig(**LLAMA), Qwen3MoeConfig(**EXPERTS)], ids=["dense", "experts"])
def test_layouts_say_what_their_numbers_say(tmp_path: Path, name: str, kind: PreTrainedConfig) -> None:
    if name == "w4a16 in order" and isinstance(kind, Qwen3MoeConfig):
        with pytest.raises(ModelError, match=r"mlp.experts.0 in the order of activations; Penstock serves such"):
            write_pair(tmp_path, kind, CONFIGS[name])
        return
    quantized, dense = write_pair(tmp_path, kind, CONFIGS[name])
    tokens, logits = spoken(quantized)
    expected_tokens, expected = spoken(dense)
    if name in WEIGHTS_ONLY:
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
        assert tokens == expected_tokens
    else:  # rows are rounded, too
        assert (logits - expected).norm() < 0.5 * expected.norm()
        assert not torch.equal(logits, expected)


@pytest.mark.parametrize("name", CONFIGS)
def test_names_and_memory_are_those_of_the_spec(tmp_path: Path, name: str) -> None:
    quantized, _ = write_pair(tmp_path, LlamaConfig(**LLAMA), CONFIGS[name])
    model = ours(quantized)
    check_weights(quantized, model.spec)
    assert tensor_shapes(model.spec) == {name: place.shape for name, place in model.destinations().items()}
    held = model.weight_bytes
    assert held == pytest.approx(weight_bytes(model.spec, 4), rel=0.03)
    pack(model.destinations())
    assert model.weight_bytes == weight_bytes(model.spec, 4, dequantized=True), "a CPU holds the dequantized weights"
    assert model.weight_bytes > held


def exact(place: Path, config: PreTrainedConfig, quantization: dict[str, Any]) -> Decoder:
    """Weights alone are quantized: the same to the last digits as their numbers. The model, loaded and packed."""
    quantized, dense = write_pair(place, config, quantization)
    (tokens, logits), (expected_tokens, expected) = spoken(quantized), spoken(dense)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    assert tokens == expected_tokens
    return ours(quantized)


def changed(quantization: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {**quantization, **more}


def test_parts_of_different_formats_stand_side_by_side(tmp_path: Path) -> None:
    ignored = ["lm_head", "re:.*k_proj", "re:.*layers.1.mlp.up_proj"]
    model = exact(tmp_path, LlamaConfig(**LLAMA, attention_bias=True), changed(CONFIGS["w4a16"], ignore=ignored))
    assert [len(block.attention.qkv.operands) for block in model.blocks] == [3, 3, 3]
    assert [len(block.mlp.gate_up.operands) for block in model.blocks] == [1, 2, 1]  # type: ignore[union-attr]


def test_blocks_that_end_within_a_part_undo_the_fusion(tmp_path: Path) -> None:
    """Keys are half a block high, so that values cannot follow them in one layout."""
    config = changed(CONFIGS["fp8 blocks"], weight_block_size=[64, 64])
    quantized, dense = write_pair(tmp_path, LlamaConfig(**LLAMA), config)
    model = ours(quantized)
    assert [len(block.attention.qkv.operands) for block in model.blocks] == [2, 2, 2]
    whole = [operand.dequantized(torch.float32) for operand in model.blocks[0].attention.qkv.operands]  # type: ignore[union-attr]
    found = load_file(dense / SINGLE)
    parts = [found[f"model.layers.0.self_attn.{name}.weight"] for name in ("q_proj", "k_proj", "v_proj")]
    assert torch.equal(torch.cat(whole), torch.cat(parts))


@pytest.mark.parametrize("name", ["w4a16", "awq", "gptq"])
def test_fused_tensors_and_turned_heads(tmp_path: Path, name: str) -> None:
    """Of GLM 4, whose gates and ups are one tensor, and whose heads are turned in pairs of neighbours."""
    config = GlmConfig(**LLAMA, head_dim=16, partial_rotary_factor=0.5, pad_token_id=0)
    exact(tmp_path, config, CONFIGS[name])


def test_turned_heads_in_blocks(tmp_path: Path) -> None:
    """Turned numbers stay in their blocks, or scales become those of single rows."""
    for height in (16, 8):
        config = changed(CONFIGS["fp8 blocks"], weight_block_size=[height, 32])
        place = tmp_path / str(height)
        place.mkdir()
        quantized, dense = write_pair(place, GlmConfig(**LLAMA, head_dim=16, pad_token_id=0), config)
        (_, logits), (_, expected) = spoken(quantized), spoken(dense)
        assert (logits - expected).norm() < 0.5 * expected.norm()


def test_an_output_embedding_may_be_quantized(tmp_path: Path) -> None:
    config = changed(CONFIGS["w4a16"], ignore=[])
    config["config_groups"] = {"group_0": {**config["config_groups"]["group_0"], "targets": ["Linear", "re:.*lm_head"]}}
    model = exact(tmp_path, LlamaConfig(**LLAMA), config)
    assert model.head is not None
    assert model.head.matrices
    edited(tmp_path / "quantized", lambda found: found.update({"lm_head.weight": torch.ones(96, 64)}))
    with pytest.raises(ModelError, match=r"tensor lm_head\.weight is not part of the model"):
        check_weights(tmp_path / "quantized", read_spec(tmp_path / "quantized"))
    with pytest.raises(ModelError, match="says that lm_head is quantized, and it is the input embedding"):
        write_pair(tmp_path / "tied", LlamaConfig(**LLAMA, tie_word_embeddings=True), config)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ["fp8", "int8", "int4"])
def test_weights_are_rounded_while_they_load(tmp_path: Path, name: str, tied: bool) -> None:
    """Into the numbers that rounding gives, of every matrix of the layers and of no other."""
    write_checkpoint(tmp_path, Qwen3MoeConfig(**EXPERTS, tie_word_embeddings=tied))
    spec, device = read_spec(tmp_path, name), torch.device("cpu")
    model = build(spec, torch.float32, device, 64)
    check_weights(tmp_path, spec)
    load(model, tmp_path)
    found = load_file(tmp_path / SINGLE)
    block = model.blocks[1]
    weight = found["model.layers.1.self_attn.o_proj.weight"]
    form = dict(spec.blocks[1].attention.formats)["o_proj"]
    expected = round_matrix(form, weight).dequantized(torch.float32)
    assert torch.equal(block.attention.output.operand.dequantized(torch.float32), expected)  # type: ignore[union-attr]
    assert isinstance(block.mlp, SparseMlp)
    assert block.mlp.quantized is not None
    down = block.mlp.quantized.weights[1].dequantized(torch.float32)[3]
    form = dict(block.mlp.spec.formats)["down_proj"]
    weight = found["model.layers.1.mlp.experts.3.down_proj.weight"]
    assert torch.equal(down, round_matrix(form, weight).dequantized(torch.float32))
    assert (model.head is None) == tied
    assert isinstance(block.mlp.router.operand, torch.Tensor)


def test_what_is_quantized_is_not_rounded_again(tmp_path: Path) -> None:
    quantized, _ = write_pair(tmp_path, LlamaConfig(**LLAMA), CONFIGS["fp8 blocks"])
    assert read_spec(quantized, "fp8") == read_spec(quantized)
    with pytest.raises(ConfigError, match=r"--quantization.*'int4'.*quantized already"):
        read_spec(quantized, "int4")


@pytest.mark.parametrize("name", WEIGHTS_ONLY)
def test_ranks_have_shares_that_add_up(tmp_path: Path, name: str) -> None:
    quantized, _ = write_pair(tmp_path, LlamaConfig(**LLAMA), CONFIGS[name])
    spec, device = read_spec(quantized), torch.device("cpu")
    if name == "w4a16 in order":
        with pytest.raises(ConfigError, match=r"o_proj is quantized in the order of activations.*: one of 1$"):
            check_ranks(spec, 2)
        return
    check_ranks(spec, 2)
    single, x = ours(quantized), torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    rows, total = [], torch.zeros(5, 64)
    for rank in range(2):
        model = build(spec, torch.float32, device, 64, group=Group(rank, 2))
        load(model, quantized)
        rows.append(model.blocks[0].attention.heads_of(model.blocks[0].attention.qkv.forward(x)))
        total += model.blocks[0].mlp.forward(x)
    whole = single.blocks[0].attention
    for parts, expected in zip(zip(*rows, strict=True), whole.heads_of(whole.qkv.forward(x)), strict=True):
        torch.testing.assert_close(torch.cat(parts, 1), expected)
    torch.testing.assert_close(total, single.blocks[0].mlp.forward(x), atol=1e-5, rtol=0)


def test_shares_that_cut_groups_are_refused_with_what_is_left(tmp_path: Path) -> None:
    quantized, _ = write_pair(tmp_path, LlamaConfig(**LLAMA), changed(CONFIGS["awq"], group_size=64))
    with pytest.raises(ConfigError) as caught:
        check_ranks(read_spec(quantized), 2)
    assert "o_proj is quantized so that a share of its inputs must be a multiple of 64, not 32: one of 1" in str(caught)


def edited(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    found = load_file(folder / SINGLE)
    change(found)
    save_file(found, folder / SINGLE, {"format": "pt"})


UP = "model.layers.1.mlp.up_proj"


@pytest.mark.parametrize(("name", "change", "complaint"), [
    ("fp8 blocks", lambda found: found.pop(f"{UP}.weight_scale_inv"), f"tensor {UP}.weight_scale_inv is missing"),
    ("fp8 static", lambda found: found.pop(f"{UP}.input_scale"), f"tensor {UP}.input_scale is missing"),
    ("w4a16", lambda found: found.update({f"{UP}.weight_scale": torch.ones(128, 4)}),
     rf"tensor {UP}.weight_scale has shape \[128, 4\]; config.json asks for \[128, 2\]"),
    ("awq", lambda found: found.update({f"{UP}.qweight": torch.ones(64, 16)}),
     f"tensor {UP}.qweight is of type F32; Penstock reads I32"),
    ("gptq", lambda found: found.update({f"{UP}.bits": torch.ones(1)}), f"tensor {UP}.bits is not part of the model"),
])  # fmt: skip
def test_what_contradicts_the_format_is_refused_by_name(
    tmp_path: Path, name: str, change: Callable[[dict[str, Tensor]], None], complaint: str
) -> None:
    quantized, _ = write_pair(tmp_path, LlamaConfig(**LLAMA), CONFIGS[name])
    edited(quantized, change)
    with pytest.raises(ModelError, match=complaint):
        check_weights(quantized, read_spec(quantized))


def test_scales_of_a_cache_may_be_there(tmp_path: Path) -> None:
    """They are not read where keys and values are cached in another type."""
    scheme = {"kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True,
                                  "dynamic": False}}  # fmt: skip
    quantized, _ = write_pair(tmp_path, LlamaConfig(**LLAMA), changed(CONFIGS["fp8 channels"], **scheme))
    edited(quantized, lambda found: found.update({"model.layers.0.self_attn.k_scale": torch.ones(1)}))
    check_weights(quantized, read_spec(quantized))


def test_types_of_quantized_weights_are_refused_elsewhere(tmp_path: Path) -> None:
    quantized, _ = write_pair(tmp_path, LlamaConfig(**LLAMA), CONFIGS["fp8 channels"])
    edited(quantized, lambda found: found.update({"model.norm.weight": torch.ones(64).to(torch.float8_e4m3fn)}))
    with pytest.raises(ModelError, match=r"tensor model.norm.weight is of type F8_E4M3; Penstock reads F64, F32"):
        check_weights(quantized, read_spec(quantized))


def test_a_chip_without_products_of_floats_of_8_bits_has_weights_of_them_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    form = WeightFormat(kind="float8", packing="dense", activations="row")
    for name, activations in (("sm_80", "none"), ("sm_89", "row")):
        monkeypatch.setattr(quantized_matrix, "chip_of", lambda device, name=name: CHIPS[name])
        layer = Linear((whole("o_proj", 8),), 16, Placement(torch.float32, torch.device("cpu")), bias=False,
                       formats=(("o_proj", form),))  # fmt: skip
        layer.matrices["o_proj"].round(torch.randn(8, 16))
        assert layer.operand.activations == activations  # type: ignore[union-attr]


@pytest.mark.gpu
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("rows", [1, 7, 200])
@torch.inference_mode()
def test_a_gpu_multiplies_as_a_cpu_does(tmp_path: Path, name: str, rows: int) -> None:
    """Every product of a layer, by what loading made of the same files on both."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    experts = {**EXPERTS, "moe_intermediate_size": 128}
    kinds = (LlamaConfig, LLAMA), (Qwen3MoeConfig, experts), (
        Qwen2MoeConfig, {**experts, "shared_expert_intermediate_size": 128},
    )  # fmt: skip
    for kind, known in kinds[: 1 if name == "w4a16 in order" else 3]:
        place = tmp_path / kind.__name__
        place.mkdir()
        quantized, _ = write_pair(place, kind(**{**known, **sizes}), CONFIGS[name])
        spec, random = read_spec(quantized), torch.Generator().manual_seed(rows)
        blocks = []
        for device in ("cpu", "cuda"):
            model = build(spec, torch.bfloat16, torch.device(device), 64)
            load(model, quantized)
            pack(model.destinations())
            blocks.append(model.blocks[1])
        x = torch.randn(rows, 256, generator=random).bfloat16()
        attended = torch.randn(rows, blocks[0].attention.output.inputs, generator=random).bfloat16()
        for layer, given in (("qkv", x), ("output", attended)):
            mine, others = (getattr(block.attention, layer) for block in blocks)
            check_near(others.forward(given.cuda()).cpu(), mine.forward(given))
        check_near(blocks[1].mlp.forward(x.cuda()).cpu(), blocks[0].mlp.forward(x))


def check_near(found: Tensor, expected: Tensor) -> None:
    """Up to what rounding to bfloat16 makes of sums, and of rows on the way to the second product."""
    error = (found.float() - expected.float()).norm() / expected.float().norm()
    assert error < 0.02
