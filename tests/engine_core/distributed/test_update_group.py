"""A group with a trainer of another process, which makes it as SGLang's trainers do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from penstock.engine_core.distributed.update_group import UpdateGroup
from tests.services.links.network import free_port

TRAINER = Path(__file__).parents[2] / "e2e" / "trainer.py"
CPU = torch.device("cpu")


def test_tensors_come_in_their_order_until_the_trainer_ends(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 2), "b": torch.arange(4, dtype=torch.bfloat16), "c": torch.randn(())}
    save_file(tensors, tmp_path / "f")
    port = free_port()
    command = [sys.executable, str(TRAINER), str(port), "2", "policy", str(tmp_path / "f")]
    trainer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    group = UpdateGroup("policy", "127.0.0.1", port, 1, 2, "gloo")
    try:
        assert trainer.stdin is not None
        trainer.stdin.write("0 3\n")
        trainer.stdin.flush()
        for tensor in tensors.values():
            assert torch.equal(group.receive(tuple(tensor.shape), tensor.dtype, CPU), tensor)
        trainer.kill()
        with pytest.raises(RuntimeError):
            group.receive((3, 2), torch.float32, CPU)
    finally:
        trainer.kill()
        trainer.communicate()
        group.leave()
