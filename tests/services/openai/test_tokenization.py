"""POST /tokenize and /detokenize."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.engine_core.embedded import demo_folder
from penstock.protocol.config import Config, TokenizerConfig
from penstock.protocol.errors import ConfigError
from penstock.protocol.messages import Detokenize, Tokenize
from penstock.services.client.model_info import read_model_info, tokenizer_info
from tests.services.client.fake_engine import FakeLink, answering, app_state, client, silent, words
from tests.services.openai.shapes import check_error

HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]}


async def test_tokenize_and_back() -> None:
    port = FakeLink(answering(words("")))
    async with client(app_state(port)) as http:
        answer = (await http.post("/tokenize", json={"prompt": "abc"})).json()
        assert answer == {"count": 3, "max_model_len": 512, "tokens": [97, 98, 99], "token_strs": None}
        told = (await http.post("/tokenize", json={"prompt": "ab", "return_token_strs": True})).json()
        assert told["token_strs"] == ["a", "b"]
        back = (await http.post("/detokenize", json={"tokens": answer["tokens"]})).json()
        assert back == {"prompt": "abc"}
        assert (await http.post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}
    first, second = port.of(Tokenize)
    assert (first.add_special_tokens, first.with_strings, second.with_strings) == (True, False, True)


async def test_tokenizing_a_chat() -> None:
    port = FakeLink(answering(words("")))
    body = HELLO | {"tools": [{"type": "function"}], "chat_template_kwargs": {"a": 1}, "continue_final_message": True}
    async with client(app_state(port)) as http:
        assert (await http.post("/tokenize", json=body)).status_code == 200
    (question,) = port.of(Tokenize)
    assert json.loads(question.messages) == HELLO["messages"]
    assert json.loads(question.tools) == body["tools"]
    assert json.loads(question.template_arguments) == {"a": 1}
    assert question.continue_final_message
    assert not question.add_generation_prompt
    assert not question.add_special_tokens


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", HELLO | {"prompt": "a"}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "a", "return_token_strs": 1}, "return_token_strs"),
        ("/tokenize", HELLO | {"tools": 5}, "tools"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1000]}, "tokens"),
        ("/detokenize", {"tokens": [1] * 513}, "tokens"),
    ],
)
async def test_wrong_tokenizations(path: str, body: dict[str, Any], param: str) -> None:
    async with client(app_state(FakeLink(silent))) as http:
        answer = await http.post(path, json=body)
        assert answer.status_code == 400
        check_error(answer.json(), "invalid_request_error", param)
        unknown = await http.post(path, json={"prompt": "a", "tokens": [1], "model": "nobody"})
        assert unknown.status_code == 404


async def test_token_ids_travel_as_int32() -> None:
    port = FakeLink(answering(words("")))
    async with client(app_state(port)) as http:
        await http.post("/detokenize", json={"tokens": [1, 999]})
    assert port.of(Detokenize)[0].token_ids == struct.pack("<2i", 1, 999)


async def test_the_tokenizers_configuration(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{{ messages }}")
    model = read_model_info(Config())
    ours = read_model_info(Config(tokenizer=TokenizerConfig(chat_template=str(file))))
    async with client(replace(app_state(FakeLink(silent)), model=model)) as http:
        info = (await http.get("/tokenizer_info")).json()
    stated = json.loads((demo_folder() / "tokenizer_config.json").read_text())
    assert stated.items() <= info.items()
    assert info["tokenizer_class"]
    assert info["chat_template"] == (demo_folder() / "chat_template.jinja").read_text()
    assert json.loads(ours.tokenizer)["chat_template"] == "{{ messages }}"
    assert json.loads(tokenizer_info(tmp_path, "")) == {"tokenizer_class": "PreTrainedTokenizerFast"}
    with pytest.raises(ConfigError, match="--chat-template"):
        tokenizer_info(tmp_path, str(tmp_path / "nothing.jinja"))
