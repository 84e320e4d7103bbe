"""The reference against the definition in double precision, and a text alone against the same beside others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.kernels.records import AttentionOptions
from penstock.kernels.varlen_attention import varlen_attention
from tests.kernels.varlen_scene import LENGTHS, Sequences, exact, sequences


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [0, 1, 5, 1000])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (3, 1)])
def test_definition(heads: int, kv_heads: int, window: int, dtype: torch.dtype) -> None:
    scene = sequences(LENGTHS, heads, kv_heads, 16, dtype)
    found = run(scene, AttentionOptions(0.3, window))
    assert found.dtype == dtype
    atol = 2e-6 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(found.double(), exact(scene, 0.3, window), atol=atol, rtol=atol)


def test_caps_and_sinks_go_through() -> None:
    scene = sequences(LENGTHS, 2, 2, 16, torch.float32)
    plain, capped = (run(scene, AttentionOptions(0.3, softcap=cap)) for cap in (0.0, 1.0))
    assert not torch.allclose(plain, capped)


def run(scene: Sequences, options: AttentionOptions) -> Tensor:
    return varlen_attention(*scene.tensors, scene.query_start, max(scene.lengths), options)
