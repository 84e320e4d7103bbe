"""The placement benchmark without its servers: what it asks, what it reckons, what it writes."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from benchmarks.placement import (
    BLOCK,
    POLICIES,
    RESULTS,
    Figures,
    Load,
    compared,
    converse,
    line,
    parser,
    recomputed,
    settled,
    write,
)

LOAD = Load(conversations=3, turns=2, shared=32, history=10, more=4, output=2, open=2)


def figures(policy: str, speed: float, hits: float = 0.5) -> Figures:
    return Figures(
        policy=policy, seconds=2.0, requests=6, prompt_tokens=100, cached_tokens=50, output_tokens=12,
        output_tokens_per_second=speed / 10, tokens_per_second=speed, hit_rate=hits, shares=(0.25, 0.75),
    )  # fmt: skip


class Answers(BaseHTTPRequestHandler):
    """A server that says the same two tokens and keeps what it was asked."""

    asked: list[dict[str, Any]]
    finished = 0

    def log_message(self, *words: object) -> None:
        """Nothing."""

    def reply(self, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        self.reply({"choices": [{"token_ids": [7, 8]}], "usage": {"completion_tokens": 2}})

    def do_GET(self) -> None:
        type(self).finished += 1  # heartbeats count on
        self.reply({"engine": {"finished": self.finished}})


@contextmanager
def answering() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    asked: list[dict[str, Any]] = []
    kind = type("Asked", (Answers,), {"asked": asked, "finished": 0})
    with ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", asked
        finally:
            server.shutdown()
            thread.join()


def test_what_is_said_in_all() -> None:
    assert LOAD.own == 10 + 4 + 2 * 2
    assert LOAD.total() == 32 + 3 * LOAD.own


def test_each_turn_goes_on_from_what_was_said() -> None:
    with answering() as (url, asked):
        seconds, requests, outputs = asyncio.run(converse(url, LOAD, 4096, "m"))
    assert (requests, outputs) == (6, 12)
    assert seconds > 0
    prompts = [body["prompt"] for body in asked]
    assert Counter(map(len, prompts)) == {32 + 10: 3, 32 + 10 + 2 + 4: 3}
    assert len({tuple(prompt[:32]) for prompt in prompts}) == 1, "all begin with the same"
    firsts = {tuple(prompt[:42]) for prompt in prompts if len(prompt) == 42}
    assert len(firsts) == 3
    for prompt in prompts:
        assert tuple(prompt[:42]) in firsts
        assert len(prompt) == 42 or prompt[42:44] == [7, 8]
    assert {(body["model"], body["max_tokens"], body["temperature"], body["ignore_eos"]) for body in asked} == {
        ("m", 2, 0, True)
    }


def test_the_same_conversations_each_time() -> None:
    said = []
    for _ in range(2):
        with answering() as (url, asked):
            asyncio.run(converse(url, LOAD, 4096, "m"))
        said.append(sorted(body["prompt"] for body in asked))
    assert said[0] == said[1]


def test_it_waits_until_heartbeats_count_all() -> None:
    with answering() as (url, _):
        assert settled(url, 3)["engine"]["finished"] == 3


def test_medians_of_rounds_are_compared() -> None:
    runs = [figures(name, speed) for speed in (100.0, 300.0, 200.0) for name in POLICIES]
    assert compared(runs).ratio == 1.0
    runs = [figures("prefix", 300.0, 0.9), figures("round_robin", 150.0, 0.4)]
    found = compared(runs)
    assert (found.ratio, found.hit_rate) == (2.0, {"prefix": 0.9, "round_robin": 0.4})
    assert found.output_tokens_per_second == {"prefix": 30.0, "round_robin": 15.0}


def test_the_published_rates_follow_from_their_counts() -> None:
    """Output tokens stand by themselves: cached prompt tokens are not work."""
    for path in RESULTS.parent.glob("placement_*.json"):
        report = json.loads(path.read_text())
        assert recomputed(report) == report, path.name
        for run in report["runs"]:
            assert run["output_tokens_per_second"] == run["output_tokens"] / run["seconds"]


def test_a_line_says_rates_and_shares() -> None:
    assert line(figures("prefix", 300.0, 0.9)).split() == [
        "prefix", "2.0", "s", "30.0", "output", "tokens/s", "300", "with", "prompts", "90.0%", "found,", "by",
        "replica", "25%", "75%",
    ]  # fmt: skip


def test_a_report_has_what_is_needed_to_repeat_it(tmp_path: Path) -> None:
    options = parser().parse_args(["--to", str(tmp_path / "out.json"), "--replicas", "2"])
    options.rest = ["--device", "cpu"]
    runs = [figures(name, speed) for name, speed in zip(POLICIES, (300.0, 150.0), strict=True)]
    write(options, LOAD, runs)
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["comparison"]["ratio"] == 2.0
    assert (found["replicas"], found["model"], found["server"]) == (2, "embedded", ["--device", "cpu"])
    assert Load(**found["load"]) == LOAD
    assert [run["policy"] for run in found["runs"]] == list(POLICIES)
    assert found["cache_tokens_per_replica"] >= BLOCK


def test_options_of_the_server_stand_behind_two_dashes() -> None:
    options = parser().parse_args(["--turns", "8", "--", "--device", "cuda"])
    assert (options.turns, options.rest, options.conversations) == (8, ["--device", "cuda"], 64)
    assert isinstance(options, argparse.Namespace)
    with pytest.raises(SystemExit):
        parser().parse_args(["--nonsense"])
