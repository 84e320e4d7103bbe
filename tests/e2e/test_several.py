"""A server with several api and tokenizer processes behind one port."""

from __future__ import annotations

import http.client
import json
import select
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.server import Server, descendants, serving

APIS, TOKENIZERS = 3, 2
CONNECTIONS = 64


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    counts = ("--api-processes", str(APIS), "--tokenizer-processes", str(TOKENIZERS))
    with serving(tmp_path_factory.mktemp("several"), *counts) as server:
        yield server


def connection(server: Server) -> http.client.HTTPConnection:
    host, port = server.url.removeprefix("http://").split(":")
    return http.client.HTTPConnection(host, int(port), timeout=60)


def ask(connection: http.client.HTTPConnection, tokens: int) -> str:
    """The text of a stream's deltas."""
    body = {"prompt": "What is 2 + 3?", "max_tokens": tokens, "ignore_eos": True, "stream": True, "temperature": 0}
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    answer = connection.getresponse()
    assert answer.status == 200
    events = [line[6:] for line in answer.read().split(b"\n") if line.startswith(b"data: {")]
    return "".join(choice["text"] for event in events for choice in json.loads(event)["choices"])


def metrics(connection: http.client.HTTPConnection, name: str) -> dict[str, float]:
    """A metric by api process, the one that answered first."""
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    samples = [one for family in text_string_to_metric_families(text) for one in family.samples if one.name == name]
    return {one.labels["api"]: one.value for one in samples}


def roles(server: Server) -> Counter[str]:
    found: Counter[str] = Counter()
    for pid in descendants(server.process.pid):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        found.update(role for role in ("api", "tokenizer", "scheduler", "executor") if role.encode() in words[:4])
    return found


def test_every_process_runs_and_every_api_sees_every_tokenizer(several: Server) -> None:
    found = roles(several)
    assert (found["api"], found["tokenizer"], found["scheduler"], found["executor"]) == (APIS, TOKENIZERS, 1, 1)
    with closing(connection(several)) as one:
        linked = metrics(one, "penstock_connected_tokenizers")
        one.request("GET", "/health")
        health = json.load(one.getresponse())
    assert linked == {str(index): TOKENIZERS for index in range(APIS)}
    assert health["ready"]
    assert health["parts"]["tokenizer"] == {"connected": TOKENIZERS, "configured": TOKENIZERS}


def test_kept_connections_are_spread(several: Server) -> None:
    """The kernel spreads them by a hash of the client's port: not evenly, but no process gets none or nearly all."""
    with ExitStack() as stack:
        kept = [stack.enter_context(closing(connection(several))) for _ in range(CONNECTIONS)]
        answering = Counter(next(iter(metrics(one, "penstock_unfinished_requests"))) for one in kept)
    assert len(answering) == APIS
    assert min(answering.values()) >= CONNECTIONS / APIS / 5
    assert max(answering.values()) <= CONNECTIONS / APIS * 2


def test_all_of_them_give_the_same_text_and_a_scrape_counts_them_all(several: Server) -> None:
    with ExitStack() as stack:
        kept = [stack.enter_context(closing(connection(several))) for _ in range(12)]
        before = sum(metrics(kept[0], "penstock_completion_tokens_total").values())
        texts = {ask(one, 8) for one in kept}
        assert len(texts) == 1
        deadline = time.monotonic() + 30
        while sum(metrics(kept[0], "penstock_completion_tokens_total").values()) - before != 12 * 8:
            assert time.monotonic() < deadline
            select.select([], [], [], 0.05)


def test_the_end_is_orderly(tmp_path: Path) -> None:
    with serving(tmp_path, "--api-processes", "2") as server:
        pids = descendants(server.process.pid)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 0
        assert not list(server.run_dir.glob("api-*"))
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
