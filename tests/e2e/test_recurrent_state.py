"""A model with recurrent layers through real processes: the second turn of a conversation begins from a snapshot, and
/health, the metrics and `penstock plan` tell of snapshots. A tiny random Qwen 3.5 with the embedded model's tokenizer.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from benchmarks.samples import scrape, total
from penstock.engine_core.embedded import demo_folder
from penstock.engine_core.models.spec import read_spec
from tests.e2e.server import LIMIT, serving
from tests.engine_core.models.families.test_qwen_next import CASES
from tests.engine_core.models.parity import SIZES, write_checkpoint

PLACES = 12
SYSTEM = "You answer in a few words. " * 16
SNAPSHOT = 2 * (4 * 8 * 12 * 4 + 3 * (2 * 2 * 8 + 4 * 12) * 4)  # bytes
OPTIONS = ("--state-snapshots", str(PLACES), "--dtype", "float32", "--max-model-len", "1024")
HOST = ("--state-host-memory", str(5 * SNAPSHOT + 1))


def write_model(folder: Path) -> Path:
    kind, options = CASES["qwen3_5"]
    vocabulary = read_spec(demo_folder()).vocab_size
    write_checkpoint(folder, kind(**{**SIZES, **options, "vocab_size": vocabulary, "max_position_embeddings": 1024}))
    for file in demo_folder().iterdir():
        if "token" in file.name or file.name == "chat_template.jinja":
            (folder / file.name).symlink_to(file)
    return folder


def test_the_second_turn_begins_from_a_snapshot(tmp_path: Path) -> None:
    model, place = write_model(tmp_path / "model"), tmp_path / "server"
    place.mkdir()
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Hello there."}]
    with serving(place, *OPTIONS, *HOST, "--served-model-name", "hybrid", model=str(model)) as server:

        def said(**more: Any) -> tuple[str, int, int]:
            """What the model writes, and how much of how long a prompt was found."""
            body = {"model": "hybrid", "messages": messages, "temperature": 0, "max_tokens": 30, **more}
            answer = httpx.post(server.url + "/v1/chat/completions", json=body, timeout=LIMIT).json()
            usage = answer["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            return answer["choices"][0]["message"]["content"], cached, usage["prompt_tokens"]

        first, cached, length = said()
        assert cached == 0
        assert length > 128
        messages.extend([{"role": "assistant", "content": first}, {"role": "user", "content": "And what else?"}])
        second, cached, _ = said()
        assert cached >= 128
        assert cached % 64 == 0
        cold, other, _ = said(cache_salt="of its own")
        assert (cold, other) == (second, 0)
        engine = server.until("/health", lambda found: found["engine"]["state_snapshots"] > 0)["engine"]
        assert (engine["state_places"], engine["state_host_places"], engine["state_host_snapshots"]) == (PLACES, 5, 0)
        deadline = time.monotonic() + LIMIT
        while total(samples := scrape(server.url), "engine_state_hits_total") < 1:
            assert time.monotonic() < deadline, "the scheduler's metrics stayed as they were"
            select.select([], [], [], 0.05)
        assert total(samples, "engine_state_places") == PLACES
        assert total(samples, "engine_state_host_places") == 5
        assert total(samples, "engine_state_kept_total") > 0
    command = [sys.executable, "-m", "penstock", "plan", str(model), *OPTIONS, "--gpu", "h200", "--json"]
    plan = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=LIMIT).stdout)
    assert plan["snapshots"] == PLACES
    assert plan["snapshot_bytes"] == SNAPSHOT
