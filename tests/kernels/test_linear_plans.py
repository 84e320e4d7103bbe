"""Which plan a product gets: a measured one of this chip, else the rules'."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from penstock.kernels.chip import CHIPS
from penstock.kernels.linear_plans import MeasuredPlan, MeasuredTable, Plans, plans_of, read, shipped
from penstock.kernels.linear_tilings import PipelinedTiling, Plan, Product, Tiling, VectorTiling, fits, ruled

H200 = CHIPS["sm_90"]
BF16 = torch.bfloat16
PRODUCT = Product(4096, 4096, BF16)
KEY = (4096, 4096, BF16, False, 0, "")
MEASURED = MeasuredPlan(
    4096, 4096, "bfloat16", ((1, VectorTiling(4, 512, 4)), (8, PipelinedTiling(8, 2, 3)), (2048, None))
)


def table(*plans: MeasuredPlan, chip: str = H200.name) -> MeasuredTable:
    return MeasuredTable(chip, "3.6.0", plans)


def test_without_measurements_the_rules_decide() -> None:
    plans = Plans(H200)
    for invariant in (False, True):
        assert plans.find((*KEY, invariant)) == ruled(PRODUCT, H200, invariant=invariant)


def test_measured_plans_come_before_the_rules() -> None:
    plans = Plans(H200, [table(MEASURED)])
    found = plans.find((*KEY, False))
    assert found == Plan((1, 8, 2048), (VectorTiling(4, 512, 4), PipelinedTiling(8, 2, 3), None))
    assert plans.find((*KEY, False)) is found, "asked once"
    for other in (
        (4096, 4096, torch.float16, False, 0, ""), (4096, 4096, BF16, True, 0, ""), (4096, 8192, BF16, False, 0, ""),
        (4096, 4096, BF16, False, 0, "fp8"),
    ):  # fmt: skip
        assert plans.find((*other, False)) == ruled(Product(*other), H200, invariant=False)


def test_invariant_products_are_never_measured() -> None:
    plans = Plans(H200, [table(MEASURED)])
    assert plans.find((*KEY, True)) == ruled(PRODUCT, H200, invariant=True)
    assert not plans.asked


def test_what_asked_is_known_in_its_order() -> None:
    plans = Plans(H200, [table(MEASURED)])
    keys = [(size, 4096, BF16, False, 0, "") for size in (6144, 4096, 1024)]
    for key in (*keys, *keys):
        plans.find((*key, False))
    assert list(plans.asked) == [Product(*key) for key in keys]


def test_what_is_learned_counts_from_then_on() -> None:
    plans = Plans(H200)
    before = plans.find((*KEY, False))
    plans.learn(table(MEASURED))
    assert plans.find((*KEY, False)) == plans.measured[PRODUCT] != before


def test_other_chips_measurements_are_ignored() -> None:
    plans = Plans(H200, [table(MEASURED, chip="NVIDIA H100 80GB HBM3")])
    assert not plans.measured


def test_a_plan_that_does_not_fit_is_ignored_whole() -> None:
    """A file from another driver's limits, or a simulated chip's name."""
    large = MeasuredPlan(4096, 4096, "bfloat16", ((8, None), (2048, Tiling(128, 256, 128, 8, 6))))
    assert not Plans(H200, [table(large)]).measured
    empty = MeasuredPlan(4096, 4096, "bfloat16", ())
    assert not Plans(H200, [table(empty)]).measured


def test_a_cpu_reads_no_tables() -> None:
    plans = plans_of(torch.device("cpu"))
    assert not plans.measured
    assert plans_of(torch.device("cpu")) is plans


@pytest.mark.parametrize("found", list(shipped()), ids=lambda found: found.chip)
def test_shipped_tables_fit_their_chip(found: MeasuredTable) -> None:
    assert found.chip.startswith("NVIDIA H")
    assert len({plan.product for plan in found.plans}) == len(found.plans)
    for plan in found.plans:
        rows = [most for most, _ in plan.ways]
        assert rows == sorted(set(rows))
        assert plan.product.dtype == BF16
        assert all(fits(way, plan.product, H200) for _, way in plan.ways)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"chip":"a","triton":"b","plans":[{"width":1}]}'])
def test_a_damaged_file_is_an_error(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_bytes(data)
    with pytest.raises(msgspec.MsgspecError):
        read(path)


@pytest.mark.parametrize("dtype", ["int8", "complex64", "nn", "bfloat17", "float"])
def test_a_table_of_an_unknown_type_is_an_error(dtype: str, tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    plan = msgspec.to_builtins(table(MEASURED))
    plan["plans"][0]["dtype"] = dtype
    path.write_bytes(msgspec.json.encode(plan))
    with pytest.raises(msgspec.ValidationError, match="dtype"):
        read(path)
