"""Which models have which encoder, and that each is whole."""

from __future__ import annotations

import importlib

from penstock.engine_core.models.families import families
from penstock.engine_core.models.vision.tower import Tower
from penstock.engine_core.models.vision_kinds import vision_kind, vision_kinds


def test_every_kind_belongs_to_a_model_that_is_served() -> None:
    wrappers = {name for family in families().values() for name in family.wrappers}
    own = [name for kind in vision_kinds() for name in kind.wrappers]
    assert set(own) <= wrappers
    assert len(set(own)) == len(own)


def test_every_kind_has_an_encoder() -> None:
    for kind in vision_kinds():
        module = kind.read.__module__.rpartition(".")[2]
        found = importlib.import_module(f"penstock.engine_core.models.vision.{module}").TOWER
        assert issubclass(found, Tower)


def test_an_encoder_is_found_by_architecture_and_type() -> None:
    named = ["Other", "Qwen3VLForConditionalGeneration"]
    found = vision_kind(named, "qwen3_vl")
    assert found is not None
    assert found is vision_kind(named, None)
    assert vision_kind(named, "pixtral") is None
    assert vision_kind(["Qwen3ForCausalLM"], None) is None
