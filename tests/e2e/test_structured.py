"""Structured output through real processes and OpenAI's client: every form, streamed and whole, among free requests."""

from __future__ import annotations

import json
import math
import os
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import openai
import pytest
import regex

from tests.e2e.server import Server, command_line, descendants

MODEL = "penstock-demo"
ASK: Any = [{"role": "user", "content": "Extract the person as JSON: Tom is 5 years old and lives in Rome."}]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON}}
LONG = "root ::= " + " ".join([f'"x{number}"' for number in range(90_000)])  # takes more than two seconds
BALANCED = 'root ::= "(" root ")" | [xy]{1,3}'


def said(client: openai.OpenAI, *, stream: bool = False, **words: Any) -> list[tuple[str, str]]:
    """Text and finish reason of each choice of a chat."""
    words = {"messages": ASK, "max_tokens": 120, "temperature": 1.0, **words}
    if not stream:
        answer = client.chat.completions.create(model=MODEL, **words)
        return [(choice.message.content or "", choice.finish_reason) for choice in answer.choices]
    texts: dict[int, str] = {}
    ends: dict[int, str] = {}
    for chunk in client.chat.completions.create(model=MODEL, stream=True, **words):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
    return [(texts[index], ends[index]) for index in sorted(texts)]


@pytest.mark.parametrize("stream", [False, True])
def test_every_choice_of_a_schema_validates(client: openai.OpenAI, stream: bool) -> None:
    for seed in range(4):
        for text, end in said(client, response_format=FORMAT, n=3, seed=seed, stream=stream, max_tokens=300):
            assert end == "stop"
            jsonschema.validate(json.loads(text), PERSON)


@pytest.mark.parametrize(
    ("extra", "pattern"),
    [
        ({"guided_regex": "[a-f]{3}-[0-9]{4}"}, "[a-f]{3}-[0-9]{4}"), ({"regex": "(ab|cd)+e"}, "(ab|cd)+e"),
        ({"structured_outputs": {"choice": ["yes", 'may"be', "no\n"]}}, 'yes|may"be|no\n'),
        ({"guided_choice": ["left", "right"]}, "left|right"), ({"guided_grammar": BALANCED}, r"\(*[xy]{1,3}\)*"),
        ({"ebnf": BALANCED}, r"\(*[xy]{1,3}\)*"), ({"guided_grammar": 'start: "a" | "b" "c"'}, "a|bc"),
        ({"guided_json": {"enum": ["p", 7]}, "whitespace": "none"}, '"p"|7'),
        ({"structural_tag": {"format": {"type": "sequence", "elements": [
            {"type": "const_string", "value": "v="}, {"type": "json_schema", "json_schema": {"enum": [1, 22]}}]}}},
         "v=(1|22)"),
    ],
)  # fmt: skip
def test_every_form_is_followed(client: openai.OpenAI, extra: dict[str, Any], pattern: str) -> None:
    for stream in (False, True):
        for text, end in said(client, extra_body=extra, n=2, stream=stream):
            follows(text, end, pattern)
    done = client.completions.create(
        model=MODEL, prompt="Say:", max_tokens=60, temperature=1.0, extra_body=extra
    ).choices[0]
    follows(done.text, done.finish_reason, pattern)


def follows(text: str, end: str | None, pattern: str) -> None:
    """An output that ended by itself is of the pattern; one that was cut off is the beginning of such a one."""
    assert end in ("stop", "length")
    assert regex.fullmatch(pattern, text, partial=end == "length"), text


@pytest.mark.parametrize("text", ["<|im_end|>", "a<|im_start|>system\n", "<think>x", "</think>", "<tool_call>x", " b"])
def test_text_that_spells_a_control_token_is_text(client: openai.OpenAI, text: str) -> None:
    literal = json.dumps(text)
    forms: list[dict[str, Any]] = [
        {"guided_choice": [text]}, {"guided_regex": re.escape(text)}, {"guided_grammar": f"start: {literal}"},
        {"ebnf": f"root ::= {literal}"}, {"guided_json": {"const": text}}, {"guided_json": {"enum": [text]}},
        {"structural_tag": {"format": {"type": "const_string", "value": text}}},
    ]  # fmt: skip
    for form in forms:
        asked: Any = {"extra_body": form, "prediction": {"type": "content", "content": text}}
        found = [*said(client, **asked), *said(client, stream=True, **asked)]
        done = client.completions.create(model=MODEL, prompt="Say:", max_tokens=60, extra_body=form).choices[0]
        for answer, end in [*found, (done.text, done.finish_reason)]:
            assert end == "stop"
            assert (json.loads(answer) if "guided_json" in form else answer) == text


def test_any_object(client: openai.OpenAI) -> None:
    found = said(client, response_format={"type": "json_object"}, temperature=0.0, max_tokens=300)
    for text, end in found:
        assert end == "stop"
        assert isinstance(json.loads(text), dict)


def test_the_limit_inside_a_structure_is_told(client: openai.OpenAI) -> None:
    ((text, end),) = said(client, extra_body={"regex": "[a-z]{500}"}, max_tokens=10)
    assert end == "length"
    assert re.fullmatch("[a-z]+", text)


def test_a_seed_gives_the_same_structure_again(client: openai.OpenAI) -> None:
    first = said(client, response_format=FORMAT, seed=7, n=2)
    assert said(client, response_format=FORMAT, seed=7, n=2) == first
    assert said(client, response_format=FORMAT, seed=7, n=2, stream=True) == first


def test_logprobs_come_with_it(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=ASK, response_format=FORMAT, logprobs=True, top_logprobs=2, max_tokens=200
    ).choices[0]
    assert answer.logprobs is not None
    assert answer.logprobs.content is not None
    assert "".join(position.token for position in answer.logprobs.content).startswith("{")


@pytest.mark.parametrize("speculative", [True, False])
def test_processed_logprobs_are_of_what_the_structure_leaves(client: openai.OpenAI, speculative: bool) -> None:
    """Of two choices of two letters each: the best listed tokens are all there are, the others' share is theirs."""
    asked: Any = {
        "messages": ASK, "logprobs": True, "top_logprobs": 20, "temperature": 0.7, "n": 3, "seed": 5, "max_tokens": 20,
    }  # fmt: skip
    both = {}
    for mode in ("raw_logprobs", "processed_logprobs"):
        extra = {"regex": "(ab|cd)!!", "logprobs_mode": mode, "speculative": speculative}
        answer = client.chat.completions.create(model=MODEL, **asked, extra_body=extra)
        both[mode] = [
            choice.logprobs.content for choice in answer.choices if choice.logprobs and choice.logprobs.content
        ]
    assert len(both["raw_logprobs"]) == 3
    for raw, processed in zip(both["raw_logprobs"], both["processed_logprobs"], strict=True):
        assert [position.token for position in raw] == [position.token for position in processed]
        first = processed[0]
        assert {top.token[0] for top in first.top_logprobs} <= {"a", "c"}
        for position, own in zip(processed, raw, strict=True):
            listed = [top.logprob for top in position.top_logprobs]
            assert sum(map(math.exp, listed)) == pytest.approx(1.0, abs=1e-4)
            assert position.logprob in listed
            assert min(listed) > -9999.0
            assert len(own.top_logprobs) == 20
        assert processed[-1].logprob == pytest.approx(0.0, abs=1e-5)  # the end, which is all that may come
        assert raw[0].logprob < first.logprob


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"regex": "(a"}, "regex"), ({"guided_json": {"type": "objekt"}}, "guided_json"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"ebnf": "root ::= x"}, "ebnf"), ({"regex": "a", "ebnf": 'root ::= "a"'}, "ebnf"),
        ({"structured_outputs": {"structural_tag": {"format": {"type": "x"}}}}, "structured_outputs.structural_tag"),
    ],
)  # fmt: skip
def test_what_cannot_be_followed_is_a_400_that_names_the_field(
    client: openai.OpenAI, fields: dict[str, Any], param: str
) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            said(client, extra_body=fields, stream=stream)
        assert caught.value.param == param


def test_automata_are_made_behind_streams(client: openai.OpenAI, server: Server) -> None:
    said(client, extra_body={"regex": "[a-z]{3}x"}, max_tokens=5)
    scheduler, own = server.children()["scheduler"], os.getpriority(os.PRIO_PROCESS, 0)
    assert os.getpriority(os.PRIO_PROCESS, scheduler) == own
    found = [os.getpriority(os.PRIO_PROCESS, int(thread)) for thread in os.listdir(f"/proc/{scheduler}/task")]
    assert (min(found), max(found)) == (own, min(19, own + 10))


def test_a_bomb_ends_its_own_request_alone(client: openai.OpenAI, server: Server) -> None:
    """Free and structured requests go on while a grammar is being given up."""
    with ThreadPoolExecutor(4) as threads:
        bomb = threads.submit(said, client, extra_body={"ebnf": LONG})
        free = [threads.submit(said, client, max_tokens=20, temperature=0.0) for _ in range(3)]
        assert len({str(each.result()) for each in free}) == 1
        for text, _ in said(client, extra_body={"guided_choice": ["left", "right"]}):
            assert text in ("left", "right")
        with pytest.raises(openai.BadRequestError, match="--grammar-compile-timeout"):
            bomb.result()
    assert server.get("/health/ready")


def test_structured_requests_do_not_change_free_ones(client: openai.OpenAI) -> None:
    alone = said(client, temperature=0.0, max_tokens=40)
    with ThreadPoolExecutor(8) as threads:
        structured = [threads.submit(said, client, response_format=FORMAT, seed=seed, n=2) for seed in range(4)]
        free = [threads.submit(said, client, temperature=0.0, max_tokens=40) for _ in range(4)]
        assert all(each.result() == alone for each in free)
        for each in structured:
            for text, end in each.result():
                if end == "stop":
                    jsonschema.validate(json.loads(text), PERSON)


def test_compile_workers_are_children_and_few(client: openai.OpenAI, server: Server) -> None:
    said(client, extra_body={"guided_choice": ["a"]})
    module = b"penstock.services.tokenizer.compile_worker"
    workers = [pid for pid in descendants(server.process.pid) if module in command_line(pid)]
    assert 1 <= len(workers) <= 2 * 64
