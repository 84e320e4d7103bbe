"""Rates and prices of images, and result files from before there were several rates (images.py)."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.adapters import write_adapters
from benchmarks.images import Beside, figures_of, table
from benchmarks.shapes import Shape, make_folder
from benchmarks.vision_shapes import TWO_ROPE, TWO_TEXT, TWO_TOWER, seeing
from penstock.engine_core.models.adapter_folder import read_adapter_folder
from penstock.engine_core.models.spec import read_spec

OLD: dict[str, Any] = {
    "model": "qwen3-vl-2b", "pixels": 448, "tokens": 210, "file_bytes": 9, "images_per_second": 100.4,
    "share_of_limit": 0.0772, "ttft_ms": 27.5, "known_ttft_ms": 8.5, "text_ttft_ms": 7.3, "tpot_ms": 2.0,
    "tpot_with_images_ms": 2.2, "tpot_with_text_ms": 2.06, "offered": 4.0, "price": 10.0, "text_price": 3.0,
    "errors": {},
}  # fmt: skip


def test_the_price_of_encoding_is_what_images_cost_beyond_their_tokens() -> None:
    found = Beside(offered=1.0, tpot_ms=2.0, with_images_ms=2.2, with_text_ms=2.06)
    assert (found.price, found.text_price) == (10.0, 3.0)
    assert found.encoder_price == pytest.approx(7.0)


def test_older_files_have_one_rate() -> None:
    (found,) = figures_of({"figures": [OLD]})
    assert table([found]).splitlines()[2] == (
        "| Qwen3-VL-2B | 448 x 448, 210 tokens | 100 | 8% | 27.5 | 8.5 | 7.3 | 4/s | 2.00 → 2.20 | +10.0 % | +3.0 % "
        "| +7.0 % |"
    )
    without = {key: value for key, value in OLD.items() if "text_" not in key or key == "text_ttft_ms"}
    (found,) = figures_of({"figures": [{key: value for key, value in without.items() if key != "tpot_with_text_ms"}]})
    assert table([found]).endswith("| +10.0 % |  |  |"), "what was not measured is not told"


def test_each_rate_has_a_row() -> None:
    rates = [{"offered": rate, "tpot_ms": 2.0, "with_images_ms": 2.1, "with_text_ms": 2.0} for rate in (1.0, 4.0)]
    rows = table(figures_of({"figures": [{**OLD, "beside": rates}]})).splitlines()[2:]
    assert [row.split(" | ")[7] for row in rows] == ["1/s", "4/s"]
    assert rows[1].startswith("|  |  |  |")


def test_an_adapter_of_a_model_that_sees(tmp_path: Any) -> None:
    text = {**TWO_TEXT, "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 64, "vocab_size": 4104}
    tower = {**TWO_TOWER, "out_hidden_size": 64, "deepstack_visual_indexes": [5]}
    shape = Shape("small", "", seeing(text, tower, TWO_ROPE))
    ((_, adapter),) = write_adapters(shape, tmp_path, 4, 1)
    (tmp_path / "model").mkdir()
    folder = make_folder(shape, tmp_path / "model")
    assert len(read_adapter_folder(adapter, read_spec(folder), 16).matrices) == 14
