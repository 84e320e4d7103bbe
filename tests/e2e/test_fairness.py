"""A flood of one client and the short request of another, on a real server with the embedded model."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.samples import read_samples, total
from tests.e2e.server import LIMIT, Server, serving

FLOOD = {"prompt": "Once upon a time", "max_tokens": 3000, "ignore_eos": True, "stream": True}
PROBE = {"prompt": "Hello", "max_tokens": 8, "ignore_eos": True, "stream": True}
ONE, OTHER = ({"authorization": f"Bearer {key}"} for key in ("one", "other"))


@contextmanager
def flooded(server: Server, headers: dict[str, str], n: int, users: bool) -> Iterator[list[float]]:
    """Four requests of `n` choices of 3000 tokens that take every slot, each over a connection of its own and with a
    user that was made up. The list gets the times at which they end; in the end they are given up."""
    ended: list[float] = []
    leave = threading.Event()

    def ask(number: int) -> None:
        body = {**FLOOD, "n": n, **({"user": f"invented-{number}"} if users else {})}
        with httpx.stream("POST", server.url + "/v1/completions", json=body, headers=headers, timeout=LIMIT) as answer:
            for line in answer.iter_lines():
                if line == "data: [DONE]":
                    ended.append(time.monotonic())
                if leave.is_set():
                    return

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    try:
        yield ended
    finally:
        leave.set()
        for thread in threads:
            thread.join(LIMIT)


def probed(server: Server, headers: dict[str, str], **fields: Any) -> tuple[float, int]:
    """Seconds until the first token of a short request, and its tokens."""
    began, first, tokens = time.monotonic(), 0.0, 0
    body = {**PROBE, **fields, "stream_options": {"include_usage": True}}
    with httpx.stream("POST", server.url + "/v1/completions", json=body, headers=headers, timeout=LIMIT) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                frame = json.loads(line[6:])
                if frame["usage"]:
                    tokens = frame["usage"]["completion_tokens"]
                first = first or time.monotonic() - began
    return first, tokens


def counted(server: Server, name: str, headers: dict[str, str]) -> float:
    text = httpx.get(server.url + "/metrics", headers=headers, timeout=LIMIT).text
    return total(read_samples(text), f"engine_{name}")


def full(server: Server, slots: int, headers: dict[str, str]) -> None:
    """Wait until every slot is taken and others wait."""
    while counted(server, "running", headers) < slots or not counted(server, "waiting", headers):
        pass


def test_short_requests_pass_a_flood_that_holds_every_slot(tmp_path: Path) -> None:
    """Of another key, of another user of the flood's own key, and of another connection: all are over while the flood's
    requests, of which each would write for minutes, go on."""
    options = ("--max-num-seqs", "32", "--api-key", "one,other")
    with serving(tmp_path, *options) as server, flooded(server, ONE, 32, users=True) as ended:
        full(server, 32, ONE)
        for headers, fields in ((OTHER, {}), (ONE, {"user": "somebody"}), (ONE, {})):
            _, tokens = probed(server, headers, **fields)
            assert tokens == 8
        assert ended == []


@pytest.mark.long
def test_the_first_token_comes_within_two_seconds(tmp_path: Path) -> None:
    """Four requests of 128 choices of 3000 tokens, where 256 run at once."""
    with serving(tmp_path) as server, flooded(server, {}, 128, users=False) as ended:
        full(server, 256, {})
        found = [probed(server, {}) for _ in range(5)]
        print("first tokens after", [f"{first:.2f} s" for first, _ in found])
        assert [tokens for _, tokens in found] == [8] * 5
        assert max(first for first, _ in found) < 2.0
        assert ended == []
