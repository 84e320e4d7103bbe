"""Whether a model sees images, and how their tokens are turned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from penstock.engine_core.models.spec import read_spec
from penstock.protocol.errors import ModelError
from tests.engine_core.models.vision_kinds.test_qwen import QWEN_3_VL_2B, QWEN_3_VL_PROCESSOR, QWEN_35_9B, read


def test_without_an_image_processor_the_text_half_is_served(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN_3_VL_2B))
    alone = read_spec(tmp_path)
    assert alone.vision is None
    assert "visual." in alone.unread
    assert not any(own.rope.sections for own in alone.attentions)


@pytest.mark.parametrize("config", [QWEN_3_VL_2B, QWEN_35_9B])
def test_without_vision_a_spec_is_that_of_the_text_half(config: dict[str, Any], tmp_path: Path) -> None:
    seeing = read(tmp_path, config)
    assert "visual." not in seeing.unread
    assert "audio_tower." in seeing.unread
    (tmp_path / "preprocessor_config.json").unlink()
    alone, blind = read_spec(tmp_path), seeing.without_vision()
    assert set(blind.unread) == set(alone.unread)
    assert replace(blind, unread=alone.unread) == alone
    assert alone.without_vision() is alone


@pytest.mark.parametrize("values", [None, {**QWEN_3_VL_2B["vision_config"], "model_type": "siglip_vision_model"}])
def test_an_encoder_of_another_kind_is_left_unread(values: Any, tmp_path: Path) -> None:
    assert read(tmp_path, {**QWEN_3_VL_2B, "vision_config": values}).vision is None


def test_settings_of_an_image_processor_may_stand_in_the_processors_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN_3_VL_2B))
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": QWEN_3_VL_PROCESSOR}))
    found = read_spec(tmp_path).vision
    assert found is not None
    assert found.processor.mean == (0.5, 0.5, 0.5)


@pytest.mark.parametrize(
    ("rope", "why"),
    [
        ({"mrope_section": [24, 20, 21]}, "add up to the 64 turned pairs"),
        ({"mrope_section": [24, 40]}, "three numbers"),
        ({"mrope_section": [24, 40, 0]}, "three numbers"),
        ({"mrope_section": "24"}, "three numbers"),
        ({"mrope_interleaved": False}, "the other way"),
    ],
)
def test_sections_that_do_not_fit_are_refused(rope: dict[str, Any], why: str, tmp_path: Path) -> None:
    text = QWEN_3_VL_2B["text_config"]
    changed = {**QWEN_3_VL_2B, "text_config": {**text, "rope_scaling": {**text["rope_scaling"], **rope}}}
    with pytest.raises(ModelError, match=why) as found:
        read(tmp_path, changed)
    assert next(iter(rope)) in str(found.value)


def test_a_file_that_is_silent_has_the_familys_sections(tmp_path: Path) -> None:
    changed = {**QWEN_3_VL_2B, "text_config": {**QWEN_3_VL_2B["text_config"], "rope_scaling": None}}
    rope = read(tmp_path, changed).attention.rope
    assert (rope.sections, rope.sections_alternate) == ((24, 20, 20), True)
