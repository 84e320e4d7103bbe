"""What config.json says about images: the vision encoder, and how tokens of an image are turned. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from penstock.engine_core.images.processor_spec import ProcessorSpec
from penstock.engine_core.models.config_file import ROPE_KEYS, ConfigFile, refuse_unread
from penstock.engine_core.models.image_processor import find_file, read_processor
from penstock.engine_core.models.layer_spec import RopeSpec
from penstock.engine_core.models.reading import ModelFile
from penstock.engine_core.models.vision_kinds import VisionKind, vision_kind
from penstock.engine_core.models.vision_spec import VisionSpec

VISION = "vision_config"
SECTIONS, ALTERNATE = "mrope_section", "mrope_interleaved"


def served_kind(file: ConfigFile, folder: Path) -> VisionKind | None:
    """The vision encoder that a config.json has and that is served. None: it has none, one of a kind that is not
    served, or the folder has no image processor; then the text half is served alone."""
    named, values = file.get("architectures"), file.values.get(VISION)
    if not isinstance(named, list) or not isinstance(values, dict) or find_file(folder) is None:
        return None
    return vision_kind(named, values.get("model_type"))


def read_vision(file: ConfigFile, kind: VisionKind, folder: Path) -> VisionSpec:
    """The spec of a kind of encoder by the whole config.json and the image processor of the folder.

    Raises ModelError naming the file and the key: a size that is missing or impossible, a setting that changes
    arithmetic and is not known.
    """
    values = {kind.keys.get(key, key): value for key, value in file.values[VISION].items()}
    own = ModelFile(file.path, values, kind.defaults)

    def processor(cell: int) -> ProcessorSpec:
        found = read_processor(folder, str(file.get("model_type")), cell)
        assert found is not None, "its file is there"
        return found

    found = kind.read(own, ModelFile(file.path, file.values), processor)
    refuse_unread(own, kind.ignored)
    return found


def read_sections(
    rope: RopeSpec, head_dim: int, file: ConfigFile, inner: Mapping[str, Any], kind: VisionKind
) -> RopeSpec:
    """The positions of a layer with those of images. inner: the numbers of the text half. Raises ModelError."""
    values = next((found for key in ROPE_KEYS if isinstance(found := inner.get(key), dict)), {})
    own = ConfigFile(file.path, values)
    sections = own.get(SECTIONS) or kind.sections
    if own.flag(ALTERNATE, kind.sections_alternate) is not kind.sections_alternate:
        raise own.error(ALTERNATE, "this family has it the other way")
    pairs = (rope.dim or head_dim) // 2
    whole = isinstance(sections, list | tuple) and len(sections) == 3 and all(type(one) is int for one in sections)
    if not whole or min(sections) < 1 or sum(sections) != pairs:
        raise own.error(SECTIONS, f"three numbers are expected that add up to the {pairs} turned pairs of a head")
    return replace(rope, sections=tuple(sections), sections_alternate=kind.sections_alternate)
