"""A kernel in Gluon gives way to a general one, whatever is wrong with it, and a line of the log says why."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

GENERAL = {
    "attention_kernel", "prefix_kernel", "schedule_kernel", "tile_kernel", "vector_kernel", "tma_kernel",
    "tiles_kernel", "activation_kernel", "norm_kernel", "quantize_kernel", "scaled_tile_kernel", "scaled_tma_kernel",
    "scaled_vector_kernel", "rescale_kernel", "plane_kernel", "dequantize_kernel", "route_kernel", "count_kernel",
    "place_kernel", "scaled_expert_kernel", "sum_kernel",
}  # fmt: skip
IN_GLUON = {  # and what is launched for them alone
    "attention_hopper": {"chunk_kernel"},
    "experts_hopper": {"block_kernel", "pairs_kernel"},
    "grouped_hopper": {"plane_wide_kernel"},
    "linear_hopper": {"pipelined_kernel"},
    "scaled_hopper": {"split_kernel"},
}


@pytest.fixture(scope="module")
def run() -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.gluon_fallback"]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=True)


@pytest.fixture(scope="module")
def launched(run: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    return {name: set(kernels) for name, kernels in json.loads(run.stdout).items()}


def test_hopper_is_served_by_gluon(launched: dict[str, Any]) -> None:
    assert launched["all"] == GENERAL.union(*IN_GLUON.values())


@pytest.mark.parametrize("module", IN_GLUON)
def test_one_that_is_given_up_is_launched_no_more_and_the_others_are(module: str, launched: dict[str, Any]) -> None:
    assert launched[module] == launched["all"] - IN_GLUON[module]


@pytest.mark.parametrize("state", ["none", "renamed"])
def test_without_gluon_as_it_was_the_general_kernels_serve(state: str, launched: dict[str, Any]) -> None:
    assert launched[state] == GENERAL


def test_each_failure_is_said_once(run: subprocess.CompletedProcess[str]) -> None:
    assert run.stderr.count("kernel_unavailable") == 3 * len(IN_GLUON)
