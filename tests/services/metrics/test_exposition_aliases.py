"""Metrics under another server's names: the same numbers, and only where they mean the same."""

from __future__ import annotations

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from penstock.protocol.config import ApiConfig
from penstock.protocol.links import Role
from penstock.services.metrics import exposition
from penstock.services.metrics.definitions import METRICS, Kind, Subject
from tests.services.client.fake_engine import FakeLink, answering, app_state, client, words
from tests.services.metrics.snapshots import every, message

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
    assert {ours for ours, _ in exposition.VLLM.values()} <= set(METRICS)


def test_ends_are_told_by_their_reasons_and_errors_are_no_success() -> None:
    engine = every(Role.SCHEDULER, engine_ended=5)
    families = {family.name: family for family in exposition.vllm([engine], "m")}
    reasons = [sample.labels["finished_reason"] for sample in families["vllm:request_success"].samples]
    assert reasons == ["stop", "length", "abort"]
    places = families["vllm:spec_decode_num_accepted_tokens_per_pos"].samples
    assert [sample.labels["position"] for sample in places] == ["0", "1"]


def test_aliases_of_several_processes_are_one_series() -> None:
    apis = [
        every(Role.API, index, time_to_first_token_seconds=seconds, e2e_seconds=seconds)
        for index, seconds in enumerate((0.001, 0.02))
    ]
    families = {family.name: family for family in exposition.vllm([*apis, every(Role.SCHEDULER)], "m")}
    for name in ("vllm:time_to_first_token_seconds", "vllm:e2e_request_latency_seconds"):
        assert [s.value for s in families[name].samples if s.name.endswith("_count")] == [2]
        assert [s.value for s in families[name].samples if s.name.endswith("_sum")] == [pytest.approx(0.021)]
    assert {"model_name": "m", "engine": "0"} in [
        sample.labels for sample in families["vllm:num_requests_running"].samples
    ]


def test_without_processes_there_is_nothing_to_tell() -> None:
    assert list(exposition.vllm([], "m")) == []
    assert list(exposition.vllm([every(Role.EXECUTOR)], "m")) == []
