"""What drafts make of a schema for one stream of the embedded model: `python -m benchmarks.schema_drafts`, and with
`--device cuda` on a GPU.

Where a grammar leaves one way to go on, the forced run is verified as a draft, many tokens in a step. How much that is
depends on the model, which must split the run as the tokenizer does, and on the whitespace between JSON tokens: where
some is allowed, little is forced, and prompt lookup finds what repeats. So a model that was trained is asked, one
request at a time, greedy, as many tokens of each. The ways take turns, so that what else the machine does falls on all.
"""

from __future__ import annotations

import datetime
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from benchmarks.cpu_embedded import write
from benchmarks.speculation import RESULTS, origin, parser_of, post, served

OUTPUTS: Mapping[str, Path] = {"cpu": RESULTS / "schema_drafts_cpu.json", "cuda": RESULTS / "schema_drafts_h200.json"}


def records(properties: Mapping[str, Any]) -> dict[str, Any]:
    """A schema of so many records that an answer never reaches their end."""
    item = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"type": "array", "items": item, "minItems": 200, "maxItems": 300}


TEXT = {"type": "string", "maxLength": 12}
SCHEMAS: Mapping[str, dict[str, Any]] = {
    "List of users as JSON:\n": records({
        "id": {"type": "integer", "minimum": 0, "maximum": 99999}, "name": TEXT, "ok": {"type": "boolean"},
    }),
    "The items of the invoice:\n": records({
        "description": TEXT, "quantity": {"type": "integer", "minimum": 1, "maximum": 99},
        "unit_price": {"type": "number", "minimum": 0, "maximum": 9999}, "currency": {"enum": ["EUR", "USD", "GBP"]},
    }),
    "Calls of the tool:\n": records({
        "name": {"const": "get_weather"},
        "arguments": {
            "type": "object", "properties": {"city": TEXT, "unit": {"enum": ["celsius", "fahrenheit"]}},
            "required": ["city", "unit"], "additionalProperties": False,
        },
    }),
}  # by prompt  # fmt: skip


class Way(msgspec.Struct, frozen=True):
    """One way to ask one of `benchmarks.speculation.SERVERS`."""

    name: str
    server: str = "plain"
    schema: bool = True
    whitespace: str = ""  # between JSON tokens; empty: the default


WAYS = (
    Way("free", schema=False),
    Way("schema"),
    Way("schema, no whitespace", whitespace="none"),
    Way("free, prompt lookup", "ngram", schema=False),
    Way("schema, prompt lookup", "ngram"),
    Way("schema, no whitespace, prompt lookup", "ngram", whitespace="none"),
)


class Asked(msgspec.Struct, frozen=True):
    """One answer."""

    seconds: float
    tokens: int
    accepted: int  # of its tokens, as drafts


class Figures(msgspec.Struct, frozen=True):
    """One way, all prompts: times are medians over the rounds."""

    way: str
    requests: int
    tokens: int  # of a round
    milliseconds: float  # per token, prompt included
    speedup: float  # against the first way
    drafted_share: float  # of the tokens, taken as drafts
    tokens_per_step: float


def body(way: Way, prompt: str, tokens: int) -> dict[str, Any]:
    """Of one request."""
    found: dict[str, Any] = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    if way.schema:
        form = {"name": "records", "schema": SCHEMAS[prompt]}
        found["response_format"] = {"type": "json_schema", "json_schema": form}
    if way.whitespace:
        found["whitespace"] = way.whitespace
    return found


def ask(url: str, asked: Mapping[str, Any]) -> Asked:
    """The answer to a request."""
    found, seconds = post(url + "/v1/completions", asked)
    usage = found["usage"]
    details = usage["completion_tokens_details"]
    return Asked(seconds, usage["completion_tokens"], details["accepted_prediction_tokens"])


def measure(urls: Mapping[str, str], tokens: int, rounds: int) -> dict[str, list[list[Asked]]]:
    """Answers by way, by prompt, by round. One round is not kept: in it schemas are compiled and prompts cached."""
    found: dict[str, list[list[Asked]]] = {way.name: [[] for _ in SCHEMAS] for way in WAYS}
    for number in range(rounds + 1):
        for place, prompt in enumerate(SCHEMAS):
            for way in WAYS:
                answer = ask(urls[way.server], body(way, prompt, tokens))
                if number:
                    found[way.name][place].append(answer)
    return found


def figures(found: Mapping[str, Sequence[Sequence[Asked]]]) -> list[Figures]:
    """What each way came to."""
    rows: list[Figures] = []
    for way, prompts in found.items():
        seconds = sum(median(answer.seconds for answer in answers) for answers in prompts)
        tokens = sum(answers[0].tokens for answers in prompts)
        accepted = sum(answers[0].accepted for answers in prompts)
        each = 1e3 * seconds / tokens
        rows.append(Figures(
            way=way, requests=sum(len(answers) for answers in prompts), tokens=tokens, milliseconds=round(each, 3),
            speedup=round(rows[0].milliseconds / each if rows else 1.0, 2),
            drafted_share=round(accepted / tokens, 4), tokens_per_step=round(tokens / (tokens - accepted), 2),
        ))  # fmt: skip
    return rows


def table(rows: Sequence[Figures]) -> str:
    lines = [f"{'way':<38}{'ms/token':>10}{'speed-up':>10}{'drafts':>9}{'tokens/step':>13}"]
    lines += [
        f"{row.way:<38}{row.milliseconds:>10.3f}{row.speedup:>9.2f}x{row.drafted_share:>9.1%}{row.tokens_per_step:>13.2f}"
        for row in rows
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--tokens", type=int, default=256, help="of each answer")
    parser.add_argument("--rounds", type=int, default=7, help="times that each prompt is asked and measured")
    options = parser.parse_args(arguments)
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    with served(dict.fromkeys(way.server for way in WAYS), options) as (urls, chip):
        rows = figures(measure(urls, options.tokens, options.rounds))
    print(table(rows))
    write(options.output or OUTPUTS[options.device], {
        **origin(started, options, urls, chip),
        "workload": "records of three schemas, one request at a time, greedy, ends ignored",
        "tokens": options.tokens, "rounds": options.rounds,
        "cache": "prompts and schemas are cached from the first round on, which is not counted", "figures": rows,
    })  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
