"""Metrics under another server's names: the same numbers, and only where they mean the same."""

from __future__ import annotations

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from penstock.protocol.config import ApiConfig, Config
from penstock.protocol.links import Role
from penstock.services.metrics import exposition
from penstock.services.metrics.definitions import METRICS, Kind, Subject
from penstock.services.metrics.snapshot import Snapshot
from tests.services.client.fake_engine import FakeLink, answering, app_state, client, words
from tests.services.metrics.snapshots import every, message, server

SAME = {  # of an engine, without labels of their own
    theirs: found for theirs, found in exposition.VLLM.items()
    if METRICS[found[0]].subject is Subject.ENGINE and not METRICS[found[0]].labels
}  # fmt: skip
SUFFIX = {Kind.COUNTER: "_total", Kind.HISTOGRAM: "_sum", Kind.GAUGE: ""}


def samples(families: list[Metric]) -> dict[tuple[str, ...], float]:
    """By name and values of labels other than the model's."""
    return {
        (s.name, *(value for name, value in sorted(s.labels.items()) if name != "model_name")): s.value
        for family in families
        for s in family.samples
    }


# What the dashboards of vLLM and of its production stack, the stack's router and endpoint pickers read.
READ = """
e2e_request_latency_seconds_bucket time_to_first_token_seconds_bucket inter_token_latency_seconds_bucket
time_per_output_token_seconds_sum request_time_per_output_token_seconds_bucket request_queue_time_seconds_sum
request_prefill_time_seconds_sum request_decode_time_seconds_sum request_inference_time_seconds_sum
request_prompt_tokens_bucket request_generation_tokens_bucket request_success_total prompt_tokens_total
generation_tokens_total num_requests_running num_requests_waiting kv_cache_usage_perc gpu_cache_usage_perc
prefix_cache_queries_total prefix_cache_hits_total gpu_prefix_cache_queries_total gpu_prefix_cache_hits_total
num_preemptions_total spec_decode_num_drafts_total spec_decode_num_draft_tokens_total
spec_decode_num_accepted_tokens_total spec_decode_num_accepted_tokens_per_pos_total cache_config_info
lora_requests_info
"""


async def test_every_name_that_others_read_is_there() -> None:
    port = FakeLink(answering(words("a")))
    async with client(app_state(port, metrics_alias="vllm")) as http:
        port.arrive(message(*server(engine_blocks=8, engine_lora_places=4)))
        text = (await http.get("/metrics")).text
    found = {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}
    assert {f"vllm:{name}" for name in READ.split()} <= found


async def test_aliases_say_what_ours_say() -> None:
    port = FakeLink(answering(words("a")))
    values = {name: 3.0 + place for place, (name, _) in enumerate(sorted(SAME.values()))}
    async with client(app_state(port, metrics_alias="vllm")) as http:
        port.arrive(message(every(Role.SCHEDULER, 1, **values)))
        text = (await http.get("/metrics")).text
    found = samples(list(text_string_to_metric_families(text)))
    for theirs, (ours, _) in SAME.items():
        suffix = SUFFIX[METRICS[ours].kind]
        assert found[theirs + suffix, "1"] == found[f"penstock_{ours}{suffix}", "1"] == values[ours], theirs


async def test_aliases_are_off_unless_asked_for() -> None:
    assert ApiConfig().metrics_alias == "none"
    async with client(app_state(FakeLink(answering(words("a"))))) as http:
        assert "vllm:" not in (await http.get("/metrics")).text


def test_every_name_of_ours_is_in_the_catalogue() -> None:
    several = {ours for names, _ in exposition.VLLM_INFO.values() for ours in names}
    assert several | {ours for ours, _ in exposition.VLLM.values()} <= set(METRICS)


def test_ends_are_told_by_their_reasons_and_errors_are_no_success() -> None:
    engine = every(Role.SCHEDULER, engine_ended=5)
    families = {family.name: family for family in exposition.vllm([("m", [engine])])}
    reasons = [sample.labels["finished_reason"] for sample in families["vllm:request_success"].samples]
    assert reasons == ["stop", "length", "abort"]
    places = families["vllm:spec_decode_num_accepted_tokens_per_pos"].samples
    assert [sample.labels["position"] for sample in places] == ["0", "1"]


def test_aliases_of_several_processes_are_one_series() -> None:
    apis = [
        every(Role.API, index, time_to_first_token_seconds=seconds, e2e_seconds=seconds)
        for index, seconds in enumerate((0.001, 0.02))
    ]
    families = {family.name: family for family in exposition.vllm([("m", [*apis, every(Role.SCHEDULER)])])}
    for name in ("vllm:time_to_first_token_seconds", "vllm:e2e_request_latency_seconds"):
        assert [s.value for s in families[name].samples if s.name.endswith("_count")] == [2]
        assert [s.value for s in families[name].samples if s.name.endswith("_sum")] == [pytest.approx(0.021)]
    assert {"model_name": "m", "engine": "0"} in [
        sample.labels for sample in families["vllm:num_requests_running"].samples
    ]


def engine(index: int, time: float, blocks: int, places: int, **names: tuple[str, ...]) -> Snapshot:
    found = every(Role.SCHEDULER, index, time, engine_blocks=blocks, engine_block_size=16, engine_lora_places=places)
    found.values["engine_lora_requests"] = {(state, name): 2.0 for state, several in names.items() for name in several}
    return found


def test_an_endpoint_picker_reads_the_cache_and_the_adapters() -> None:
    """Each gauge with the labels that the model server protocol has, as a text that Prometheus' parser takes."""
    engines = [
        engine(0, 1700000000.5, 4096, 4, running=("sql", "chat"), waiting=("law/v2",)),
        engine(1, 1700000001.5, 2048, 4),
    ]
    config = Config(api=ApiConfig(metrics_alias="vllm"))
    text = exposition.ServerCollector(config, engines, "m").text().decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    cache, lora = families["vllm:cache_config_info"], families["vllm:lora_requests_info"]
    assert cache.type == lora.type == "gauge"
    assert [(sample.labels, sample.value) for sample in cache.samples] == [
        ({"model_name": "m", "engine": "0", "block_size": "16", "num_gpu_blocks": "4096"}, 1),
        ({"model_name": "m", "engine": "1", "block_size": "16", "num_gpu_blocks": "2048"}, 1),
    ]
    labels = {"max_lora": "4", "running_lora_adapters": "chat,sql", "waiting_lora_adapters": "law/v2"}
    assert [(sample.labels, sample.value) for sample in lora.samples] == [
        ({"model_name": "m", "engine": "0", **labels}, 1700000000.5),
        ({"model_name": "m", "engine": "1", **dict.fromkeys(labels, ""), "max_lora": "4"}, 1700000001.5),
    ]
    for name in ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc", "gpu_cache_usage_perc"):
        assert families[f"vllm:{name}"].type == "gauge"
        assert [sample.labels["engine"] for sample in families[f"vllm:{name}"].samples] == ["0", "1"]


def test_what_an_engine_does_not_have_is_not_told() -> None:
    """Neither adapters without --enable-lora, nor a cache before the executors are ready."""
    families = {family.name for family in exposition.vllm([("m", [engine(0, 1.0, 0, 0)])])}
    assert not families & set(exposition.VLLM_INFO)


def test_without_processes_there_is_nothing_to_tell() -> None:
    assert list(exposition.vllm([("m", [])])) == []
    assert list(exposition.vllm([("m", [every(Role.EXECUTOR)])])) == []
