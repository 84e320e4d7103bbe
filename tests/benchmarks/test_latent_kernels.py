"""The benchmark of latent attention on a CPU: both ways are held against double precision. Its imports stand in the
tests: they bring Triton, whose interpreter other tests choose when they are collected."""

from __future__ import annotations

from typing import Any

import pytest
import torch


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Any:
    """One model, and the module. In fp32: oneDNN's products in bfloat16 trap on some machines."""
    from benchmarks import latent_kernels

    monkeypatch.setattr(latent_kernels, "DTYPE", torch.float32)
    monkeypatch.setattr(latent_kernels, "MIXTURES", ([(1, 70), (130, 133), (5, 90)], [(129, 300), (140, 141)]))
    torch.manual_seed(0)
    return latent_kernels


def test_both_ways_are_right(tiny: Any) -> None:
    model = tiny.Model("tiny", 3, 12, 20, 24, 8)
    absorbed, expanded = tiny.check(model, "cpu")
    assert 0 < absorbed < 1e-5
    assert 0 < expanded < 1e-5


def test_what_is_wrong_or_not_a_number_is_found(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.Model("tiny", 3, 12, 20, 24, 8)
    step = tiny.Step(model, [(130, 133), (5, 90)], device="cpu")
    found = step.mixed()
    found[-1] = torch.nan
    assert step.error(found) != step.error(found)
    monkeypatch.setattr(tiny, "attend_expanded", lambda *given: given[6].zero_())
    with pytest.raises(AssertionError):
        tiny.check(model, "cpu")


def test_pairs_of_a_chunk_are_counted(tiny: Any) -> None:
    model = tiny.Model("tiny", 3, 12, 20, 24, 8)
    assert tiny.flops(model, 4, 10) == 2 * (7 + 8 + 9 + 10) * 3 * (12 + 8 + 20)


@pytest.mark.gpu
def test_published_heads_on_a_gpu() -> None:
    from benchmarks.latent_kernels import MODELS, check

    for model in MODELS[:2]:
        check(model)
