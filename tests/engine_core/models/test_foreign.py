"""Folders of other formats; how a start ends with them is in tests/services/supervisor/test_preflight_folders.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.engine_core.models.foreign import FORMATS, LAYOUT, beside, foreign


@pytest.mark.parametrize(("pattern", "text"), FORMATS, ids=[pattern for pattern, _ in FORMATS])
def test_each_format_is_told(pattern: str, text: str, tmp_path: Path) -> None:
    file = tmp_path / pattern.replace("**", "deep").replace("*", "x")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    said = foreign(tmp_path)
    assert said.startswith(text.partition("{}")[0])
    assert said.endswith(text.partition("{}")[2])
    assert "{" not in said


def test_a_model_that_lacks_its_weights_is_not_sought_below(tmp_path: Path) -> None:
    for name in ("config.json", "1_Pooling/config.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert foreign(tmp_path) == LAYOUT


def test_what_came_from_the_hub_lacks_what_is_not_fetched(tmp_path: Path) -> None:
    (tmp_path / "snapshots" / "0123").mkdir(parents=True)
    assert "fetches neither pickles nor GGUF" in foreign(tmp_path / "snapshots" / "0123")


def test_a_model_alone_has_nothing_beside_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    assert beside(tmp_path) is None
