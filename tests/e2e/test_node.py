"""OpenAI's client for Node against the embedded model (client.mjs); skipped where node or the package cannot be had.

The package is installed once, into a folder of the user's cache.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from tests.e2e.agents import node_package
from tests.e2e.server import Server

SCRIPT = Path(__file__).with_name("client.mjs")
PACKAGE = "openai@^6"


def test_node(server: Server) -> None:
    place = node_package(PACKAGE)
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
