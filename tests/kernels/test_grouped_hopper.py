"""Products with weights of 4 bits by the kernels in Gluon, held to double precision on a GPU of Hopper's generation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.kernels.grouped_linear import planes_of
from penstock.kernels.quantized import GroupedWeight
from tests.kernels.grouped_weights import exact_product, grouped

RINGS = [(8, 16, 4, 4, 2), (8, 16, 2, 2, 4), (8, 32, 4, 8, 2), (16, 16, 1, 1, 3), (16, 32, 2, 2, 2)]
WIDES = [
    *((16, 64, 4, 4, 16, 1), (32, 128, 4, 2, 3, 2), (64, 128, 8, 3, 6, 1), (64, 128, 8, 2, 4, 3)),
    (128, 128, 8, 2, 4, 2),
]


def check(kind: str, outputs: int, inputs: int, gated: bool, ways: list[tuple[int, ...]], dtype: torch.dtype) -> None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("this is no GPU of Hopper's generation")
    from penstock.kernels import grouped_hopper as hopper

    torch.manual_seed(outputs + inputs)
    weight = grouped(kind, outputs, inputs, "cuda")
    assert isinstance(weight, GroupedWeight)
    planes = planes_of(weight)
    assert planes is not None
    bias = torch.randn(outputs, device="cuda").to(dtype)
    x = torch.randn(300, inputs, device="cuda").to(dtype)
    exact = exact_product(x, weight, bias, gated)
    for way in ways:
        for rows in (way[0], 1, way[0] - 3, 300 if ways is WIDES else way[0]):
            found: Tensor
            for _ in range(2):  # counters of a tile are set back
                if ways is WIDES:
                    found = hopper.multiply_wide(x[:rows], planes, bias, hopper.WideTiling(*way), gated=gated)
                else:
                    found = hopper.multiply_ring(x[:rows], planes, bias, hopper.RingTiling(*way), gated=gated)
                error = (found.double() - exact[:rows]).norm() / exact[:rows].norm()
                assert error < 8e-3, (way, rows)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["int4 128 bf16", "int4 128 fp16 zeros", "int4 64 bf16", "int4 0 fp32 zeros"])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [(1024, 4096), (400, 768)])
def test_ring(kind: str, outputs: int, inputs: int, gated: bool) -> None:
    check(kind, outputs, inputs, gated, RINGS, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [(1024, 4096), (400, 768)])
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("int4 128 bf16", torch.bfloat16), ("int4 64 bf16 zeros", torch.bfloat16), ("int4 128 fp16 zeros", torch.float16)],
)
def test_wide(kind: str, dtype: torch.dtype, outputs: int, inputs: int, gated: bool) -> None:
    check(kind, outputs, inputs, gated, WIDES, dtype)
