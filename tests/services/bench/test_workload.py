"""Workloads: reproducible, within their ranges, the same for any number of client processes."""

from __future__ import annotations

import json
import statistics

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.load.workload import JSON, ROWS
from penstock.services.bench.workload import FIRST_ID, FREE, Workload, arrivals, requests

MIXED = Workload(requests=23, concurrency=8, input=(5, 40), output=(3, 9), prefix=16, prefixes=3, variants=(JSON, FREE))


@given(st.integers(1, 9))
def test_requests_do_not_depend_on_the_number_of_processes(workers: int) -> None:
    alone = list(requests(MIXED, "m"))
    shared = [r for worker in range(workers) for r in requests(MIXED, "m", worker=worker, workers=workers)]
    assert sorted(shared, key=lambda request: request.index) == alone


def test_lengths_ids_and_prefixes_are_as_asked() -> None:
    prompts = []
    for request in requests(MIXED):
        body = json.loads(request.body)
        assert request.prompt_tokens == len(body["prompt"])
        assert 5 + 16 <= len(body["prompt"]) <= 40 + 16
        assert 3 <= body["max_tokens"] == request.output_tokens <= 9
        assert all(FIRST_ID <= token < MIXED.vocab for token in body["prompt"])
        assert body["ignore_eos"] is True
        assert body["stream_options"] == {"include_usage": True}
        assert ("response_format" in body) == (request.index % 2 == 0)
        assert "model" not in body
        prompts.append(body["prompt"])
    assert len({tuple(prompt[:16]) for prompt in prompts}) == 3
    assert prompts[0][:16] == prompts[3][:16]
    assert len({tuple(prompt[16:]) for prompt in prompts}) == len(prompts)


def test_warmup_is_the_same_shape_of_other_prompts() -> None:
    warm = [json.loads(request.body)["prompt"] for request in requests(MIXED, warmup=True)]
    load = [json.loads(request.body)["prompt"] for request in requests(MIXED)]
    assert len(warm) == MIXED.warmup
    assert {tuple(p[:16]) for p in warm} == {tuple(p[:16]) for p in load}
    assert not {tuple(p[16:]) for p in warm} & {tuple(p[16:]) for p in load}


def test_a_warm_ups_answers_may_be_short() -> None:
    short = msgspec.structs.replace(MIXED, warmup_output=2)
    assert {request.output_tokens for request in requests(short, warmup=True)} == {2}
    assert list(requests(short)) == list(requests(MIXED))


def test_a_seed_changes_every_prompt() -> None:
    other = msgspec.structs.replace(MIXED, seed=1)
    assert not {r.body for r in requests(MIXED)} & {r.body for r in requests(other)}


def test_two_workloads_share_no_prompt() -> None:
    """A prefix cache keeps nothing of one for the other."""
    short, long = (Workload(name=f"{count}", requests=4, input=(count, count), vocab=1 << 20) for count in (8, 64))
    starts = {tuple(json.loads(request.body)["prompt"][:4]) for load in (short, long) for request in requests(load)}
    assert len(starts) == 8


def test_text_and_chat_prompts_have_no_expected_length() -> None:
    text = next(requests(msgspec.structs.replace(MIXED, text=True)))
    chat = next(requests(msgspec.structs.replace(MIXED, endpoint="chat", ignore_eos=False)))
    assert isinstance(json.loads(text.body)["prompt"], str)
    assert text.prompt_tokens == chat.prompt_tokens == chat.output_tokens == -1
    assert json.loads(chat.body)["messages"][0]["role"] == "user"


def test_extra_fields_win_and_variants_win_over_them() -> None:
    body = json.loads(next(requests(MIXED, "m", extra={"temperature": 1, "response_format": None})).body)
    assert (body["model"], body["temperature"]) == ("m", 1)
    assert body["response_format"]["type"] == "json_schema"


def test_arrivals_are_a_poisson_process() -> None:
    due = arrivals(Workload(requests=4000, rate=50.0))
    gaps = [b - a for a, b in zip([0.0, *due], due, strict=False)]
    assert statistics.mean(gaps) == pytest.approx(1 / 50, rel=0.08)
    assert statistics.stdev(gaps) == pytest.approx(1 / 50, rel=0.12)
    assert set(arrivals(Workload(requests=3))) == {0.0}


def test_rows_are_those_of_the_reference() -> None:
    rows = {row.name: row for row in ROWS}
    assert len(rows) == len(ROWS) == 22
    shape = {name: (row.input[1], row.output[1], row.requests, row.concurrency) for name, row in rows.items()}
    assert shape["bs64"] == (512, 256, 128, 64)
    assert shape["thr_c256"] == (1024, 256, 512, 256)
    assert shape["decode_c256"] == (128, 512, 256, 256)
    assert shape["json_c1"] == (128, 256, 4, 1)
    assert (rows["mixed_256"].input, rows["mixed_256"].output) == ((100, 1024), (100, 1024))
    assert (rows["prefix4k"].prefix, rows["prefix4k"].input, rows["prefix4k"].output) == (4096, (128, 128), (64, 64))
    assert [variant.name for variant in rows["half_json_c64"].variants] == ["json", "free"]
    assert all(row.prefixes == 1 and row.ignore_eos for row in ROWS)
    assert {row.name: row.temperature for row in ROWS if row.temperature} == {"offline_256": 0.6}
