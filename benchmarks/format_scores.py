"""What each weight format costs the embedded model: `python -m benchmarks.format_scores --write`.

Each folder of benchmarks/format_folders.py answers the same held-out conversations through the Python API, greedily, in
fp32 on a CPU. Scored are right answers, the likelihood of the one right answer, and the tokens that the original would
have said: at each position of the right answer, and as whole answers.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from math import exp
from pathlib import Path
from random import Random

import msgspec

from benchmarks import format_folders, report
from benchmarks.demo_model.conversation import Conversation, prompt
from benchmarks.demo_model.evaluate import judge_of
from benchmarks.demo_model.suites import SUITES, conversations
from benchmarks.relimit import RESULTS
from penstock import LLM, SamplingParams
from penstock.engine_core.embedded import demo_folder
from penstock.engine_core.models.weight_files import SINGLE

END = "<|im_end|>"
LONGEST = 320  # tokens of an answer
OPTIONS = {"device": "cpu", "dtype": "float32", "tokenizer_processes": 1}
ORIGINAL = "bf16"
FILE = RESULTS / "format_scores.json"


class Said(msgspec.Struct, frozen=True):
    """What one folder made of every conversation."""

    answers: list[str]
    tokens: list[list[int]]
    chosen: list[list[int]]  # the first choice at each position of the right answer
    logprobs: list[list[float]]  # of the right answer's tokens


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """Of one format, over all conversations."""

    format: str
    bytes: int  # of the weights' file
    right: int  # answers, word for word
    loss: float  # nats a token of right answers
    perplexity: float
    same_tokens: float  # share of positions at which the first choice is the original's
    same_answers: float


class Report(msgspec.Struct, frozen=True, kw_only=True):
    conversations: int
    tokens: int  # of right answers
    scores: list[Score]


def held_out(count: int, seed: int = 1) -> list[tuple[str, Conversation]]:
    """Conversations of every suite, as `demo_model.evaluate` draws them."""
    return [
        (suite, one) for suite in SUITES for one in conversations(suite, Random(f"evaluation/{seed}/{suite}"), count)
    ]


def said(folder: Path, asked: Sequence[tuple[str, Conversation]]) -> Said:
    """What the model in `folder` answers, and what it makes of the right answers."""
    prompts = [prompt(conversation) for _, conversation in asked]
    told = [text + one.answer + END for text, (_, one) in zip(prompts, asked, strict=True)]
    greedy = SamplingParams(temperature=0.0, max_tokens=LONGEST, skip_special_tokens=False)
    with LLM(str(folder), **OPTIONS) as llm:
        free = llm.generate(prompts, greedy, use_tqdm=False)
        read = llm.generate(told, SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1), use_tqdm=False)
    chosen, logprobs = [], []
    for before, one in zip(free, read, strict=True):
        assert one.prompt_logprobs is not None
        start = len(before.prompt_token_ids)
        answer = [position for position in one.prompt_logprobs[start:] if position is not None]
        chosen.append([max(at, key=lambda token, at=at: at[token].logprob) for at in answer])
        logprobs.append([at[token].logprob for at, token in zip(answer, one.prompt_token_ids[start:], strict=True)])
    outputs = [one.outputs[0] for one in free]
    return Said([one.text for one in outputs], [one.token_ids for one in outputs], chosen, logprobs)


def score(name: str, size: int, asked: Sequence[tuple[str, Conversation]], found: Said, original: Said) -> Score:
    """size: bytes of the weights' file."""
    told = [number for one in found.logprobs for number in one]
    choices = [a == b for one, other in zip(found.chosen, original.chosen, strict=True)
               for a, b in zip(one, other, strict=True)]  # fmt: skip
    right = [judge_of(suite)(text, one) for text, (suite, one) in zip(found.answers, asked, strict=True)]
    same = [one == other for one, other in zip(found.tokens, original.tokens, strict=True)]
    loss = -sum(told) / len(told)
    return Score(format=name, bytes=size, right=sum(right), loss=loss, perplexity=exp(loss),
                 same_tokens=sum(choices) / len(choices), same_answers=sum(same) / len(same))  # fmt: skip


def measure(names: Sequence[str], count: int, place: Path) -> Report:
    """The scores of the original and of the formats, over `count` conversations a suite."""
    asked = held_out(count)
    original = said(demo_folder(), asked)
    scores = [score(ORIGINAL, (demo_folder() / SINGLE).stat().st_size, asked, original, original)]
    for name in names:
        folder = format_folders.write(demo_folder(), place / name, name)
        scores.append(score(name, (folder / SINGLE).stat().st_size, asked, said(folder, asked), original))
        print(scores[-1], flush=True)
    return Report(conversations=len(asked), tokens=sum(map(len, original.logprobs)), scores=scores)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.format_scores", description=__doc__.partition("\n")[0])
    names = (*format_folders.QUANTIZE, *format_folders.LAYOUTS)
    parser.add_argument("--formats", default=",".join(names), help="names, with commas (default: %(default)s)")
    parser.add_argument("--count", type=int, default=25, help="conversations of each suite (default: %(default)s)")
    parser.add_argument("--write", action="store_true", help=f"write {FILE.name}")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as place:
        found = measure(options.formats.split(","), options.count, Path(place))
    if options.write:
        report.write(FILE, "format_scores", found, arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
