"""Tensors of checkpoints as layouts in memory."""

from __future__ import annotations

import torch

from penstock.engine_core.models.quantization.convert import read_matrix
from penstock.engine_core.models.quantization.weight_format import WeightFormat


def test_one_scale_of_a_matrix_is_every_outputs() -> None:
    values = torch.ones(4, 8).to(torch.float8_e4m3fn)
    form = WeightFormat(kind="float8", per_tensor=True, activations="row")
    found = read_matrix(form, {"values": values, "scales": torch.tensor(0.5, dtype=torch.bfloat16)}, "w")
    assert torch.equal(found.dequantized(torch.float32), torch.full((4, 8), 0.5))
