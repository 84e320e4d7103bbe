"""The search for plans by whole layers: what it tries, what it keeps, and what its layers compute."""

from __future__ import annotations

from typing import cast

import pytest
import torch

from benchmarks import layer_plans
from benchmarks.layer_plans import NAMES, Scene, Search, ways_of
from benchmarks.linear_shapes import Model
from penstock.kernels.chip import CHIPS
from penstock.kernels.linear_tilings import Product, SplitTiling, Way, fits

H200 = CHIPS["sm_90"]


def test_ways_fit_and_differ() -> None:
    for gated, width, inputs in ((False, 6144, 4096), (True, 14336, 4096), (False, 4096, 14336)):
        for weight in ("", "fp8"):
            product = Product(width, inputs, torch.bfloat16, gated, 0, weight)
            for rows in (1, 8, 64, 256, 2048):
                found = ways_of(product, rows, H200)
                assert None in found
                assert len(set(found)) == len(found)
                assert all(fits(way, product, H200) for way in found)
                assert not any(isinstance(way, SplitTiling) and way.rows < rows for way in found)


def test_the_fastest_of_each_product_is_kept_while_the_others_stay() -> None:
    choices: dict[str, list[Way]] = {
        name: [None, *(SplitTiling(8, splits, 4) for splits in (1, 2, 4))] for name in NAMES
    }
    search = Search.__new__(Search)

    def time(ways: dict[str, Way]) -> float:
        """One output's programs share best where another's do not."""
        shares = [9 if way is None else cast("SplitTiling", way).splits for way in ways.values()]
        return 10.0 * abs(shares[0] - 2) + 2 * abs(shares[1] - 4) + abs(shares[2] - shares[1]) + shares[3]

    search.time = time  # type: ignore[method-assign]
    best: dict[str, Way] = dict.fromkeys(NAMES)
    timed = [(name, taken) for name, _, taken in search.descend(best, choices)]
    assert len(timed) == 4 * 3
    assert best == dict(zip(NAMES, (SplitTiling(8, splits, 4) for splits in (2, 4, 4, 1)), strict=True))


@pytest.mark.parametrize("kind", ["", "fp8"])
def test_layers_run_whole_and_without_a_part(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_plans, "MODELS", (Model("small", 2, 64, 4, 2, 16, 96, 100),))
    monkeypatch.setattr(layer_plans, "BOUND", 64)
    scene = Scene(kind, 2, torch.device("cpu"))
    scene.take(3, 20)
    whole = scene.run()
    assert whole.shape == (3, 64)
    assert torch.isfinite(whole).all()
    for part in ("norm", "attention"):
        scene.without = part
        assert not torch.equal(scene.run(), whole), part
