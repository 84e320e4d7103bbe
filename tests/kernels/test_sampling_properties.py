"""The sampler's kernels under any mixture of parameters on logits full of equals: sampling_triton.py."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from tests.kernels.sampling_runs import check
from tests.kernels.sampling_scene import Row


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    levels=some.lists(some.integers(-6, 6), min_size=1, max_size=6),
    temperature=some.sampled_from([0.0, 0.5, 1.0, 3.0]),
    top_k=some.integers(0, 310),
    top_p=some.sampled_from([1.0, 0.999, 0.9, 0.5, 0.05]),
    min_p=some.sampled_from([0.0, 0.01, 0.5, 1.0]),
    seed=some.integers(-(2**63), 2**63 - 1),
    vocabulary=some.sampled_from([1, 37, 130, 300]),  # each is compiled on a GPU
)
def test_equal_logits_are_kept_or_left_together(
    levels: list[int], temperature: float, top_k: int, top_p: float, min_p: float, seed: int, vocabulary: int,
    device: str,
) -> None:  # fmt: skip
    chance = np.random.default_rng(seed % 1000)
    logits = torch.from_numpy(chance.choice(np.array(levels, np.float32), (3, vocabulary)))
    top_k = top_k if top_k < vocabulary else 0
    row = Row(temperature, min_p, top_k, top_p, seed=seed, tokens=(0,))
    check(logits, [row, dataclasses.replace(row, seed=-seed - 1, presence=0.5), row], device)
