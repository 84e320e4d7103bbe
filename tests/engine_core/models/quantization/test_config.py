"""`quantization_config` as published checkpoints have it, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.engine_core.models.config_file import ConfigFile
from penstock.engine_core.models.quantization.config import read_quantization
from penstock.engine_core.models.quantization.rules import Quantization
from penstock.protocol.errors import ModelError


def read(names: tuple[str, ...] = (), **values: Any) -> Quantization | None:
    return read_quantization(ConfigFile(Path("/models/m/config.json"), {"quantization_config": values}), names)


def test_a_config_without_the_key_is_not_quantized() -> None:
    assert read_quantization(ConfigFile(Path("/models/m/config.json"), {})) is None


def test_an_unknown_method_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match="quantized by bitsandbytes; Penstock reads fp8, compressed-tensors, awq"):
        read(quant_method="bitsandbytes", load_in_4bit=True)
