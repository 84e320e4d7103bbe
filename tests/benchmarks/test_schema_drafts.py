"""The measurement of what drafts make of a schema: its requests, its figures, and a small one from end to end."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from benchmarks import schema_drafts
from benchmarks.schema_drafts import WAYS, Asked, Task, Way, body, figures, main, measure, said, table, tasks
from benchmarks.speculation import SERVERS
from penstock.protocol.speculation import read_speculative

FREE, FORCED, SCHEMA, DENSE = WAYS[:4]


def test_tasks_are_of_both_loads_and_their_answers_follow_their_schemas() -> None:
    found = tasks(5, 1)
    assert [task.load for task in found] == ["extract"] * 5 + ["call"] * 5
    assert found == tasks(5, 1)
    for task in found:
        if task.load == "extract":
            jsonschema.validate(task.answer, task.schema)
            continue
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in task.tools}
        jsonschema.validate(task.answer["arguments"], schemas[task.answer["name"]])


def test_servers_are_started_with_options_that_they_read() -> None:
    servers = dict.fromkeys(way.server for way in WAYS)
    assert [read_speculative(SERVERS[name]).method for name in servers] == ["none", "ngram"]


def test_a_free_request_has_no_grammar_and_the_others_have_one() -> None:
    extract, call = tasks(1, 2)
    assert "response_format" not in body(FREE, extract)
    assert body(SCHEMA, extract)["response_format"]["json_schema"]["schema"] == extract.schema
    assert body(FORCED, extract)["speculative"] is False
    assert body(DENSE, extract)["whitespace"] == "none"
    free, bound = body(FREE, call), body(SCHEMA, call)
    assert (free["tool_choice"], bound["tool_choice"]) == ("auto", "required")
    assert [tool["function"]["strict"] for tool in (*free["tools"], *bound["tools"])] == [
        *[False] * len(call.tools), *[True] * len(call.tools),
    ]  # fmt: skip


def test_what_is_said_is_text_or_a_call() -> None:
    assert said({"content": '{"a": 1}'}) == {"a": 1}
    assert said({"content": "I don't know"}) is None
    assert said({"content": None}) is None
    call = {"function": {"name": "f", "arguments": '{"a": 1}'}}
    assert said({"content": None, "tool_calls": [call]}) == {"name": "f", "arguments": {"a": 1}}


def answer(seconds: float, accepted: int = 0, rejected: int = 0, *, right: bool = True) -> Asked:
    return Asked(seconds, 100, accepted, rejected, right)


def test_figures_are_of_medians_and_compare_with_the_loads_first_way() -> None:
    rows = figures(
        {
            ("extract", "free"): [[answer(2.0), answer(9.0), answer(1.0)], [answer(2.0)] * 3],
            ("extract", "schema"): [[answer(1.0, 80, 20)] * 3, [answer(1.0, 20, 0, right=False)] * 3],
            ("call", "free"): [[answer(3.0)]],
        }
    )
    assert [(row.load, row.way, row.requests, row.tokens, row.milliseconds) for row in rows] == [
        ("extract", "free", 6, 200, 20.0), ("extract", "schema", 6, 200, 10.0), ("call", "free", 1, 100, 30.0),
    ]  # fmt: skip
    assert [(row.speedup, row.drafted_share, row.acceptance, row.tokens_per_step, row.right) for row in rows] == [
        (1.0, 0.0, 0.0, 1.0, 1.0), (2.0, 0.5, 0.8333, 2.0, 0.5), (1.0, 0.0, 0.0, 1.0, 1.0),
    ]  # fmt: skip
    assert "2.00x" in table(rows)


def test_the_first_round_is_not_kept_and_each_way_asks_its_server(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, str, str]] = []

    def ask(url: str, way: Way, task: Task) -> Asked:
        calls.append((url, way.name, task.load))
        return answer(1.0)

    monkeypatch.setattr(schema_drafts, "ask", ask)
    monkeypatch.setattr(schema_drafts, "WAYS", (FREE, DENSE, WAYS[-1]))
    found = measure({"plain": "0", "ngram": "1"}, tasks(2, 3), rounds=2)
    assert {key: [len(answers) for answers in rows] for key, rows in found.items()} == {
        ("extract", "free"): [2, 2], ("extract", "schema, no whitespace"): [2, 2],
        ("extract", "schema, prompt lookup"): [2, 2],
        ("call", "free"): [2, 2], ("call", "schema, prompt lookup"): [2, 2],
    }  # fmt: skip
    assert calls[:3] == [("0", "free", "extract"), ("0", "schema, no whitespace", "extract"),
                         ("1", "schema, prompt lookup", "extract")]  # fmt: skip
    assert len(calls) == 3 * (3 * 2 + 2 * 2)


def test_a_small_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """How fast it is, and whether drafts pay, is the machine's matter; what was drafted came true, and the answers are
    those of the model that writes freely."""
    monkeypatch.setattr(schema_drafts, "WAYS", (FREE, SCHEMA))
    out = tmp_path / "result.json"
    assert main(["--tasks", "2", "--rounds", "1", "--output", str(out)]) == 0
    report = json.loads(out.read_text())
    rows = {(row["load"], row["way"]): row for row in report["figures"]}
    assert report["widened"] == {}
    for load in ("extract", "call"):
        free, schema = rows[load, "free"], rows[load, "schema"]
        assert free["drafted_share"] == 0.0
        assert (schema["tokens"], schema["right"]) == (free["tokens"], free["right"])
        assert schema["acceptance"] == (1.0 if schema["drafted_share"] else 0.0)
    assert rows["call", "schema"]["tokens_per_step"] > 1.1
