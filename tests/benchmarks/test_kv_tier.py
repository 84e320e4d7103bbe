from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import kv_tier
from benchmarks.kv_tier import Sizes
from benchmarks.shapes import SHAPES, make_folder


def test_the_server_has_room_for_the_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten times the device's cache fit the machine, and a prompt with its turns the model's length."""
    monkeypatch.setattr(kv_tier, "available_memory", lambda: 118 << 30)
    folder = make_folder(SHAPES["8b"], tmp_path)
    words, sizes, host = kv_tier.arguments_of(SHAPES["8b"], folder, Sizes(), smoke=False)
    assert sizes == Sizes()
    assert host > 10 * sizes.cache
    assert int(words[words.index("--kv-host-memory") + 1]) == host // 16 * (2 << 20)
    monkeypatch.setattr(kv_tier, "available_memory", lambda: 32 << 30)
    _, sizes, _ = kv_tier.arguments_of(SHAPES["8b"], folder, Sizes(), smoke=False)
    assert 0 < sizes.cache < Sizes().cache


@pytest.mark.long
def test_a_try_of_the_disk_on_a_cpu(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    assert kv_tier.main(["--smoke", "--disk", str(tmp_path / "kv"), "--output", str(output)]) == 0
    found = json.loads(output.read_bytes())["figures"]
    assert found["reads_beside"] > 0
    assert found["disk_hit_tokens"] > 200
    assert found["failed_blocks"] == 0


@pytest.mark.long
def test_a_try_on_a_cpu(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    assert kv_tier.main(["--smoke", "--output", str(output)]) == 0
    found = json.loads(output.read_bytes())["figures"]
    assert found["hit_rate"] > 0.8
    assert found["fetches_beside"] > 0
    assert found["host_hit_tokens"] > 200
