"""What is measured of products, what is chosen of it, and how it is kept on disk."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace as struct_replace

from penstock.engine_core.execution import product_tuning
from penstock.engine_core.execution.product_tuning import (
    MEANS,
    NOISE,
    ROWS,
    SMALLEST,
    Job,
    Times,
    choose,
    encoded,
    file_name,
    folder_of,
    jobs_of,
    load,
    replace_file,
    store,
    tunable,
    tune,
    untuned,
)
from penstock.kernels.chip import CHIPS
from penstock.kernels.linear_plans import MeasuredTable, Plans, read
from penstock.kernels.linear_tilings import PipelinedTiling, Product, Tiling, VectorTiling, Way, fits, ruled

H200, L4 = CHIPS["sm_90"], CHIPS["sm_89"]
BF16 = torch.bfloat16
PRODUCT = Product(4096, 4096, BF16)
GATED = Product(14336, 4096, BF16, gated=True)
EXPERTS = Product(768, 2048, BF16, experts=128)
FAST = Tiling(64, 128, 128, 4, 4, tma=True, gated=False)


def asked(*products: Product, chip: str = "sm_90") -> Plans:
    plans = Plans(CHIPS[chip])
    for one in products:
        plans.find((one.width, one.inputs, one.dtype, one.gated, one.experts, one.weight, False))
    return plans


def measured(fast: Callable[[Job, Way], float]) -> Callable[[Sequence[Job]], list[Times]]:
    return lambda jobs: [{way: fast(job, way) for way in job.ways} for job in jobs]


def errors(path: Path, error: Exception) -> None:
    raise AssertionError(f"{path}: {error}")


def test_what_has_no_benchmark_follows_the_rules() -> None:
    """Experts in groups have none."""
    found = [
        struct_replace(one, weight=weight) for one in (PRODUCT, EXPERTS) for weight in ("", "fp8_blocks", "int4-128")
    ]
    assert [(bool(one.experts), one.weight) for one in tunable(found)] == [
        (False, ""), (False, "fp8_blocks"), (False, "int4-128"), (True, ""), (True, "fp8_blocks"),
    ]  # fmt: skip


def test_what_matters_and_is_not_measured_is_tuned() -> None:
    small = Product(512, 1024, BF16)
    assert small.width * small.inputs < SMALLEST
    plans = asked(PRODUCT, small, GATED, Product(4096, 4096, torch.float32), EXPERTS)
    assert untuned(plans) == [PRODUCT, GATED, EXPERTS]
    tune(plans, [GATED], measured(lambda job, way: 1.0), "3.6.0")
    assert untuned(plans) == [PRODUCT, EXPERTS]


@pytest.mark.parametrize("chip", CHIPS.values(), ids=lambda chip: chip.name)
@pytest.mark.parametrize("product", [PRODUCT, GATED, EXPERTS], ids=str)
def test_what_is_measured_fits_the_chip(product: Product, chip: product_tuning.Chip) -> None:
    jobs = jobs_of(product, chip)
    assert [job.rows for job in jobs] == list(MEANS if product.experts else ROWS)
    for job in jobs:
        assert job.rule in job.ways
        assert job.rule == ruled(product, chip, invariant=False).way(job.rows)
        assert product.experts or job.ways[0] is None, "the library's result is what others are held to"
        assert len(set(job.ways)) == len(job.ways) <= 24
        assert all(fits(way, product, chip) for way in job.ways)
        assert any(way not in (None, job.rule) for way in job.ways)


@pytest.mark.parametrize(
    ("own", "other", "library", "best"),
    [
        (10.0, 9.0, 20.0, FAST),
        (10.0, 10 * NOISE + 0.01, 20.0, SQUARE := Tiling(64, 64, 128, 4, 6)),
        (10.0, 11.0, 9.0, None),
        (None, 11.0, 12.0, FAST),
        (None, None, 12.0, None),
        (None, None, None, SQUARE),
    ],
)
def test_the_rules_stay_unless_another_is_faster(
    own: float | None, other: float | None, library: float | None, best: Way
) -> None:
    """A way that failed has no time."""
    times = {way: time for way, time in ((None, library), (SQUARE, own), (FAST, other)) if time is not None}
    found = choose(Job(PRODUCT, 128, (None, SQUARE, FAST), SQUARE), times)
    assert (found.way, found.rule) == (best, SQUARE)
    assert found.microseconds == times.get(best, float("inf"))
    assert found.ruled == (own or float("inf"))


def test_a_plan_has_the_fastest_ways() -> None:
    plans = asked(PRODUCT)

    def time(job: Job, way: Way) -> float:
        if job.rows <= 8:
            return 1.0 if way == PipelinedTiling(8, 2, 3) else 2.0
        return 2.0 if way is not None else 1.0

    found, choices = tune(plans, [PRODUCT], measured(time), "3.6.0")
    first, ring = ruled(PRODUCT, H200, invariant=False).way(1), PipelinedTiling(8, 2, 3)
    assert [plan.ways for plan in found.plans] == [((1, first), (8, ring), (2048, None))]
    assert [(one.rows, one.microseconds) for one in choices[1:]] == [(rows, 1.0) for rows in ROWS[1:]]
    plan = plans.find((4096, 4096, BF16, False, 0, "", False))
    assert [plan.way(rows) for rows in (1, 2, 8, 9, 10**6)] == [first, ring, ring, None, None]


def test_where_nothing_can_be_measured_the_rules_stay() -> None:
    plans = asked(PRODUCT, EXPERTS)
    tune(plans, [PRODUCT, EXPERTS], lambda jobs: [{} for _ in jobs], "3.6.0")
    for product in (PRODUCT, EXPERTS):
        plan, rules = plans.measured[product], ruled(product, H200, invariant=False)
        assert [plan.way(rows) for rows in (MEANS if product.experts else ROWS)] == [
            rules.way(rows) for rows in (MEANS if product.experts else ROWS)
        ]


def test_what_was_measured_is_there_at_the_next_start(tmp_path: Path) -> None:
    plans = asked(PRODUCT, GATED, EXPERTS)
    found, _ = tune(plans, untuned(plans), measured(lambda job, way: float(job.ways.index(way) != 1)), "3.6.0")
    store(tmp_path, H200, found)
    assert len(list(folder_of(tmp_path, H200, "3.6.0").iterdir())) == 3, "a file for each, and nothing else"
    later = asked(PRODUCT, GATED, EXPERTS)
    load(tmp_path, later, "3.6.0", errors)
    assert later.measured == plans.measured
    assert not untuned(later)


def test_it_is_kept_by_chip_triton_type_and_shape(tmp_path: Path) -> None:
    chips = H200, L4, replace(H200, shared_memory=99 << 10), replace(H200, tma=False), replace(H200, num_sms=78)
    folders = {folder_of(tmp_path, chip, triton) for chip in chips for triton in ("3.6.0", "3.9.0")}
    assert len(folders) == 2 * len(chips)
    products = PRODUCT, GATED, EXPERTS, replace_product(dtype=torch.float16), replace_product(width=4097)
    found, _ = tune(asked(), products, lambda jobs: [{} for _ in jobs], "3.6.0")
    assert len({file_name(plan) for plan in found.plans}) == len(products)
    store(tmp_path, H200, found)
    for chip, triton in ((L4, "3.6.0"), (H200, "3.9.0")):
        plans = Plans(chip)
        load(tmp_path, plans, triton, errors)
        assert not plans.measured


def test_plans_of_a_release_with_other_ways_are_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = tune(asked(), [PRODUCT], lambda jobs: [{} for _ in jobs], "3.6.0")
    store(tmp_path, H200, found)
    for module, kept in (("later", 0), ("", 1)):
        source = tmp_path / "tilings.py"
        source.write_text(module)
        with monkeypatch.context() as patch:
            if module:
                patch.setattr("penstock.kernels.grouped_tilings.__file__", str(source))
            plans = Plans(H200)
            load(tmp_path, plans, "3.6.0", errors)
        assert len(plans.measured) == kept


def replace_product(width: int = 4096, dtype: torch.dtype = BF16) -> Product:
    return Product(width, 4096, dtype)


def test_names_of_chips_are_no_paths(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, replace(H200, name="../a b/c"), "3.6.0+git")
    assert folder.parent == tmp_path
    assert folder.name.startswith("..-a-b-c-132-")


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b"[1]"])
def test_a_damaged_file_is_told_and_ignored(data: bytes, tmp_path: Path) -> None:
    found, _ = tune(asked(), [PRODUCT, GATED], measured(lambda job, way: 1.0), "3.6.0")
    store(tmp_path, H200, found)
    path = folder_of(tmp_path, H200, "3.6.0") / file_name(found.plans[0])
    path.write_bytes(data)
    told: list[Path] = []
    plans = asked(PRODUCT, GATED)
    load(tmp_path, plans, "3.6.0", lambda path, error: told.append(path))
    assert told == [path]
    assert untuned(plans) == [PRODUCT]


def test_without_a_folder_nothing_is_loaded(tmp_path: Path) -> None:
    plans = asked(PRODUCT)
    load(tmp_path / "none", plans, "3.6.0", errors)
    assert not plans.measured


def test_many_writers_and_readers_never_meet_half_a_file(tmp_path: Path) -> None:
    tables = [
        tune(asked(), [PRODUCT], measured(lambda job, way, fast=fast: float(way != fast)), "3.6.0")[0]
        for fast in (None, VectorTiling(8, 256, 4), FAST)
    ]
    store(tmp_path, H200, tables[0])

    def work(at: int) -> None:
        if at % 2:
            store(tmp_path, H200, tables[at % 3])
        else:
            plans = Plans(H200)
            load(tmp_path, plans, "3.6.0", errors)
            assert plans.measured

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(200)))
    folder = folder_of(tmp_path, H200, "3.6.0")
    assert [path.name for path in folder.iterdir()] == [file_name(tables[0].plans[0])]


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    replace_file(path, b"old")

    def full(self: Path, data: bytes) -> int:
        with open(self, "wb") as file:
            file.write(data[:1])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space"):
        replace_file(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_table_has_a_line_for_each_product(tmp_path: Path) -> None:
    found, _ = tune(asked(), [PRODUCT, EXPERTS], measured(lambda job, way: 1.0), "3.6.0")
    data = encoded(found)
    assert data.count(b"\n") == 4
    replace_file(tmp_path / "table.json", data)
    assert read(tmp_path / "table.json") == found
    empty = MeasuredTable("a", "b", ())
    replace_file(tmp_path / "table.json", encoded(empty))
    assert read(tmp_path / "table.json") == empty
