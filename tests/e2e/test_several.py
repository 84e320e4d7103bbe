"""A server with several api and tokenizer processes behind one port."""

from __future__ import annotations

import http.client
import json
import os
import select
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.services.metrics.definitions import METRICS, Kind
from tests.e2e.server import LIMIT, Server, command_line, descendants, serving
from tests.e2e.test_processes import wait_gone

APIS, TOKENIZERS = 3, 2
CONNECTIONS = 64


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    counts = ("--api-processes", str(APIS), "--tokenizer-processes", str(TOKENIZERS))
    with serving(tmp_path_factory.mktemp("several"), *counts) as server:
        yield server


def connection(server: Server) -> http.client.HTTPConnection:
    host, port = server.url.removeprefix("http://").split(":")
    return http.client.HTTPConnection(host, int(port), timeout=120)


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


def every_api(
    connection: http.client.HTTPConnection, name: str, done: Callable[[dict[str, float]], bool]
) -> dict[str, float]:
    """A metric by api process, once every process is in it and `done` holds of it."""
    deadline = time.monotonic() + LIMIT
    while len(found := metrics(connection, name)) < APIS or not done(found):
        assert time.monotonic() < deadline, found
        select.select([], [], [], 0.05)
    return found


def scraped(connection: http.client.HTTPConnection) -> dict[tuple[str, str, str], float]:
    """Every sample by its name, role and index, summed over its other labels."""
    connection.request("GET", "/metrics")
    found: Counter[tuple[str, str, str]] = Counter()
    for family in text_string_to_metric_families(connection.getresponse().read().decode()):
        for one in family.samples:
            found[one.name, one.labels.get("role", ""), one.labels.get("index", "")] += one.value
    return dict(found)


def until(
    connection: http.client.HTTPConnection, told: Callable[[dict[tuple[str, str, str], float]], bool]
) -> dict[tuple[str, str, str], float]:
    """A scrape that tells what is waited for."""
    deadline = time.monotonic() + LIMIT
    while not told(found := scraped(connection)):
        assert time.monotonic() < deadline, found
        select.select([], [], [], 0.1)
    return found


def roles(server: Server) -> Counter[str]:
    found: Counter[str] = Counter()
    for pid in descendants(server.process.pid):
        words = command_line(pid)[:4]
        found.update(role for role in ("api", "tokenizer", "scheduler", "executor") if role.encode() in words)
    return found


def test_every_process_runs_and_every_api_sees_every_tokenizer(several: Server) -> None:
    found = roles(several)
    assert (found["api"], found["tokenizer"], found["scheduler"], found["executor"]) == (APIS, TOKENIZERS, 1, 1)
    with closing(connection(several)) as one:
        every_api(one, "penstock_connected_tokenizers", lambda linked: set(linked.values()) == {TOKENIZERS})
    health = several.until("/health", lambda health: health["ready"])
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
        name = "penstock_completion_tokens_total"
        before = sum(every_api(kept[0], name, lambda _: True).values())
        texts = {ask(one, 8) for one in kept}
        assert len(texts) == 1
        every_api(kept[0], name, lambda told: sum(told.values()) - before == 12 * 8)


IMAGES = ("images", "refused_images", "image_decodings", "image_workers", "image_waiting", "image_cache_bytes")
HOST = ("engine_lora_requests", "executor_copied_bytes", "executor_copy_seconds", "executor_disk_copied_bytes",
        "executor_disk_seconds")  # fmt: skip
# Once there are any, where images are seen, and with adapters or blocks in the host's memory or on disk.
SELDOM = {
    "engine_ended",
    "engine_accepted_tokens_by_position",
    "rejected_requests",
    "image_pixel_bytes",
    *IMAGES,
    *HOST,
}
CPU = "penstock_process_cpu_seconds_total"


def test_one_scrape_has_the_figures_of_every_process(several: Server) -> None:
    suffixes = {Kind.COUNTER: "_total", Kind.HISTOGRAM: "_count", Kind.GAUGE: ""}
    wanted = {f"penstock_{one.name}{suffixes[one.kind]}" for one in METRICS.values() if one.name not in SELDOM}
    with closing(connection(several)) as one:
        ask(one, 4)
        until(
            one,
            lambda found: (
                found.get(("penstock_engine_queue_seconds_count", "", ""), 0) > 0
                and sum(name == CPU for name, _, _ in found) == APIS + TOKENIZERS + 2
                and wanted <= {name for name, _, _ in found}
            ),
        )


def test_a_dead_process_leaves_no_series_and_comes_back_counted(several: Server) -> None:
    with closing(connection(several)) as one:
        starts, epoch = ("penstock_process_starts_total", "executor", "0"), ("penstock_engine_epoch", "", "")
        before = until(one, lambda found: (CPU, "executor", "0") in found and epoch in found)
        victim = several.children()["executor"]
        with several.no_restarts():
            os.kill(victim, signal.SIGKILL)
            gone = until(one, lambda found: (CPU, "executor", "0") not in found)
        assert gone["penstock_processes", "executor", ""] == 0
        assert gone["penstock_configured_processes", "executor", ""] == 1
        # The scheduler tells of its epoch, which may be a scrape later than the executor's own figures.
        back = until(one, lambda found: (CPU, "executor", "0") in found and found.get(epoch, 0) > before[epoch])
    assert back[starts] == before[starts] + 1


def test_the_end_is_orderly(tmp_path: Path) -> None:
    with serving(tmp_path, "--api-processes", "2") as server:
        pids = descendants(server.process.pid)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(LIMIT) == 0
        assert not list(server.run_dir.glob("api-*"))
        wait_gone(pids)
