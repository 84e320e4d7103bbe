"""The embedded model gives the same greedy tokens here and in transformers, on 50 prompts, in fp32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.engine_core.embedded import demo_folder
from penstock.protocol.messages import Sampling
from tests.matrix.engine import Cell, Engine, Prompt

CANARY = Path(__file__).parents[1] / "canary.jsonl"
HEROES = ("fox", "owl", "king", "robot", "bear", "girl", "miller", "horse", "painter", "dragon")
LONGEST = 120


def prompts() -> list[dict[str, Any]]:
    """The canary's forty and ten stories, whose next words are far less certain."""
    asked = [json.loads(line) for line in CANARY.read_text().splitlines()]
    stories = [{"messages": [{"role": "user", "content": f"Tell me a short story about a {hero}."}]} for hero in HEROES]
    return asked + stories


@pytest.fixture(scope="module")
def expected() -> list[tuple[list[int], list[int]]]:
    """Prompt ids and greedy output ids by transformers, one prompt at a time."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(demo_folder())
    model = AutoModelForCausalLM.from_pretrained(demo_folder(), dtype=torch.float32)
    found = []
    for prompt in prompts():
        ids = tokenizer.apply_chat_template(
            prompt["messages"], tools=prompt.get("tools"), add_generation_prompt=True, return_tensors="pt",
            return_dict=True,
        )  # fmt: skip
        with torch.inference_mode():
            out = model.generate(**ids, do_sample=False, max_new_tokens=LONGEST, temperature=None)
        length = ids["input_ids"].shape[1]
        found.append((ids["input_ids"][0].tolist(), out[0, length:].tolist()))
    return found


CELLS = {
    "overlap": Cell(max_model_len=1024),
    "chunks": Cell(depth=1, budget=64, block_size=8, max_model_len=1024),
    "preemption": Cell(blocks=64, max_model_len=1024, expected_share=0.0),
}


@pytest.mark.parametrize("name", [pytest.param("overlap", marks=pytest.mark.long), "chunks"])
def test_the_canary_passes_in_bfloat16(name: str, expected: list[tuple[list[int], list[int]]]) -> None:
    """What `--dtype auto` may choose on a CPU: the certain answers are those of fp32."""
    stops = (*json.loads((demo_folder() / "generation_config.json").read_text())["eos_token_id"],)
    sampling = Sampling(temperature=0.0, max_tokens=LONGEST, eos_token_ids=stops)
    certain = expected[: -len(HEROES)]
    engine = Engine(CELLS[name], demo_folder(), dtype=torch.bfloat16)
    answers = engine.answer([Prompt(token_ids=tuple(ids), sampling=sampling) for ids, _ in certain])
    assert [answers[number, 0] for number in range(len(certain))] == [out for _, out in certain]


@pytest.mark.parametrize("name", ["overlap", pytest.param("chunks", marks=pytest.mark.long), "preemption"])
def test_fifty_prompts_give_transformers_tokens(name: str, expected: list[tuple[list[int], list[int]]]) -> None:
    stops = (*json.loads((demo_folder() / "generation_config.json").read_text())["eos_token_id"],)
    sampling = Sampling(temperature=0.0, max_tokens=LONGEST, eos_token_ids=stops)
    assert len(expected) == 50
    asked = [Prompt(token_ids=tuple(ids), sampling=sampling) for ids, _ in expected]
    engine = Engine(CELLS[name], demo_folder())
    answers = engine.answer(asked)
    assert [answers[number, 0] for number in range(50)] == [out for _, out in expected]
    assert (engine.scheduler.statistics().preemptions > 0) == (name == "preemption")
