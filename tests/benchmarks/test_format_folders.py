"""The embedded model in other formats is nearly the embedded model, as it is read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.format_folders import LAYOUTS, write
from penstock.engine_core import loading
from penstock.engine_core.embedded import demo_folder
from penstock.engine_core.models import registry
from penstock.engine_core.models.decoder import Decoder
from penstock.engine_core.models.layers import pack
from penstock.engine_core.models.spec import read_spec
from penstock.engine_core.models.tensors import check_weights

# By how much outputs of an MLP differ, and the format that is to be read. 4 bits lose ten percent of a matrix each.
EXPECTED = {
    "w8a16": (0.02, "INT8"), "w4a16": (0.25, "INT4 in groups of 64"), "w4a16-zeros": (0.25, "INT4 in groups of 64"),
    "nvfp4": (0.25, "FP4 in groups of 16"), "mxfp4": (0.3, "FP4 in groups of 32"),
    "awq": (0.25, "INT4 in groups of 64"), "gptq": (0.25, "INT4 in groups of 64"),
    "fp8-blocks": (0.1, "FP8 in blocks of 128x128"),
}  # fmt: skip


def loaded(folder: Path) -> Decoder:
    spec = read_spec(folder)
    check_weights(folder, spec)
    model = registry.build(spec, torch.float32, torch.device("cpu"), 64)
    loading.load(model, folder)
    pack(model.destinations())
    return model


@pytest.fixture(scope="module")
def original() -> Decoder:
    return loaded(demo_folder())


def test_every_layout_is_expected() -> None:
    assert EXPECTED.keys() == LAYOUTS.keys()


@pytest.mark.parametrize("name", EXPECTED)
def test_a_folder_is_nearly_the_model(name: str, original: Decoder, tmp_path: Path) -> None:
    most, label = EXPECTED[name]
    model = loaded(write(demo_folder(), tmp_path / name, name))
    assert model.spec.quantization is not None
    assert model.spec.quantization.formats[0].label == label
    x = torch.randn(9, model.spec.hidden, generator=torch.Generator().manual_seed(1))
    found, exact = (torch.stack([block.mlp.forward(x) for block in one.blocks]) for one in (model, original))
    assert most / 20 < (found - exact).norm() / exact.norm() < most
