"""The embedded model gives the same greedy tokens here and in transformers, on 50 prompts, in fp32."""

from __future__ import annotations

import json

import pytest
import torch

from penstock.engine_core.embedded import demo_folder
from penstock.protocol.messages import Sampling
from tests.matrix.embedded_tokens import HEROES, LONGEST, Pairs, by_transformers, stored
from tests.matrix.engine import Cell, Engine, Prompt


@pytest.fixture(scope="module")
def expected() -> Pairs:
    """By transformers, as stored."""
    return stored()


@pytest.mark.long
def test_what_is_stored_is_what_transformers_says(expected: Pairs) -> None:
    assert by_transformers() == expected


CELLS = {
    "overlap": Cell(max_model_len=1024),
    "chunks": Cell(depth=1, budget=64, block_size=8, max_model_len=1024),
    "preemption": Cell(blocks=64, max_model_len=1024, expected_share=0.0),
}


@pytest.mark.parametrize("name", [pytest.param("overlap", marks=pytest.mark.long), "chunks"])
def test_the_canary_passes_in_bfloat16(name: str, expected: Pairs) -> None:
    """What `--dtype auto` may choose on a CPU: the certain answers are those of fp32."""
    stops = (*json.loads((demo_folder() / "generation_config.json").read_text())["eos_token_id"],)
    sampling = Sampling(temperature=0.0, max_tokens=LONGEST, eos_token_ids=stops)
    certain = expected[: -len(HEROES)]
    engine = Engine(CELLS[name], demo_folder(), dtype=torch.bfloat16)
    answers = engine.answer([Prompt(token_ids=tuple(ids), sampling=sampling) for ids, _ in certain])
    assert [answers[number, 0] for number in range(len(certain))] == [out for _, out in certain]


@pytest.mark.parametrize(
    "name", [*(pytest.param(name, marks=pytest.mark.long) for name in ("overlap", "chunks")), "preemption"]
)
def test_fifty_prompts_give_transformers_tokens(name: str, expected: Pairs) -> None:
    stops = (*json.loads((demo_folder() / "generation_config.json").read_text())["eos_token_id"],)
    sampling = Sampling(temperature=0.0, max_tokens=LONGEST, eos_token_ids=stops)
    assert len(expected) == 50
    asked = [Prompt(token_ids=tuple(ids), sampling=sampling) for ids, _ in expected]
    engine = Engine(CELLS[name], demo_folder())
    answers = engine.answer(asked)
    assert [answers[number, 0] for number in range(50)] == [out for _, out in expected]
    assert (engine.scheduler.statistics().preemptions > 0) == (name == "preemption")
