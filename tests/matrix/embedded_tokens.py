"""What transformers says with the embedded model, greedily: 50 prompts and their answers as token ids, stored.

`python -m tests.matrix.embedded_tokens` writes the file anew, once the model has changed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from penstock.engine_core.embedded import demo_folder

FILE = Path(__file__).with_name("embedded_tokens.json")
CANARY = Path(__file__).parents[1] / "canary.jsonl"
HEROES = ("fox", "owl", "king", "robot", "bear", "girl", "miller", "horse", "painter", "dragon")
LONGEST = 120
Pairs = list[tuple[list[int], list[int]]]


def prompts() -> list[dict[str, Any]]:
    """The canary's forty and ten stories, whose next words are far less certain."""
    asked = [json.loads(line) for line in CANARY.read_text().splitlines()]
    stories = [{"messages": [{"role": "user", "content": f"Tell me a short story about a {hero}."}]} for hero in HEROES]
    return asked + stories


def model_sums() -> str:
    return (demo_folder() / "SHA256SUMS").read_text()


def stored() -> Pairs:
    """Prompt ids and greedy output ids."""
    found = json.loads(FILE.read_text())
    assert found["model"] == model_sums(), f"{FILE.name} is of another model: python -m tests.matrix.embedded_tokens"
    return [(ids, out) for ids, out in found["pairs"]]


def by_transformers() -> Pairs:
    """The same, one prompt at a time in fp32."""
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


if __name__ == "__main__":
    pairs = ",\n".join(json.dumps(pair, separators=(",", ":")) for pair in by_transformers())
    FILE.write_text(f'{{"model": {json.dumps(model_sums())}, "pairs": [\n{pairs}\n]}}\n')
