"""What tracing costs is taken from differences within rounds."""

from __future__ import annotations

import os
import urllib.request

import pytest

from benchmarks import tracing
from benchmarks.tracing import Measured, collecting, costs, environment, text, variables


def measured(setting: str, number: int, cpu: float, speed: float) -> Measured:
    return Measured(setting, number, 1000, speed, {"api": cpu / 2, "scheduler": cpu / 2}, 1.0, 2.0)


def test_rounds_are_compared_with_themselves() -> None:
    found = []
    for number, slow in enumerate((1.0, 3.0, 2.0)):  # what else the machine does
        for setting, cpu, speed in (("off", 10.0, 1000.0), ("1 %", 10.1, 995.0), ("100 %", 11.0, 960.0)):
            found.append(measured(setting, number, cpu * slow, speed / slow))
    found.append(measured("off", 3, 1.0, 1.0))  # a round that was not completed
    few, all_ = costs(found)
    assert (few.cpu, few.throughput) == (1.0, 0.5)
    assert (all_.cpu, all_.throughput) == (10.0, 4.0)
    assert all_.by_role == {"api": 10.0, "scheduler": 10.0}
    assert all_.cpu_range == (10.0, 10.0)
    assert "throughput lost 4.00 %" in text(all_)


def test_settings_are_the_standard_variables() -> None:
    assert variables("off", "http://c") == {}
    assert variables("1 %", "http://c")["OTEL_TRACES_SAMPLER_ARG"] == "0.01"
    assert set(tracing.SETTINGS) == {"off", *tracing.GOALS}


def test_the_environment_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_ONE", "before")
    monkeypatch.delenv("OTEL_TWO", raising=False)
    with environment({"OTEL_ONE": "a", "OTEL_TWO": "b"}):
        assert (os.environ["OTEL_ONE"], os.environ["OTEL_TWO"]) == ("a", "b")
    assert os.environ["OTEL_ONE"] == "before"
    assert "OTEL_TWO" not in os.environ


def test_the_collector_counts(capfd: pytest.CaptureFixture[str]) -> None:
    with collecting() as url:
        for _ in range(3):
            with urllib.request.urlopen(urllib.request.Request(url + "/v1/traces", b"x" * 10, method="POST")) as answer:
                assert answer.status == 200
    assert "3 exports, 30 bytes" in capfd.readouterr().out
