"""Tuning at the start of an executor: what is measured, kept, logged, and what happens where that cannot be."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.engine_core.execution import product_bench
from penstock.engine_core.execution.product_tuning import Job, Times, folder_of
from penstock.kernels.chip import CHIPS, SIMULATED
from penstock.kernels.linear_plans import Plans
from penstock.kernels.linear_tilings import Product
from penstock.services.executor import product_tuning
from penstock.services.executor.product_tuning import log_chip, take_measured, tuned
from penstock.services.supervisor.process import StartupPhases

L4, BF16 = CHIPS["sm_89"], torch.bfloat16
DEVICE = torch.device("cpu")


class Measuring:
    """In place of a GPU: every way but the rules' takes a microsecond."""

    def __init__(self) -> None:
        self.products: list[Product] = []
        self.error: Exception | None = None

    def __call__(
        self, jobs: Sequence[Job], device: torch.device, compilers: None, dropped: Callable[..., None],
        progress: Callable[[int, int], None],
    ) -> list[Times]:  # fmt: skip
        if self.error is not None:
            raise self.error
        self.products += dict.fromkeys(job.product for job in jobs)
        dropped(jobs[0], jobs[0].ways[-1], "RuntimeError: " + "x" * 300)
        for at in range(len(jobs)):
            progress(at, len(jobs))
        return [{way: 2.0 if way == job.rule else 1.0 for way in job.ways} for job in jobs]


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Plans:
    found = Plans(L4)
    monkeypatch.setattr(product_tuning, "plans_of", lambda device: found)
    monkeypatch.setattr(product_tuning, "kept", lambda: (tmp_path / "kept", "3.6.0"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    found.find((4096, 4096, BF16, False, 0, "", False))
    found.find((64, 64, BF16, False, 0, "", False))
    return found


@pytest.fixture
def measuring(monkeypatch: pytest.MonkeyPatch) -> Measuring:
    found = Measuring()
    monkeypatch.setattr(product_bench, "measure", found)
    return found


def events(caplog: pytest.LogCaptureFixture) -> dict[str, Any]:
    return {record.getMessage(): record for record in caplog.records}


def test_what_is_unknown_is_measured_once_and_kept(
    plans: Plans,
    measuring: Measuring,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    told: list[str] = []
    monkeypatch.setattr(product_tuning, "progress", told.append)
    caplog.set_level(logging.INFO)
    phases = StartupPhases()
    take_measured(DEVICE)
    assert tuned(DEVICE, None, phases)
    assert measuring.products == [Product(4096, 4096, BF16)]
    assert phases.all[-1].name == "measuring 1 products with weights"
    assert told[0] == "measuring products with weights, 0 of 10"
    assert {"products_measured", "way_left_out"} <= set(events(caplog))
    assert not tuned(DEVICE, None, phases), "nothing is left"
    later = Plans(L4)
    later.find((4096, 4096, BF16, False, 0, "", False))
    monkeypatch.setattr(product_tuning, "plans_of", lambda device: later)
    take_measured(DEVICE)
    assert later.measured == plans.measured
    assert not tuned(DEVICE, None, phases)
    assert len(measuring.products) == 1


def test_damaged_files_are_measured_anew(
    plans: Plans, measuring: Measuring, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = folder_of(tmp_path / "kept", L4, "3.6.0")
    folder.mkdir(parents=True)
    (folder / "linear-4096x4096-bfloat16.json").write_text("{")
    take_measured(DEVICE)
    assert "measured_products_damaged" in events(caplog)
    assert tuned(DEVICE, None, StartupPhases())
    assert len(measuring.products) == 1


def test_a_folder_that_cannot_be_written_costs_only_the_next_start(
    plans: Plans, measuring: Measuring, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "kept").write_text("a file")
    assert tuned(DEVICE, None, StartupPhases())
    assert "products_not_kept" in events(caplog)
    assert plans.measured


def test_without_memory_the_rules_decide(plans: Plans, measuring: Measuring, caplog: pytest.LogCaptureFixture) -> None:
    measuring.error = torch.OutOfMemoryError("1 GiB")
    assert not tuned(DEVICE, None, StartupPhases())
    assert "products_not_measured" in events(caplog)
    assert not plans.measured


def test_a_cpu_measures_nothing(monkeypatch: pytest.MonkeyPatch, measuring: Measuring) -> None:
    plans = Plans(replace(L4, vendor="cpu"))
    plans.find((4096, 4096, BF16, False, 0, "", False))
    monkeypatch.setattr(product_tuning, "plans_of", lambda device: plans)
    take_measured(DEVICE)
    assert not tuned(DEVICE, None, StartupPhases())
    assert measuring.products == []


@pytest.mark.parametrize(("name", "level"), [("NVIDIA H200", logging.INFO), ("NVIDIA L4", logging.WARNING)])
def test_the_log_says_where_invariance_was_shown(
    name: str, level: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.delenv(SIMULATED, raising=False)
    monkeypatch.setattr(product_tuning, "chip_of", lambda device: replace(L4, name=name))
    log_chip(DEVICE, invariant=False)
    assert not caplog.records
    log_chip(DEVICE, invariant=True)
    assert events(caplog)["batch_invariant"].levelno == level


def test_the_log_says_that_a_chip_is_simulated(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(SIMULATED, "tma=0")
    log_chip(DEVICE, invariant=False)
    assert not caplog.records, "a CPU is never simulated"
    monkeypatch.setattr(product_tuning, "chip_of", lambda device: L4)
    log_chip(DEVICE, invariant=False)
    assert "simulated_chip" in events(caplog)
