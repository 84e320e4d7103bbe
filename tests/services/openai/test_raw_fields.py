"""Long grammars pass through the api process unread; everything else of a body is read as ever."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from penstock.protocol.errors import InvalidRequest, Unsupported
from penstock.protocol.messages import SubmitText
from penstock.services.openai.parameters import UNSUPPORTED_IN_COMPLETIONS, check_unsupported
from penstock.services.openai.schema import ChatRequest, CompletionRequest
from penstock.services.openai.structured_output import FORMS, UNREAD, grammar_of
from penstock.services.openai.validation import LONG, RawFields, read_fields
from tests.services.client.fake_engine import FakeLink, answering, app_state, client, words

COMPLETION = msgspec.json.Decoder(CompletionRequest)
CHAT = msgspec.json.Decoder(ChatRequest)
KINDS = {
    "guided_json": "json_schema", "json_schema": "json_schema", "guided_regex": "regex", "regex": "regex",
    "guided_grammar": "grammar", "ebnf": "grammar", "grammar": "grammar", "guided_choice": "choice",
    "structural_tag": "structural_tag",
}  # fmt: skip
LONG_TEXT = "é\n" * LONG
NUMBERS = list(range(LONG))  # no regex, no grammar, no choices


async def of(body: dict[str, Any]) -> RawFields:
    return await read_fields(json.dumps({"prompt": "x", "messages": [], **body}).encode())


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("value", [LONG_TEXT, NUMBERS, {"items": NUMBERS}], ids=["text", "array", "object"])
async def test_a_long_grammar_is_set_aside_as_it_came(name: str, value: object) -> None:
    members = await of({name: value, "n": 3})
    assert len(members.text) < 100
    assert set(members.deferred) == {name}
    for decoder in (COMPLETION, CHAT):
        request = members.decode(decoder)
        assert bytes(getattr(request, name)) == json.dumps(value).encode()
        assert request.n == 3


@pytest.mark.parametrize("name", KINDS)
async def test_nobody_here_looks_into_it(name: str) -> None:
    """Not even whether it is text or a list, which for a short one is told at once."""
    grammar = grammar_of((await of({name: NUMBERS})).decode(COMPLETION))
    assert grammar is not None
    assert (grammar.kind, grammar.source, grammar.param) == (KINDS[name], "", name)
    assert grammar.unread == json.dumps(NUMBERS).encode()


@pytest.mark.parametrize("length", [UNREAD, UNREAD + 1])
async def test_what_is_long_is_a_matter_of_its_own_length(length: int) -> None:
    text = "a" * (length - 2)  # less its quotes
    grammar = grammar_of((await of({"regex": text, "metadata": LONG_TEXT})).decode(COMPLETION))
    assert grammar is not None
    assert (grammar.source == text) is (length == UNREAD)
    assert (grammar.unread == json.dumps(text).encode()) is (length > UNREAD)


async def test_within_other_fields() -> None:
    schema = {"enum": NUMBERS}
    for body, param in (
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": schema, "strict": False}}},
         "response_format.json_schema.schema"),
        ({"structured_outputs": {"json": schema}, "lenient": True}, "structured_outputs.json"),
    ):  # fmt: skip
        grammar = grammar_of((await of(body)).decode(CHAT))
        assert grammar is not None
        assert (grammar.kind, grammar.source, grammar.param, grammar.lenient) == ("json_schema", "", param, True)
        assert json.loads(grammar.unread) == schema


async def test_fields_are_those_of_the_body() -> None:
    for body in ({"regex": LONG_TEXT, "top_logprobs": 2}, {"regex": "a", "top_logprobs": 2}):
        members = await of(body)
        assert set(members.fields) == {"prompt", "messages", *body}
        with pytest.raises(Unsupported, match="top_logprobs"):
            check_unsupported(members.fields, UNSUPPORTED_IN_COMPLETIONS, {}, 1)


async def test_of_two_members_with_one_name_the_last_counts() -> None:
    long = json.dumps(LONG_TEXT)
    for text, expected in (
        (f'{{"prompt":"x","regex":{long},"regex":"b"}}', b'"b"'),
        (f'{{"prompt":"x","regex":"b","regex":{long}}}', long.encode()),
    ):
        assert bytes((await read_fields(text.encode())).decode(COMPLETION).regex) == expected


async def test_a_long_body_without_a_long_grammar_stays_as_it_is() -> None:
    for body in ({"prompt": LONG_TEXT}, {"metadata": LONG_TEXT, "regex": "a"}):
        text = json.dumps({"prompt": "", **body}).encode()
        members = await read_fields(text)
        assert (members.text, members.deferred) == (text, {})
        assert members.decode(COMPLETION).prompt == body.get("prompt", "")


@pytest.mark.parametrize(
    ("text", "told"),
    [("[%s]", "Expected `object`"), ('{"regex":%s', "not valid JSON"), ('{"regex":%s,}', "not valid JSON"),
     ("%s", "Expected `object`")],
)  # fmt: skip
async def test_long_bodies_that_are_no_object(text: str, told: str) -> None:
    body = (text % json.dumps(LONG_TEXT)).encode()
    with pytest.raises(InvalidRequest, match=told):
        await read_fields(body)


async def test_a_long_grammar_reaches_the_tokenizer_unread() -> None:
    port = FakeLink(answering(words("b")))
    async with client(app_state(port)) as http:
        for path, field in (("/v1/completions", "guided_regex"), ("/v1/chat/completions", "ebnf")):
            body = {"prompt": "x"} if field == "guided_regex" else {"messages": [{"role": "user", "content": "x"}]}
            answer = await http.post(path, json={**body, field: LONG_TEXT})
            assert answer.status_code == 200, answer.text
            sent = port.sent[-1]
            assert isinstance(sent, SubmitText)
            assert sent.grammar is not None
            assert (sent.grammar.source, sent.grammar.param) == ("", field)
            assert json.loads(sent.grammar.unread) == LONG_TEXT
