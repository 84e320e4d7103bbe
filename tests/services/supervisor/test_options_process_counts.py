"""Numbers of processes: what was given holds, what was left open follows the cores."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.protocol.config import ApiConfig, Config, TokenizerConfig
from penstock.services.supervisor.options import sized, usable_cores


@pytest.mark.parametrize(
    ("cores", "apis", "tokenizers"), [(1, 1, 1), (2, 1, 1), (3, 1, 1), (4, 2, 1), (7, 2, 1), (8, 4, 2), (128, 4, 2)]
)
def test_processes_follow_the_cores(cores: int, apis: int, tokenizers: int) -> None:
    found = sized(Config(), cores)
    assert (found.api.api_processes, found.tokenizer.tokenizer_processes) == (apis, tokenizers)
    assert sized(found, 1) == found


def test_what_was_given_holds() -> None:
    given = Config(api=ApiConfig(api_processes=7, port=9), tokenizer=TokenizerConfig(tokenizer_processes=5))
    assert sized(given, 2) == given
    assert sized(Config(api=ApiConfig(api_processes=7)), 2).tokenizer.tokenizer_processes == 1


@pytest.mark.parametrize(("text", "most"), [("200000 100000", 2), ("50000 100000", 1), ("max 100000", 4096)])
def test_a_quota_bounds_the_cores(text: str, most: int, tmp_path: Path) -> None:
    quota = tmp_path / "cpu.max"
    quota.write_text(text + "\n")
    assert 1 <= usable_cores(quota) <= most


@pytest.mark.parametrize("text", ["", "nonsense"])
def test_without_a_quota_the_affinity_counts(text: str, tmp_path: Path) -> None:
    quota = tmp_path / "cpu.max"
    alone = usable_cores(quota)
    quota.write_text(text)
    assert usable_cores(quota) == alone >= 1
