"""OpenAI's client for Node against the embedded model (client.mjs); skipped where node or the package cannot be had.

The package is installed once, into a folder of the user's cache.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.server import Server

SCRIPT = Path(__file__).with_name("client.mjs")
PACKAGE = "openai@^6"
INSTALL_LIMIT = 120.0  # seconds


def folder() -> Path:
    """Where the package is; it skips the test where it cannot be had."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("node and npm are not installed")
    place = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "penstock" / "node"
    made = place / "made"  # an installation that was cut short leaves a folder as well
    if not made.exists():
        place.mkdir(parents=True, exist_ok=True)
        (place / "package.json").write_text('{"private": true, "type": "module"}')
        command = [npm, "install", "--no-audit", "--no-fund", PACKAGE]
        try:
            done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=INSTALL_LIMIT)
        except subprocess.TimeoutExpired:
            pytest.skip("npm took too long to install openai")
        if done.returncode:
            pytest.skip(f"npm cannot install openai: {done.stderr[-300:]}")
        made.touch()
    return place


def test_node(server: Server) -> None:
    place = folder()
    script = place / "client.mjs"  # beside its node_modules, where node looks for them
    script.write_text(SCRIPT.read_text())
    command = ["node", str(script), server.url]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    for name in ("chat", "response"):
        assert "585" in found[name]
        assert found[name] == found[f"{name}Stream"]
    for name in ("call", "callStream", "responseCall"):
        assert found[name]["name"] == "get_weather"
        assert json.loads(found[name]["arguments"]) == {"city": "Rome"}
    assert found["status"] == "completed"
    assert found["refusal"] == {"status": 400, "param": "temperature"}
