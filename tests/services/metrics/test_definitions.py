"""The table of metrics: names as Prometheus wants them, each with one meaning."""

from __future__ import annotations

import re
from typing import Any

import pytest

from penstock.services.metrics.definitions import BY_ROLE, METRICS, Kind, Metric, Subject

NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
RESERVED = ("le", "quantile", "role", "index", "replica", "api", "job", "instance")


def test_a_name_means_the_same_in_every_process() -> None:
    for table in BY_ROLE.values():
        for metric in table:
            same = METRICS[metric.name]
            assert (metric.kind, metric.help, metric.labels, metric.subject) == (
                same.kind, same.help, same.labels, same.subject,
            )  # fmt: skip


@pytest.mark.parametrize("metric", METRICS.values(), ids=lambda metric: metric.name)
def test_names_and_labels(metric: Metric[Any]) -> None:
    assert NAME.fullmatch(metric.name)
    assert all(NAME.fullmatch(label) and label not in RESERVED for label in metric.labels)
    assert not metric.name.endswith(("_total", "_count", "_sum", "_bucket"))
    assert metric.help
    assert metric.help[0].isupper() or metric.help[0].isdigit()
    assert not metric.help.endswith(".")


def test_times_are_seconds_and_sizes_are_bytes() -> None:
    for metric in METRICS.values():
        words = metric.name.split("_")
        assert not {"ms", "us", "ns", "milliseconds", "kb", "mb", "percent", "minutes"} & set(words), metric.name
        if metric.kind is Kind.HISTOGRAM:
            assert words[-1] in ("seconds", "tokens"), metric.name


def test_an_engines_metrics_say_so() -> None:
    for metric in METRICS.values():
        assert (metric.subject is Subject.ENGINE) == metric.name.startswith("engine_"), metric.name
