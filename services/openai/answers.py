"""Response bodies as types, and how a reply becomes one.

Source: OpenAI API reference, "The chat completion object" and "The completion object". Beyond them stand only
`stop_reason` (the stop string or stop token id that ended a choice), `prompt_logprobs` and token ids where they were
asked for, and
`penstock` where there is something to remark.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Literal

import msgspec

from penstock.protocol.messages import Finish
from penstock.protocol.outputs import PositionLogprobs, TokenLogprob
from penstock.services.client.output_collector import (
    Choice,
    OutputCollector,
    ParsedOutput,
    PromptFacts,
    ToolCall,
    Usage,
    parsed_output,
)
from penstock.services.openai.schema import CustomCall

TokenIds = tuple[int, ...]

# OpenAI's words, and vLLM's for what the operator ended. Failed choices end their response with an error instead.
FINISH_REASONS: Mapping[Finish, str] = {
    Finish.STOP: "stop", Finish.LENGTH: "length", Finish.CALLS: "tool_calls", Finish.ABORT: "abort",
}  # fmt: skip


class Identity(msgspec.Struct, frozen=True):
    """What names a response."""

    id: str
    created: int
    model: str


class ResponseOptions(msgspec.Struct, frozen=True):
    """What an answer tells beside its text, because its request asked for it."""

    logprobs: bool = False
    prompt_logprobs: bool = False
    echo: bool = False
    token_ids: bool = False
    tokens_as_ids: bool = False  # in log-probabilities
    reasoning: bool = True  # where it was parsed
    customs: frozenset[str] = frozenset()  # names of the request's custom tools


class PromptDetails(msgspec.Struct, frozen=True):
    """What is known of the prompt's tokens."""

    cached_tokens: int
    image_tokens: int | msgspec.UnsetType = msgspec.UNSET  # of a prompt with images


class CompletionDetails(msgspec.Struct, frozen=True):
    """Tokens of the reasoning; what became of drafts, whoever made them: OpenAI's names are of its `prediction`."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int
    reasoning_tokens: int


class UsageAnswer(msgspec.Struct, frozen=True):
    """`usage`."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails | None
    completion_tokens_details: CompletionDetails

    @classmethod
    def of(cls, usage: Usage) -> UsageAnswer:
        images = usage.image_tokens or msgspec.UNSET
        known = usage.cached_tokens is not None or images
        details = PromptDetails(usage.cached_tokens or 0, images) if known else None
        total = usage.prompt_tokens + usage.completion_tokens
        drafts = CompletionDetails(usage.accepted_tokens, usage.rejected_tokens, usage.reasoning_tokens)
        return cls(usage.prompt_tokens, usage.completion_tokens, total, details, drafts)


class Remarks(msgspec.Struct, frozen=True, omit_defaults=True):
    """`penstock`: what a client should know that OpenAI's fields have no place for."""

    approximations: tuple[str, ...] = ()  # what a lenient grammar does not hold exactly
    ignored: tuple[str, ...] = ()  # what of the request was left out, and why
    weight_version: str = ""  # of the weights, where the server's can change; of several, that of the last tokens
    weight_versions: tuple[WeightSpan, ...] = ()  # where the tokens are of several

    @classmethod
    def of(
        cls, collector: OutputCollector, ignored: tuple[str, ...] = (), choice: Choice | None = None
    ) -> Remarks | msgspec.UnsetType:
        """choice: the only one that they are about."""
        about = collector.choices if choice is None else [choice]
        spans = [WeightSpan(one.index, *span) for one in about for span in one.versions] if collector.versioned else []
        versions = {span.weight_version for span in spans}
        last = max(spans, key=attrgetter("start")).weight_version if spans else ""
        made = cls(collector.approximations, ignored, last, tuple(spans) if len(versions) > 1 else ())
        return msgspec.UNSET if made == cls() else made


class WeightSpan(msgspec.Struct, frozen=True):
    """A choice's tokens from number `start` on came from these weights, up to its next entry."""

    index: int  # of the choice
    start: int
    weight_version: str


class FunctionAnswer(msgspec.Struct, frozen=True):
    """What is to be called, and with what: JSON, unless the answer was cut off or the model erred."""

    name: str
    arguments: str


class CallAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One of `tool_calls`: the member of its type stands there."""

    id: str
    type: Literal["function", "custom"] = "function"
    function: FunctionAnswer | msgspec.UnsetType = msgspec.UNSET
    custom: CustomCall | msgspec.UnsetType = msgspec.UNSET

    @classmethod
    def of(cls, call: ToolCall, customs: frozenset[str]) -> CallAnswer:
        if call.name in customs:
            return cls(id=call.id, type="custom", custom=CustomCall(name=call.name, input=call.arguments))
        return cls(id=call.id, function=FunctionAnswer(call.name, call.arguments))


class AssistantMessage(msgspec.Struct, frozen=True):
    """What the model said. `content` is null where it only called tools. Its reasoning stands under both names; where
    it is looked for and there is none, `reasoning_content` is null, which clients of reasoning models read."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    reasoning_content: str | msgspec.UnsetType | None = msgspec.UNSET
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[CallAnswer] | msgspec.UnsetType = msgspec.UNSET

    @classmethod
    def of(cls, output: ParsedOutput, told: ResponseOptions, *, reasons: bool) -> AssistantMessage:
        thought = output.reasoning if told.reasoning and output.reasoning else msgspec.UNSET
        absent = None if told.reasoning and reasons else msgspec.UNSET
        calls = [CallAnswer.of(call, told.customs) for call in output.calls]
        return cls(
            output.content if output.content or not calls else None,
            reasoning_content=absent if thought is msgspec.UNSET else thought,
            reasoning=thought,
            tool_calls=calls or msgspec.UNSET,
        )


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One answer of a chat completion."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: str | int | msgspec.UnsetType = msgspec.UNSET
    token_ids: TokenIds | msgspec.UnsetType = msgspec.UNSET


class ChatAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Body of a chat completion."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageAnswer
    prompt_logprobs: PromptPositions | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: TokenIds | msgspec.UnsetType = msgspec.UNSET
    penstock: Remarks | msgspec.UnsetType = msgspec.UNSET


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One answer of a completion."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str
    stop_reason: str | int | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: PromptPositions | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: TokenIds | msgspec.UnsetType = msgspec.UNSET
    token_ids: TokenIds | msgspec.UnsetType = msgspec.UNSET


class CompletionAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Body of a completion."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageAnswer
    penstock: Remarks | msgspec.UnsetType = msgspec.UNSET


def chat_answer(identity: Identity, collector: OutputCollector, told: ResponseOptions) -> ChatAnswer:
    """The whole answer; every choice has finished."""
    choices = [
        ChatChoice(
            index=choice.index,
            message=AssistantMessage.of(parsed_output(choice.take()), told, reasons=collector.prompts[0].reasons),
            logprobs=chat_logprobs(choice.take_logprobs(), as_ids=told.tokens_as_ids) if told.logprobs else None,
            finish_reason=FINISH_REASONS[choice.finish],
            stop_reason=msgspec.UNSET if choice.stop_reason is None else choice.stop_reason,
            token_ids=unpacked(choice.take_token_ids()) if told.token_ids else msgspec.UNSET,
        )
        for choice in collector.choices
    ]
    prompt = collector.prompts[0]
    return ChatAnswer(
        id=identity.id,
        created=identity.created,
        model=identity.model,
        choices=choices,
        usage=UsageAnswer.of(collector.usage),
        prompt_logprobs=prompt_positions(prompt.logprobs or ()) if told.prompt_logprobs else msgspec.UNSET,
        prompt_token_ids=unpacked(prompt.token_ids) if told.token_ids else msgspec.UNSET,
        penstock=Remarks.of(collector),
    )


def completion_answer(identity: Identity, collector: OutputCollector, told: ResponseOptions) -> CompletionAnswer:
    """The whole answer; every choice has finished."""
    return CompletionAnswer(
        id=identity.id,
        created=identity.created,
        model=identity.model,
        choices=[completion_choice(collector, choice, told) for choice in collector.choices],
        usage=UsageAnswer.of(collector.usage),
        penstock=Remarks.of(collector),
    )


def completion_choice(collector: OutputCollector, choice: Choice, told: ResponseOptions) -> CompletionChoice:
    text = choice.take_text()
    facts = collector.prompts[choice.prompt]
    prompt = facts.logprobs
    shaped = completion_logprobs(choice.take_logprobs(), as_ids=told.tokens_as_ids) if told.logprobs else None
    if shaped is not None and told.echo and prompt is not None:
        shaped = with_prompt(text, prompt, shaped, first_id(facts) if told.tokens_as_ids else None)
    return CompletionChoice(
        index=choice.index,
        text=text,
        logprobs=shaped,
        finish_reason=FINISH_REASONS[choice.finish],
        stop_reason=msgspec.UNSET if choice.stop_reason is None else choice.stop_reason,
        prompt_logprobs=prompt_positions(prompt or ()) if told.prompt_logprobs else msgspec.UNSET,
        prompt_token_ids=unpacked(facts.token_ids) if told.token_ids else msgspec.UNSET,
        token_ids=unpacked(choice.take_token_ids()) if told.token_ids else msgspec.UNSET,
    )


def unpacked(ids: bytes) -> TokenIds:
    """Token ids as JSON has them."""
    return struct.unpack(f"<{len(ids) // 4}i", ids)


def first_id(facts: PromptFacts) -> int | None:
    """Id of the prompt's first token, where the prompt's ids are known."""
    return unpacked(facts.token_ids[:4])[0] if facts.token_ids else None


ID_NAME = "token_id:{}"
LEAST = -9999.0  # JSON has no minus infinity


class TopLogprob(msgspec.Struct, frozen=True):
    """One of the most likely tokens at a position."""

    token: str
    logprob: float
    bytes: tuple[int, ...]


class ChatTokenLogprob(msgspec.Struct, frozen=True):
    """The token at a position, with the most likely ones."""

    token: str
    logprob: float
    bytes: tuple[int, ...]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """`logprobs` of a chat choice or chunk."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """`logprobs` of a completions choice or chunk, one entry per token in each list."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(msgspec.Struct, frozen=True):
    """A token at a prompt position, by its id."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptPositions = list[dict[str, PromptLogprob] | None]


def chat_logprobs(positions: Iterable[PositionLogprobs], *, as_ids: bool = False) -> ChatLogprobs:
    """With `as_ids` tokens are called by their ids instead of their texts, here and below."""
    return ChatLogprobs(
        [
            ChatTokenLogprob(
                token_name(at.chosen, as_ids),
                finite(at.chosen),
                tuple(at.chosen.raw),
                [TopLogprob(token_name(top, as_ids), finite(top), tuple(top.raw)) for top in at.top],
            )
            for at in positions
        ]
    )


def completion_logprobs(positions: Iterable[PositionLogprobs], *, as_ids: bool = False) -> CompletionLogprobs:
    """The chosen token stands among the top ones in any case, as OpenAI has it."""
    listed = list(positions)
    return CompletionLogprobs(
        text_offset=[at.text_offset for at in listed],
        token_logprobs=[finite(at.chosen) for at in listed],
        tokens=[token_name(at.chosen, as_ids) for at in listed],
        top_logprobs=[best_by_name(at, as_ids) for at in listed],
    )


def with_prompt(
    text: str,
    prompt: tuple[PositionLogprobs | None, ...],
    output: CompletionLogprobs,
    first_id: int | None = None,
) -> CompletionLogprobs:
    """Logprobs of an echoed choice that begins with `text`: the prompt's, then the output's.

    The prompt's first token has none; its text is what stands before the second token. `first_id` is its id where
    tokens are called by their ids.
    """
    rest = completion_logprobs((at for at in prompt if at is not None), as_ids=first_id is not None)
    followers = rest.text_offset or output.text_offset
    opening = text[: followers[0]] if followers else text
    if first_id is not None:
        opening = ID_NAME.format(first_id)
    return CompletionLogprobs(
        text_offset=[0, *rest.text_offset, *output.text_offset],
        token_logprobs=[None, *rest.token_logprobs, *output.token_logprobs],
        tokens=[opening, *rest.tokens, *output.tokens],
        top_logprobs=[None, *rest.top_logprobs, *output.top_logprobs],
    )


def prompt_positions(prompt: tuple[PositionLogprobs | None, ...]) -> PromptPositions:
    """`prompt_logprobs`: per position the token that stands there and the most likely ones, by token id."""
    positions: PromptPositions = []
    for at in prompt:
        if at is None:
            positions.append(None)
            continue
        entries = {str(at.chosen.token_id): PromptLogprob(finite(at.chosen), at.rank, at.chosen.token)}
        for rank, top in enumerate(at.top, 1):
            entries.setdefault(str(top.token_id), PromptLogprob(finite(top), rank, top.token))
        positions.append(entries)
    return positions


def token_name(token: TokenLogprob, as_ids: bool) -> str:
    return ID_NAME.format(token.token_id) if as_ids else token.token


def best_by_name(at: PositionLogprobs, as_ids: bool) -> dict[str, float]:
    """Tokens that read the same keep the likelier one's value."""
    best: dict[str, float] = {}
    for token in (*at.top, at.chosen):
        best.setdefault(token_name(token, as_ids), finite(token))
    return best


def finite(token: TokenLogprob) -> float:
    return max(token.logprob, LEAST)
