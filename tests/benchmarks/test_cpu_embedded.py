"""The comparison: its plan, its table, its file."""

from __future__ import annotations

import argparse
import json
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from benchmarks import cpu_embedded
from benchmarks.cpu_embedded import Comparison, compare, plan, table
from benchmarks.generate_baseline import Figures
from penstock.services.bench.serve import Result, summarize
from penstock.services.bench.workload import Record, Workload, requests


def comparison() -> Comparison:
    records = [Record(0, 0, start=0.0, first=0.5, last=1.5, end=2.0, events=11, tokens=11, prompt_tokens=4)]
    result = Result(workload=Workload(concurrency=16), summary=summarize(records), variants={}, processes=1,
                    client_cpu_seconds=0.1)  # fmt: skip
    figures = Figures(workload=Workload(), seconds=1.0, output_tokens=2, output_tokens_per_second=2.0,
                      seconds_per_step=0.1, dtype="float32", threads=1, transformers="5", torch="2")  # fmt: skip
    return compare([result], [figures])[0]


def test_both_sides_get_the_same_prompts() -> None:
    options = argparse.Namespace(concurrency="1,16,64", rounds=2, least=8, input=(128, 128), output_tokens=(64, 64))
    found = plan(options, 4096)
    assert [(w.concurrency, w.requests, w.warmup, w.vocab) for w in found] == [
        (1, 8, 1, 4096), (16, 32, 16, 4096), (64, 128, 64, 4096), (64, 128, 64, 4096),
    ]  # fmt: skip
    assert (found[3].name, found[3].input, found[3].output) == ("mixed c64", (16, 240), (8, 120))
    assert all(w.ignore_eos and w.temperature == 0 for w in found)


def test_no_two_prompts_share_a_block_of_the_prefix_cache() -> None:
    """Of all loads and their warm-ups together: one server gets them all."""
    options = argparse.Namespace(concurrency="1,16,64", rounds=2, least=8, input=(128, 128), output_tokens=(64, 64))
    prompts = [
        msgspec.json.decode(request.body)["prompt"]
        for workload in plan(options, 4096) for warmup in (False, True)
        for request in requests(workload, warmup=warmup)
    ]  # fmt: skip
    assert len(prompts) == 441
    assert len({tuple(prompt[:16]) for prompt in prompts}) == len(prompts)


def test_a_run_with_prefix_hits_writes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = comparison()
    summaries = [msgspec.structs.replace(found.penstock.summary, cached_tokens=16), found.penstock.summary]

    async def served(url: str, workloads: Sequence[Workload]) -> list[Result]:
        return [found.penstock, msgspec.structs.replace(found.penstock, summary=summaries.pop(0))]

    @contextmanager
    def serving(arguments: Sequence[str]) -> Iterator[argparse.Namespace]:
        yield argparse.Namespace(url="", seconds=1.0)

    monkeypatch.setattr(cpu_embedded, "serving", serving)
    monkeypatch.setattr(cpu_embedded, "serve_all", served)
    monkeypatch.setattr(cpu_embedded, "generate", lambda *given: [found.generate] * 2)
    monkeypatch.setattr(signal, "signal", lambda *given: None)
    output = tmp_path / "found.json"
    once = ["--turns", "1", "--generate-dtypes", "float32"]
    assert cpu_embedded.main(["--output", str(output), *once]) == 1
    assert not output.exists()
    assert cpu_embedded.main(["--output", str(output), *once]) == 0
    record = json.loads(output.read_text())
    assert set(record["cached_tokens"].values()) == {0}
    assert len(msgspec.convert(record["comparisons"], list[Comparison])) == 2
    assert record["command"] == f"python -m benchmarks.cpu_embedded --output {output} {' '.join(once)}"


def test_the_faster_type_and_the_middle_turn_count() -> None:
    found = comparison()
    slow, fast = (msgspec.structs.replace(found.generate, output_tokens_per_second=rate) for rate in (2.0, 3.0))
    assert cpu_embedded.faster([[slow, fast], [fast, slow]]) == [fast, fast]
    turns = [[msgspec.structs.replace(found, ratio=ratio)] for ratio in (3.0, 1.0, 2.0)]
    (chosen,) = cpu_embedded.middle(turns)
    assert (chosen.ratio, chosen.turns) == (2.0, [3.0, 1.0, 2.0])
    (lower,) = cpu_embedded.middle(turns[:2])
    assert lower.ratio == 1.0


def test_the_table() -> None:
    found = comparison()
    assert "2.75x" in table([found])
    assert "500.0 ms" in table([found])
    assert "100.00 ms" in table([found])
