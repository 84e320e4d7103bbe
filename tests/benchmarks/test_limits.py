"""The limits, held against hand calculation and against what the reference page says of the same chip."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.limits import CHIPS, Chip, Cost, chip, lengths, limit
from benchmarks.rows import SERVING, TOKENS, WORKLOADS
from benchmarks.shapes import EIGHT, MIXTRAL, QUANTIZED, QWEN_MOE, SHAPES, SMALL, make_folder
from penstock.engine_core.models.spec import read_spec
from penstock.services.bench.workload import Workload, requests

PLAIN = Cost(chip=Chip("plain", 100.0, 1000.0, 2000.0), layer_weights=40, head_weights=10, attention=2, cache_bytes=5)


@pytest.fixture(scope="module")
def costs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Cost]:
    place = tmp_path_factory.mktemp("shapes")
    return {shape.name: Cost.of(read_spec(make_folder(shape, place)), CHIPS["H200"]) for shape in (EIGHT, SMALL)}


def test_a_chip_is_known_by_the_name_its_driver_gives() -> None:
    assert chip("NVIDIA H200") is CHIPS["H200"]
    assert chip("cpu") is None
    assert chip("2 x cpu") is None


def test_lengths_are_those_of_the_requests() -> None:
    load = Workload(requests=23, concurrency=8, input=(5, 40), output=(3, 9), prefix=16)
    assert lengths(load) == [(request.prompt_tokens - 16, request.output_tokens) for request in requests(load)]


def test_several_chips_have_the_rates_of_all() -> None:
    found = chip("4 x NVIDIA H200")
    one = CHIPS["H200"]
    assert found == Chip("4 x H200", 4 * one.bytes_per_second, 4 * one.flops_per_second, 4 * one.fp8_flops_per_second)


def test_a_decode_step_reads_weights_or_multiplies_and_reads_the_cache() -> None:
    assert PLAIN.decode(1, 0) == 2 * 50 / 100
    assert PLAIN.decode(100, 0) == 2 * 50 * 100 / 1000
    assert PLAIN.decode(1, 20) == 1 + 20 * 5 / 100


def test_a_prompt_costs_its_products_and_its_pairs() -> None:
    assert PLAIN.prefill(10) == pytest.approx((2 * (40 * 10 + 10) + 2 * 50) / 1000)
    assert PLAIN.prefill(10, cached=30) == pytest.approx((2 * (40 * 10 + 10) + 2 * (300 + 50)) / 1000)
    assert PLAIN.first_token(1) == 1.0  # the weights must be read


def test_of_a_mixture_a_step_reads_the_experts_that_its_tokens_go_to() -> None:
    mixture = msgspec.structs.replace(PLAIN, expert_weights=100, experts=4, chosen=1)
    assert mixture.token_weights == 140
    assert mixture.decode(1, 0) == 2 * (50 + 100) / 100
    assert mixture.decode(2, 0) == pytest.approx(2 * (50 + 175) / 100)  # the second goes to another in three of four
    assert mixture.decode(1000, 0) == 2 * 150 * 1000 / 1000
    assert mixture.read_weights(1000) == pytest.approx(440)
    assert mixture.prefill(10) == pytest.approx((2 * (140 * 10 + 10) + 2 * 50) / 1000)
    assert mixture.first_token(1) == 3.0


def test_published_mixtures(tmp_path: Path) -> None:
    """A token of Qwen3-30B-A3B reads 3.0 billion weights and is multiplied with them, 256 read nearly all 30."""
    for shape, one, many in ((QWEN_MOE, 3.04e9, 30.2e9), (MIXTRAL, 12.75e9, 46.6e9)):
        cost = Cost.of(read_spec(make_folder(shape, tmp_path)), CHIPS["H200"])
        assert cost.read_weights(1) == pytest.approx(cost.token_weights)
        assert cost.token_weights + cost.head_weights == pytest.approx(one, rel=0.01)
        assert cost.read_weights(256) + cost.head_weights == pytest.approx(many, rel=0.01)


def test_latents_are_all_that_is_cached(tmp_path: Path) -> None:
    """Of GLM-4.7-Flash 1,152 bytes a token and layer. Heads have 256 numbers for keys and for values."""
    found = Cost.of(read_spec(make_folder(SHAPES["glm-4.7-flash"], tmp_path)), CHIPS["H200"])
    assert found.cache_bytes == 47 * 1152
    assert found.attention == 47 * 20 * 2 * (256 + 256)
    attention = 2048 * (768 + 576) + 768 * 20 * 256 + 512 * 20 * 448 + 20 * 256 * 2048
    mlps = 3 * 2048 * 10240 + 46 * 3 * 2048 * 1536 + 46 * 2048 * 64
    assert found.layer_weights == 47 * attention + mlps
    assert found.experts * found.expert_weights == 46 * 64 * 3 * 2048 * 1536


def test_recurrent_layers_have_products_and_states_of_their_own(tmp_path: Path) -> None:
    """One layer of each kind, in the sizes of Qwen3.5-9B."""
    (tmp_path / "config.json").write_text(json.dumps({
        "model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"], "vocab_size": 1000, "hidden_size": 4096,
        "intermediate_size": 12288, "num_hidden_layers": 2, "num_attention_heads": 16, "num_key_value_heads": 4,
        "layer_types": ["linear_attention", "full_attention"],
    }))  # fmt: skip
    found = Cost.of(read_spec(tmp_path), CHIPS["H200"])
    attention = 4096 * 256 * (2 * 16 + 2 * 4 + 16)
    linear = 4096 * (2 * 2048 + 4096 + 4096 + 2 * 32 + 4096)
    assert found.layer_weights == attention + linear + 2 * 3 * 4096 * 12288
    assert found.cache_bytes == 2 * 2 * 4 * 256
    assert found.state_bytes == 4 * 32 * 128 * 128
    bare = msgspec.structs.replace(found, state_bytes=0)
    assert found.decode(8, 0) - bare.decode(8, 0) == pytest.approx(8 * found.state_bytes / 4.6e12)


def test_quantized_weights_are_read_with_their_scales_and_multiplied_at_their_rate(tmp_path: Path) -> None:
    found = {}
    for shape in (EIGHT, *QUANTIZED[:3]):
        found[shape.name] = Cost.of(read_spec(make_folder(shape, tmp_path)), CHIPS["H200"])
    sizes = {name: cost.weight_bytes for name, cost in found.items()}
    assert sizes["8b"] == 2
    assert sizes["8b-fp8"] == pytest.approx(1 + 4 / 14336)  # a scale of four bytes for each output
    assert sizes["8b-fp8-blocks"] == pytest.approx(1 + 4 / 128**2)
    assert sizes["8b-w4a16"] == pytest.approx(0.5 + 2 / 128)
    assert [cost.fast for cost in found.values()] == [False, True, True, False]
    layers, head = 2 * found["8b"].layer_weights, 2 * found["8b"].head_weights
    assert found["8b-fp8"].decode(1, 0) == pytest.approx((layers * sizes["8b-fp8"] / 2 + head) / 4.6e12)
    assert found["8b-fp8"].multiply(8192, 0) == pytest.approx(layers * 8192 / 1293e12)
    assert found["8b-w4a16"].multiply(8192, 0) == found["8b"].multiply(8192, 0)


def test_a_load_by_hand() -> None:
    """Two slots, three requests: (4, 3) and (2, 1) begin; the second has its only token, so (1, 2) follows at once."""
    prompts = PLAIN.prefill(4) + PLAIN.prefill(2) + PLAIN.prefill(1)
    steps = PLAIN.decode(2, 5 + 2) + PLAIN.decode(1, 6)
    assert PLAIN.load([(4, 3), (2, 1), (1, 2)], 2) == pytest.approx(prompts + steps)


def test_a_shared_prefix_is_read_once_a_step() -> None:
    alone = PLAIN.load([(4, 3), (4, 3)], 2)
    shared = PLAIN.load([(4, 3), (4, 3)], 2, cached=8)
    assert shared - alone == pytest.approx(2 * (PLAIN.prefill(4, 8) - PLAIN.prefill(4)) + 2 * 8 * 5 / 100)


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), min_size=1, max_size=20), st.integers(1, 8))
def test_a_load_takes_at_least_its_longest_answer_and_at_most_one_after_the_other(
    sizes: list[tuple[int, int]], concurrency: int
) -> None:
    seconds = PLAIN.load(sizes, concurrency)
    alone = sum(PLAIN.load([size], 1) for size in sizes)
    assert seconds <= alone + 1e-9
    assert seconds >= max(PLAIN.load([size], 1) for size in sizes) - 1e-9
    assert PLAIN.load(sizes, 1) == pytest.approx(alone)


def test_the_limits_of_the_reference(costs: dict[str, Cost]) -> None:
    eight, small = costs["8b"], costs["0.6b"]
    copies = 4.3e12 / CHIPS["H200"].bytes_per_second  # the reference's rate of bytes
    assert eight.decode(1, 0) == pytest.approx(3.5e-3 * copies, rel=0.01)
    assert small.decode(1, 0) == pytest.approx(0.28e-3 * copies, rel=0.02)
    assert 2 * eight.layer_weights == pytest.approx(14.0e9, rel=0.01)  # operations per prompt token
    assert small.head_weights == 1024 * 151936
    assert eight.attention * 8192**2 / 2 == pytest.approx(4 * 8192**2 / 2 * 4096 * 32)


def test_every_row_has_a_limit_and_vllm_is_below_it(costs: dict[str, Cost]) -> None:
    for row in SERVING:
        for name, cost in costs.items():
            workload = msgspec.structs.replace(WORKLOADS[row.load], vocab=SHAPES[name].vocab)
            found = limit(row.figure, workload, cost)
            assert found is not None
            for value in row.targets[name].vllm:
                assert value < found if row.figure == TOKENS else value > found


def test_a_figure_without_a_formula_has_no_limit() -> None:
    assert limit("ttft_ms", Workload(concurrency=8), PLAIN) is None
    assert limit("start_seconds", Workload(), PLAIN) is None
