"""Sizes of models in use that are no multiple of 128, or large: hidden sizes of gpt-oss and Gemma 3, vocabularies up to
262,208, and rows of logits that begin beyond 2**31 elements."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from penstock.kernels.activation_triton import activate_rows
from penstock.kernels.linear_tilings import Tiling, VectorTiling
from penstock.kernels.linear_triton import multiply_tiles, multiply_tma, multiply_vector
from penstock.kernels.logprobs import token_logprobs
from penstock.kernels.logprobs_triton import score_tokens
from penstock.kernels.norm_triton import add_norm_rows, norm_rows
from penstock.kernels.records import MOST, Activation
from penstock.kernels.sampling import sample_entries
from penstock.kernels.sampling_triton import choose_tokens
from tests.kernels.sampling_scene import Row, scene

HIDDEN = (1152, 2880, 5376)
VOCABULARIES = (201088, 262208)
FAR = (1 << 30) + 64  # elements from one row to the next: the third begins behind 2**31


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("hidden", HIDDEN)
def test_norms_and_gates(hidden: int, device: str, poisoned: None) -> None:
    x, residual, weight = random(3, hidden), random(3, hidden), random(hidden)
    expected = functional.rms_norm(x, (hidden,), weight, 1e-6)
    torch.testing.assert_close(norm_rows(x.to(device), weight.to(device), 1e-6).cpu(), expected)
    normed, total = add_norm_rows(x.to(device), residual.to(device), weight.to(device), 1e-6)
    torch.testing.assert_close(total.cpu(), x + residual)
    torch.testing.assert_close(normed.cpu(), functional.rms_norm(x + residual, (hidden,), weight, 1e-6))
    fused = random(2, 2 * hidden)
    gate, up = fused.chunk(2, dim=-1)
    torch.testing.assert_close(
        activate_rows(fused.to(device), Activation("silu"), gated=True).cpu(), functional.silu(gate) * up
    )


@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize("outputs", [40, 72])
def test_products(hidden: int, outputs: int, device: str, poisoned: None) -> None:
    """Of one row and of several, with tiles that neither the inputs nor the outputs fill."""
    x, weight = random(5, hidden), random(outputs, hidden)
    expected = x @ weight.T
    found = [
        multiply_vector(x[:1].to(device), weight.to(device), None, VectorTiling(4, 512, 4), gated=False),
        multiply_tiles(x.to(device), weight.to(device), None, Tiling(16, 64, 256, 4, 2), gated=False),
        multiply_tma(x.to(device), weight.to(device), None, Tiling(16, 64, 128, 4, 2, tma=True), gated=False),
    ]
    for product in found:
        torch.testing.assert_close(product.cpu(), expected[: len(product)], rtol=1e-4, atol=1e-3)


ROWS = [
    Row(temperature=0),
    Row(top_k=40, top_p=0.9),
    Row(top_p=0.5, min_p=0.01),
    Row(temperature=0, presence=2.0, repetition=1.2, tokens=(5, 6, 5), prompt=1, bias=((262_000, 1.0),)),
]


def peaked(rows: int, vocabulary: int) -> Tensor:
    """Logits whose best tokens are at the end of the vocabulary, in its last span and group, which are not full."""
    logits = random(rows, vocabulary)
    logits[:, -3:] += 20.0
    return logits


@pytest.mark.parametrize("vocabulary", [pytest.param(VOCABULARIES[0], marks=pytest.mark.long), VOCABULARIES[1]])
def test_large_vocabularies(vocabulary: int, device: str, poisoned: None) -> None:
    """Kernels and references take the same tokens, and score them alike."""
    rows = [row if max((at for at, _ in row.bias), default=0) < vocabulary else Row() for row in ROWS]
    found = scene(rows, vocabulary)
    there = found.on(device)
    logits = peaked(len(rows), vocabulary)
    expected = sample_entries(logits, found.entries, found.sampling, found.history)
    chosen = choose_tokens(logits.to(device), there.entries, there.sampling, there.history)
    assert chosen.tokens.tolist() == expected.tokens.tolist()
    assert min(chosen.tokens.tolist()) >= vocabulary - 3
    widths = torch.full_like(found.sampling.logprobs, MOST)
    scores = token_logprobs(logits, expected.tokens, found.entries.slots, widths)
    scored = score_tokens(logits.to(device), chosen.tokens, there.entries.slots, widths.to(device))
    assert scored.ids.tolist() == scores.ids.tolist()
    assert scored.ranks.tolist() == scores.ranks.tolist()
    torch.testing.assert_close(scored.values.cpu(), scores.values, rtol=1e-4, atol=1e-4)


FAR_ROWS = [
    Row(temperature=0), Row(temperature=0), Row(presence=0.5, tokens=(1, 2), prompt=1), Row(temperature=0),
    Row(top_p=0.9), Row(top_k=200, top_p=0.9),
]  # fmt: skip


@pytest.fixture
def far_apart(tmp_path: Path) -> Tensor:
    """Rows of 300 logits, from the third on more than 2**31 elements behind the first, in a file that is mostly a
    hole."""
    count = len(FAR_ROWS)
    size = (count - 1) * FAR + 512
    with (tmp_path / "logits").open("wb") as file:
        file.truncate(2 * size)
    whole = torch.from_file(str(tmp_path / "logits"), shared=True, size=size, dtype=torch.bfloat16)
    rows = whole.as_strided((count, 300), (FAR, 1))
    rows.copy_(random(count, 300))
    return rows


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU would need the memory")
def test_rows_beyond_the_reach_of_32_bits(far_apart: Tensor) -> None:
    """As 16,384 rows of a vocabulary of 262,144 are: every kernel that reads logits finds its row."""
    found = scene(FAR_ROWS, 300)
    near = far_apart.contiguous()
    results = []
    for logits in (near, far_apart):
        chosen = choose_tokens(logits, found.entries, found.sampling, found.history)
        widths = torch.full_like(found.sampling.logprobs, MOST)
        scored = score_tokens(logits, chosen.tokens, found.entries.slots, widths)
        results.append((chosen.tokens.tolist(), scored.ids.tolist(), scored.ranks.tolist()))
    assert results[0] == results[1]
