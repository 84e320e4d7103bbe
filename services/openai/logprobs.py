"""Log-probabilities in the shapes of chat, of completions, and of the `prompt_logprobs` extra.

Source: OpenAI API reference, "The chat completion object" and "The completion object" (`logprobs`).
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from penstock.protocol.messages import PositionLogprobs, TokenLogprob

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
                name(at.chosen, as_ids),
                finite(at.chosen),
                tuple(at.chosen.raw),
                [TopLogprob(name(top, as_ids), finite(top), tuple(top.raw)) for top in at.top],
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
        tokens=[name(at.chosen, as_ids) for at in listed],
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


def name(token: TokenLogprob, as_ids: bool) -> str:
    return ID_NAME.format(token.token_id) if as_ids else token.token


def best_by_name(at: PositionLogprobs, as_ids: bool) -> dict[str, float]:
    """Tokens that read the same keep the likelier one's value."""
    best: dict[str, float] = {}
    for token in (*at.top, at.chosen):
        best.setdefault(name(token, as_ids), finite(token))
    return best


def finite(token: TokenLogprob) -> float:
    return max(token.logprob, LEAST)
