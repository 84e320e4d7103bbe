"""Groups of modules with a scheme each, as compressed-tensors has them."""

from __future__ import annotations

from penstock.engine_core.models.quantization.compressed_tensors import selector


def test_targets_are_names_or_patterns() -> None:
    found = selector(["re:.*k_proj", "lm_head"])
    assert found.matches("layers.0.self_attn.k_proj")
    assert found.matches("lm_head")
    assert not found.matches("layers.0.self_attn.q_proj")
