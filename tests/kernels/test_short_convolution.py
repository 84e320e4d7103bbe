"""Short convolutions against torch's, however texts are cut, by the reference and by short_convolution_triton.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv1d, silu

from penstock.kernels.short_convolution import NO_HEADS, short_convolution
from penstock.kernels.short_convolution_triton import convolve_rows
from penstock.kernels.states import UnitHeads, convolution_length
from tests.kernels.state_scene import Row, batch_of, cut_at

pytestmark = pytest.mark.usefixtures("one_thread")

DRAFTS = 2
LENGTH = 36


def exact(x: Tensor, weight: Tensor, bias: Tensor | None, *, activated: bool, unit: UnitHeads) -> Tensor:
    """Of one text `[length, channels]`, in fp64."""
    wide = torch.nn.functional.pad(x.double().T, (weight.shape[1] - 1, 0))
    found = conv1d(wide, weight.double()[:, None], None if bias is None else bias.double(), groups=x.shape[1]).T
    found = silu(found) if activated else found
    heads = found[:, : unit.channels].unflatten(1, (unit.heads, unit.dim))
    heads = heads / (heads.square().sum(-1, keepdim=True) + unit.eps).sqrt()
    return torch.cat((heads.flatten(1), found[:, unit.channels :]), 1)


def run(
    x: Tensor, weight: Tensor, bias: Tensor | None, steps: list[list[Row]], activated: bool, unit: UnitHeads,
    by_kernel: bool = False,
) -> Tensor:  # fmt: skip
    """Of texts `[texts, length, channels]`, by the steps that computed each token last."""
    ring = torch.full((len(x) + 1, convolution_length(weight.shape[1], DRAFTS + 1), x.shape[2]), float("nan"))
    ring = ring.to(x.device, x.dtype)
    bases = torch.zeros(len(x) + 1, dtype=torch.int32, device=x.device)
    found = torch.full(x.shape, float("nan"), dtype=x.dtype, device=x.device)
    for rows in steps:
        batch = batch_of(rows, bases, DRAFTS + 1)
        wide = torch.cat([x[row.text, row.start : row.start + row.count] for row in rows]).repeat(1, 2)
        given = wide[:, : x.shape[2]], weight, bias, ring, batch
        made = convolve_rows(*given, activated, unit) if by_kernel else short_convolution(
            *given, activated=activated, unit=unit
        )  # fmt: skip
        first = 0
        for row in rows:
            found[row.text, row.start : row.start + row.count] = made[first : first + row.count]
            first += row.count
    return found.cpu()


def mixed_steps() -> list[list[Row]]:
    """Chunks of one text, one of them shorter than the width, beside steps of another, whose drafts are rejected."""
    steps = [[Row(1, at, 1 + DRAFTS, True), row] for at, row in enumerate(cut_at(0, 1, 3, 17, 18))]
    return steps + [[Row(1, at, 1 + DRAFTS, True), Row(0, at + 14, 1, True)] for at in range(4, 9)]


@pytest.mark.parametrize("by_kernel", [False, True])
@pytest.mark.parametrize(
    ("width", "bias", "activated", "unit"),
    [
        (4, False, True, UnitHeads(2, 8)), (4, True, True, NO_HEADS), (3, False, False, NO_HEADS),
        (2, True, False, NO_HEADS),
    ],
)  # fmt: skip
def test_definition_however_texts_are_cut(
    width: int, bias: bool, activated: bool, unit: UnitHeads, by_kernel: bool, device: str
) -> None:
    random = torch.Generator().manual_seed(width)
    x, weight = torch.randn(2, LENGTH, 24, generator=random), torch.randn(24, width, generator=random)
    given = torch.randn(24, generator=random) if bias else None
    on = x.to(device), weight.to(device), None if given is None else given.to(device)
    whole = run(*on, [cut_at(0, LENGTH), cut_at(1, LENGTH)], activated, unit, by_kernel)
    for text in range(2):
        expected = exact(x[text], weight, given, activated=activated, unit=unit)
        torch.testing.assert_close(whole[text].double(), expected, rtol=1e-5, atol=1e-5)
    cut = run(*on, mixed_steps(), activated, unit, by_kernel)
    few = {"rtol": 1e-5, "atol": 1e-6} if activated and not by_kernel else {"rtol": 0.0, "atol": 0.0}  # torch's silu
    torch.testing.assert_close(cut[0, :23], whole[0, :23], **few)
    torch.testing.assert_close(cut[1, :11], whole[1, :11], **few)


@pytest.mark.parametrize("by_kernel", [False, True])
def test_snapshots_hold_the_inputs_before_them(by_kernel: bool, device: str) -> None:
    """Those before a chunk are of the ring; others' lines and places stay as they are."""
    random = torch.Generator().manual_seed(4)
    x, weight = torch.randn(2, LENGTH, 24, generator=random).to(device), torch.randn(24, 4, generator=random).to(device)
    for cuts in ((LENGTH,), (14, 15, 31, 32, LENGTH)):
        ring = torch.full((3, convolution_length(4, 1), 24), float("nan"), device=device)
        tails = torch.full((4, 2, 3, 24), float("nan"), device=device)[:, 1]  # of one of two layers
        bases = torch.zeros(3, dtype=torch.int32, device=device)
        for number, row in enumerate(cut_at(0, *cuts, kept={16: 3, 32: 1})):
            rows = [Row(1, number, 1, True), row]
            batch = batch_of(rows, bases, 1)
            inputs = torch.cat([x[one.text, one.start : one.start + one.count] for one in rows])
            if by_kernel:
                convolve_rows(inputs, weight, None, ring, batch, True, NO_HEADS, tails)
            else:
                short_convolution(inputs, weight, None, ring, batch, tails=tails)
        assert torch.equal(tails[3], x[0, 13:16])
        assert torch.equal(tails[1], x[0, 29:32])
        assert tails[[0, 2]].isnan().all()


def test_a_type_of_16_bits() -> None:
    """Rounded once."""
    random = torch.Generator().manual_seed(9)
    x, weight = torch.randn(1, LENGTH, 8, generator=random).bfloat16(), torch.randn(8, 4, generator=random).bfloat16()
    found = run(x, weight, None, [cut_at(0, LENGTH)], activated=True, unit=NO_HEADS)
    expected = exact(x[0], weight, None, activated=True, unit=NO_HEADS).bfloat16()
    torch.testing.assert_close(found[0], expected, rtol=2 * torch.finfo(torch.bfloat16).eps, atol=1e-5)
