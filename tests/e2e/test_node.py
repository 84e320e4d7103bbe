"""Clients for Node against the embedded model: OpenAI's (client.mjs) and Vercel's AI SDK with its Anthropic provider
(vercel.mjs). Skipped where node or the packages cannot be had, which are installed once, into a folder of the user's
cache.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from tests.e2e.agents import node_package
from tests.e2e.server import Server

HERE = Path(__file__).parent


def told(server: Server, script: str, *packages: str) -> dict[str, Any]:
    """What a script found, with these packages beside it, where node looks for them."""
    place = node_package(*packages)
    (place / script).write_text((HERE / script).read_text())
    command = ["node", script, server.url]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_openai(server: Server) -> None:
    found = told(server, "client.mjs", "openai@^6")
    for name in ("chat", "response"):
        assert "585" in found[name]
        assert found[name] == found[f"{name}Stream"]
    for name in ("call", "callStream", "responseCall"):
        assert found[name]["name"] == "get_weather"
        assert json.loads(found[name]["arguments"]) == {"city": "Rome"}
    assert found["status"] == "completed"
    assert found["refusal"] == {"status": 400, "param": "temperature"}


def test_vercel(server: Server) -> None:
    found = told(server, "vercel.mjs", "ai@^6", "@ai-sdk/anthropic@^3")
    assert "585" in found["whole"]
    assert found["stream"] == found["whole"]
    assert found["calls"] == [["get_weather", {"city": "Rome"}]]
    assert "sunny" in found["answer"]
    assert found["finish"] == "stop"
    assert found["thought"]
    assert "585" in found["behind"]
