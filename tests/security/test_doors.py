"""Each way to ask, held to the classes of tests/security/test_advisories.py: what a request holds reaches nobody behind
the api unless it is bounded, can be encoded, and points nowhere."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest

from penstock.engine_core.kv.prefix_index import root
from penstock.protocol.links import TEXT, decoder
from penstock.protocol.message import Message
from penstock.protocol.messages import Rejected, SubmitText
from penstock.services.http.request_context import digest
from tests.rules.source import ROOT
from tests.services.client.fake_engine import FakeLink, app_state, client, silent

CHAT = {"messages": [{"role": "user", "content": "a"}]}
DOORS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "a"},
    "/v1/responses": {"input": "a"},
    "/v1/messages": {**CHAT, "max_tokens": 4},
    "/v1/embeddings": {"input": "a"},
    "/v1/score": {"text_1": "a", "text_2": "b"},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/tokenize": {"prompt": "a"},
}
NUMBERS = {
    "/v1/chat/completions": ("temperature", "n", "max_completion_tokens", "seed", "top_logprobs", "timeout"),
    "/v1/completions": ("logprobs", "prompt_logprobs", "truncate_prompt_tokens", "repetition_penalty"),
    "/v1/responses": ("max_output_tokens", "top_logprobs", "temperature", "top_k", "seed"),
    "/v1/messages": ("max_tokens", "top_k", "top_p", "min_p", "thinking_token_budget"),
    "/v1/embeddings": ("dimensions", "truncate_prompt_tokens", "priority"),
    "/v1/score": ("priority", "truncate_prompt_tokens"),
    "/v1/rerank": ("top_n", "priority"),
}
WORDS = ("cache_salt", "stop", "bad_words", "guided_regex", "user")
WRONG = "invalid_request_error"
INTERNALS = (str(ROOT), "Traceback", ".py", "site-packages", "object at", "0x7f")


async def asked(path: str, body: bytes, port: FakeLink, **options: Any) -> tuple[int, str]:
    """Status and text of the answer."""
    async with client(app_state(port, **options)) as http:
        answer = await http.post(path, content=body, headers={"content-type": "application/json"})
    return answer.status_code, answer.text


def check_refusal(path: str, text: str, kind: str, param: str | None, code: str, message: str) -> None:
    """`text` is the error of this door in its own dialect, with exactly these and a message that begins so."""
    body = json.loads(text)
    if path == "/v1/messages":
        assert body.keys() == {"type", "error", "request_id"}
        assert body["type"] == "error"
        assert body["error"].keys() == {"type", "message"}
        assert body["error"]["type"] == {"server_error": "api_error"}.get(kind, kind)
    else:
        assert body.keys() == {"error"}
        assert body["error"] == {"message": body["error"]["message"], "type": kind, "param": param, "code": code}
    assert body["error"]["message"].startswith(message), text


# C and D: nothing raises behind the door, and every number is bounded before it


@pytest.mark.parametrize(("path", "name"), [(path, name) for path, names in NUMBERS.items() for name in names])
async def test_a_number_beyond_all_bounds_ends_at_each_door(path: str, name: str) -> None:
    for value in ("NaN", "-Infinity", "1e999", "9" * 4000, "-" + "9" * 400):
        port = FakeLink(silent)
        rest = json.dumps({key: given for key, given in DOORS[path].items() if key != name}).removesuffix("}")
        status, text = await asked(path, f'{rest}, "{name}": {value}}}'.encode(), port)
        assert (status, port.sent) == (400, []), text
        if value in ("NaN", "-Infinity"):  # no JSON
            check_refusal(path, text, WRONG, None, "invalid_json", "the body is not valid JSON: ")
        else:
            check_refusal(path, text, WRONG, name, "invalid_value", name)


@pytest.mark.parametrize("path", DOORS)
@pytest.mark.parametrize("lone", [b'"\\ud800"', b'"a\\udfffb"', b'"\xed\xa0\x80"', b'"\xff"'])
async def test_what_is_no_text_ends_at_each_door(path: str, lone: bytes) -> None:
    """Half of a pair of surrogates could not be encoded again for the next process: CVE-2026-105756 is of this kind."""
    port = FakeLink(silent)
    known = "prompt" if path == "/tokenize" else "cache_salt"  # a field that nobody knows is not read
    for name in {next(iter(DOORS[path])), known}:
        rest = json.dumps({key: value for key, value in DOORS[path].items() if key != name}).removesuffix("}")
        begun = rest.encode() + (b", " if len(rest) > 1 else b"")
        status, text = await asked(path, begun + b'"%s": %s}' % (name.encode(), lone), port)
        assert (status, port.sent) == (400, []), text
        if name == "messages" and b"\\" not in lone:  # what it holds is read behind what kind it is
            check_refusal(path, text, WRONG, name, "invalid_type", "messages: expected `array`, got `str`")
        else:
            check_refusal(path, text, WRONG, None, "invalid_json", "the body is not valid JSON: ")


@pytest.mark.parametrize("word", ["\0", "\uffff", "\u202e", "e\u0301" * 50, "\U0010ffff", "' OR 1=1", "../../etc"])
@pytest.mark.parametrize("name", WORDS)
async def test_any_text_can_be_passed_on(name: str, word: str) -> None:
    """The next process reads it as it was, with a salt that makes a key; what it says of it comes back."""
    port = FakeLink(ending)
    given = [word] if name == "bad_words" else word
    status, text = await asked("/v1/completions", json.dumps({"prompt": word, name: given}).encode(), port)
    assert status == 400
    check_refusal("/v1/completions", text, WRONG, "prompt", "seen_there", "seen")
    (message,) = port.of(SubmitText)
    assert decoder(TEXT, at_binder=True).decode(msgspec.msgpack.encode(message)) == message
    assert message.prompt == word
    match name:
        case "cache_salt":
            assert message.cache_salt == word
            assert len({root(salt) for salt in (word, word + "x", "")}) == 3
        case "stop":
            assert message.stop == (word,)
        case "bad_words":
            assert message.bad_words == (word,)
        case "guided_regex":
            assert (message.grammar.kind, message.grammar.source) == ("regex", word)
        case "user":
            assert message.session == digest(b"user:" + word.encode())


async def test_a_text_of_another_type_is_no_text() -> None:
    for name in ("cache_salt", "bad_words", "guided_regex", "user", "stop"):
        port = FakeLink(silent)
        status, text = await asked("/v1/completions", json.dumps({"prompt": "a", name: 5}).encode(), port)
        assert (status, port.sent) == (400, [])
        check_refusal("/v1/completions", text, WRONG, name, "invalid_type", name)


def ending(port: FakeLink, message: Message) -> None:
    """A tokenizer that says goodbye to whoever asks: the requests alone are looked at."""
    if isinstance(message, SubmitText):
        asyncio.get_running_loop().call_soon(
            port.arrive, Rejected(id=message.id, status=400, message="seen", param="prompt", code="seen_there")
        )


# F: what a request points to is not looked at


@pytest.mark.parametrize("url", ["http://169.254.169.254/latest/", "file:///etc/passwd", "ftp://localhost/x"])
async def test_no_door_follows_an_address(url: str) -> None:
    image = {"type": "input_image", "image_url": url}
    file = {"type": "input_file", "file_url": url}
    source = {"type": "image", "source": {"type": "url", "url": url}}
    document = {"type": "document", "source": {"type": "url", "url": url}}
    bodies: list[tuple[str, dict[str, Any]]] = [
        *(("/v1/responses", {"input": [{"role": "user", "content": [part]}]}) for part in (image, file)),
        *(
            ("/v1/messages", {"max_tokens": 4, "messages": [{"role": "user", "content": [part]}]})
            for part in (source, document)
        ),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "file", "file": {"url": url}}]}]}),
    ]
    for path, body in bodies:
        port = FakeLink(silent)
        status, text = await asked(path, json.dumps(body).encode(), port)
        assert (status, port.sent) == (400, []), (path, text)


# H and I: without a key nobody gets further, and no answer tells of the inside


@pytest.mark.parametrize("path", DOORS)
async def test_each_door_asks_for_the_key_before_it_reads(path: str) -> None:
    port = FakeLink(silent)
    for body in (b"", b"{", b'{"prompt": "a"}' * 1000, json.dumps(DOORS[path]).encode()):
        status, text = await asked(path, body, port, api_key="a-key")
        assert (status, port.sent) == (401, [])
        told = "You didn't provide an API key; send it as the header Authorization: Bearer KEY"
        check_refusal(path, text, "authentication_error", None, "invalid_api_key", told)
        assert "a-key" not in text


@pytest.mark.parametrize("path", DOORS)
@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        (b"", "invalid_json", "the body is empty"),
        (b"{", "invalid_json", "the body is not valid JSON: Input data was truncated"),
        (b"[]", "invalid_type", "the body: Expected `object`, got `array`"),
        (b"null", "invalid_type", "the body: Expected `object`, got `null`"),
        (b'{"model": "../../etc/passwd"}', "missing_required_parameter", ""),
        (b'{"\xff": 1}', "missing_required_parameter", ""),
    ],
)
async def test_no_door_tells_of_the_inside(path: str, body: bytes, code: str, message: str) -> None:
    port = FakeLink(silent)
    status, text = await asked(path, body, port)
    assert port.sent == []
    if path in ("/tokenize", "/v1/score") and b"etc" in body:  # of which no field is required by itself
        assert status == 404
        told = "The model `../../etc/passwd` does not exist."
        check_refusal(path, text, "not_found_error", "model", "model_not_found", told)
    elif path == "/v1/score" and b"\xff" in body:
        check_refusal(path, text, WRONG, None, "invalid_json", "the body is not valid JSON: ")
    elif message:
        assert status == 400
        check_refusal(path, text, WRONG, None, code, message)
    else:
        first = next(iter(DOORS[path]))
        told = "give either prompt or messages" if path == "/tokenize" else f"{first} is missing"
        assert status == 400
        check_refusal(path, text, WRONG, first, code, told)
    assert not [internal for internal in INTERNALS if internal in text]


@pytest.mark.parametrize("path", DOORS)
async def test_a_bug_of_ours_is_told_without_its_words(path: str, caplog: pytest.LogCaptureFixture) -> None:
    """The log has them, the client has the name of its request to ask about."""

    def broken(port: FakeLink, message: Message) -> None:
        raise RuntimeError(f"{ROOT}/secret.py failed on the prompt")

    status, text = await asked(path, json.dumps(DOORS[path]).encode(), FakeLink(broken))
    assert status == 500
    check_refusal(path, text, "server_error", None, "internal_error", "the server failed on this request")
    assert not [internal for internal in (*INTERNALS, "secret", "RuntimeError") if internal in text]
    assert "secret.py" in caplog.text
