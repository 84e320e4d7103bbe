"""Which modules a rule means."""

from __future__ import annotations

from penstock.engine_core.models.quantization.rules import Selector


def test_a_name_means_the_module_and_all_below() -> None:
    selector = Selector(names=frozenset(("layers.1.mlp",)))
    assert selector.matches("layers.1.mlp.gate_proj")
    assert not selector.matches("layers.11.mlp.gate_proj")
    assert not selector.matches("layers.1.mlp_gate")
