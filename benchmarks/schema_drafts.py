"""What drafts make of a schema for one stream of the embedded model: `python -m benchmarks.schema_drafts`, and with
`--device cuda` on a GPU.

Where a grammar leaves one way to go on, or one if whitespace stands where it mostly does, the run is verified as a
draft, many tokens in a step. How much that gives depends on the model, which must write JSON as it always does. So one
that was trained is asked what it was trained for, one request at a time, greedy: to extract fields of a text
(`extract`) and to call a tool (`call`), held-out exercises whose right answers are known. Free, it writes the same JSON
by itself. The ways take turns, so that what else the machine does falls on all.

With `--widened` the model is in an 8B's shape (`benchmarks.widened`, 14 GB): a step takes the GPU as long as such a
model's, and not less than it takes a token to go to the automaton and its mask to come back.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import msgspec

from benchmarks import report
from benchmarks.demo_model.generator import Split, draw
from benchmarks.demo_model.tasks import extraction, tools
from benchmarks.speculation import CACHE, RESULTS, parser_of, post, served, setting
from benchmarks.widened import EIGHT, widen

OUTPUTS: Mapping[str, Path] = {"cpu": RESULTS / "schema_drafts_cpu.json", "cuda": RESULTS / "schema_drafts_h200.json"}
WIDENED = RESULTS / "schema_drafts_8b_h200.json"
TYPES = {str: "string", int: "integer", float: "number", bool: "boolean"}
LEAST_FIELDS = 3
LONGEST = 200  # tokens of an answer


class Task(msgspec.Struct, frozen=True):
    """What is asked, and the right answer."""

    load: str
    question: str
    answer: dict[str, Any]
    schema: dict[str, Any] = {}  # of the answer, where it is text
    tools: tuple[dict[str, Any], ...] = ()  # that may be called, where it is a call


class Way(msgspec.Struct, frozen=True):
    """One way to ask one of `benchmarks.speculation.SERVERS`."""

    name: str
    server: str = "plain"
    schema: bool = True
    options: dict[str, Any] = {}  # of the request
    loads: tuple[str, ...] = ("extract", "call")


WAYS = (
    Way("free", schema=False),
    Way("schema, forced runs alone", options={"speculative": False}),
    Way("schema"),
    Way("schema, no whitespace", options={"whitespace": "none"}, loads=("extract",)),
    Way("free, prompt lookup", "ngram", schema=False),
    Way("schema, prompt lookup", "ngram"),
)


class Asked(msgspec.Struct, frozen=True):
    """One answer."""

    seconds: float
    tokens: int
    accepted: int  # of its tokens, as drafts
    rejected: int  # drafts
    right: bool


class Figures(msgspec.Struct, frozen=True):
    """One way to one load: times are medians over the rounds."""

    load: str
    way: str
    requests: int
    tokens: int  # of a round
    milliseconds: float  # per token, prompt included
    speedup: float  # against the first way
    drafted_share: float  # of the tokens, taken as drafts
    acceptance: float  # share of the drafts
    tokens_per_step: float
    right: float  # share of the answers


def closed(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """A tool's parameters as strict ones are written: what is not required is not there."""
    required = parameters.get("required", [*parameters["properties"]])
    properties = {name: parameters["properties"][name] for name in required}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def extract_task(rng: Random) -> Task | None:
    """None if it has few fields."""
    exercise = draw(rng, extraction.extract, Split.HELD_OUT)
    answer = json.loads(exercise.messages[-1].content)
    if len(answer) < LEAST_FIELDS:
        return None
    properties = {name: {"type": TYPES[type(value)]} for name, value in answer.items()}
    schema = closed({"properties": properties})
    return Task("extract", exercise.messages[0].content, answer, schema=schema)


def call_task(rng: Random) -> Task | None:
    """None if it is not one call."""
    kit = tools.draw_tools(rng)
    exercise = draw(rng, lambda chance: tools.tool_use(chance, kit), Split.HELD_OUT)
    calls = exercise.messages[-1].calls
    if len(calls) != 1:
        return None
    signatures = []
    for tool in kit:
        function = tool.signature["function"]
        strict = {"parameters": closed(function["parameters"]), "strict": True}
        signatures.append({"type": "function", "function": function | strict})
    answer = {"name": calls[0].name, "arguments": calls[0].arguments}
    return Task("call", exercise.messages[0].content, answer, tools=tuple(signatures))


def tasks(count: int, seed: int) -> list[Task]:
    """So many of each load."""
    found: list[Task] = []
    for make in (extract_task, call_task):
        rng, enough = Random(seed), len(found) + count
        while len(found) < enough:
            task = make(rng)
            if task is not None:
                found.append(task)
    return found


def body(way: Way, task: Task) -> dict[str, Any]:
    """Of one request."""
    messages = [{"role": "user", "content": task.question}]
    found: dict[str, Any] = {"messages": messages, "max_tokens": LONGEST, "temperature": 0, **way.options}
    if task.tools:
        found |= {"tools": task.tools, "tool_choice": "required" if way.schema else "auto"}
        if not way.schema:
            found["tools"] = [{**tool, "function": tool["function"] | {"strict": False}} for tool in task.tools]
    elif way.schema:
        found["response_format"] = {"type": "json_schema", "json_schema": {"name": "fields", "schema": task.schema}}
    return found


def said(message: Mapping[str, Any]) -> Any:
    """What an answer comes to."""
    try:
        if calls := message.get("tool_calls"):
            function = calls[0]["function"]
            return {"name": function["name"], "arguments": json.loads(function["arguments"])}
        return json.loads(message["content"] or "")
    except json.JSONDecodeError:
        return None


def ask(url: str, way: Way, task: Task) -> Asked:
    """The answer to a request."""
    found, seconds = post(url + "/v1/chat/completions", body(way, task))
    usage = found["usage"]
    details = usage["completion_tokens_details"]
    return Asked(
        seconds, usage["completion_tokens"], details["accepted_prediction_tokens"],
        details["rejected_prediction_tokens"], right=said(found["choices"][0]["message"]) == task.answer,
    )  # fmt: skip


Answers = dict[tuple[str, str], list[list[Asked]]]  # by load and way, by task, by round


def measure(urls: Mapping[str, str], asked: Sequence[Task], rounds: int) -> Answers:
    """One round is not kept: in it schemas are compiled and prompts cached."""
    found: Answers = {}
    kept = [{way.name: list[Asked]() for way in WAYS if task.load in way.loads} for task in asked]
    for number in range(rounds + 1):
        for task, answers in zip(asked, kept, strict=True):
            for way in [way for way in WAYS if way.name in answers]:
                answer = ask(urls[way.server], way, task)
                if number:
                    answers[way.name].append(answer)
    for task, answers in zip(asked, kept, strict=True):
        for name, rows in answers.items():
            found.setdefault((task.load, name), []).append(rows)
    return found


def figures(found: Mapping[tuple[str, str], Sequence[Sequence[Asked]]]) -> list[Figures]:
    """What each way came to."""
    rows: list[Figures] = []
    first: dict[str, float] = {}
    for (load, way), answered in found.items():
        every = [answer for answers in answered for answer in answers]
        seconds = sum(median(answer.seconds for answer in answers) for answers in answered)
        tokens = sum(answers[0].tokens for answers in answered)
        all_tokens = sum(answer.tokens for answer in every)
        accepted, rejected = sum(answer.accepted for answer in every), sum(answer.rejected for answer in every)
        each = 1e3 * seconds / tokens
        rows.append(Figures(
            load=load, way=way, requests=len(every), tokens=tokens, milliseconds=round(each, 3),
            speedup=round(first.setdefault(load, each) / each, 2), drafted_share=round(accepted / all_tokens, 4),
            acceptance=round(accepted / max(1, accepted + rejected), 4),
            tokens_per_step=round(all_tokens / (all_tokens - accepted), 2),
            right=round(sum(answer.right for answer in every) / len(every), 4),
        ))  # fmt: skip
    return rows


def table(rows: Sequence[Figures]) -> str:
    head = f"{'load':<9}{'way':<28}{'ms/token':>9}{'speed-up':>10}{'drafts':>8}{'came true':>11}"
    lines = [head + f"{'tokens/step':>13}{'right':>7}"]
    lines += [
        f"{row.load:<9}{row.way:<28}{row.milliseconds:>9.3f}{row.speedup:>9.2f}x{row.drafted_share:>8.1%}"
        f"{row.acceptance:>11.1%}{row.tokens_per_step:>13.2f}{row.right:>7.0%}"
        for row in rows
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--widened", action="store_true", help="in an 8B's shape")
    parser.add_argument("--tasks", type=int, default=12, help="of each load")
    parser.add_argument("--rounds", type=int, default=7, help="times that each task is asked and measured")
    parser.add_argument("--seed", type=int, default=5)
    options = parser.parse_args(arguments)
    servers = dict.fromkeys(way.server for way in WAYS)
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as place:
        model = [str(widen(Path(place) / "model", EIGHT))] if options.widened else []
        with served(servers, options, model, 4 << 30 if options.widened else CACHE) as (urls, chip):
            rows = figures(measure(urls, tasks(options.tasks, options.seed), options.rounds))
    print(table(rows))
    report.write(options.output or (WIDENED if options.widened else OUTPUTS[options.device]), "schema_drafts", {
        **setting(options, urls, chip), "widened": msgspec.structs.asdict(EIGHT) if options.widened else {},
        "workload": "held-out exercises: fields of a text, a call of a tool; one request at a time, greedy",
        "tasks": options.tasks, "rounds": options.rounds, "seed": options.seed,
        "cache": "prompts and schemas are cached from the first round on, which is not counted", "figures": rows,
    }, arguments, options.commit)  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
