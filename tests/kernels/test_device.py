"""The device of the tensors decides: a CPU is served by the references and needs no Triton."""

from __future__ import annotations

import subprocess
import sys

CALLS = """
import sys, torch
from penstock.kernels.activation import activate
from penstock.kernels.records import (AttentionBatch, AttentionOptions)
from penstock.kernels.attention import (paged_attention)
from penstock.kernels.norm import add_norm
from penstock.kernels.rope import (rotate_and_store)
from penstock.kernels.records import (Rotation)
import penstock.engine_core.models.registry, penstock.engine_core.execution.model_runner

x, pages = torch.ones(1, 2, 8), torch.zeros(2, 4, 2, 8)
one = torch.ones(1, dtype=torch.int32)
q = rotate_and_store(x, x, x, Rotation(x[:, :1], x[:, :1]), pages, pages, one.long())
batch = AttentionBatch(torch.tensor([0, 1]), one, one * 0, one[None], one.long(), 1, 1)
paged_attention(q, pages, pages, batch, AttentionOptions(1.0))
add_norm(x[0], x[0], x[0, 0], 1e-5)
activate(x[0])
print("triton" in sys.modules)
"""


def test_a_cpu_needs_no_triton() -> None:
    run = subprocess.run([sys.executable, "-c", CALLS], capture_output=True, text=True, timeout=300, check=False)
    assert run.stdout == "False\n", run.stderr
