"""Steps of Gated DeltaNet and Mamba-2 by the kernels against the definition in fp64, and beside others."""

from __future__ import annotations

import pytest
import torch

from penstock.kernels import recurrence_triton
from penstock.kernels.chip import Chip
from tests.kernels.state_scene import Row, batch_of, cache_of, exact, layer
from tests.kernels.test_recurrence_triton import LENGTH, run, step

pytestmark = pytest.mark.usefixtures("one_thread", "poisoned")


@pytest.mark.parametrize(("delta", "most_steps"), [(True, 1), (False, 1), (True, 3)])
def test_single_tokens(delta: bool, most_steps: int, device: str) -> None:
    """From an empty ring until it is full, and over its end; beside a row without tokens, and one with drafts."""
    drawn = layer(2, LENGTH, (1, 2), (24, 40), delta=delta, seed=9)
    steps = [[Row(0, 0, 62)], *([Row(0, at, 1, True), Row(1, 0, 0, True)] for at in range(62, 66)), [Row(0, 66, 60)]]
    steps += [[Row(0, at, 1, True)] for at in range(126, 130)]
    if most_steps > 1:
        steps += [[Row(1, at, most_steps, True), Row(0, 130 + at, 1, True)] for at in range(2)]
    results, states, bases = run(drawn.to(device, torch.float32), steps, most_steps)
    assert bases.tolist()[:2] == [0, 128]
    expected, held = exact(drawn, 0)
    end = 130 if most_steps == 1 else 132
    torch.testing.assert_close(results[0, :end].double(), expected[:end], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(states[1].double(), held[127], rtol=1e-4, atol=1e-5)


def test_a_single_token_has_the_same_bits_whether_others_may_have_drafts(device: str) -> None:
    given = layer(1, 80, (1, 1), (16, 48), delta=True, seed=10).to(device, torch.float32)
    steps = [[Row(0, 0, 62)], *([Row(0, at, 1, True)] for at in range(62, 66))]
    alone, among = run(given, steps, 1), run(given, steps, 5)
    assert torch.equal(alone[0][0, :66], among[0][0, :66])
    assert torch.equal(alone[1][1], among[1][1])


@pytest.mark.parametrize("delta", [True, False])
def test_a_single_token_has_the_same_bits_by_any_form(
    delta: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside few rows a program has few columns, beside many it has all."""
    given = layer(1, 90, (1, 2), (64, 64), delta=delta, seed=12).to(device, torch.float32)
    cache = cache_of(given, 2, 1)
    random = torch.Generator(device).manual_seed(13)
    for held in (cache.states, cache.keys, cache.values, cache.updates, cache.gates):
        if held is not None:
            held.normal_(generator=random)
    cache.gates[:, :, 0].abs_().mul_(-0.02)
    found = []
    for resident, columns in ((2, 32), (99, 16), (0, 64)):
        monkeypatch.setattr(recurrence_triton, "RESIDENT", resident)
        chip = Chip("", "", 90, 2, 0, pdl=False, tma=False, wgmma=False)
        assert recurrence_triton.token_form(2, 64, 64, chip)["COLUMNS"] == columns
        bases = torch.full((2,), 64, dtype=torch.int32, device=device)
        found.append(step(given, rows := [Row(0, 89, 1, True)], cache, batch_of(rows, bases, 1)))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_more_drafts_than_a_tile_of_eight(device: str) -> None:
    given = layer(1, 40, (1, 1), (16, 16), delta=True, seed=4)
    results, _, _ = run(given.to(device, torch.float32), [[Row(0, 0, 11, True)], [Row(0, 9, 12, True)]], 12)
    torch.testing.assert_close(results[0, :21].double(), exact(given, 0)[0][:21], rtol=1e-4, atol=1e-5)
