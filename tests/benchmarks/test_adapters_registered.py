"""Registered adapters under measurement: how they are given, and what is told of their first tokens."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from benchmarks import adapters_registered
from benchmarks.adapters_registered import ASKED, body, first_tokens, summary, ways
from benchmarks.cpu_seconds import memory


def test_each_way_names_all_adapters_or_their_folder(tmp_path: Path) -> None:
    found = ways([("a", tmp_path / "a"), ("b", tmp_path / "b")], tmp_path)
    assert found["off"] == []
    assert found["modules"][-2:] == [f"--lora-modules=a={tmp_path}/a", f"--lora-modules=b={tmp_path}/b"]
    assert found["directory"][-2:] == ["--lora-dir", str(tmp_path)]


def test_the_first_request_of_an_adapter_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[str] = set()

    def first_token(url: str, request: bytes) -> float:
        name = json.loads(request)["model"]
        later = 1.0 if name in seen else 100.0
        seen.add(name)
        return later

    class Server:
        url = ""

    monkeypatch.setattr(adapters_registered, "first_token", first_token)
    found = first_tokens(Server(), [f"a{number}" for number in range(ASKED)])  # type: ignore[arg-type]
    assert {kind: set(times) for kind, times in found.items()} == {"model": {1.0}, "never seen": {100.0}, "seen": {1.0}}
    assert summary({"seen": [1.0, 5.0, 9.04]}) == {"seen": {"median": 5.0, "worst": 9.0}}
    assert json.loads(body("a"))["stream"]


def test_memory_is_that_of_this_process() -> None:
    assert (1 << 20) < memory(os.getpid())["launcher"] < (1 << 36)
