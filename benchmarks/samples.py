"""What a server's /metrics says, as its benchmarks read it. Source: the Prometheus text format 0.0.4."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Mapping

SAMPLE = re.compile(r"(?m)^(penstock_\w+(?:\{[^}]*\})?) (\S+)$")


def scrape(url: str) -> dict[str, float]:
    """The series of a server, by name and labels as they stand there. Raises OSError."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        return read_samples(answer.read().decode())


def read_samples(text: str) -> dict[str, float]:
    """The same of a scrape's text."""
    return {name: float(value) for name, value in SAMPLE.findall(text)}


def total(samples: Mapping[str, float], name: str) -> float:
    """The sum over the labels of what is called penstock_`name`."""
    return sum(value for series, value in samples.items() if series.partition("{")[0] == f"penstock_{name}")
