"""The baseline runs the workload it is given: the same prompts and lengths, each batch to its longest."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks import generate_baseline
from benchmarks.generate_baseline import batches, measure, padded
from penstock.services.bench.workload import Workload, requests

MIXED = Workload(requests=5, concurrency=2, input=(3, 9), output=(2, 6), vocab=60)


@pytest.fixture(scope="module")
def model() -> Qwen3ForCausalLM:
    config = Qwen3Config(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, head_dim=8,
                         num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64,
                         eos_token_id=1, pad_token_id=0)  # fmt: skip
    torch.manual_seed(0)
    return Qwen3ForCausalLM(config).eval()


def test_batches_hold_the_workload() -> None:
    found = list(batches(MIXED))
    assert [len(batch) for batch in found] == [2, 2, 1]
    flat = [pair for batch in found for pair in batch]
    bodies = [msgspec.json.decode(request.body) for request in requests(MIXED)]
    assert flat == [(body["prompt"], body["max_tokens"]) for body in bodies]


def test_padding_is_on_the_left() -> None:
    ids, mask = padded([([11, 12, 13], 4), ([14], 4)])
    assert ids.tolist() == [[11, 12, 13], [0, 0, 14]]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1]]


def test_output_is_what_was_asked_for(model: Qwen3ForCausalLM) -> None:
    figures = measure(model, MIXED)
    assert figures.output_tokens == sum(request.output_tokens for request in requests(MIXED))
    assert figures.output_tokens_per_second == pytest.approx(figures.output_tokens / figures.seconds, rel=0.01)
    assert figures.dtype == "float32"


def test_a_folder_by_the_command(model: Qwen3ForCausalLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model.save_pretrained(tmp_path)
    threads = torch.get_num_threads()
    text = msgspec.json.encode([MIXED]).decode()
    assert generate_baseline.main([str(tmp_path), "--workloads", text, "--json", "--threads", str(threads)]) == 0
    (figures,) = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert msgspec.convert(figures["workload"], Workload) == MIXED
    options = ["--concurrency", "1,3", "--input", "4", "--output-tokens", "3", "--vocab", "60"]
    assert generate_baseline.main([str(tmp_path), *options, "--threads", str(threads)]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["c1", "c3"]
