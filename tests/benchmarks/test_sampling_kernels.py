"""What the sampler's benchmark counts, and that its batches are those that it names. Its import stands in the tests: it
brings Triton, whose interpreter other tests choose when they are collected."""

from __future__ import annotations

import pytest
import torch

from penstock.kernels.records import DRAWS, PENALTIES, TOP_K, TOP_P


def test_logits_are_read_once() -> None:
    from benchmarks.kernels import READ
    from benchmarks.sampling_kernels import read_time

    assert read_time(64, 128256) == pytest.approx(64 * 128256 * 2 / READ * 1e6)


def test_every_shape_has_a_step_to_be_measured_by() -> None:
    from benchmarks.sampling_kernels import SHAPES, STEP

    assert {rows for rows, _ in SHAPES} == set(STEP)


def test_greedy_rows_come_first_for_they_are_what_prices_are_over() -> None:
    from benchmarks.sampling_kernels import GREEDY, MIXES

    assert MIXES[0] == ("greedy", (GREEDY,))
    assert len({name for name, _ in MIXES}) == len(MIXES)


def test_a_batch_holds_its_mix_in_turn() -> None:
    from benchmarks.sampling_kernels import KNOWN, MIXES, Batch

    mixes = dict(MIXES)
    batch = Batch(4, 500, mixes["half greedy, half seeded"], torch.device("cpu"))
    assert batch.sampling.uses.tolist() == [0, DRAWS, 0, DRAWS, 0]
    assert batch.sampling.seed.tolist()[:4] == [0, 1, 2, 3]
    assert batch.history.known.tolist() == [KNOWN] * 5
    batch = Batch(2, 500, mixes["top_k 40, top_p 0.95"], torch.device("cpu"))
    assert batch.sampling.uses.tolist() == [DRAWS | TOP_K | TOP_P] * 2 + [0]
    assert Batch(1, 500, mixes["penalties"], torch.device("cpu")).sampling.uses[0] == DRAWS | PENALTIES
    assert Batch(1, 500, mixes["logprobs 5"], torch.device("cpu")).sampling.logprobs[0] == 5


def test_a_batch_runs_on_a_cpu_too() -> None:
    from benchmarks.sampling_kernels import KNOWN, MIXES, Batch

    for _, mix in MIXES:
        batch = Batch(2, 200_000, mix, torch.device("cpu"))
        batch.run(torch.randn(2, 200_000))
        assert batch.history.known.tolist() == [KNOWN + 1] * 2 + [KNOWN]


def test_a_line_says_what_was_measured() -> None:
    from benchmarks.sampling_kernels import Cost, line

    cost = Cost(
        mix="greedy", rows=64, vocabulary=1000, spread=1.0, microseconds=12.34, read=3.0, price=0.0125
    )  # fmt: skip
    assert line(cost).startswith("greedy ")
    assert line(cost).endswith("64 x 1000 spread 1.0     12.3 us (read   3.0)  +1.25 %")
