"""`penstock tune`: measures how a model's products with weights run best on this GPU, and keeps that for every start.

A start does it by itself where a chip or a shape is unknown. Here it is done ahead, and anew where it was done before.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from penstock.engine_core import folder
from penstock.engine_core.distributed.group import Group
from penstock.engine_core.execution.product_tuning import Choice, encoded, replace_file, tunable
from penstock.engine_core.execution.warmup import compile_steps
from penstock.engine_core.models import registry
from penstock.kernels.linear_plans import plans_of
from penstock.kernels.linear_tilings import describe
from penstock.protocol.errors import ConfigError
from penstock.services.executor.kernel_compilers import compilers
from penstock.services.executor.product_tuning import keep, measure
from penstock.services.executor.startup import choose_dtype, read_model, runner_options, take_device
from penstock.services.supervisor.options import Effective
from penstock.services.supervisor.process import ExitCode


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", default="", metavar="FILE", help="write a table of what was measured, too")


def command(namespace: argparse.Namespace, effective: Effective) -> int:
    """Measure and print a table. Raises ConfigError without a GPU, and ModelError for the model's folder."""
    config, output = effective.config, Path(namespace.output)
    if namespace.output and not output.parent.is_dir():
        raise ConfigError("--output", namespace.output, "its folder must exist")
    began = time.monotonic()
    device = take_device(config, 0)
    plans = plans_of(device)
    if not plans.chip.runs_triton:
        raise ConfigError("--device", config.executor.device, "only a GPU's products are measured, and here is none")
    path = folder.resolve(config.model.model, config.model.revision)
    spec, length, _ = read_model(config, path)
    dtype = choose_dtype(config, spec, device)
    group = Group(size=config.model.tensor_parallel_size)  # the first of so many ranks, which exchanges nothing
    with compilers(device) as processes:  # weights stay what the memory held
        model = registry.build(
            spec, dtype, device, length,
            group=group, expert_parallel=config.model.expert_parallel, adapters=config.model.enable_lora,
        )  # fmt: skip
        options = runner_options(config, spec, model, length, device, dtype, group)
        compile_steps(model, options, options.step_tokens, None, processes)
        del model
        torch.cuda.empty_cache()
        table, choices = measure(plans, tunable(plans.asked), device, processes)
    keep(plans, table)
    if namespace.output:
        replace_file(output, encoded(table))
    print(text(choices))
    print(f"{plans.chip.name}: {len(table.plans)} products in {time.monotonic() - began:.1f} s")
    return ExitCode.ORDERLY


def text(choices: Sequence[Choice]) -> str:
    """A table with a line for each product and number of rows."""
    lines = [f"{'product':<30} {'rows':>5}  {'way':<34} {'us':>8}  {'by rules':>8}"]
    for one in choices:
        product = one.product
        kind = f"{product.experts} experts" if product.experts else "gated" if product.gated else ""
        name = f"{product.width} x {product.inputs} {kind}".rstrip()
        lines.append(f"{name:<30} {one.rows:>5}  {describe(one.way):<34} {one.microseconds:>8.1f}  {one.ruled:>8.1f}")
    return "\n".join(lines)
