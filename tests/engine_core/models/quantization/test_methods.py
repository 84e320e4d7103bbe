"""Methods that say one thing of all matrices."""

from __future__ import annotations

from pathlib import Path

from penstock.engine_core.models.config_file import ConfigFile
from penstock.engine_core.models.quantization.methods import read_block


def test_a_block_is_outputs_and_inputs() -> None:
    assert read_block(ConfigFile(Path("config.json"), {"block": [128, 64]}), "block") == (128, 64)
