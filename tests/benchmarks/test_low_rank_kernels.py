"""The parts of low_rank_kernels.py that need no GPU."""

from __future__ import annotations

import pytest
import torch

from benchmarks import low_rank_kernels
from benchmarks.low_rank_kernels import Case, Layer, cases, off, places_of, rows_of, table


def test_no_case_has_more_adapters_than_rows() -> None:
    assert {case[:2] for case in cases([1, 4, 8])} == {(1, 1), (4, 1), (4, 4), (8, 1), (8, 8)}
    assert Case(8, 1, 16).ways == ("base", "before", "now", "early", "tiles")
    assert Case(9, 1, 16).ways == ("base", "before", "now")


def test_products_are_held_to_double_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the reference makes them, which does not round what it shrinks."""
    monkeypatch.setattr(low_rank_kernels, "HIDDEN", 64)
    shapes = {"qkv": (64, (64, 16, 16)), "output": (64, (64,)), "gate_up": (64, (96, 96)), "down": (96, (64,))}
    monkeypatch.setattr(low_rank_kernels, "SHAPES", shapes)
    torch.manual_seed(0)
    layer, case = Layer("cpu"), Case(12, 3, 16)
    layer.adapt(case.rank)
    assert places_of(case, torch.device("cpu"), base=True).tolist() == [1, 2, 3, 1, 0, 3, 1, 2, 3, 0, 2, 3]
    assert off(layer, case, "now") < 0.01
    assert off(layer, case, "base") > 0.1
    rows = rows_of(places_of(case, torch.device("cpu")), "now")
    x = torch.randn(case.rows, 64, dtype=torch.bfloat16)
    assert all(found.shape == (case.rows, 64) for found in layer.run(x, x, rows, "now"))


def test_percent_of_each_way() -> None:
    case = {"rows": 64, "adapters": 8, "rank": 16}
    figures = [
        {**case, "way": "base", "us": 100.0}, {**case, "way": "now", "us": 104.0},
        {**case, "way": "before", "problem": "wrong"},
    ]  # fmt: skip
    assert table(figures).splitlines()[1].split() == ["64", "8", "16", "100.00", "+4.0%"]
