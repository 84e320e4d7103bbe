"""`penstock tune`: refusals, the file and the table. On a GPU, a model that serves the same tokens afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from penstock.engine_core.embedded import demo_folder
from penstock.engine_core.execution.product_tuning import Choice
from penstock.kernels.chip import CHIPS
from penstock.kernels.linear_plans import MeasuredTable, Plans, read
from penstock.kernels.linear_tilings import BY_MEAN, Product, VectorTiling
from penstock.services import cli
from penstock.services.commands import tune
from penstock.services.supervisor.process import ExitCode

BF16 = torch.bfloat16
WIDE = Product(4096, 4096, BF16)


def test_without_a_gpu_it_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tune", "--device", "cpu"]) == ExitCode.CONFIG
    expected = "penstock: --device: 'cpu' is not allowed; only a GPU's products are measured, and here is none\n"
    assert capsys.readouterr().err == expected


def test_a_file_in_no_folder_is_refused_before_anything_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tune", "--output", "/no/such/folder/table.json"]) == ExitCode.CONFIG
    assert "--output: '/no/such/folder/table.json' is not allowed; its folder must exist" in capsys.readouterr().err


def test_the_products_of_a_rank_are_measured_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those that dummy steps ask for, also where they are measured already."""
    plans, kept = Plans(CHIPS["sm_89"]), list[MeasuredTable]()
    seen: list[object] = []
    table = MeasuredTable("NVIDIA L4", "3.6.0", ())

    def compile_steps(model: object, options: object, tokens: int, draft: None, compilers: object) -> None:
        seen.append(options)
        for width in (4096, 32):
            plans.find((width, 4096, BF16, False, 0, "", False))
        plans.measured[WIDE] = plans.asked[WIDE]

    def measure(
        plans: Plans, products: Sequence[Product], device: torch.device, compilers: object
    ) -> tuple[MeasuredTable, list[Choice]]:
        seen.append(list(products))
        return table, [Choice(WIDE, 1, VectorTiling(4, 512, 4), 10.26, None, float("inf"))]

    monkeypatch.setattr(tune, "plans_of", lambda device: plans)
    monkeypatch.setattr(tune, "compile_steps", compile_steps)
    monkeypatch.setattr(tune, "measure", measure)
    monkeypatch.setattr(tune, "keep", lambda plans, table: kept.append(table))
    words = ["--device", "cpu", "--tensor-parallel-size", "2", "--output", str(tmp_path / "l4.json")]
    assert cli.main(["tune", str(demo_folder()), *words]) == ExitCode.ORDERLY
    assert seen[0].group.size == 2  # type: ignore[attr-defined]
    assert seen[1] == [WIDE], "not what is too small to matter"
    assert kept == [table]
    assert read(tmp_path / "l4.json") == table
    shown = capsys.readouterr().out
    assert "4096 x 4096                        1  vector 4x512 w4                        10.3       inf\n" in shown
    assert "NVIDIA L4: 0 products in " in shown


def test_the_table_names_each_kind() -> None:
    way = BY_MEAN[0][1]
    lines = tune.text([
        Choice(Product(14336, 4096, BF16, gated=True), 8, None, 57.0, None, 57.0),
        Choice(Product(768, 2048, BF16, experts=128), 4, way, 99.0, way, 99.0),
    ]).splitlines()  # fmt: skip
    assert lines[1].startswith("14336 x 4096 gated                 8  cuBLAS ")
    assert lines[2].startswith("768 x 2048 128 experts             4  16x64x128 w4 s4 r1 sg, 16x128x128 ")
