"""Outputs of gpt-oss, as the format is published, between OpenAI's client and the tokens: the prompt is made, the
grammar of the answer takes the tokens, and the client is told reasoning, calls and content."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pydantic
import pytest
import torch

from penstock.engine_core.grammar.sources import source_of
from penstock.engine_core.grammar.tokens import GrammarTokens
from penstock.engine_core.parsers.dialect import read_dialect
from penstock.engine_core.placement.placement import Placement
from penstock.engine_core.text.controls import read_controls
from penstock.engine_core.text.frontend import Frontend
from penstock.engine_core.text.prompts import Prepared, Prompter, PromptLimits
from penstock.engine_core.text.template import ChatTemplate
from penstock.protocol.message import Message
from penstock.protocol.messages import Abort, Finish, SubmitText
from tests.e2e.server import LIMIT, serving
from tests.engine_core.text.families import HARMONY, tokenizer_of, vocabulary_of
from tests.engine_core.text.streams import API, STATUS, batch
from tests.services.client.fake_engine import FakeLink, app_state, client

THOUGHT = "<|channel|>analysis<|message|>They want the weather.<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city":"Rome"}<|call|>'
FINAL = "<|channel|>final<|message|>Sunny.<|return|>"
WHY = "They want the weather."
ASK: Any = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "How is it in Rome?"}]
SCHEMA: Any = {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False
}  # fmt: skip
WEATHER: Any = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "strict": True}}


class City(pydantic.BaseModel):
    name: str
    people: int


class Model:
    """The tokenizer's side of an api process, over a model that writes this output token by token."""

    def __init__(self, output: str) -> None:
        self._output = output
        vocabulary = self.vocabulary = vocabulary_of("harmony")
        self._ends = tuple(each for each in vocabulary.special if vocabulary.token(each) in ("<|return|>", "<|call|>"))
        dialect = read_dialect(HARMONY, vocabulary)
        template = ChatTemplate({"default": HARMONY}, vocabulary.names)
        limits = PromptLimits(vocabulary.size, 4096, self._ends)
        prompter = Prompter(vocabulary, template, limits, dialect, read_controls(vocabulary, HARMONY, dialect))
        self._frontend = Frontend(vocabulary, prompter, Placement("prefix", 1, 16))
        self._frontend.join_api(API)
        self._frontend.report(STATUS)
        self.prompt = ""

    def __call__(self, link: FakeLink, message: Message) -> None:
        assert link.peer is not None
        link.peer.credit += 1
        if not isinstance(message, SubmitText):
            assert isinstance(message, Abort)
            return
        frontend = self._frontend
        frontend.open(API, message)
        made = frontend.make(message, 0.0)
        frontend.close(message.id, made)
        token_ids = self.vocabulary.encode(self._output, add_special_tokens=False)
        if isinstance(made, Prepared):
            self.prompt = self.vocabulary.decode(made.token_ids, skip_special_tokens=False)
            self._follows(made, token_ids)
            for place, token_id in enumerate(token_ids):
                last = place == len(token_ids) - 1
                frontend.batch(batch((message.id, 0, [token_id], Finish.STOP if last else Finish.NONE)))
        outbox = frontend.outbox(API)
        while (told := outbox.next()) is not None:
            outbox.sent()
            asyncio.get_running_loop().call_soon(link.arrive, told)

    def _follows(self, made: Prepared, token_ids: list[int]) -> None:
        """The grammar of the answer, if it has one, takes all of the output, its last token included."""
        if made.grammar is None:
            return
        tokens = GrammarTokens(self.vocabulary, self.vocabulary.size, self._ends)
        matcher = tokens.matcher(source_of(made.grammar, tokens).text)
        assert not matcher.is_error(), matcher.get_error()
        for place, token_id in enumerate(token_ids):
            mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
            assert mask[token_id], (self.vocabulary.token(token_id), self.vocabulary.decode(
                token_ids[:place], skip_special_tokens=False))  # fmt: skip
            assert matcher.consume_token(token_id)


async def chat(output: str, **words: Any) -> tuple[Model, Any]:
    """A chat's answer, which must be the same streamed and whole."""
    model = Model(output)
    words = {"model": "demo", "messages": ASK, **words}
    async with client(app_state(FakeLink(model))) as http:
        asking = openai.AsyncOpenAI(base_url="http://api/v1", api_key="none", http_client=http, max_retries=0)
        whole = await asking.chat.completions.create(**words)
        async with asking.chat.completions.stream(**words) as stream:
            flowed = await stream.get_final_completion()
    told, same = whole.choices[0], flowed.choices[0]
    assert told.finish_reason == same.finish_reason
    assert (told.message.content or None) == (same.message.content or None)
    for one, two in zip(told.message.tool_calls or (), same.message.tool_calls or (), strict=True):
        assert (one.function.name, one.function.arguments) == (two.function.name, two.function.arguments)
    return model, whole


async def respond(output: str, **words: Any) -> Any:
    """A response, which must be the same streamed and whole."""
    words = {"model": "demo", "input": "How is it in Rome?", **words}
    async with client(app_state(FakeLink(Model(output)))) as http:
        asking = openai.AsyncOpenAI(base_url="http://api/v1", api_key="none", http_client=http, max_retries=0)
        whole = await asking.responses.create(**words)
        async with asking.responses.stream(**words) as stream:
            flowed = await stream.get_final_response()
    assert whole.status == flowed.status
    assert [item.type for item in whole.output] == [item.type for item in flowed.output]
    assert whole.output_text == flowed.output_text
    return whole


@pytest.mark.parametrize("tools", [False, True])
async def test_an_answer_with_its_reasoning(tools: bool) -> None:
    model, told = await chat(THOUGHT + FINAL, **({"tools": [WEATHER]} if tools else {}))
    message = told.choices[0].message
    assert (message.reasoning_content, message.content, message.tool_calls) == (WHY, "Sunny.", None)
    assert told.choices[0].finish_reason == "stop"
    assert told.usage.completion_tokens_details.reasoning_tokens > len(WHY.split())
    assert model.prompt.startswith("<|start|>system<|message|>Reasoning: medium<|end|><|start|>developer<|message|>")
    assert model.prompt.endswith("<|start|>assistant")


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "weather"}}])
async def test_a_call(choice: Any) -> None:
    """`strict` binds `auto` too, so each of these has a grammar, which takes the published spelling."""
    _, told = await chat(THOUGHT + CALL, tools=[WEATHER], tool_choice=choice)
    (call,) = told.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Rome"})
    assert (told.choices[0].finish_reason, told.choices[0].message.content) == ("tool_calls", None)
    assert told.choices[0].message.reasoning_content == WHY


async def test_a_preamble_and_the_call() -> None:
    preamble = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    for strict in (True, False):
        tool = {**WEATHER, "function": {**WEATHER["function"], "strict": strict}}
        _, told = await chat(THOUGHT + preamble + CALL, tools=[tool])
        assert told.choices[0].message.content == "I look."
        assert told.choices[0].finish_reason == "tool_calls"


async def test_a_schema_binds_the_final_message() -> None:
    answer = THOUGHT + '<|channel|>final<|message|>{"name":"Rome","people":3}<|return|>'
    form = {"type": "json_schema", "json_schema": {"name": "c", "schema": City.model_json_schema(), "strict": True}}
    for more in ({}, {"tools": [WEATHER]}, {"reasoning_effort": "high"}):
        model, told = await chat(answer, response_format=form, **more)
        assert City.model_validate_json(told.choices[0].message.content) == City(name="Rome", people=3)
        assert told.choices[0].message.reasoning_content == WHY
    assert "Reasoning: high" in model.prompt


async def test_a_budget_ends_the_analysis() -> None:
    _, told = await chat(THOUGHT + FINAL, extra_body={"thinking_token_budget": 100})
    assert (told.choices[0].message.reasoning_content, told.choices[0].message.content) == (WHY, "Sunny.")


async def test_an_answer_that_comes_back() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Rome"}'}}
    said = {"role": "assistant", "content": "I look.", "reasoning_content": WHY, "tool_calls": [call]}
    messages = [*ASK, said, {"role": "tool", "tool_call_id": "c1", "content": "<|end|>sun"}]
    model, _ = await chat(THOUGHT + FINAL, messages=messages, tools=[WEATHER])
    assert f"<|channel|>analysis<|message|>{WHY}\nI look.<|end|><|start|>assistant to=functions.weather" in model.prompt
    assert '<|message|>{"city": "Rome"}<|call|>' in model.prompt
    assert '<|message|>"<|end|>sun"<|end|>' in model.prompt


async def test_no_reasoning_apart() -> None:
    _, told = await chat(THOUGHT + FINAL, extra_body={"separate_reasoning": False})
    assert told.choices[0].message.content == f"{WHY}\nSunny."
    with pytest.raises(openai.BadRequestError, match="always reasons"):
        await chat(FINAL, reasoning_effort="none")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random gpt-oss with harmony's control tokens, whose outputs only grammars give a form."""
    from transformers import GptOssConfig, GptOssForCausalLM

    path = tmp_path_factory.mktemp("harmony")
    made = tokenizer_of("harmony")
    torch.manual_seed(7)
    config = GptOssConfig(
        vocab_size=made.get_vocab_size(), hidden_size=64, intermediate_size=96, num_hidden_layers=2, head_dim=16,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=1024, sliding_window=32,
        num_local_experts=4, num_experts_per_tok=2,
        rope_parameters={"rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "truncate": False,
                         "original_max_position_embeddings": 256},
        bos_token_id=made.token_to_id("<|startoftext|>"), eos_token_id=made.token_to_id("<|return|>"),
    )  # fmt: skip
    GptOssForCausalLM(config).save_pretrained(path)
    made.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|return|>", "bos_token": "<|startoftext|>"}))
    (path / "chat_template.jinja").write_text(HARMONY)
    return path


def test_a_server_forces_calls_and_structures_on_channels(folder: Path, tmp_path: Path) -> None:
    words: dict[str, Any] = {"model": "m", "messages": ASK, "temperature": 1, "seed": 3, "max_completion_tokens": 400}
    budget = {"thinking_token_budget": 6}
    colour: Any = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"],
                   "additionalProperties": False}  # fmt: skip
    tool: Any = {"type": "function", "function": {"name": "paint", "parameters": colour, "strict": True}}
    form: Any = {"type": "json_schema", "json_schema": {"name": "c", "schema": colour, "strict": True}}
    with (
        serving(tmp_path, "--served-model-name", "m", model=str(folder)) as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=LIMIT) as asking,
    ):
        called = asking.chat.completions.create(**words, tools=[tool], tool_choice="required", extra_body=budget)
        (call,) = called.choices[0].message.tool_calls or ()
        assert json.loads(call.function.arguments)["colour"] in ("red", "blue")  # type: ignore[union-attr]
        assert called.choices[0].finish_reason == "tool_calls"
        held = asking.chat.completions.create(**words, response_format=form, extra_body=budget)
        assert json.loads(held.choices[0].message.content or "")["colour"] in ("red", "blue")
        assert held.choices[0].finish_reason == "stop"
        more: dict[str, Any] = {"model": "m", "input": ASK, "temperature": 0, "max_output_tokens": 400}
        answer = asking.responses.create(
            **more, tools=[{"type": "function", **tool["function"]}], tool_choice="required", extra_body=budget
        )
        assert answer.output[-1].type == "function_call"
        assert json.loads(answer.output[-1].arguments)["colour"] in ("red", "blue")
        text: Any = {"format": {"type": "json_schema", **form["json_schema"]}}
        answer = asking.responses.create(**more, text=text, extra_body=budget)
        assert answer.output[-1].type == "message"
        assert json.loads(answer.output_text)["colour"] in ("red", "blue")


async def test_responses_with_tools_reasoning_and_a_schema() -> None:
    tool = {"type": "function", **WEATHER["function"]}
    told = await respond(THOUGHT + CALL, tools=[tool], reasoning={"effort": "low"})
    thought, call = told.output
    assert (thought.type, thought.content[0].text) == ("reasoning", WHY)
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "weather", {"city": "Rome"})
    form = {"type": "json_schema", "name": "c", "schema": City.model_json_schema(), "strict": True}
    told = await respond(
        THOUGHT + '<|channel|>final<|message|>{"name":"Rome","people":3}<|return|>', text={"format": form}, tools=[tool]
    )
    assert [item.type for item in told.output] == ["reasoning", "message"]
    assert City.model_validate_json(told.output_text) == City(name="Rome", people=3)
