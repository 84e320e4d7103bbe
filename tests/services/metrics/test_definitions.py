"""The catalogue: names as Prometheus wants them, each once, each with a meaning."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from penstock.services.metrics.definitions import ENGINE, METRICS, Kind, Metric, Subject

NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
RESERVED = ("le", "quantile", "role", "index", "replica", "job", "instance")


def test_each_name_stands_once() -> None:
    assert [name for name, count in Counter(metric.name for metric in METRICS).items() if count > 1] == []


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_names_and_labels(metric: Metric) -> None:
    assert NAME.fullmatch(metric.name)
    assert all(NAME.fullmatch(label) and label not in RESERVED for label in metric.labels)
    assert not metric.name.endswith(("_total", "_count", "_sum", "_bucket"))
    assert metric.meaning
    assert metric.meaning[0].isupper() or metric.meaning[0].isdigit()
    assert not metric.meaning.endswith(".")


def test_times_are_seconds_and_sizes_are_bytes() -> None:
    for metric in METRICS:
        words = metric.name.split("_")
        assert not {"ms", "us", "ns", "milliseconds", "kb", "mb", "percent", "minutes"} & set(words), metric.name
        if metric.kind is Kind.HISTOGRAM:
            assert words[-1] in ("seconds", "tokens"), metric.name


def test_an_engines_figures_say_so() -> None:
    assert all(metric.subject is Subject.ENGINE and metric.name.startswith("engine_") for metric in ENGINE)
    assert {metric.name for metric in METRICS if metric.subject is Subject.ENGINE} == {each.name for each in ENGINE}
