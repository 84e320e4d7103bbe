"""Adapters under measurement: what is written, and who is asked for."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from safetensors import safe_open

from benchmarks.adapters import main, skewed, write_adapters
from benchmarks.shapes import SMOKE


def test_adapters_have_seven_matrices_of_each_layer(tmp_path: Path) -> None:
    found = write_adapters(SMOKE, tmp_path, 4, 6)
    assert [name for name, _ in found] == [f"a{number}" for number in range(6)]
    with safe_open(found[5][1] / "adapter_model.safetensors", "pt") as file:
        names = list(file.keys())
        down = file.get_tensor("base_model.model.model.layers.0.mlp.down_proj.lora_A.weight")
    assert len(names) == 2 * 7 * SMOKE.config["num_hidden_layers"]
    assert down.shape == (4, SMOKE.config["intermediate_size"])
    told = json.loads((found[5][1] / "adapter_config.json").read_text())
    assert (told["r"], len(told["target_modules"])) == (4, 7)


def test_few_adapters_are_asked_for_often() -> None:
    drawn = skewed(256, 4000)
    count = Counter(variant.body["model"] for variant in drawn)
    assert len({variant.name for variant in drawn}) == 4000
    assert 1.5 < count["a0"] / count["a1"] < 2.5
    assert count["a0"] > 20 * count["a99"] > 0
    assert drawn == skewed(256, 4000)


@pytest.mark.long
def test_a_small_run_from_end_to_end(tmp_path: Path) -> None:
    output = tmp_path / "found.json"
    arguments = [
        "--smoke",
        "--places",
        "2",
        "--swap",
        "3",
        "--swap-places",
        "2",
        "--rank",
        "4",
        "--output",
        str(output),
    ]
    assert main(arguments) == 0
    told = msgspec.json.decode(output.read_bytes())
    assert {one["rows"] for one in told["figures"]} == {"off", "base", "one", "each", "held", "swap"}
    assert all(one["tpot_ms"] > 0 and not one["errors"] for one in told["figures"])
    assert [one["rows"] for one in told["figures"] if one["share"] is not None] == ["swap"]
    assert all((one["price"] is None) == (one["rows"] in ("off", "held", "swap")) for one in told["figures"])
