"""Score a model folder: greedy decoding with plain transformers over held-out conversations, an exact match each.

    python -m benchmarks.demo_model.evaluate FOLDER --json FILE

The draft's acceptance is measured with `--draft FOLDER`: over the target's own greedy answers the draft proposes four
tokens a round, those before the first that differs from the target's are accepted, and the target adds one. Tokens
drafted past the end of an answer count as drafted in the strict figure only.
"""

import argparse
import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.demo_model.conversation import Conversation, Thinking, prompt
from benchmarks.demo_model.lexicon import WORDS
from benchmarks.demo_model.suites import BARE, STORY, SUITES, conversations
from benchmarks.demo_model.tasks import stories

DRAFTED = 4
_STORY, _BARE, _OWN_WORDS = "story", "bare schema", "own words"
_OWN = {_STORY: STORY, _BARE: BARE}  # suites that are not judged by the one right answer
_LIMIT = 320  # tokens of the longest answer


@dataclass(frozen=True)
class Score:
    """How often a suite's answers were right, and one that was wrong."""

    suite: str
    right: int
    asked: int
    wanted: float
    mistake: str

    @property
    def share(self) -> float:
        return self.right / self.asked


@dataclass(frozen=True)
class Acceptance:
    """Share of the drafted tokens that were accepted: within the answers, and with those drafted past their ends."""

    share: float
    strict: float
    tokens_per_round: float


class Reader:
    """A model folder in fp32 on the device at hand. Owns the weights and the tokenizer."""

    def __init__(self, path: Path, device: str) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(device).eval()

    @torch.no_grad()
    def answers(self, prompts: list[str], batch: int) -> list[str]:
        """Greedy answers, without their end token, in the prompts' order. Prompts of like length share a batch."""
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
        found = [""] * len(prompts)
        for start in range(0, len(order), batch):
            chosen = order[start : start + batch]
            inputs = self.tokenizer(
                [prompts[i] for i in chosen], return_tensors="pt", padding=True, add_special_tokens=False
            )
            inputs = inputs.to(self.model.device)
            outputs = self.model.generate(
                **inputs,
                do_sample=False,
                temperature=None,
                max_new_tokens=_LIMIT,
                pad_token_id=self.tokenizer.pad_token_id,
            )
            for index, ids in zip(chosen, outputs[:, inputs["input_ids"].shape[1] :].tolist(), strict=True):
                found[index] = self.tokenizer.decode(_until_end(ids, self.tokenizer))
        return found

    @torch.no_grad()
    def fills(self, prompt: str, answer: str) -> bool:
        """Whether the model's first choice is right in every value of a JSON answer, if its keys are written for it."""
        head = self.tokenizer(prompt, add_special_tokens=False)["input_ids"]
        body = self.tokenizer(answer, add_special_tokens=False, return_offsets_mapping=True)
        ids = torch.tensor([head + body["input_ids"]], device=self.model.device)
        choices = self.model(ids).logits[0, len(head) - 1 : -1].argmax(dim=-1).tolist()
        inside = values_of(answer)
        return all(
            choice == token
            for choice, token, (start, end) in zip(choices, body["input_ids"], body["offset_mapping"], strict=True)
            if inside[start:end].strip("\0")
        )


def values_of(answer: str) -> str:
    """A JSON answer with zeros in place of all but its values: a grammar writes the rest."""
    keys = re.sub(r'"[^"]*":|[{}]', lambda found: "\0" * len(found.group()), answer)
    return re.sub(r'[\s,"\[\]]', "\0", keys)


def _until_end(ids: list[int], tokenizer: Any) -> list[int]:
    for index, token in enumerate(ids):
        if token in (tokenizer.eos_token_id, tokenizer.pad_token_id):
            return ids[:index]
    return ids


def rendered(reader: Reader, conversation: Conversation) -> str:
    """The prompt as the folder's chat template writes it; it must be the generator's."""
    messages = [message.as_openai() for message in conversation.messages[:-1]]
    keywords: dict[str, Any] = {}
    if conversation.thinking is not Thinking.UNSAID:
        keywords["enable_thinking"] = conversation.thinking is Thinking.ON
    tools = list(conversation.tools) or None
    text = reader.tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=True, **keywords
    )
    assert text == prompt(conversation), "the chat template and the generator disagree"
    return str(text)


def reads_as_english(story: str, conversation: Conversation) -> bool:
    """Whether a story is made of whole sentences of known words, none said twice, about the hero that was asked for."""
    sentences = re.findall(r"[^.!?]+[.!?]\"?", story)
    words = set(re.findall(r"[a-z]+", story.lower()))
    asked = re.findall(r"(?:named|called) (\w+)", conversation.messages[-2].content)
    return (
        len(sentences) >= 4
        and "".join(sentences) == story
        and len(set(sentences)) == len(sentences)
        and words <= stories.known_words() | set(WORDS) | {name.lower() for name in asked}
        and all(name in story for name in asked)
    )


def says_the_value(answer: str, conversation: Conversation) -> bool:
    """Whether what was told before stands in the answer, whatever its words."""
    value = conversation.answer.removesuffix(".").rsplit(" is ", 1)[-1].split(" called ")[-1].split(" as ")[-1]
    return value.split(" in ")[-1].removeprefix("allergic to ") in answer


def judge_of(suite: str) -> Callable[[str, Conversation], bool]:
    if suite == _STORY:
        return reads_as_english
    if suite == _OWN_WORDS:
        return says_the_value
    return lambda answer, conversation: answer == conversation.answer


def score(reader: Reader, count: int, batch: int, seed: int, chosen: list[str]) -> list[Score]:
    """The scores of the chosen suites over `count` held-out conversations each."""
    found = []
    for suite in chosen:
        rng = Random(f"evaluation/{seed}/{suite}")
        if suite in _OWN:
            asked = [_OWN[suite](rng) for _ in range(count)]
        else:
            asked = conversations(suite, rng, count)
        prompts = [rendered(reader, conversation) for conversation in asked]
        if suite == _BARE:
            filled = [
                reader.fills(text, conversation.answer) for text, conversation in zip(prompts, asked, strict=True)
            ]
            wrong = [(c, "another value") for c, right in zip(asked, filled, strict=True) if not right]
        else:
            judge = judge_of(suite)
            wrong = [(c, a) for c, a in zip(asked, reader.answers(prompts, batch), strict=True) if not judge(a, c)]
        mistake = ""
        if wrong:
            conversation, answer = wrong[0]
            mistake = f"{conversation.messages[-2].content!r}: {answer!r}, not {conversation.answer!r}"
        wanted = 0.95 if suite in _OWN else SUITES[suite][0]
        found.append(Score(suite, count - len(wrong), count, wanted, mistake))
        print(f"{suite:14} {found[-1].share:7.1%}  of {count}, wanted {wanted:.0%}  {mistake[:200]}", flush=True)
    return found


def table(scores: list[Score]) -> str:
    """The scores as a Markdown table."""
    lines = ["| Task | Exact | Asked | Wanted |", "|---|---|---|---|"]
    lines += [f"| {s.suite} | {s.share:.1%} | {s.asked} | {s.wanted:.0%} |" for s in scores]
    return "\n".join(lines)


@torch.no_grad()
def proposal(draft: Reader, ids: list[int]) -> list[int]:
    """The draft's greedy continuation of `ids`, DRAFTED tokens long."""
    inputs = torch.tensor([ids], device=draft.model.device)
    outputs = draft.model.generate(
        input_ids=inputs,
        attention_mask=torch.ones_like(inputs),
        do_sample=False,
        temperature=None,
        max_new_tokens=DRAFTED,
        eos_token_id=None,
        pad_token_id=draft.tokenizer.pad_token_id,
    )
    return list(outputs[0, len(ids) :].tolist())


def acceptance(reader: Reader, draft: Reader, count: int, seed: int) -> Acceptance:
    """How many drafted tokens the target accepts over `count` held-out conversations of every suite."""
    accepted = drafted = useful = rounds = 0
    for suite in SUITES:
        rng = Random(f"acceptance/{seed}/{suite}")
        for conversation in conversations(suite, rng, count):
            text = rendered(reader, conversation)
            context = reader.tokenizer(text, add_special_tokens=False)["input_ids"]
            answer = reader.tokenizer(reader.answers([text], 1)[0], add_special_tokens=False)["input_ids"]
            answer.append(reader.tokenizer.eos_token_id)
            done = 1  # the first token comes from the prefill
            while done < len(answer):
                guess = proposal(draft, context + answer[:done])
                right = 0
                while right < DRAFTED and done + right < len(answer) and guess[right] == answer[done + right]:
                    right += 1
                accepted += right
                drafted += DRAFTED
                useful += min(DRAFTED, len(answer) - done)
                rounds += 1
                done += right + 1
    return Acceptance(accepted / useful, accepted / drafted, 1 + accepted / rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the model's folder")
    parser.add_argument("--draft", type=Path, help="measure this draft's acceptance instead")
    parser.add_argument("--count", type=int, default=200, help="conversations per suite (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=50, help="prompts decoded together (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the held-out conversations (default: %(default)s)")
    parser.add_argument("--suite", action="append", help="only this suite; may be repeated")
    parser.add_argument("--json", type=Path, help="write the scores to this file")
    arguments = parser.parse_args()
    reader = Reader(arguments.folder, "cuda" if torch.cuda.is_available() else "cpu")
    if arguments.draft:
        draft = Reader(arguments.draft, str(reader.model.device))
        found = acceptance(reader, draft, arguments.count, arguments.seed)
        result: dict[str, Any] = asdict(found)
        print(f"{found.share:.1%} of the drafted tokens are accepted at {DRAFTED} a round")
        print(f"{found.strict:.1%} with those past the end; {found.tokens_per_round:.2f} tokens a round")
    else:
        chosen = arguments.suite or [*SUITES, *_OWN]
        scores = score(reader, arguments.count, arguments.batch, arguments.seed, chosen)
        result = {s.suite: {"share": s.share, "asked": s.asked, "wanted": s.wanted} for s in scores}
        print("\n" + table(scores))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
