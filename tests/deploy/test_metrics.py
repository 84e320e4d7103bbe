"""What dashboards and alerts ask for is what /metrics has; and /metrics is as Prometheus wants it."""

from __future__ import annotations

import asyncio
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

from penstock.protocol.config import Config
from penstock.services.metrics.exposition import ServerCollector
from tests.services.client.fake_engine import FakeLink, answering, app_state, client, words
from tests.services.metrics.snapshots import message, server

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
DASHBOARDS = tuple(sorted((DEPLOY / "grafana").glob("*.json")))
NAME = re.compile(r"\b(penstock|vllm)[_:][a-z0-9_:]+")
UNITLESS = re.compile(r"_(ms|millis|milliseconds|minutes|percent|kb|mb)(_|$)")


async def exported() -> list[Metric]:
    """Everything that a server can export, alias included, after a streamed request and one that is refused."""
    port = FakeLink(answering(words("a", "b", "c")))
    parts = app_state(port, metrics_alias="vllm")
    async with client(parts) as http:
        port.arrive(message(*server(engine_blocks=8, engine_lora_places=4)))
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


async def test_labels_that_results_are_grouped_by_are_there() -> None:
    """Each `by (…)` names labels that some metric of the query has; `le` only where buckets are summed."""
    known: dict[str, set[str]] = {}
    for family in await exported():
        for sample in family.samples:
            known.setdefault(sample.name, {"job", "instance"}).update(sample.labels)
    for where, query in expressions():
        names = [name[0] for name in NAME.finditer(query)]
        for labels in re.findall(r"\bby \(([^)]*)\)", query):
            for label in re.split(r"[\s,]+", labels):
                assert any(label in known[name] for name in names), f"{where}: nothing has a label {label}"
        assert ("histogram_quantile" in query) == any(name.endswith("_bucket") for name in names), where


async def test_texts_of_alerts_use_labels_that_are_left() -> None:
    for group in rules()["groups"]:
        for rule in group["rules"]:
            used = set(re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])))
            kept = [set(re.split(r"[\s,]+", labels)) for labels in re.findall(r"\bby \(([^)]*)\)", rule["expr"])]
            if kept:
                assert used <= set.intersection(*kept), rule["alert"]


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
            assert family.name.endswith(("_seconds", "_tokens")), family.name


BASE = frozenset(("seconds", "bytes", "ratio"))
OTHER_UNITS = frozenset(
    (
        *("milliseconds", "microseconds", "nanoseconds", "minutes", "hours", "days", "weeks"),
        *("bits", "kilobytes", "megabytes", "gigabytes", "kibibytes", "mebibytes", "gibibytes", "percent"),
    )
)
ABBREVIATIONS = frozenset(
    ("s", "ms", "us", "ns", "sec", "b", "kb", "mb", "gb", "tb", "pb", "m", "h", "d", "bps", "kbps", "mbps", "pct")
)
TYPES = frozenset(("counter", "gauge", "histogram", "summary", "untyped"))
RESERVED = {"le": "histogram", "quantile": "summary"}


def lint(family: Metric) -> list[str]:
    """What promtool's `check metrics` holds against a family. Source: promlint's list of validations."""
    name, words, found = family.name, family.name.split("_"), []
    labels = {label for sample in family.samples for label in sample.labels}
    if not family.documentation:
        found.append("no help text")
    if OTHER_UNITS & set(words):
        found.append("a unit that is no base unit")
    if ABBREVIATIONS & set(words):
        found.append("an abbreviated unit")
    if TYPES & set(words):
        found.append("its type in its name")
    if any(word in BASE and place < len(words) - 1 and words[-1] in BASE for place, word in enumerate(words)):
        found.append("two units")
    if family.type == "counter" and not all(sample.name.endswith("_total") for sample in family.samples):
        found.append("a counter without _total")
    if family.type != "counter" and name.endswith("_total"):
        found.append("_total, and no counter")
    if family.type != "histogram" and name.endswith(("_bucket", "_count", "_sum")):
        found.append("a suffix that is a histogram's")
    if any(label in labels and family.type != kind for label, kind in RESERVED.items()):
        found.append("a label that is reserved")
    if ":" in name or not re.fullmatch(r"[a-z0-9_]+", name) or any(not re.fullmatch(r"[a-z_]+", la) for la in labels):
        found.append("a name that is not in snake case, or has a colon")
    return [f"{name}: {what}" for what in found]


async def test_promtools_own_rules_have_nothing_to_say() -> None:
    """Aliases are another server's names, whose colons are its own."""
    ours = [family for family in await exported() if not family.name.startswith("vllm:")]
    assert len(ours) > 80
    assert [what for family in ours for what in lint(family)] == []


@pytest.mark.parametrize(
    ("name", "kind", "what"),
    [
        ("penstock_lag_milliseconds", "gauge", "a unit that is no base unit"),
        ("penstock_lag_ms", "gauge", "an abbreviated unit"),
        ("penstock_request_counter", "counter", "its type in its name"),
        ("penstock_requests_total", "gauge", "_total, and no counter"),
        ("penstock_requests_count", "gauge", "a suffix that is a histogram's"),
        ("penstock:requests", "gauge", "a name that is not in snake case, or has a colon"),
        ("penstockRequests", "gauge", "a name that is not in snake case, or has a colon"),
    ],
)
def test_the_rules_find_what_they_are_for(name: str, kind: str, what: str) -> None:
    family = Metric(name, "Help", kind)
    family.add_sample(name + "_total" * (kind == "counter"), {}, 1.0)
    assert f"{name}: {what}" in lint(family)
    assert f"{name}: no help text" in lint(Metric(name, "", kind))


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
async def test_promtool_has_nothing_to_say_of_the_text() -> None:
    parts = app_state(FakeLink(answering(words("a"))))
    async with client(parts) as http:
        text = (await http.get("/metrics")).content
    pipe = asyncio.subprocess.PIPE
    ran = await asyncio.create_subprocess_exec("promtool", "check", "metrics", stdin=pipe, stdout=pipe, stderr=pipe)
    told = await ran.communicate(text)
    assert ran.returncode == 0, told


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
    text = ServerCollector(Config(), [], "m").text().decode()
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
