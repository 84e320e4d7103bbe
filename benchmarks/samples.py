"""What a server's /metrics says, as its benchmarks and tests read it."""

from __future__ import annotations

import urllib.request
from collections.abc import Sequence

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample


def scrape(url: str) -> list[Sample]:
    """Every sample of a server. Raises OSError."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        return read_samples(answer.read().decode())


def read_samples(text: str) -> list[Sample]:
    """Every sample in Prometheus' text."""
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def total(samples: Sequence[Sample], name: str, **labels: str) -> float:
    """The sum of the samples called penstock_`name` that have these labels."""
    return sum(
        sample.value
        for sample in samples
        if sample.name == f"penstock_{name}" and labels.items() <= sample.labels.items()
    )
