from __future__ import annotations

import subprocess
import sys

import torch

from penstock.engine_core.distributed.group import Group
from penstock.engine_core.models.registry import build
from tests.engine_core.models.test_layers import SPEC


def test_a_share_of_a_model() -> None:
    part = build(SPEC, torch.bfloat16, torch.device("meta"), 16, group=Group(1, 2))
    assert (part.placement.rank, part.placement.size) == (1, 2)
    assert part.blocks[0].mlp.gate_up.weight.shape == (20, 12)
    assert [table.shape for table in part.ropes.values()] == [(16, 6)]


def test_the_product_imports_no_models_of_transformers() -> None:
    script = "import sys, penstock.engine_core.models.registry, penstock.engine_core.loading\n"
    script += "print('transformers' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=True)
    assert found.stdout.strip() == "False"
