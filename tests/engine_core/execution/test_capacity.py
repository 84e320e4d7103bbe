"""Blocks from bytes, and the refusal of a cache that is too small."""

from __future__ import annotations

import dataclasses

import pytest

from penstock.engine_core.kv.block_layout import BlockLayout
from penstock.engine_core.models.memory_estimate import (
    CPU_CEILING,
    CacheShape,
    block_bytes,
    check_blocks,
    cpu_blocks,
    given_blocks,
    gpu_blocks,
)
from penstock.protocol.errors import ConfigError
from tests.engine_core.execution.harness import tiny_spec

SHAPE = CacheShape(block_bytes=1000, layout=BlockLayout(16), max_model_len=100, max_num_seqs=8, length_given=False)


def test_bytes_of_a_block() -> None:
    spec = tiny_spec()
    assert block_bytes(spec, 16, 2) == 2 * spec.layers * 16 * spec.attention.kv_heads * spec.attention.head_dim * 2


def test_a_request_takes_whole_blocks() -> None:
    assert SHAPE.request_blocks == 7
    assert SHAPE.useful_blocks == 56


def test_a_cpu_gives_an_eighth_at_most_the_ceiling_and_what_is_useful() -> None:
    assert cpu_blocks(SHAPE, 8 * 20_000) == 19  # one block's bytes are scratch
    assert cpu_blocks(SHAPE, 1 << 40) == SHAPE.useful_blocks
    large = dataclasses.replace(SHAPE, block_bytes=1 << 20, max_num_seqs=1 << 12)
    assert cpu_blocks(large, 1 << 40) == (CPU_CEILING >> 20) - 1


def test_a_gpu_gives_what_weights_and_the_worst_step_leave() -> None:
    assert gpu_blocks(SHAPE, total=1_000_000, utilization=0.9, used=300_000, step_peak=100_000) == 499
    assert gpu_blocks(SHAPE, total=1_000_000, utilization=0.3, used=300_000, step_peak=100_000) < 0


def test_given_bytes_include_the_scratch_block() -> None:
    assert given_blocks(SHAPE, 8_999) == 7


def test_one_full_request_must_fit() -> None:
    assert check_blocks(SHAPE, 7, "--kv-cache-memory", 0) == 7
    with pytest.raises(ConfigError) as caught:
        check_blocks(SHAPE, 6, "--kv-cache-memory", 7000)
    assert (caught.value.option, caught.value.value) == ("--max-model-len", None)  # which nobody gave
    for number in ("96 tokens", "6 blocks of 16", "100 tokens", "7 blocks", "8000 bytes", "at most 96"):
        assert number in str(caught.value)


@pytest.mark.parametrize("blocks", [0, -5])
def test_no_room_at_all_names_the_option_that_decides(blocks: int) -> None:
    with pytest.raises(ConfigError) as caught:
        check_blocks(SHAPE, blocks, "--gpu-memory-utilization", 0.1)
    assert caught.value.option == "--gpu-memory-utilization"
    assert "0 tokens" in str(caught.value)
