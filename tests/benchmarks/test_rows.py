"""Rows and records: figures, goals, prices, files and tables."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from benchmarks import rows
from benchmarks.rows import ALL, FEATURES, SERVING, STARTS, TOKENS, VLLM, WORKLOADS, Record, Row, Target
from penstock.services.bench.serve import Result, Summary, summarize
from penstock.services.bench.workload import Record as Sent
from penstock.services.bench.workload import Workload

MODELS = [("8b", "8B"), ("0.6b", "0.6B")]


def summary(tpot: float, requests: int = 2) -> Summary:
    """Requests of 11 tokens with `tpot` seconds between them, the first one after half a second."""
    return summarize([
        Sent(index, 0, start=0.0, first=0.5, last=0.5 + 10 * tpot, end=0.5 + 10 * tpot, events=11, tokens=11,
             prompt_tokens=4)
        for index in range(requests)
    ])  # fmt: skip


def result(tpot: float, **variants: float) -> Result:
    found = {name: summary(value, 1) for name, value in variants.items()}
    return Result(workload=Workload(concurrency=2), summary=summary(tpot), variants=found, processes=1,
                  client_cpu_seconds=0.1)  # fmt: skip


def by_name(name: str) -> Row:
    return next(row for row in ALL if row.name == name)


def test_rows_are_complete() -> None:
    assert len({row.name for row in ALL}) == len(ALL)
    for row in (*SERVING, *FEATURES):
        assert row.load in WORKLOADS
        assert not row.against or by_name(row.against)
        names = [variant.name for variant in WORKLOADS[row.load].variants]
        assert not row.variant or row.variant in names
    for row in (*SERVING, *STARTS):
        assert set(row.targets) - set(rows.QUANTIZED) == {"8b", "0.6b"}
    for goals in rows.QUANTIZED.values():
        assert set(goals) <= {row.name for row in SERVING}
    assert [row.name for row in SERVING if row.load != row.name] == ["lat_bs1"]


def test_a_row_against_another_comes_after_it() -> None:
    order = [row.name for row in (*SERVING, *FEATURES)]
    for row in FEATURES:
        assert not row.against or order.index(row.against) < order.index(row.name)


def test_figures() -> None:
    found = result(0.002, free=0.001)
    assert rows.figure(by_name("bs8"), found) == pytest.approx(2.0)
    assert rows.figure(by_name("ttft_128"), found) == pytest.approx(500.0)
    assert rows.figure(by_name("bs64"), found) == pytest.approx(22 / 0.52, rel=1e-3)
    assert rows.figure(by_name("half_json_c64"), found) == pytest.approx(1.0)
    nothing = Result(workload=Workload(), summary=summarize([]), variants={}, processes=1, client_cpu_seconds=0.0)
    assert [rows.figure(by_name(name), nothing) for name in ("bs8", "ttft_128", "bs64")] == [None] * 3


def test_goals() -> None:
    faster, more = by_name("bs8"), by_name("bs64")
    priced = by_name("sample_c64")
    assert rows.met(faster, Target(4.0), 4.0, None) is True
    assert rows.met(faster, Target(4.0), 4.1, None) is False
    assert rows.met(more, Target(4.0), 4.1, None) is True
    assert rows.met(more, Target(4.0), 3.9, None) is False
    assert rows.met(more, Target(4.0), None, None) is None
    assert rows.met(priced, Target(2), 100.0, 1.5) is True
    assert rows.met(priced, Target(2), 0.0, 2.5) is False
    assert rows.met(priced, Target(2), 5.0, None) is None


def test_prices_and_shares() -> None:
    assert rows.price(6.6, 6.0) == pytest.approx(10.0)
    assert rows.price(None, 6.0) is None
    assert rows.price(6.6, None) is None
    assert rows.share(by_name("bs8"), 4.0, 3.0) == 0.75
    assert rows.share(by_name("bs64"), 3.0, 4.0) == 0.75
    assert rows.share(by_name("bs64"), None, 4.0) is None
    assert rows.share(by_name("bs64"), 3.0, None) is None


def record(row: str, model: str = "8b", **fields: object) -> Record:
    found = by_name(row)
    whole = {"row": row, "model": model, "figure": found.figure, "unit": rows.UNITS[found.figure], **fields}
    return msgspec.convert(whole, Record, from_attributes=True)


def test_a_figure_of_cached_prompts_says_so() -> None:
    half = msgspec.structs.replace(summary(0.001), prompt_tokens=8, cached_tokens=4)
    record = Record(row="bs8", model="8b", figure="tpot_ms", unit="ms", value=1.0, client=half, workload=Workload())
    assert rows.cached_share(record) == 0.5
    assert "(50% cached)" in rows.table({("8b", "bs8"): record}, MODELS)
    shared = msgspec.structs.replace(record, workload=Workload(prefix=4))
    assert rows.cached_share(shared) == 0.0
    assert rows.cached_share(msgspec.structs.replace(record, client=None)) == 0.0


def test_a_record_is_a_file(tmp_path: Path) -> None:
    one = record("bs8", value=4.2, client=summary(0.0042), workload=WORKLOADS["bs8"], environment={"chip": "x"})
    two = record("bs8", "0.6b", value=None, error="it broke")
    for each in (one, two):
        rows.write(tmp_path, each)
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.json")) == [
        "0.6b/bs8.json", "8b/bs8.json",
    ]  # fmt: skip
    assert rows.read(tmp_path) == {("8b", "bs8"): one, ("0.6b", "bs8"): two}


def test_the_table() -> None:
    records = [
        record("bs8", value=4.2, met=True, share_of_limit=0.87),
        record("bs8", "0.6b", value=1.2, met=False),
        record("bs64", "0.6b", value=None, error="it broke"),
        record("free_c64", value=11000.0, met=True, goal=10800, vllm=(9389.0,), client=summary(0.006),
               output_tokens_per_second=11000.0, host_microseconds_per_token={"scheduler": 3.21, "api": 2.0}),
        record("sample_c64", value=6.1, price=1.5, met=True, goal=2, vllm=(3.0,), client=summary(0.0061),
               output_tokens_per_second=10900.0),
        record("json_c64", value=None, goal=3, error="it broke"),
    ]  # fmt: skip
    lines = rows.table({(one.model, one.row): one for one in records}, MODELS).splitlines()
    assert lines[0] == f"| Row | figure | 8B | goal | {VLLM} | limit | 0.6B | goal | {VLLM} | limit |"
    assert lines[2] == "| bs8 | ms per token | **4.20** | ≤ 4.45 | 5.09 | 87% | 1.20 | ≤ 1.05 | 1.78 |  |"
    assert lines[3] == "| bs64 | tok/s |  | ≥ 8,000 | 6,815 |  | failed | ≥ 34,000 | 18,928 |  |"
    assert "| free_c64 | **11,000** | 6.00 |  | ≥ 10,800 | 9,389 | 3.21 |" in lines
    assert "| sample_c64 | 10,900 | 6.10 | **+1.5 %** | ≤ +2 % | +3 % |  |" in lines
    assert "| json_c64 |  |  | failed | ≤ +3 % |  |  |" in lines
    for line in lines:
        assert not line or line.count("|") in (11, 8)


def test_a_table_of_one_model_has_its_columns_alone() -> None:
    found = rows.table({("8b", "start_cold"): record("start_cold", value=14.0, met=True)}, MODELS).splitlines()
    assert found[0] == f"| Row | figure | 8B | goal | {VLLM} | limit |"
    assert found[2] == "| start_cold | s to ready | **14.0** | ≤ 15.0 | 75.6 |  |"
    assert len(found) == 3


@pytest.mark.parametrize(("value", "text"), [(None, ""), (1234.5, "1,234"), (12.34, "12.3"), (0.9, "0.90")])
def test_numbers(value: float | None, text: str) -> None:
    assert rows.number(value) == text


def test_units_are_said_of_every_figure() -> None:
    assert {row.figure for row in ALL} <= set(rows.UNITS)
    assert TOKENS in rows.UNITS
