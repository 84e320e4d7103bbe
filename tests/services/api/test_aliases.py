"""Metrics under another server's names (aliases.py): the same numbers, and only where they mean the same."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine_core.histogram import Histogram, cumulated, merged
from protocol.config import ApiConfig
from services.api import aliases
from services.api.ledger import Entry
from services.api.metrics import FIRST_TOKEN, Traffic
from tests.services.api.pipe import FakePort, answering, client, service, status, words


async def test_aliases_say_what_ours_say() -> None:
    async with client(service(FakePort(answering(words("a"))), metrics_alias="vllm")) as http:
        text = (await http.get("/metrics")).text
    families = text_string_to_metric_families(text)
    found = {s.name: s.value for family in families for s in family.samples if len(family.samples) == 1}
    for name, ours in (
        ("vllm:num_requests_running", "penstock_engine_running"),
        ("vllm:num_requests_waiting", "penstock_engine_waiting"),
        ("vllm:prompt_tokens_total", "penstock_engine_prompt_tokens_total"),
        ("vllm:generation_tokens_total", "penstock_engine_output_tokens_total"),
        ("vllm:prefix_cache_hits_total", "penstock_engine_cached_tokens_total"),
        ("vllm:num_preemptions_total", "penstock_engine_preemptions_total"),
    ):
        assert found[name] == found[ours]
    blocks, free, idle = (found[f"penstock_engine_blocks{suffix}"] for suffix in ("", "_free", "_idle"))
    assert found["vllm:kv_cache_usage_perc"] == pytest.approx(1 - (free + idle) / blocks)


async def test_aliases_are_off_unless_asked_for() -> None:
    assert ApiConfig().metrics_alias == "none"
    async with client(service(FakePort(answering(words("a"))))) as http:
        assert "vllm:" not in (await http.get("/metrics")).text


def test_aliases_of_several_processes_are_one_series() -> None:
    parts = service(FakePort(answering(words("a"))))
    entries = []
    for index, seconds in enumerate((0.001, 0.02)):
        traffic = Traffic()
        traffic.timings.first_token.observe(seconds)
        entries.append(Entry.of(index, traffic, parts.pipeline.statistics()))
    families = {family.name: family for family in aliases.vllm(entries, status(), "m")}
    counts = [s.value for s in families["vllm:time_to_first_token_seconds"].samples if s.name.endswith("_count")]
    assert counts == [2]
    assert {"model_name": "m", "engine": "0"} in [
        sample.labels for sample in families["vllm:num_requests_running"].samples
    ]
    assert list(aliases.vllm([], None, "m")) == []


def test_histograms_are_merged_and_cumulated() -> None:
    several = []
    for seconds in (0.0005, 0.002, 1e9):
        histogram = Histogram(FIRST_TOKEN)
        histogram.observe(seconds)
        several.append(histogram.statistics())
    one = merged(several)
    assert one.total == pytest.approx(1e9 + 0.0025)
    assert sum(one.counts) == 3
    buckets = dict(cumulated(one))
    assert (buckets["0.001"], buckets["0.0025"], buckets["60.0"], buckets["+Inf"]) == (1, 2, 2, 3)


def test_an_engine_without_blocks_uses_none_of_them() -> None:
    assert aliases.used(status(blocks=0, blocks_free=0, blocks_idle=0)) == 0.0
    assert aliases.used(status(blocks=100, blocks_free=30, blocks_idle=20)) == 0.5
