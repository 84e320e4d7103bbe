"""Images of any size on padded patches, as graphs want them: the rows of images as they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from penstock.engine_core.execution import encoder_graphs
from penstock.engine_core.execution.encoder_graphs import TowerGraphs
from penstock.engine_core.models.parts import Placement
from penstock.engine_core.models.vision.tower import Tower, tower
from tests.engine_core.models.vision import test_qwen
from tests.engine_core.models.vision.vision_folders import random_image, read_tower, write

SIZES = ((8, 8), (40, 56), (24, 104), (16, 8), (64, 64))
CASES = ("qwen2_5_vl", "qwen3_vl")


def rows_of(graphs: TowerGraphs, pixels: Tensor) -> Tensor:
    """What the encoder takes: nothing behind the rows."""
    for rows in graphs.slices(pixels):
        if rows is not None:
            return rows.clone()
    raise AssertionError("the last piece has the rows")


@pytest.fixture(params=CASES)
def encoder(request: pytest.FixtureRequest, tmp_path: Path) -> Tower:
    """Qwen2.5-VL has windows and an order of cells, Qwen3-VL learned positions and levels."""
    write(tmp_path, test_qwen.CASES[request.param], test_qwen.PROCESSOR)
    return read_tower(tmp_path)


@torch.inference_mode()
def test_padding_changes_no_row(encoder: Tower, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each image behind another one's, whose patches still stand in the padding."""
    monkeypatch.setattr(encoder_graphs, "STEP", 96)
    graphs = TowerGraphs(encoder)
    for _ in range(2):
        for size in SIZES:
            pixels = random_image(*size)
            torch.testing.assert_close(rows_of(graphs, pixels), encoder.encode(pixels), atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_a_larger_image_runs_as_it_is(encoder: Tower, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder_graphs, "STEP", 16)
    monkeypatch.setattr(encoder_graphs, "MOST", 64)
    graphs, pixels = TowerGraphs(encoder), random_image(40, 56)
    assert torch.equal(rows_of(graphs, pixels), encoder.encode(pixels))


@pytest.mark.gpu
@torch.inference_mode()
def test_graphs_give_the_same_bits(encoder: Tower, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first image of a size runs eagerly, the second makes the graphs, further ones replay them; between two of one
    size there are others."""
    monkeypatch.setattr(encoder_graphs, "PIECE", 512)  # two layers of 256 patches
    device = torch.device("cuda")
    found = tower(encoder.spec, Placement(torch.float32, device))
    for name, place in found.destinations().items():
        source = encoder.destinations()[name].tensor
        assert place.tensor is not None
        assert source is not None
        place.tensor.copy_(source)
    graphs, stream = TowerGraphs(found), torch.cuda.Stream(device)
    images = [random_image(*size).to(device) for size in (*SIZES, (120, 120))]
    with torch.cuda.stream(stream):
        first = [rows_of(graphs, pixels) for pixels in images]
        for _ in range(3):
            for pixels, rows in zip(images, first, strict=True):
                assert torch.equal(rows_of(graphs, pixels), rows)
        assert sum(1 for _ in graphs.slices(images[0])) == 1 + 2  # prepared, two layers, and the third with the rows
        for pixels, rows in zip(images, first, strict=True):
            torch.testing.assert_close(rows, found.encode(pixels), atol=1e-4, rtol=1e-4)
