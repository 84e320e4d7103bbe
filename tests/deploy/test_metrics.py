"""What dashboards and alerts ask for is what /metrics has; and /metrics is as Prometheus wants it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from protocol.config import Config
from services.api.scrape import Scrape
from tests.services.api.pipe import FakePort, answering, client, service, words
from tests.services.figures import census

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
DASHBOARDS = tuple(sorted((DEPLOY / "grafana").glob("*.json")))
NAME = re.compile(r"\b(penstock|vllm)[_:][a-z0-9_:]+")
UNITLESS = re.compile(r"_(ms|millis|milliseconds|minutes|percent|kb|mb)(_|$)")


async def exported() -> list[Metric]:
    """Everything that a server can export, alias included, after a streamed request and one that is refused."""
    port = FakePort(answering(words("a", "b", "c")))
    parts = service(port, metrics_alias="vllm")
    async with client(parts) as http:
        port.arrive(census())
        await http.post("/v1/chat/completions", json={})
        await http.post(
            "/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hello"}], "stream": True}
        )
        answer = await http.get("/metrics")
    return list(text_string_to_metric_families(answer.text))


def expressions() -> Iterator[tuple[str, str]]:
    """Every query of dashboards and rules, with where it stands."""
    for path in DASHBOARDS:
        board = json.loads(path.read_text())
        for panel in board["panels"]:
            yield from ((f"{path.name}: {panel['title']}", target["expr"]) for target in panel.get("targets", ()))
        for variable in board["templating"]["list"]:
            yield f"{path.name}: ${variable['name']}", variable["query"]
    for group in rules()["groups"]:
        yield from ((f"alerts: {rule['alert']}", rule["expr"]) for rule in group["rules"])


def rules() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yaml").read_text())
    return found


async def test_every_name_that_is_asked_for_is_exported() -> None:
    known = {sample.name for family in await exported() for sample in family.samples}
    known |= {family.name + "_total" for family in await exported() if family.type == "counter"}
    wrong = [
        f"{where}: {name[0]}" for where, query in expressions() for name in NAME.finditer(query) if name[0] not in known
    ]
    assert wrong == []


async def test_labels_that_are_asked_for_are_there() -> None:
    known: dict[str, set[str]] = {}
    for family in await exported():
        for sample in family.samples:
            known.setdefault(sample.name, {"job", "instance"}).update(sample.labels)
    for where, query in expressions():
        for name, selector in re.findall(r"((?:penstock|vllm)[_:][a-z0-9_:]+)\{([^}]*)\}", query):
            for label in re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector):
                assert label in known.get(name, {label}), f"{where}: {name} has no label {label}"


def test_queries_are_balanced_and_counters_are_rates() -> None:
    for where, query in expressions():
        assert all(query.count(left) == query.count(right) for left, right in ("()", "[]", "{}")), where
        for name in re.findall(r"(?:penstock|vllm)[_:][a-z0-9_:]+_(?:total|bucket)\b", query):
            assert re.search(rf"(rate|increase)\({re.escape(name)}", query), f"{where}: {name} is not a rate"


async def test_the_endpoint_lints_clean() -> None:
    """Prometheus' own conventions: help, type, `_total`, base units, each series once."""
    families = await exported()
    assert [name for name, count in Counter(family.name for family in families).items() if count > 1] == []
    for family in families:
        assert family.documentation, family.name
        assert family.type in ("counter", "gauge", "histogram"), family.name
        assert not UNITLESS.search(family.name), family.name
        assert not family.name.endswith("_total"), family.name  # the parser takes it off a counter's
        series = Counter((sample.name, tuple(sorted(sample.labels.items()))) for sample in family.samples)
        assert [key for key, count in series.items() if count > 1] == []
        names = {sample.name for sample in family.samples}
        if family.type == "counter":
            assert names <= {family.name + "_total"}, family.name
        elif family.type == "histogram":
            assert names == {f"{family.name}_{part}" for part in ("bucket", "count", "sum")}
            assert family.name.endswith("_seconds"), family.name


async def test_histograms_are_cumulative_and_end_with_everything() -> None:
    for family in await exported():
        if family.type != "histogram":
            continue
        by_series: dict[tuple[str, ...], list[tuple[float, float]]] = {}
        for sample in family.samples:
            if sample.name.endswith("_bucket"):
                labels = tuple(value for name, value in sorted(sample.labels.items()) if name != "le")
                by_series.setdefault(labels, []).append((float(sample.labels["le"]), sample.value))
        for buckets in by_series.values():
            assert buckets == sorted(buckets)
            assert buckets[-1][0] == float("inf")


def test_before_the_engine_is_known_there_is_text_all_the_same() -> None:
    text = Scrape(Config(), [], (), "m").text().decode()
    assert "penstock_build_info" in text
    assert "penstock_engine_ready" not in text
    assert 'penstock_processes{role="executor"} 0.0' in text


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.name)
def test_dashboards_are_whole(path: Path) -> None:
    board = json.loads(path.read_text())
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        if panel["type"] != "row":
            assert panel["description"]
            assert panel["datasource"]["uid"] == "${datasource}"
    spots = Counter((p["gridPos"]["x"], p["gridPos"]["y"]) for p in panels)
    assert max(spots.values()) == 1


def test_alerts_say_what_to_do() -> None:
    for group in rules()["groups"]:
        for rule in group["rules"]:
            assert rule["labels"]["severity"] in ("warning", "critical")
            assert rule["annotations"]["summary"]
            assert rule["annotations"]["description"]


def test_prometheus_reads_its_rules() -> None:
    settings = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yaml").read_text())
    assert settings["rule_files"] == ["alerts.yaml"]
    assert [job["job_name"] for job in settings["scrape_configs"]] == ["penstock"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
@pytest.mark.parametrize("words", [("config", "prometheus.yaml"), ("rules", "alerts.yaml")])
def test_promtool_has_nothing_to_say(words: tuple[str, str]) -> None:
    command = ["promtool", "check", words[0], str(DEPLOY / "prometheus" / words[1])]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
