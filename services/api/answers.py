"""Response bodies as types, and how a reply becomes one.

Source: OpenAI API reference, "The chat completion object" and "The completion object". Beyond them stand only
`stop_reason` (the stop string or stop token id that ended a choice), `prompt_logprobs` where it was asked for, and
`penstock` where there is something to remark.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from protocol.messages import Finish
from services.api.logprobs import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptPositions,
    chat_logprobs,
    completion_logprobs,
    prompt_positions,
    with_prompt,
)
from services.api.reply import Choice, Reply, Usage

COMPLETE = (Finish.STOP, Finish.LENGTH)


class Identity(msgspec.Struct, frozen=True):
    """What names a response."""

    id: str
    created: int
    model: str


class PromptDetails(msgspec.Struct, frozen=True):
    """What is known of the prompt's tokens."""

    cached_tokens: int


class CompletionDetails(msgspec.Struct, frozen=True):
    """What became of drafts, whoever made them: OpenAI's names are of its `prediction`."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class UsageAnswer(msgspec.Struct, frozen=True):
    """`usage`."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails | None
    completion_tokens_details: CompletionDetails

    @classmethod
    def of(cls, usage: Usage) -> UsageAnswer:
        details = None if usage.cached_tokens is None else PromptDetails(usage.cached_tokens)
        total = usage.prompt_tokens + usage.completion_tokens
        drafts = CompletionDetails(usage.accepted_tokens, usage.rejected_tokens)
        return cls(usage.prompt_tokens, usage.completion_tokens, total, details, drafts)


class Remarks(msgspec.Struct, frozen=True):
    """`penstock`: what a client should know that OpenAI's fields have no place for."""

    approximations: tuple[str, ...]  # what a lenient grammar does not hold exactly

    @classmethod
    def of(cls, reply: Reply) -> Remarks | msgspec.UnsetType:
        return cls(reply.approximations) if reply.approximations else msgspec.UNSET


class AssistantMessage(msgspec.Struct, frozen=True):
    """What the model said."""

    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One answer of a chat completion."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: str | int | msgspec.UnsetType = msgspec.UNSET


class ChatAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Body of a chat completion."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageAnswer
    prompt_logprobs: PromptPositions | msgspec.UnsetType = msgspec.UNSET
    penstock: Remarks | msgspec.UnsetType = msgspec.UNSET


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One answer of a completion."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str
    stop_reason: str | int | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: PromptPositions | msgspec.UnsetType = msgspec.UNSET


class CompletionAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Body of a completion."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageAnswer
    penstock: Remarks | msgspec.UnsetType = msgspec.UNSET


def chat_answer(identity: Identity, reply: Reply, *, logprobs: bool, prompt_logprobs: bool) -> ChatAnswer:
    """The whole answer; every choice has finished."""
    choices = [
        ChatChoice(
            index=choice.index,
            message=AssistantMessage(choice.take_text()),
            logprobs=chat_logprobs(choice.take_logprobs()) if logprobs else None,
            finish_reason=finish_reason(choice.finish),
            stop_reason=msgspec.UNSET if choice.stop_reason is None else choice.stop_reason,
        )
        for choice in reply.choices
    ]
    return ChatAnswer(
        id=identity.id,
        created=identity.created,
        model=identity.model,
        choices=choices,
        usage=UsageAnswer.of(reply.usage),
        prompt_logprobs=prompt_positions(reply.prompts[0].logprobs or ()) if prompt_logprobs else msgspec.UNSET,
        penstock=Remarks.of(reply),
    )


def completion_answer(
    identity: Identity, reply: Reply, *, logprobs: bool, echo: bool, prompt_logprobs: bool
) -> CompletionAnswer:
    """The whole answer; every choice has finished."""
    return CompletionAnswer(
        id=identity.id,
        created=identity.created,
        model=identity.model,
        choices=[
            completion_choice(reply, choice, logprobs=logprobs, echo=echo, prompt_logprobs=prompt_logprobs)
            for choice in reply.choices
        ],
        usage=UsageAnswer.of(reply.usage),
        penstock=Remarks.of(reply),
    )


def completion_choice(
    reply: Reply, choice: Choice, *, logprobs: bool, echo: bool, prompt_logprobs: bool
) -> CompletionChoice:
    text = choice.take_text()
    prompt = reply.prompts[choice.prompt].logprobs
    shaped = completion_logprobs(choice.take_logprobs()) if logprobs else None
    if shaped is not None and echo and prompt is not None:
        shaped = with_prompt(text, prompt, shaped)
    return CompletionChoice(
        index=choice.index,
        text=text,
        logprobs=shaped,
        finish_reason=finish_reason(choice.finish),
        stop_reason=msgspec.UNSET if choice.stop_reason is None else choice.stop_reason,
        prompt_logprobs=prompt_positions(prompt or ()) if prompt_logprobs else msgspec.UNSET,
    )


def finish_reason(finish: Finish) -> str:
    """OpenAI's word. Aborted and failed choices end their response with an error instead."""
    assert finish in COMPLETE
    return "length" if finish == Finish.LENGTH else "stop"
