"""The kernel that only reads. Its import stands in the test: it brings Triton, whose interpreter other tests choose
when they are collected."""

from __future__ import annotations

import torch


def test_every_number_is_read_once() -> None:
    from benchmarks.read_bandwidth import ROUNDS, read

    for count in (1, 100, 64 * ROUNDS, 64 * ROUNDS * 3 + 7):
        source = torch.arange(count, dtype=torch.float32)
        found = read(source, 64, 4)
        assert len(found) == -(-count // (64 * ROUNDS))
        parts = torch.nn.functional.pad(source, (0, len(found) * 64 * ROUNDS - count)).view(len(found), -1)
        torch.testing.assert_close(found, parts.sum(1))
