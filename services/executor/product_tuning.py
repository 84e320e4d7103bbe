"""Measures the products of a model that nobody has measured on this chip, at the start of an executor, and keeps them.

They are kept beside Triton's compiled kernels. `penstock tune` does the same without serving.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from concurrent.futures import Executor
from functools import partial
from pathlib import Path

import torch

from penstock.engine_core.execution import product_tuning
from penstock.engine_core.execution.product_tuning import Choice, Job
from penstock.kernels.chip import SIMULATED, chip_of
from penstock.kernels.linear_plans import MeasuredTable, Plans, plans_of
from penstock.kernels.linear_tilings import Product, Way, describe
from penstock.kernels.triton_names import cache_folder
from penstock.services.supervisor import logs
from penstock.services.supervisor.process import StartupPhases
from penstock.services.supervisor.sd_notify import progress

log = logging.getLogger(__name__)

SHOWN = ("NVIDIA H100", "NVIDIA H200")  # whose invariant products were compared bit by bit


def log_chip(device: torch.device, *, invariant: bool) -> None:
    """Log what an operator should know of the chip: that it is simulated, and where invariance was shown."""
    chip = chip_of(device)
    if os.environ.get(SIMULATED) and chip.runs_triton:
        logs.warning(log, "simulated_chip", chip=chip.name, fields=os.environ[SIMULATED])
    if invariant:
        tell = logs.info if chip.name.startswith(SHOWN) else logs.warning
        tell(log, "batch_invariant", chip=chip.name, shown_on=", ".join(SHOWN))


def take_measured(device: torch.device) -> None:
    """Use what earlier starts, or `penstock tune`, measured on this chip."""
    plans = plans_of(device)
    if plans.chip.runs_triton:
        folder, triton = kept()
        product_tuning.load(folder, plans, triton, damaged)


def tuned(device: torch.device, compilers: Executor | None, phases: StartupPhases) -> bool:
    """Measure the products that have asked for a plan and have no measured one. Returns whether there were any."""
    plans = plans_of(device)
    products = product_tuning.untuned(plans) if plans.chip.runs_triton else []
    if not products:
        return False
    phases.begin(f"measuring {len(products)} products with weights")
    try:
        table, _ = measure(plans, products, device, compilers)
    except torch.OutOfMemoryError as error:
        logs.warning(log, "products_not_measured", reason=str(error))
        return False
    keep(plans, table)
    return True


def measure(
    plans: Plans, products: Sequence[Product], device: torch.device, compilers: Executor | None
) -> tuple[MeasuredTable, list[Choice]]:
    """Measure products on the device. Raises torch's OutOfMemoryError."""
    from penstock.engine_core.execution.product_bench import measure as bench

    began = time.monotonic()
    run = partial(bench, device=device, compilers=compilers, dropped=dropped, progress=report)
    found = product_tuning.tune(plans, products, run, kept()[1])
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    logs.info(log, "products_measured", chip=plans.chip.name, products=len(products),
              seconds=round(time.monotonic() - began, 2))  # fmt: skip
    return found


def kept() -> tuple[Path, str]:
    """Where measured plans are kept, and the version of Triton that they are of."""
    import triton

    return cache_folder() / "penstock", triton.__version__


def keep(plans: Plans, table: MeasuredTable) -> None:
    """Keep measured plans for later starts, where the folder can be written."""
    folder, _ = kept()
    try:
        product_tuning.store(folder, plans.chip, table)
    except OSError as error:
        logs.warning(log, "products_not_kept", folder=str(folder), reason=str(error))


def report(at: int, total: int) -> None:
    """Tell the supervisor how far it is, now and then."""
    if at % max(1, total // 10) == 0:
        progress(f"measuring products with weights, {at} of {total}")


def dropped(job: Job, way: Way, reason: str) -> None:
    logs.info(log, "way_left_out", product=str(job.product), rows=job.rows, way=describe(way), reason=reason[:200])


def damaged(path: Path, error: Exception) -> None:
    logs.warning(log, "measured_products_damaged", file=str(path), reason=str(error))
