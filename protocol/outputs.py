"""What one step gave: tokens from scheduler to tokenizer, their text from tokenizer to api.

Columns are raw little-endian arrays that `rows()` reads: int64 ids, uint16 choices, int32 counts, uint8 finish.
Every (id, choice) gets exactly one terminal row, whose finish is not NONE (messages.py).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from penstock.protocol.message import Message, Part

# Of an output token, by its number, the version of the weights that it and those behind it came from. On the first row
# of a choice and where the version changes.
Versions = tuple[tuple[int, str], ...]


class Logprobs(Part, frozen=True):
    """Log-probabilities at consecutive positions, `width` columns each; column 0 is the token at that position."""

    width: int
    token_ids: bytes  # int32 [positions, width]
    values: bytes  # float32 [positions, width]
    ranks: bytes  # int32 [positions], 1 is the most likely


class TokenExtra(Part, frozen=True, kw_only=True):
    """What few rows of a `TokenBatch` have besides their tokens."""

    row: int
    cached_tokens: int | None = None  # on a choice's first row
    logprobs: Logprobs | None = None  # one position per token of the row
    prompt_logprobs: Logprobs | None = None  # positions 1.. of the prompt, once
    drafted: tuple[int, int] | None = None  # draft tokens accepted and rejected so far; on a choice's last row
    stop_token: int | None = None  # the stop token id that ended the choice, when the request named it
    vector: bytes | None = None  # float32, of a request that pools; on its one row
    error: str | None = None  # with Finish.ERROR, Finish.GRAMMAR and Finish.UNAVAILABLE
    weights: Versions = ()


class TokenBatch(Message, frozen=True, kw_only=True):
    """scheduler → tokenizer: what one step (or several, after a full link) gave to this tokenizer's requests."""

    ids: bytes  # int64 [rows]
    choices: bytes  # uint16 [rows]
    counts: bytes  # int32 [rows], tokens of each row
    token_ids: bytes  # int32 [sum of counts]
    finish: bytes  # uint8 [rows]
    extras: tuple[TokenExtra, ...] = ()

    def rows(self) -> Iterator[tuple[int, int, list[int], int]]:
        """Of each row its request, its choice, its tokens and why it ends, if it does."""
        counts, token_ids = memoryview(self.counts).cast("i"), memoryview(self.token_ids).cast("i").tolist()
        spans, start = [], 0
        for count in counts:
            spans.append(token_ids[start : start + count])
            start += count
        ids, choices = memoryview(self.ids).cast("q"), memoryview(self.choices).cast("H")
        return zip(ids, choices, spans, self.finish, strict=True)


class TokenLogprob(Part, frozen=True):
    token: str
    token_id: int
    logprob: float
    raw: bytes  # the token's own bytes


class PositionLogprobs(Part, frozen=True):
    chosen: TokenLogprob
    rank: int
    top: tuple[TokenLogprob, ...]
    text_offset: int  # in characters of the choice's text, echo included


class Piece(Part, frozen=True):
    """A stretch of an output that was parsed."""

    kind: int  # PieceKind
    text: str


class ParsedRow(Part, frozen=True):
    """What follows the text of a row of a `TextBatch`, in order."""

    row: int
    pieces: tuple[Piece, ...]


class TextExtra(Part, frozen=True, kw_only=True):
    """What few rows of a `TextBatch` have besides their text."""

    row: int
    prompt_tokens: int | None = None  # on a choice's first row
    image_tokens: int = 0  # on a choice's first row: those of them that stand for images
    prompt_token_ids: bytes | None = None  # int32, on the first choice's first row where they were asked for
    cached_tokens: int | None = None  # on a choice's first row
    logprobs: tuple[PositionLogprobs, ...] = ()  # of the text in this row
    prompt_logprobs: tuple[PositionLogprobs | None, ...] | None = None  # None at position 0
    stop_reason: str | int | None = None  # stop string or stop token id that ended the choice
    drafted: tuple[int, int] | None = None  # on a choice's last row: draft tokens accepted and rejected
    reasons: bool = False  # on a choice's first row: reasoning is separated from its content
    reasoning_tokens: int = 0  # on a choice's last row, where its reasoning was parsed; its markers count
    vector: bytes | None = None  # float32, of a request that pools; on its one row
    approximations: tuple[str, ...] = ()  # on a choice's first row: what a lenient grammar only approximates
    error: str | None = None
    weights: Versions = ()


class TextBatch(Message, frozen=True, kw_only=True):
    """tokenizer → api: deltas of text. A row may hold no text (a token that decodes to nothing yet)."""

    ids: bytes  # int64 [rows]
    choices: bytes  # uint16 [rows]
    text: tuple[str, ...]  # [rows]
    tokens: bytes  # int32 [rows], output tokens that this row accounts for
    token_ids: bytes  # int32 [sum of tokens]; with them the request can continue elsewhere
    finish: bytes  # uint8 [rows]
    extras: tuple[TextExtra, ...] = ()
    parsed: tuple[ParsedRow, ...] = ()  # of rows that hold more than content

    def rows(self) -> Iterator[tuple[int, int, str, int, memoryview, int]]:
        """Of each row its request, choice, text, how many tokens made it, their ids as int32 bytes, and its finish."""
        rows, token_ids = len(self.text), memoryview(self.token_ids)
        counts = struct.unpack(f"<{rows}i", self.tokens)  # for a row or two faster than a cast
        spans, start = [], 0
        for count in counts:
            end = start + 4 * count
            spans.append(token_ids[start:end])
            start = end
        ids, choices = struct.unpack(f"<{rows}q", self.ids), struct.unpack(f"<{rows}H", self.choices)
        return zip(ids, choices, self.text, counts, spans, self.finish, strict=True)
