"""The text of /metrics, of several processes."""

from __future__ import annotations

from penstock.protocol.config import Config
from penstock.protocol.links import Role
from penstock.services.metrics import definitions
from penstock.services.metrics.exposition import ServerCollector
from penstock.services.metrics.requests import Traffic
from penstock.services.metrics.snapshot import Snapshot
from tests.services.metrics.snapshots import every, server


def api(index: int, tokens: int) -> Snapshot:
    traffic = Traffic()
    traffic.answered("/v1/completions", 200, 3, tokens, 0.5)
    traffic.timings.first_token.observe(0.004)
    found = every(Role.API, index, unfinished_requests=index)
    found.collect(definitions.TRAFFIC, traffic)
    return found


def test_a_scrape_keeps_the_processes_apart() -> None:
    text = ServerCollector(Config(), [api(0, 1), api(1, 10), *server()], "m").text().decode()
    lines = text.splitlines()
    assert 'penstock_completion_tokens_total{api="0"} 1.0' in lines
    assert 'penstock_completion_tokens_total{api="1"} 10.0' in lines
    assert 'penstock_unfinished_requests{api="1"} 1.0' in lines
    assert 'penstock_time_to_first_token_seconds_count{api="1"} 1.0' in lines
    assert 'penstock_requests_total{api="0",endpoint="/v1/completions",status="200"} 1.0' in lines
    assert 'penstock_process_cpu_seconds_total{index="1",role="api"} 0.0' in lines
    assert 'penstock_processes{role="api"} 2.0' in lines
    families = [line for line in lines if line.startswith("# TYPE")]
    assert len(families) == len(set(families))  # each family once, whatever the number of processes
    assert ServerCollector(Config(), [api(0, 1)], "m").text().decode().count("penstock_engine") == 0
