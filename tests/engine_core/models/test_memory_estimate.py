"""What a model will take of a GPU: exact where a model can be made, near where an H200 was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from benchmarks.shapes import GLM_FLASH, MIXTRAL, QWEN_MOE
from penstock.engine_core.embedded import demo_folder
from penstock.engine_core.images.processor_spec import FixedSize, LongestEdge, ProcessorSpec, Size, SmartResize
from penstock.engine_core.kv.block_layout import BlockLayout
from penstock.engine_core.models import registry
from penstock.engine_core.models.layer_spec import ExpertSpec
from penstock.engine_core.models.memory_estimate import (
    CacheShape,
    StepShape,
    block_bytes,
    encoder_rows,
    expanded_bytes,
    gpu_blocks,
    idle_weights,
    image_sizes,
    mlp_numbers,
    step_bytes,
    taken_bytes,
    vision_bytes,
    weights,
)
from penstock.engine_core.models.spec import ModelSpec, read_spec
from penstock.kernels.attention_tiling import PARTIAL_BYTES
from penstock.kernels.latent_expansion import MEMORY, memory_bytes
from penstock.protocol.errors import ConfigError
from tests.engine_core.execution.image_scene import VISION, made, seeing_spec

COMMON = {"rms_norm_eps": 1e-5, "max_position_embeddings": 256, "hidden_act": "silu", "torch_dtype": "bfloat16"}
SMALL = {**COMMON, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
         "intermediate_size": 96, "vocab_size": 128}  # fmt: skip
LLAMA_8B: dict[str, Any] = {
    **COMMON, "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
    "max_position_embeddings": 131072,
}  # fmt: skip
QWEN_06B: dict[str, Any] = {
    **COMMON, "architectures": ["Qwen3ForCausalLM"], "hidden_size": 1024, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072,
    "vocab_size": 151936, "max_position_embeddings": 40960, "tie_word_embeddings": True,
}  # fmt: skip
H200 = 150_109_880_320


def spec_of(folder: Path, config: dict[str, Any]) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps(config))
    return read_spec(folder)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("architecture", "more"),
    [
        ("LlamaForCausalLM", {}), ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
        ("MistralForCausalLM", {}), ("Qwen2ForCausalLM", {}), ("Qwen3ForCausalLM", {"head_dim": 32}),
    ],
)  # fmt: skip
def test_weights_are_those_of_the_model(architecture: str, more: dict[str, Any], tied: bool, tmp_path: Path) -> None:
    config = {**SMALL, "architectures": [architecture], "tie_word_embeddings": tied, **more}
    spec = spec_of(tmp_path, config)
    model = registry.build(spec, torch.bfloat16, torch.device("cpu"), 64)
    assert weights(spec) * 2 == model.weight_bytes


def with_experts(spec: ModelSpec, experts: ExpertSpec) -> ModelSpec:
    """The same model with other experts."""
    layers = (
        msgspec.structs.replace(layer, mlp=experts) if layer.experts is not None else layer for layer in spec.blocks
    )
    return spec.with_layers(tuple(layers))


MOE = {"num_experts_per_tok": 2, "num_local_experts": 4, "moe_intermediate_size": 40, "head_dim": 32}


@pytest.mark.parametrize(
    ("architecture", "more"),
    [
        ("MixtralForCausalLM", {**MOE, "moe_intermediate_size": None}), ("Qwen3MoeForCausalLM", MOE),
        ("Qwen3MoeForCausalLM", {**MOE, "mlp_only_layers": [1]}),
    ],
)  # fmt: skip
def test_weights_of_experts_and_those_of_them_that_a_token_does_not_go_to(
    architecture: str, more: dict[str, Any], tmp_path: Path
) -> None:
    spec = spec_of(tmp_path, {**SMALL, "architectures": [architecture], **more})
    experts = spec.sparse[0]
    model = registry.build(spec, torch.bfloat16, torch.device("meta"), 64)
    assert weights(spec) * 2 == model.weight_bytes
    busy = msgspec.structs.replace(experts, count=experts.routing.chosen)
    routers = len(spec.sparse) * 64 * (4 - 2)
    assert weights(with_experts(spec, busy)) + routers == weights(spec) - idle_weights(spec)
    step = StepShape(512, 4, 256, 2)
    wider = with_experts(spec, msgspec.structs.replace(experts, width=400))
    assert step_bytes(wider, step) > step_bytes(spec, step)


def test_what_a_shared_expert_takes_depends_on_where_it_is(tmp_path: Path) -> None:
    """One of the experts gives a result of its own; an MLP beside them has gates and ups."""
    spec = spec_of(tmp_path, GLM_FLASH.config)
    layer, experts = spec.blocks[-1], spec.sparse[-1]
    assert experts.joins
    assert mlp_numbers(spec, layer) == (4 + 1) * (1536 + 2048)
    biased = msgspec.structs.replace(layer, mlp=msgspec.structs.replace(experts, bias=True))
    assert mlp_numbers(spec, biased) == 3 * 1536 + 4 * (1536 + 2048)


def test_partial_results_of_batch_invariant_attention_are_counted(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, LLAMA_8B)
    plain, invariant = (StepShape(512, 4, 256, 2, invariant) for invariant in (False, True))
    assert step_bytes(spec, invariant) - step_bytes(spec, plain) == PARTIAL_BYTES


def test_expanded_latents_are_counted(tmp_path: Path) -> None:
    """What a layer takes for them, or one head's of the longest prompt; absorbed queries need none."""
    spec = spec_of(tmp_path, dict(GLM_FLASH.config))
    for length in (4096, 202_752, 1_000_000):
        step = StepShape(8192, 256, length, 2)
        assert expanded_bytes(spec, step) == pytest.approx(memory_bytes(length, 256, 2), rel=1e-4)
    absorbed = StepShape(8192, 256, 4096, 2, invariant=True)
    assert step_bytes(spec, absorbed) - step_bytes(spec, StepShape(8192, 256, 4096, 2)) == PARTIAL_BYTES - MEMORY
    assert expanded_bytes(spec_of(tmp_path, LLAMA_8B), StepShape(8192, 256, 4096, 2)) == 0


def test_published_mixtures(tmp_path: Path) -> None:
    """Qwen3-30B-A3B and Mixtral-8x7B, as their makers count them: 30.5 and 46.7 billion, 3.3 and 12.9 for a token."""
    for shape, every, active in ((QWEN_MOE, 30_532_122_624, 3.35e9), (MIXTRAL, 46_702_792_704, 12.88e9)):
        spec = spec_of(tmp_path, dict(shape.config))
        assert weights(spec) == every
        assert weights(spec) - idle_weights(spec) == pytest.approx(active, rel=0.005)


def test_weights_of_the_embedded_model() -> None:
    spec = read_spec(demo_folder())
    assert weights(spec) * 4 == registry.build(spec, torch.float32, torch.device("cpu"), 64).weight_bytes


@pytest.mark.parametrize(
    ("config", "length", "weight_bytes", "used", "peak", "blocks"),
    [
        (LLAMA_8B, 4096, 16_060_522_496, 16_977_297_408, 2_600_263_680, 55_083),
        (QWEN_06B, 40_960, 1_192_099_840, 2_186_084_352, 1_549_219_840, 71_586),
    ],
)
def test_the_estimate_is_near_what_was_measured(
    config: dict[str, Any], length: int, weight_bytes: int, used: int, peak: int, blocks: int, tmp_path: Path
) -> None:
    """As the executor's log gave them on an H200: lines `measured` and `loaded`."""
    spec = spec_of(tmp_path, config)
    step = StepShape(8192, 256, length, 2)
    assert weights(spec) * 2 == weight_bytes
    assert taken_bytes(spec, step) == pytest.approx(used, rel=0.06)
    assert step_bytes(spec, step) == pytest.approx(peak, rel=0.02)
    shape = CacheShape(block_bytes(spec, 16, 2), BlockLayout(16), length, 256, length_given=True)
    found = gpu_blocks(shape, H200, 0.9, taken_bytes(spec, step), step_bytes(spec, step))
    assert found == pytest.approx(blocks, rel=0.005)


def test_larger_steps_take_more(tmp_path: Path) -> None:
    spec, step = spec_of(tmp_path, QWEN_06B), StepShape(8192, 256, 4096, 2)
    least = step_bytes(spec, step)
    for change in ({"tokens": 16384}, {"max_num_seqs": 512}, {"max_model_len": 40960}, {"item_bytes": 4}):
        assert step_bytes(spec, StepShape(**(vars(step) | change))) > least
    assert step_bytes(msgspec.structs.replace(spec, vocab_size=spec.vocab_size * 2), step) > least


def processor(resize: SmartResize | FixedSize | LongestEdge) -> ProcessorSpec:
    return msgspec.structs.replace(VISION.processor, resize=resize)


@pytest.mark.parametrize(
    ("resize", "smallest", "largest"),
    [
        (SmartResize(least=3136, most=12845056, factor=28), Size(56, 56), Size(3584, 3584)),
        (FixedSize(896, 896), Size(896, 896), Size(896, 896)),
        (LongestEdge(1540, 1540, 28), Size(28, 28), Size(1540, 1540)),
    ],
)
def test_sizes_of_images_up_to_the_largest(
    resize: SmartResize | FixedSize | LongestEdge, smallest: Size, largest: Size
) -> None:
    found = image_sizes(msgspec.structs.replace(VISION, processor=processor(resize)))
    assert (found[0], found[-1]) == (smallest, largest)
    assert len(found) == len(set(found))
    assert sorted(found) == [*found]


def test_the_encoder_cache_has_room_for_the_largest_image() -> None:
    wide = msgspec.structs.replace(VISION, processor=processor(SmartResize(least=64, most=1 << 22, factor=8)))
    assert encoder_rows(VISION, 0) == 16384
    assert encoder_rows(wide, 0) == 65536
    assert encoder_rows(wide, 100) == 100
    fixed = msgspec.structs.replace(VISION, processor=processor(FixedSize(64, 64)))
    with pytest.raises(ConfigError, match=r"--mm-encoder-cache-tokens.*smallest image of the model takes 64"):
        encoder_rows(fixed, 63)
    assert encoder_rows(fixed, 64) == 64


def test_an_encoders_memory_is_what_it_takes() -> None:
    encoder = made(seeing_spec()).encoder
    assert encoder is not None
    found = vision_bytes(VISION, 64, 4)
    assert (found.weights, found.cache) == (encoder.tower.weight_bytes, encoder.cache.nbytes)
    assert found.activations > 0
