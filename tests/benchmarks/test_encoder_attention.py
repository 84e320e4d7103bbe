"""The benchmark of encoders' attention: what it tries. What it measures needs a GPU."""

from __future__ import annotations

from benchmarks.encoder_attention import TILES, forms_of


def test_heads_are_tried_padded_and_not() -> None:
    forms = {dim: list(forms_of(dim)) for dim in (64, 72, 80)}
    assert {form.columns for form in forms[64]} == {(64, 0)}
    for dim in (72, 80):
        assert {form.columns for form in forms[dim]} == {(128, 0), (64, 16)}
        assert len(forms[dim]) == 2 * len(TILES)
