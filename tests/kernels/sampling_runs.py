"""Running the sampler's kernels on rows, and comparing each entry with the plain steps."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import torch

from penstock.kernels.sampling_triton import Cut, choose_tokens
from tests.kernels.sampling_scene import Row, entry_rows, scene, scores

SMALL = Cut(span=128, group=8, piece=128, sweep=128, tile=64, few=32)
VOCABULARY = 300  # the third span is not full
NEAR = 1e-4  # between scores that float32 may swap
BORDER = 1e-5  # of the mass, within which a token may be kept or left by top_p


def sample(logits: torch.Tensor, rows: Sequence[Row], device: str, cut: Cut = SMALL, padding: int = 0) -> list[int]:
    """The tokens of all entries; logits [rows, vocabulary]."""
    vocabulary = logits.shape[1]
    found = scene(rows, vocabulary, padding).on(device)
    lines = torch.cat([logits, torch.full((padding, vocabulary), math.nan, dtype=logits.dtype)])[found.row_of]
    tokens = choose_tokens(lines.to(device), found.entries, found.sampling, found.history, cut).tokens
    assert tokens[len(tokens) - padding :].tolist() == [-1] * padding
    return tokens.tolist()[: len(tokens) - padding]


def check(logits: torch.Tensor, rows: Sequence[Row], device: str, cut: Cut = SMALL) -> list[int]:
    """Every entry took what the plain steps give."""
    tokens = sample(logits, rows, device, cut)
    lines = logits.double().numpy()[np.repeat(np.arange(len(rows)), [1 + len(row.drafts) for row in rows])]
    for token, row, line in zip(tokens, entry_rows(rows), lines, strict=True):
        expected = scores(line, row)
        if expected[token] > expected.max() - NEAR:
            continue
        lower, upper = (
            scores(line, dataclasses.replace(row, top_p=row.top_p + shift)) for shift in (-BORDER, BORDER)
        )  # fmt: skip
        assert max(lower[token] - lower.max(), upper[token] - upper.max()) > -NEAR, row
    return tokens


WAYS = [
    Row(temperature=0),
    Row(),
    Row(temperature=0.7),
    Row(min_p=0.1),
    Row(top_k=5),
    Row(top_k=1),
    Row(top_k=35),  # as many as are held at once, and more groups than there are spans
    Row(top_k=90),  # more than the groups
    Row(top_k=299),
    Row(top_p=0.9),
    Row(top_p=0.3),
    Row(top_p=0.01),
    Row(top_p=0.9, min_p=0.05),
    Row(top_k=20, top_p=0.9, min_p=0.02, temperature=0.8),
    Row(top_k=100, top_p=0.5, min_p=0.001, temperature=1.5),
    Row(repetition=1.3, frequency=0.4, presence=-0.3, tokens=(5, 6, 5, 6, 7, 6), prompt=2),
    Row(temperature=0, repetition=1.3, frequency=0.4, presence=1.3, tokens=(5, 6, 5, 6, 7, 6), prompt=2),
    Row(bias=((7, 3.0), (130, 9.0), (299, -100.0)), top_k=8),
    Row(allowed=(3, 9, 27, 40, 150, 299)),
    Row(mask=tuple(range(0, 300, 7)), top_k=50, top_p=0.9),
    Row(mask=tuple(range(0, 300, 3)), allowed=tuple(range(0, 300, 5)), temperature=0),
    Row(bad_words=((4,), (2, 3, 5), (3, 6), (1, 2, 3, 7)), tokens=(1, 2, 3), prompt=1, temperature=0.3),
    Row(forbidden_until=((10, 99), (11, 2)), bias=((10, 5.0), (11, 5.0)), temperature=0.9),
    Row(bad_words=((5, 6, 4), (6, 8), (3, 5, 6, 9)), repetition=1.5, drafts=(5, 6), forbidden_until=((9, 6), (7, 5))),
    Row(frequency=2.0, presence=1.0, drafts=(7, 7, 7), temperature=0, top_p=0.9),
]
