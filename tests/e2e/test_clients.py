"""Clients that stand on top of others, each against the embedded model: instructor, langchain-openai, litellm.

Each pins an openai of its own, so each runs its script of tests/e2e/clients in an environment of its own, which is made
once, in a folder of the user's cache, and needs nothing of ours: `pytest -m long tests/e2e/test_clients.py`. A test is
skipped where its client cannot be had. Last run on 2026-11-21, all answers right: instructor 1.17.0 (openai 3.3.0),
langchain-openai 1.7.3 (openai 3.54.0), litellm 1.106.2 (openai 2.54.0).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.server import Server

pytestmark = pytest.mark.long
SCRIPTS = Path(__file__).with_name("clients")
PACKAGES = {
    "instructor": ("instructor>=1.13",),
    "langchain": ("langchain-openai>=1",),
    "litellm": ("litellm>=1.80", "mcp>=1"),  # it imports mcp without asking for it
}
INSTALL_LIMIT = 600.0  # seconds
RUN_LIMIT = 300.0
WEATHER = [{"name": "get_weather", "args": {"city": "Rome"}}]


def interpreter(client: str) -> Path:
    """Python of the environment that has this client; it skips the test where it cannot be had."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    place = cache / "penstock" / "clients" / client
    python, made = place / "bin" / "python", place / "made"
    if not made.exists():
        install = (str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *PACKAGES[client])
        for command in ((sys.executable, "-m", "venv", "--clear", str(place)), install):
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_LIMIT)
            except subprocess.TimeoutExpired:
                pytest.skip(f"it took too long to install {client}")
            if done.returncode:
                pytest.skip(f"{client} cannot be installed: {done.stderr[-300:]}")
        made.touch()
    return python


def told(server: Server, client: str) -> dict[str, Any]:
    """What the client's script found."""
    command = [str(interpreter(client)), str(SCRIPTS / f"with_{client}.py"), server.url]
    environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false"}  # stay at home
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_LIMIT, env=environment)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(client, found["version"])
    return found


def test_instructor(server: Server) -> None:
    found = told(server, "instructor")
    for way in ("schema", "tools"):
        assert found[way]["stream"] == found[way]["whole"]
        assert found[way]["whole"]["age"] == 5
    assert found["tools"]["whole"]["name"] == "Tom"
    assert found["async"] == found["schema"]["whole"]


def test_langchain(server: Server) -> None:
    found = told(server, "langchain")
    for way in ("chat", "responses"):
        assert "585" in found[way]["whole"]
        assert found[way]["stream"] == found[way]["whole"]
        assert found[way]["calls"] == found[way]["called"] == WEATHER
        assert found[way]["structure"]["age"] == 5
    assert found["async"] == [found["chat"]["whole"], found["responses"]["whole"]]
    assert found["vectors"] == [320, True]


def test_litellm(server: Server) -> None:
    found = told(server, "litellm")
    for way in ("openai", "anthropic"):
        assert "585" in found[way]["whole"]
        assert found[way]["stream"] == found[way]["async"] == found[way]["whole"]
        assert found[way]["calls"] == found[way]["called"] == WEATHER
    assert found["vectors"] == [320, True]
