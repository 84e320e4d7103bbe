"""Operations as torch counts those of transformers' encoders, and memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.vision_shapes import tower_flops
from penstock.engine_core.images.processor_spec import Size
from penstock.engine_core.models.spec import read_spec
from penstock.engine_core.models.vision_cost import tower_step_bytes, tower_weight_bytes, tower_weights
from tests.engine_core.models.vision.test_qwen import CASES, PROCESSOR, expected
from tests.engine_core.models.vision.vision_folders import random_image, write
from tests.engine_core.models.vision_kinds.test_qwen import (
    QWEN_3_VL_30B,
    QWEN_25_VL_7B,
    QWEN_25_VL_PROCESSOR,
    QWEN_35_9B,
    read,
)


@torch.inference_mode()
@pytest.mark.parametrize("case", ["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_operations(case: str, tmp_path: Path) -> None:
    """A window at the edge is smaller."""
    model = write(tmp_path, CASES[case], PROCESSOR)
    model.set_attn_implementation("eager")
    spec, size = read_spec(tmp_path).vision, Size(40, 56)
    assert spec is not None
    with FlopCounterMode(display=False) as counted:
        expected(model, random_image(*size))
    assert tower_flops(spec, size) == counted.get_total_flops()


def test_published_sizes(tmp_path: Path) -> None:
    """Of 8192 pixels a row: the numbers that the makers name, and memory that grows with the image."""
    found = read(tmp_path, QWEN_25_VL_7B, QWEN_25_VL_PROCESSOR).vision
    assert found is not None
    assert tower_weights(found) == 676_550_144
    assert tower_weight_bytes(found, 2) == 2 * 676_550_144
    large, other = (read(tmp_path, config).vision for config in (QWEN_3_VL_30B, QWEN_35_9B))
    assert large is not None
    assert other is not None
    assert tower_weights(large) - tower_weights(other) > 3 * 4608**2  # of DeepStack
    one, four = (tower_step_bytes(large, patches, 2) for patches in (4096, 16384))
    assert 3.9 * one < four < 4.1 * one
    assert 100 << 20 < one < 300 << 20
