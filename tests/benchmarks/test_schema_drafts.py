"""The measurement of what drafts make of a schema: its requests, its figures, and a small one from end to end."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from benchmarks import schema_drafts
from benchmarks.schema_drafts import SCHEMAS, WAYS, Asked, Way, body, figures, main, measure, table
from benchmarks.speculation import SERVERS
from protocol.speculation import read_speculative


def test_schemas_are_schemas_and_of_more_than_an_answer_holds() -> None:
    for schema in SCHEMAS.values():
        jsonschema.Draft202012Validator.check_schema(schema)
        assert schema["minItems"] >= 200


def test_servers_are_started_with_options_that_they_read() -> None:
    servers = dict.fromkeys(way.server for way in WAYS)
    assert [read_speculative(SERVERS[name]).method for name in servers] == ["none", "ngram"]


def test_the_ways_ask_for_as_many_tokens() -> None:
    prompt, schema = next(iter(SCHEMAS.items()))
    bodies = [body(way, prompt, 40) for way in WAYS]
    assert {(asked["max_tokens"], asked["ignore_eos"], asked["temperature"]) for asked in bodies} == {(40, True, 0)}
    assert "response_format" not in bodies[0]
    assert bodies[1]["response_format"]["json_schema"]["schema"] == schema
    assert [asked.get("whitespace") for asked in bodies[:3]] == [None, None, "none"]
    assert bodies[3:] == bodies[:3]


def test_figures_are_of_medians_and_compare_with_the_first_way() -> None:
    rows = figures({
        "free": [[Asked(2.0, 100, 0), Asked(9.0, 100, 0), Asked(1.0, 100, 0)], [Asked(2.0, 100, 0)] * 3],
        "schema": [[Asked(1.0, 100, 80)] * 3, [Asked(1.0, 100, 20)] * 3],
    })
    assert [(row.way, row.requests, row.tokens, row.milliseconds) for row in rows] == [
        ("free", 6, 200, 20.0), ("schema", 6, 200, 10.0),
    ]  # fmt: skip
    assert [(row.speedup, row.drafted_share, row.tokens_per_step) for row in rows] == [(1.0, 0.0, 1.0), (2.0, 0.5, 2.0)]
    assert "2.00x" in table(rows)


def test_the_first_round_is_not_kept_and_each_way_asks_its_server(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, str, bool]] = []

    def ask(url: str, asked: dict[str, object]) -> Asked:
        calls.append((url, str(asked["prompt"]), "response_format" in asked))
        return Asked(1.0, 4, 0)

    monkeypatch.setattr(schema_drafts, "ask", ask)
    monkeypatch.setattr(schema_drafts, "WAYS", (Way("free", schema=False), Way("schema, prompt lookup", "ngram")))
    found = measure({"plain": "0", "ngram": "1"}, 4, rounds=2)
    assert {way: [len(answers) for answers in prompts] for way, prompts in found.items()} == {
        "free": [2] * len(SCHEMAS), "schema, prompt lookup": [2] * len(SCHEMAS),
    }  # fmt: skip
    first, second = [*SCHEMAS][:2]
    assert calls[:3] == [("0", first, False), ("1", first, True), ("0", second, False)]
    assert len(calls) == 3 * 2 * len(SCHEMAS)


def test_a_small_measurement(tmp_path: Path) -> None:
    """How fast it is, is the machine's matter; without whitespace much is forced, and all of it came true."""
    out = tmp_path / "result.json"
    assert main(["--tokens", "24", "--rounds", "1", "--output", str(out)]) == 0
    report = json.loads(out.read_text())
    rows = {row["way"]: row for row in report["figures"]}
    assert [*rows] == [way.name for way in WAYS]
    assert all(row["tokens"] == 24 * len(SCHEMAS) for row in rows.values())
    assert rows["free"]["drafted_share"] == 0.0
    assert rows["schema, no whitespace"]["tokens_per_step"] > 1.2
