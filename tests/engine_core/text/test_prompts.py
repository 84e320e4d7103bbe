"""Requests become token ids within every limit, or are refused in OpenAI's words."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from penstock.engine_core.parsers.dialect import THINK, Dialect
from penstock.engine_core.parsers.formats import UNTYPED, CallFormat
from penstock.engine_core.text.prompts import Prepared, Prompter, PromptLimits, turn_ends
from penstock.engine_core.text.template import ChatTemplate
from penstock.engine_core.tokenizer import codec, piece_cache
from penstock.engine_core.tokenizer.vocabulary import Vocabulary
from penstock.protocol.columns import pack, unpack
from penstock.protocol.errors import ContextExceeded, InvalidRequest
from penstock.protocol.messages import (
    Client,
    Detokenize,
    Grammar,
    Sampling,
    SubmitText,
    Tokenize,
    ToolUse,
    TraceContext,
)
from tests.engine_core.tokenizer.vocabularies import CHAT_TEMPLATE, tokenizer, vocabulary

LENGTH = 64


def prompter(kind: str = "byte_level", vocab_size: int = 1000, template: str = CHAT_TEMPLATE) -> Prompter:
    found = vocabulary(kind)
    sources = {"default": template} if template else {}
    return Prompter(found, ChatTemplate(sources, found.names), PromptLimits(vocab_size, LENGTH, (4, 1)))


def prepare(kind: str = "byte_level", sampling: Sampling | None = None, **fields: Any) -> Prepared:
    fields.setdefault("prompt", "one two")
    if "messages" in fields or "prompt_ids" in fields:
        fields["prompt"] = None
    return prompter(kind).prepare(SubmitText(id=1, sampling=sampling or Sampling(), **fields), 0.0)


def refused(**fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        prepare(**fields)
    return caught.value


def test_what_the_scheduler_needs_is_carried_over() -> None:
    trace = TraceContext("00-1-2-01", "a=b")
    client = Client("tenant", "name")
    made = prepare(n=3, priority=-2, cache_salt="s", trace=trace, sampling=Sampling(seed=9), client=client).request
    assert (made.id, made.n, made.priority, made.cache_salt, made.trace) == (1, 3, -2, "s", trace)
    assert made.client == client
    assert made.sampling.seed == 9
    assert made.sampling.eos_token_ids == (4, 1)
    assert unpack("i", made.token_ids) == tokenizer("byte_level").encode("one two").ids


def test_special_tokens_are_the_post_processors() -> None:
    bos = tokenizer("byte_fallback").token_to_id("<s>")
    assert prepare("byte_fallback").token_ids[0] == bos
    assert bos not in prepare("byte_fallback", add_special_tokens=False).token_ids
    messages = b'[{"role":"user","content":"hi"}]'
    assert bos not in prepare("byte_fallback", messages=messages, add_special_tokens=False).token_ids


@pytest.mark.parametrize("remember", [True, False])
def test_parts_of_chats_are_remembered_for_their_salt_alone(remember: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but chats is, since a prompt without control tokens would be one part."""
    monkeypatch.setattr(piece_cache, "LEAST", 4)
    monkeypatch.setattr(codec, "LEAST", 4)
    found = Vocabulary(codec.FastCodec(tokenizer("byte_level")), {"bos_token": "<s>", "eos_token": "</s>"})
    limits = PromptLimits(1000, LENGTH, (4, 1), remember=remember)
    made = Prompter(found, ChatTemplate({"default": CHAT_TEMPLATE}, found.names), limits)
    messages = b'[{"role":"user","content":"some text"}]'
    for salt in ("", "tenant"):
        fields = {"id": 1, "sampling": Sampling(), "cache_salt": salt, "add_special_tokens": False}
        made.prepare(SubmitText(prompt="a text of some length", prediction="and more of it", **fields), 0.0)
        made.prepare(SubmitText(messages=messages, **fields), 0.0)
    made.tokenize(Tokenize(id=1, messages=messages, add_special_tokens=False), 0.0)
    pieces = found._codec._pieces  # type: ignore[union-attr]
    kept = set() if pieces is None else set(pieces._kept)
    texts = ("<|im_start|>user\nsome text", "<|im_end|>\n", "<|im_start|>assistant\n")
    assert kept == {(salt, text) for salt in ("", "tenant") for text in texts if remember}


def test_chats_are_rendered() -> None:
    messages = json.dumps([{"role": "user", "content": [{"type": "text", "text": "one"}]}]).encode()
    made = prepare(messages=messages)
    text = tokenizer("byte_level").decode(list(made.token_ids), skip_special_tokens=False)
    assert text == "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n"
    template = "{{ tools[0].a }}{{ x }}{{ messages[0].content }}"
    submit = SubmitText(
        id=1, messages=messages, tools=b'[{"a": 1}]', template_arguments=b'{"x": "two"}', sampling=Sampling()
    )
    made = prompter(template=template).prepare(submit, 0.0)
    assert tokenizer("byte_level").decode(list(made.token_ids)) == "1twoone"


def test_max_tokens_is_filled_with_the_room_that_is_left() -> None:
    made = prepare()
    assert made.request.sampling.max_tokens == LENGTH - len(made.token_ids)
    assert prepare(sampling=Sampling(max_tokens=5)).request.sampling.max_tokens == 5
    assert prepare(sampling=Sampling(max_tokens=0), echo=True).request.sampling.max_tokens == 1, "which is not told"
    exact = prepare(prompt_ids=pack("i", [7] * 60), sampling=Sampling(max_tokens=4))
    assert exact.request.sampling.max_tokens == 4


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "param", "words"),
    [
        (64, None, "prompt", "your prompt resulted in 64 tokens. Please reduce the length of the prompt."),
        (80, None, "prompt", "your prompt resulted in 80 tokens"),
        (80, 8, "prompt", "you requested 88 tokens (80 in the prompt, 8 in the completion)"),
        (60, 5, "max_tokens", "you requested 65 tokens (60 in the prompt, 5 in the completion). Please reduce"),
        (65, 0, "prompt", "your prompt resulted in 65 tokens"),
    ],
)
def test_too_long_says_how_long(prompt: int, max_tokens: int | None, param: str, words: str) -> None:
    error = refused(prompt_ids=pack("i", [7] * prompt), sampling=Sampling(max_tokens=max_tokens))
    assert (error.status, error.code, error.param) == (400, "context_length_exceeded", param)
    limit = f"This model's maximum context length is {LENGTH} tokens (--max-model-len). However, "
    assert error.message.startswith(limit)
    assert words in error.message


def test_far_too_long_texts_are_not_even_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(type(vocabulary("byte_level")), "encode")
    error = refused(prompt="a" * (LENGTH * vocabulary("byte_level").longest + 1))
    assert (error.code, error.param) == ("context_length_exceeded", "prompt")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": "", "add_special_tokens": False}, "prompt"),
        ({"prompt_ids": b""}, "prompt"),
        ({"prompt_ids": b"abc"}, "prompt"),
        ({"prompt_ids": pack("i", [5, -1])}, "prompt"),
        ({"prompt_ids": pack("i", [1000])}, "prompt"),
        ({"sampling": Sampling(stop_token_ids=(1000,))}, "stop_token_ids"),
        ({"sampling": Sampling(allowed_token_ids=(3, 1000))}, "allowed_token_ids"),
        ({"sampling": Sampling(logit_bias=((-1, 1.0),))}, "logit_bias"),
        ({"stop": ("a", "")}, "stop"),
        ({"bad_words": ("a", " ")}, "bad_words"),
        ({"bad_words": ("qjqjqjqjqjqjqjqjqjqjqjqjqjqjqjqjqjqj",)}, "bad_words"),
        ({"messages": b"[]"}, "messages"),
        ({"messages": b'[{"role":"user","content":"x"}]', "tools": b"{}"}, "tools"),
        ({"messages": b'[{"role":"user","content":"x"}]', "tools": b"["}, "tools"),
        (
            {"messages": b'[{"role":"user","content":"x"}]', "template_arguments": b"[]"},
            "chat_template_kwargs",
        ),
    ],
)
def test_mistakes_name_their_parameter(fields: dict[str, Any], param: str) -> None:
    error = refused(**fields)
    assert (error.status, error.param) == (400, param)


def test_a_model_without_a_template_takes_no_chat() -> None:
    request = SubmitText(id=1, messages=b'[{"role":"user","content":"x"}]', sampling=Sampling())
    with pytest.raises(InvalidRequest, match="no chat template"):
        prompter(template="").prepare(request, 0.0)


def test_bad_words_are_banned_with_and_without_a_space() -> None:
    """The form after a space counts where it is as many tokens and begins with another."""
    library = tokenizer("byte_level")
    made = prepare(bad_words=("s", " s", "dog"), sampling=Sampling(bad_words=((3,),))).request.sampling.bad_words
    assert made[0] == (3,)
    assert [library.decode(list(ids)) for ids in made[1:]] == ["s", " s", "dog"]
    pieces = prepare("gemma", bad_words=("qu",)).request.sampling.bad_words
    assert [tokenizer("gemma").decode(list(ids)) for ids in pieces] == ["qu", " qu"]


def test_echo_is_the_prompt_as_it_came() -> None:
    assert prepare(prompt="one  two 😀", echo=True).echo == "one  two 😀"
    assert prepare(echo=False).echo == ""
    library = tokenizer("byte_level")
    ids = library.encode("<|im_start|>one<tool_call> two").ids
    assert prepare(prompt_ids=pack("i", ids), echo=True).echo == "one<tool_call> two"
    shown = prepare(prompt_ids=pack("i", ids), echo=True, skip_special_tokens=False).echo
    assert shown == "<|im_start|>one<tool_call> two"


def test_tokenize_and_detokenize() -> None:
    found = prompter("byte_fallback")
    tokenized = found.tokenize(Tokenize(id=4, prompt="one two", with_strings=True), 0.0)
    ids = unpack("i", tokenized.token_ids)
    assert tokenized.token_strings is not None
    assert tokenized.token_strings[0] == "<s>"
    assert len(tokenized.token_strings) == len(ids)
    assert found.detokenize(Detokenize(5, pack("i", ids))).text == "<s> one two"
    assert found.tokenize(Tokenize(id=4, prompt="", add_special_tokens=False), 0.0).token_ids == b""
    chat = found.tokenize(Tokenize(id=4, messages=b'[{"role":"user","content":"x"}]', add_special_tokens=False), 0.0)
    assert chat.token_strings is None
    with pytest.raises(InvalidRequest) as caught:
        found.detokenize(Detokenize(5, pack("i", [1000])))
    assert caught.value.param == "tokens"


def test_a_prediction_becomes_token_ids_that_go_on_behind_the_prompt() -> None:
    made = prepare("byte_fallback", prediction="one two").request
    assert unpack("i", made.prediction) == tokenizer("byte_fallback").encode("one two", add_special_tokens=False).ids
    assert made.speculate
    assert prepare().request.prediction == b""


def test_without_drafts_there_is_nothing_to_encode() -> None:
    made = prepare(prediction="one two", speculate=False).request
    assert (made.prediction, made.speculate) == (b"", False)


def test_a_prediction_that_no_output_could_hold_is_refused() -> None:
    error = refused(prediction="a" * (LENGTH * 10_000))
    assert (error.param, error.code) == ("prediction", "context_length_exceeded")


def test_the_scheduler_learns_of_stop_strings() -> None:
    assert prepare(stop=("end",)).request.stop_strings
    assert not prepare().request.stop_strings


def test_reasoning_is_looked_for_where_the_grammar_leaves_room_for_it() -> None:
    found = vocabulary("byte_level")
    for text, parsed in (("", None), ("<think>", (True, True))):
        template = ChatTemplate({"default": "{{ messages[0].content }}" + text}, found.names)
        dialect = Dialect(reasoning=THINK, closing=9)
        made = Prompter(found, template, PromptLimits(1000, LENGTH, (4, 1)), dialect=dialect)
        submit = SubmitText(id=1, sampling=Sampling(), messages=b'[{"role": "user", "content": "hi"}]',
                            grammar=Grammar(kind="choice", source='["<think>x"]'))  # fmt: skip
        parsing = made.prepare(submit, 0.0).parsing
        assert (parsing and (parsing.inside, parsing.exact)) == parsed
        free = made.prepare(msgspec.structs.replace(submit, grammar=None), 0.0).parsing
        assert free is not None
        assert not free.exact


@pytest.mark.parametrize("calls", [CallFormat.QWEN3_CODER, CallFormat.HERMES])
def test_types_of_arguments_are_known_where_calls_do_not_tell_them(calls: CallFormat) -> None:
    found = vocabulary("byte_level")
    template = ChatTemplate({"default": "{{ messages[0].content }}{{ 'x' if tools }}"}, found.names)
    made = Prompter(found, template, PromptLimits(1000, LENGTH, (4, 1)), dialect=Dialect(calls=calls))
    parameters = {"type": "object", "properties": {"a": {"type": "string"}}}
    tools = json.dumps([{"type": "function", "function": {"name": "f", "parameters": parameters}}]).encode()
    submit = SubmitText(id=1, sampling=Sampling(), messages=b'[{"role": "user", "content": "hi"}]', tools=tools,
                        tool_use=ToolUse(names=("f",)))  # fmt: skip
    parsing = made.prepare(submit, 0.0).parsing
    assert parsing is not None
    assert parsing.kinds == ({"f": {"a": frozenset(("string",))}} if calls in UNTYPED else {})
    assert (parsing.names, parsing.held) == ({"f"}, frozenset())
    for use in (ToolUse(names=("f",), strict=("f",)), ToolUse(names=("f",), parallel=False)):
        parsing = made.prepare(msgspec.structs.replace(submit, tool_use=use), 0.0).parsing
        assert parsing is not None
        assert parsing.held == {"f"}


def test_an_output_that_does_not_fit_takes_what_is_left() -> None:
    prompt = len(prepare().token_ids)
    many = Sampling(max_tokens=10 * LENGTH)
    assert prepare(sampling=many, clamp=True).request.sampling.max_tokens == LENGTH - prompt
    assert prepare(sampling=Sampling(max_tokens=3), clamp=True).request.sampling.max_tokens == 3
    error = refused(sampling=many)
    assert isinstance(error, ContextExceeded)
    assert (error.param, error.prompt, error.wanted, error.limit) == ("max_tokens", prompt, 10 * LENGTH, LENGTH)


def test_a_prompt_that_fills_the_context_has_no_output_to_clamp() -> None:
    ids = pack("i", [5] * LENGTH)
    error = refused(prompt_ids=ids, sampling=Sampling(max_tokens=9), clamp=True)
    assert isinstance(error, ContextExceeded)
    assert (error.prompt, error.wanted, error.limit) == (LENGTH, 9, LENGTH)
    long = refused(prompt="x" * 100_000)
    assert isinstance(long, ContextExceeded)
    assert LENGTH < long.prompt < 100_000
    assert (long.wanted, long.limit) == (0, LENGTH)


def test_reasoning_that_stays_in_the_content_has_the_opening_of_the_prompt() -> None:
    found = vocabulary("byte_level")
    submit = SubmitText(id=1, sampling=Sampling(), messages=b'[{"role": "user", "content": "hi"}]')
    for end, kept, echo in (("<think>\\n", True, "<think>\n"), ("<think>", False, ""), ("", True, "")):
        template = ChatTemplate({"default": "{{ messages[0].content }}{{ '" + end + "' }}"}, found.names)
        dialect = Dialect(reasoning=THINK, closing=9, kept=kept, reasoning_marks=frozenset((9,)))
        made = Prompter(found, template, PromptLimits(1000, LENGTH, (4, 1)), dialect=dialect).prepare(submit, 0.0)
        assert made.parsing is not None
        assert (made.echo, made.parsing.shown) == (echo, {9})
        assert (made.parsing.reasoning is None) == made.parsing.parser().plain == kept


@pytest.mark.parametrize(
    ("ids", "ends"),
    [([5, 5], ()), ([5, 4, 5], (2,)), ([4, 5, 1, 4], (1, 3, 4)), ([4, 5, 4, 4, 1, 5, 4], (1, 4, 5, 7)), ([], ())],
)
def test_turns_end_behind_their_tokens(ids: list[int], ends: tuple[int, ...]) -> None:
    assert turn_ends(ids, (4, 1)) == ends


@pytest.mark.parametrize("recurrent", [False, True])
def test_ends_of_turns_are_told_where_states_are_kept(recurrent: bool) -> None:
    found = vocabulary("byte_level")
    limits = PromptLimits(1000, LENGTH, (4, 1), recurrent=recurrent)
    made = Prompter(found, ChatTemplate({}, found.names), limits)
    submit = SubmitText(id=1, sampling=Sampling(), prompt_ids=pack("i", [7, 4, 8, 9, 1, 7]))
    assert made.prepare(submit, 0.0).request.turns == ((2, 5) if recurrent else ())
