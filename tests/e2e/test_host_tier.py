"""KV blocks that leave a small device cache come back from the host's memory, through real processes: the same words,
cached tokens, metrics; and nothing is lost when the executor, or the scheduler, is killed meanwhile.
"""

from __future__ import annotations

import os
import select
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from benchmarks.samples import scrape, total
from penstock.engine_core.embedded import demo_folder
from penstock.engine_core.models.memory_estimate import block_bytes
from penstock.engine_core.models.spec import read_spec
from tests.e2e.server import LIMIT, Server, serving

BLOCKS, HOST_BLOCKS = 40, 400
EACH = block_bytes(read_spec(demo_folder()), 16, 4)
OPTIONS = (
    *("--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "4"),
    *("--kv-cache-memory", str((BLOCKS + 1) * EACH), "--kv-host-memory", str(HOST_BLOCKS * EACH)),
)
PLACES = ("river", "mountain", "harbour", "desert", "forest")


def prompt(place: str) -> str:
    return f"Once upon a time there was a {place}. " * 20


def said(server: Server, place: str, **more: Any) -> tuple[str, int, int]:
    """What the model goes on with, cached tokens, and those of the prompt."""
    body = {"model": "penstock-demo", "prompt": prompt(place), "temperature": 0, "max_tokens": 12, **more}
    answer = httpx.post(server.url + "/v1/completions", json=body, timeout=LIMIT).json()
    usage = answer["usage"]
    return answer["choices"][0]["text"], usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]


def until_metric(server: Server, name: str, least: float) -> None:
    deadline = time.monotonic() + LIMIT
    while total(scrape(server.url), name) < least:
        assert time.monotonic() < deadline, f"{name} stayed below {least}"
        select.select([], [], [], 0.05)


def test_prefixes_come_back_whatever_is_killed(tmp_path: Path) -> None:
    with serving(tmp_path, *OPTIONS) as server:
        first = {place: said(server, place) for place in PLACES}
        assert all(cached == 0 for _, cached, _ in first.values())
        again = {place: said(server, place) for place in PLACES}
        for place, (words, cached, length) in again.items():
            assert words == first[place][0]
            assert cached > length // 2
        until_metric(server, "engine_host_fetches_total", 3)
        until_metric(server, "executor_copied_bytes_total", 10 * EACH)
        engine = server.until("/health", lambda found: found["engine"]["host_blocks_held"] > BLOCKS)["engine"]
        assert engine["host_blocks"] == HOST_BLOCKS
        for role in ("executor", "scheduler"):
            with ThreadPoolExecutor(len(PLACES)) as threads:
                asked = [threads.submit(said, server, place) for place in PLACES for _ in range(3)]
                os.kill(server.children()[role], signal.SIGKILL)
                assert {one.result()[0] for one in asked} == {words for words, _, _ in first.values()}
            server.healthy()
        assert {said(server, place)[0] for place in PLACES} == {words for words, _, _ in first.values()}
        fetches = total(scrape(server.url), "engine_host_fetches_total")
        for place in PLACES:
            assert said(server, place)[0] == first[place][0]
        until_metric(server, "engine_host_fetches_total", fetches + 1)
        assert total(scrape(server.url), "engine_block_faults_total") == 0
