"""The self-test at a start: what it finds in log-probabilities, which prompt it reads, and that it leaves nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.engine_core.execution.self_test import BEST, FILE, PROMPT_TOKENS, Probe, judged, read_probe, trouble
from penstock.protocol.errors import ModelError
from penstock.protocol.outputs import Logprobs
from tests.engine_core.execution.harness import LENGTH, VOCABULARY, Life, prefill, tiny_model, tiny_runner

PROBE = Probe((5, 6, 7, 8), 4)


def scores(rows: list[tuple[int, list[float]]]) -> list[Logprobs]:
    """Positions by their best token and the log-probabilities of the best ones."""
    ids = np.array([[0, best, *range(50, 49 + len(values))] for best, values in rows], "<i4")
    values = np.array([[-9.0, *values] for _, values in rows], "<f4")
    ranks = np.zeros(len(rows), "<i4")
    return [Logprobs(ids.shape[1], ids.tobytes(), values.tobytes(), ranks.tobytes())]


def test_what_a_sound_model_says_passes() -> None:
    assert judged(scores([(1, [-0.1, -2.5]), (2, [-1.0, -1.5]), (2, [-0.0001, -8.0])]), PROBE) == ""


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_not_finite_are_told(value: float) -> None:
    assert "not finite" in judged(scores([(1, [-0.1, -2.5]), (2, [-0.5, value]), (3, [-1.0, -2.0])]), PROBE)


def test_a_model_that_says_one_token_whatever_it_reads_is_told() -> None:
    assert "token 7 whatever" in judged(scores([(7, [-1e-6, -20.0])] * 3), PROBE)
    assert judged(scores([(7, [-1e-6, -20.0]), (8, [-1e-6, -20.0])]), PROBE) == ""


def test_a_model_that_prefers_nothing_is_told() -> None:
    assert "same chance" in judged(scores([(1, [-4.5, -4.5])] * 3), PROBE)


def test_a_canary_that_is_silent_is_told() -> None:
    said = scores([(1, [-0.1, -2.5]), (7, [-0.5, -3.0]), (8, [-1.0, -2.0])])
    assert judged(said, Probe((5, 6, 7, 8), 2)) == ""
    assert "it says [7, 8] in place of [7, 9]" in judged(said, Probe((5, 6, 7, 9), 2))


def test_without_a_canary_any_tokens_are_read(tmp_path: Path) -> None:
    probe = read_probe(tmp_path, 1000, 4096)
    assert len(set(probe.token_ids)) == probe.answer == PROMPT_TOKENS
    assert all(0 <= token < 1000 for token in probe.token_ids)
    assert len(read_probe(tmp_path, 1000, 8).token_ids) == 7


@pytest.mark.parametrize(
    "canary",
    [
        "what", {"prompt_token_ids": [1]}, {"prompt_token_ids": [], "token_ids": [1]},
        {"prompt_token_ids": [1000], "token_ids": [1]}, {"prompt_token_ids": [1] * 100, "token_ids": [1]},
    ],
)  # fmt: skip
def test_a_canary_that_cannot_be_read_is_refused(tmp_path: Path, canary: Any) -> None:
    (tmp_path / FILE).write_text(canary if isinstance(canary, str) else json.dumps(canary))
    with pytest.raises(ModelError, match=FILE):
        read_probe(tmp_path, 1000, 100)


def test_the_runner_finds_damage_and_forgets_the_probe(tmp_path: Path) -> None:
    model = tiny_model(packed=False)
    runner, probe = tiny_runner(model), read_probe(tmp_path, VOCABULARY, LENGTH)
    assert trouble(runner, probe) == ""
    life = Life(prompt=(1, 2, 3), blocks=(1,))
    prefill(runner, [life])
    other = Life(prompt=(1, 2, 3), blocks=(1,))
    prefill(tiny_runner(model), [other])
    assert life.output == other.output
    weights = model.destinations()["model.layers.1.mlp.down_proj.weight"].tensor
    assert weights is not None
    with torch.inference_mode():
        weights[0, 0] = float("nan")
    assert "not finite" in trouble(tiny_runner(model), probe)


def test_a_canary_of_the_model_itself(tmp_path: Path) -> None:
    model = tiny_model()
    life = Life(prompt=(4, 8, 15, 16, 23, 42), blocks=(1, 2))
    prefill(tiny_runner(model), [life])
    canary = {"prompt_token_ids": list(life.prompt), "token_ids": life.output}
    (tmp_path / FILE).write_text(json.dumps(canary))
    assert trouble(tiny_runner(model), read_probe(tmp_path, VOCABULARY, LENGTH)) == ""
    canary["token_ids"] = [(life.output[0] + 1) % VOCABULARY]
    (tmp_path / FILE).write_text(json.dumps(canary))
    assert "in place of" in trouble(tiny_runner(model), read_probe(tmp_path, VOCABULARY, LENGTH))
    assert BEST < VOCABULARY
