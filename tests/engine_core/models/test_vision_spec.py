"""How many rows of embeddings an image becomes."""

from __future__ import annotations

import pytest

from penstock.engine_core.images.processor_spec import ProcessorSpec, Size
from penstock.engine_core.models.vision_spec import VisionSpec

HALVES = ProcessorSpec(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))


def spec(**fields: object) -> VisionSpec:
    common = {"kind": "qwen3", "token_id": 5, "processor": HALVES, "patch": 16, "layers": 2, "hidden": 8, "heads": 2}
    return VisionSpec(**{**common, "width": 16, "outputs": 12, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(("fields", "rows"), [({"merge": 2}, 6), ({}, 24), ({"pooled": 4}, 4)])
def test_a_row_for_each_cell_or_a_fixed_number(fields: dict[str, int], rows: int) -> None:
    assert spec(**fields).rows(Size(64, 96)) == rows
    assert spec(**fields).patches(Size(64, 96)) == 24


def test_rows_hold_what_each_level_adds() -> None:
    assert spec(levels=(0, 1)).row_width == 36
