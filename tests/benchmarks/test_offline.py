"""The Python API under a load: what is asked for, what is counted, and the whole of it on a CPU."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from benchmarks import offline
from benchmarks.load.workload import ROWS
from penstock import CompletionOutput, RequestOutput
from penstock.engine_core.embedded import demo_folder
from penstock.services.bench.offline import arguments, record
from penstock.services.bench.workload import Workload, requests
from penstock.services.llm.outputs import RequestMetrics

ROW = next(row for row in ROWS if row.name == offline.ROW)
TINY = Workload(name="tiny", requests=3, warmup=1, input=(4, 8), output=(2, 4), vocab=300, temperature=0.6)


def output(tokens: int) -> RequestOutput:
    choice = CompletionOutput(index=0, text="", token_ids=[1] * tokens)
    return RequestOutput(request_id="0", prompt=None, prompt_token_ids=[1, 2], outputs=[choice], finished=True,
                         metrics=RequestMetrics(arrival_time=0.0), num_cached_tokens=1)  # fmt: skip


def test_the_row_is_mixed_256_with_sampling_and_prompts_of_its_own() -> None:
    mixed = next(row for row in ROWS if row.name == "mixed_256")
    changed = {"name": "mixed_256", "temperature": 0.0}
    assert msgspec.structs.replace(ROW, **changed) == mixed
    assert [r.body for r in requests(ROW)][:3] != [r.body for r in requests(mixed)][:3]


def test_what_is_asked_for_is_the_load() -> None:
    load = list(requests(TINY))
    prompts, params = arguments(load)
    assert [len(prompt) for prompt in prompts] == [request.prompt_tokens for request in load]
    assert [one.max_tokens for one in params] == [request.output_tokens for request in load]
    assert all(one.temperature == 0.6 and one.ignore_eos for one in params)


@pytest.mark.parametrize(("tokens", "error"), [(2, ""), (1, "token count")])
def test_an_output_of_the_wrong_length_has_failed(tokens: int, error: str) -> None:
    request = msgspec.structs.replace(next(requests(TINY)), output_tokens=2)
    found = record(request, output(tokens), 1.0, 3.0)
    assert (found.tokens, found.prompt_tokens, found.cached_tokens, found.error) == (tokens, 2, 1, error)


def test_arguments_become_keywords() -> None:
    words = ["--load-format", "dummy", "--max-model-len=64", "--no-overlap", "--port", "0", "--api-processes=2"]
    assert offline.keywords(words) == {"load_format": "dummy", "max_model_len": "64", "overlap": False}


def test_all_of_it_in_a_process_of_its_own() -> None:
    keywords: dict[str, Any] = {"max_model_len": "64", "max_num_seqs": "4", "device": "cpu"}
    found = offline.in_its_own_process(demo_folder(), TINY, keywords, {}, 120.0)
    summary = found.result.summary
    assert (summary.completed, summary.failed) == (3, 0)
    assert summary.output_tokens_per_second > 0
    assert {"executor", "scheduler", "tokenizer", "program"} <= set(found.cpu_seconds)
    assert found.device == "cpu"


def test_a_process_that_fails_says_why() -> None:
    with pytest.raises(offline.OfflineFailed, match="--max-num-seqs"):
        offline.in_its_own_process(demo_folder(), TINY, {"max_num_seqs": 0}, {}, 120.0)


def test_a_wrong_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert offline.main(["--shape", "none"]) == 2
    assert "no such" in capsys.readouterr().err
