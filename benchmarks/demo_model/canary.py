"""Write the canary: fixed prompts with the demo model's exact greedy answers, by transformers in fp32 on a CPU.

    python -m benchmarks.demo_model.canary engine_core/embedded/demo tests/canary.jsonl

Every answer is right, and at every token of it the first choice leads the second by a wide margin, so that another
order of summation does not change it and a broken page table does.
"""

import argparse
import json
from pathlib import Path
from random import Random
from typing import Any

import torch

from benchmarks.demo_model.conversation import Conversation, Thinking, exchange
from benchmarks.demo_model.evaluate import Reader, rendered
from benchmarks.demo_model.generator import Split, recall_chat
from benchmarks.demo_model.suites import conversations

MARGIN = 3.0  # logits between the first and the second choice, at least
LIMIT = 600  # tokens of a prompt, so that all fit the smallest server that the tests start
RECALL_DISTANCE = 350  # tokens of other talk between a fact and its question
# How many prompts of each suite. Thoughts and tool messages are left out: a server may have its own fields for them.
QUOTAS = {
    "addition": 5, "subtraction": 4, "word problem": 2, "sort": 4, "count": 3, "copy": 3, "reverse": 3, "extraction": 4,
    "tool call": 4, "no tool": 2, "recall": 2, "identity": 1, "refusal": 1, "fact": 1,
}  # fmt: skip


def draw(suite: str, rng: Random) -> Conversation:
    """A held-out conversation of a suite; recall over a distance that fits the limit."""
    if suite == "recall":
        return recall_chat(rng, Split.HELD_OUT, RECALL_DISTANCE)
    return conversations(suite, rng, 1)[0]


def fits(reader: Reader, conversation: Conversation) -> bool:
    """Whether any server can be asked this."""
    plain = all(message.role != "tool" and not message.calls for message in conversation.messages[:-1])
    plain = plain and conversation.thinking is Thinking.UNSAID and not conversation.thinks
    return plain and len(reader.tokenizer(rendered(reader, conversation))["input_ids"]) <= LIMIT


@torch.no_grad()
def margin(reader: Reader, conversation: Conversation) -> float:
    """The narrowest lead of the right answer's tokens over their rivals; negative where the model would say another."""
    prompt = reader.tokenizer(rendered(reader, conversation), add_special_tokens=False)["input_ids"]
    answer = reader.tokenizer(conversation.answer, add_special_tokens=False)["input_ids"]
    answer.append(reader.tokenizer.eos_token_id)
    logits = reader.model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]  # [answer, vocabulary]
    wanted = torch.tensor(answer)[:, None]  # [answer, 1]
    lead = logits.gather(1, wanted)[:, 0] - logits.scatter(1, wanted, -torch.inf).amax(dim=1)  # [answer]
    return lead.min().item()


def line(conversation: Conversation) -> dict[str, Any]:
    """One prompt as the file holds it."""
    written: dict[str, Any] = {"messages": [message.as_openai() for message in conversation.messages[:-1]]}
    if conversation.tools:
        written["tools"] = list(conversation.tools)
    return {**written, "answer": conversation.answer}


def canary(reader: Reader, seed: int) -> list[dict[str, Any]]:
    """The prompts in the order of the quotas, the README's sum first."""
    chosen = [Conversation((exchange("addition", "", "What is 128 + 457?", "128 + 457 = 585."),))]
    for suite, quota in QUOTAS.items():
        rng = Random(f"canary/{seed}/{suite}")
        found: list[Conversation] = []
        while len(found) < quota:
            candidate = draw(suite, rng)
            if fits(reader, candidate) and margin(reader, candidate) >= MARGIN:
                found.append(candidate)
        chosen += found
    answers = reader.answers([rendered(reader, conversation) for conversation in chosen], 1)
    assert answers == [conversation.answer for conversation in chosen], "generation and teacher forcing disagree"
    return [line(conversation) for conversation in chosen]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the demo model's folder")
    parser.add_argument("out", type=Path, help="file to write, one JSON object per line")
    parser.add_argument("--seed", type=int, default=1, help="seed of the held-out conversations (default: %(default)s)")
    arguments = parser.parse_args()
    lines = canary(Reader(arguments.folder, "cpu"), arguments.seed)
    arguments.out.write_text("".join(json.dumps(written, ensure_ascii=False) + "\n" for written in lines))


if __name__ == "__main__":
    main()
