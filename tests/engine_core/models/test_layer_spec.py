"""The docstring of LayerSpec names every option that a layer may have, with its source."""

from __future__ import annotations

import re

import msgspec
import pytest

from penstock.engine_core.models.layer_spec import (
    AttentionSpec,
    ExpertSpec,
    GateSpec,
    LayerSpec,
    MlpSpec,
    NormSpec,
    RopeSpec,
    RoutingSpec,
)

# What is no model's option: how a checkpoint or a cache holds something, and what others give.
HELD = frozenset(("kv_fp8", "kv_scales", "kv_group", "formats", "stacked", "shared_name", "bias_dims"))
SAID = frozenset(("slope", "limit", "shift", "kind"))  # "experts.gate clamped and shifted"


# Numbers of the kinds of positions, which RopeSpec's own docstring explains, and of `temperature`.
KINDS = frozenset((
    *("theta", "factor", "original_max_position", "attention_factor", "beta_fast", "beta_slow", "truncate"),
    *("low_freq_factor", "high_freq_factor", "short_factor", "long_factor", "temperature_length", "temperature_shift"),
))  # fmt: skip


@pytest.mark.parametrize(
    "spec", [RopeSpec, AttentionSpec, NormSpec, MlpSpec, RoutingSpec, GateSpec, ExpertSpec, LayerSpec]
)
def test_every_option_is_listed(spec: type[msgspec.Struct]) -> None:
    options = [field.name for field in msgspec.structs.fields(spec) if not field.required]
    listed = LayerSpec.__doc__ or ""
    missing = [name for name in options if name not in HELD | SAID | KINDS and not re.search(rf"\b{name}\b", listed)]
    assert missing == []
