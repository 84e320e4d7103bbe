"""Token ids to text, one id at a time, for one choice.

The text that all pushes and the final flush give equals what the tokenizer library prints for the whole sequence, minus
what it prints for the prompt. Nothing that was given is taken back: text that later tokens could change is held, and
what is held is bounded. Each push costs the same whatever came before.

One deviation, for byte-fallback vocabularies: the library prints a run of byte tokens as U+FFFD throughout when any
part of it is not UTF-8. A run is therefore held until its end, but not beyond RUN_LIMIT bytes; of a longer run each
whole character is given as it completes, and only what is not UTF-8 becomes U+FFFD.

With it the log-probabilities of token ids, as those of tokens as clients see them.
"""

from __future__ import annotations

import math
from codecs import utf_8_decode
from collections.abc import Sequence
from typing import Final, Protocol

from penstock.engine_core.tokenizer.vocabulary import Shape, Vocabulary
from penstock.protocol.columns import unpack, unpack_floats
from penstock.protocol.outputs import Logprobs, PositionLogprobs, TokenLogprob

RUN_LIMIT = 32  # bytes of a byte-fallback run that are held
WINDOW_KEPT = 4  # tokens that stay as context when a window slides
WINDOW_LIMIT = 16  # tokens of a window at which it slides
WAITING_LIMIT = 16  # tokens that wait for what may complete a character
LONGEST_CHARACTER = 4  # bytes


class Detokenizer(Protocol):
    """The text of one choice as its tokens come."""

    def push(self, token_id: int) -> str:
        """Text that is now certain; empty when the token adds none yet."""

    def flush(self) -> str:
        """What was held, as the library prints it at the end of a sequence. The last call."""

    def held(self) -> int:
        """Whole characters that are known but held."""


class Silence:
    """The detokenizer of a request that wants token ids alone. It holds nothing, so all may share it."""

    __slots__ = ()

    def push(self, token_id: int) -> str:
        del token_id
        return ""

    def flush(self) -> str:
        return ""

    def held(self) -> int:
        return 0


SILENT: Final = Silence()


def detokenizer(
    vocabulary: Vocabulary,
    *,
    skip_special_tokens: bool,
    context: Sequence[int] = (),
    shown: frozenset[int] = frozenset(),
) -> Detokenizer:
    """A detokenizer for what follows the tokens `context` (a prompt). `shown` are special tokens that are text."""
    skipped = vocabulary.special - shown if skip_special_tokens else frozenset()
    match vocabulary.spelling.shape:
        case Shape.BYTES:
            return ByteDetokenizer(vocabulary, skipped, context)
        case Shape.PIECES:
            return PieceDetokenizer(vocabulary, skipped, context)
        case Shape.WINDOW:
            return WindowDetokenizer(vocabulary, skipped, context)


def tail(context: Sequence[int], skipped: frozenset[int], count: int) -> list[int]:
    """The last `count` ids of `context` that are not skipped, in order."""
    found: list[int] = []
    for token_id in reversed(context):
        if len(found) == count:
            break
        if token_id not in skipped:
            found.append(token_id)
    return found[::-1]


class ByteDetokenizer:
    """Byte-level vocabularies: UTF-8, decoded as it comes."""

    __slots__ = ("_pending", "_raw", "_skipped", "_texts")

    def __init__(self, vocabulary: Vocabulary, skipped: frozenset[int], context: Sequence[int]) -> None:
        self._raw = vocabulary.raw
        self._texts = vocabulary.texts
        self._skipped = skipped
        before = b"".join(map(vocabulary.raw, tail(context, skipped, LONGEST_CHARACTER)))
        self._pending = before[utf_8_decode(before, "replace", False)[1] :]  # an incomplete character's bytes

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        if not self._pending and token_id in self._texts:
            return self._texts[token_id]
        data = self._pending + self._raw(token_id)
        text, used = utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return text

    def flush(self) -> str:
        text = self._pending.decode(errors="replace")
        self._pending = b""
        return text

    def held(self) -> int:
        return 0


class ByteRun:
    """Consecutive byte-fallback tokens."""

    __slots__ = ("_long", "bytes")

    def __init__(self, pending: bytes = b"") -> None:
        self.bytes = pending  # held; never more than RUN_LIMIT
        self._long = False  # part of the run has been given

    def push(self, byte: int) -> str:
        self.bytes += bytes((byte,))
        if not self._long and len(self.bytes) <= RUN_LIMIT:
            return ""
        self._long = True
        text, used = utf_8_decode(self.bytes, "replace", False)
        self.bytes = self.bytes[used:]
        return text

    def end(self) -> str:
        """The rest of the run: U+FFFD for every byte unless all of it is UTF-8."""
        held, self.bytes = self.bytes, b""
        long, self._long = self._long, False
        try:
            return held.decode()
        except UnicodeDecodeError:
            return held.decode(errors="replace") if long else "\ufffd" * len(held)

    def held(self) -> int:
        return len(self.bytes.decode(errors="ignore"))


class PieceDetokenizer:
    """SentencePiece BPE with byte fallback: pieces of text, runs of bytes, and leading spaces that are dropped."""

    __slots__ = ("_piece", "_run", "_skipped", "_strip", "_stripped")

    def __init__(self, vocabulary: Vocabulary, skipped: frozenset[int], context: Sequence[int]) -> None:
        self._piece = vocabulary.piece
        self._skipped = skipped
        self._run: ByteRun | None = None
        self._stripped = vocabulary.spelling.stripped
        self._strip = vocabulary.spelling.strip  # leading characters that may still be dropped
        for token_id in context:
            if not self._strip:
                break
            self.push(token_id)
        if self._run is not None:
            self._strip = 0
        self._run = None
        before = bytes(self._trailing_run(context))
        pending = before[utf_8_decode(before, "replace", False)[1] :]
        if pending:
            self._run = ByteRun(pending)

    def _trailing_run(self, context: Sequence[int]) -> list[int]:
        run = []
        for token_id in reversed(tail(context, self._skipped, LONGEST_CHARACTER)):
            piece = self._piece(token_id)
            if isinstance(piece, str):
                break
            run.append(piece)
        return run[::-1]

    def push(self, token_id: int) -> str:
        """As `Detokenizer.push`."""
        text = self._piece(token_id)
        if text == "" or token_id in self._skipped:
            return ""
        if isinstance(text, int):
            if self._run is None:
                self._run = ByteRun()
            text = self._run.push(text)
        elif self._run is not None:
            text = self._run.end() + text
            self._run = None
        return self._without_lead(text) if self._strip and text else text

    def _without_lead(self, text: str) -> str:
        while self._strip and text.startswith(self._stripped):
            text = text[len(self._stripped) :]
            self._strip -= 1
        if text:
            self._strip = 0
        return text

    def flush(self) -> str:
        text = self._run.end() if self._run is not None else ""
        self._run = None
        return self._without_lead(text)

    def held(self) -> int:
        return self._run.held() if self._run is not None else 0


class WindowDetokenizer:
    """Any other decoder: the library decodes a short window of tokens, and what it adds to the text before is new."""

    __slots__ = ("_given", "_run", "_skipped", "_vocabulary", "_waiting", "_window")

    def __init__(self, vocabulary: Vocabulary, skipped: frozenset[int], context: Sequence[int]) -> None:
        self._vocabulary = vocabulary
        self._skipped = skipped
        self._run: ByteRun | None = None
        self._window: list[int] = []
        self._given = ""  # the window's text as far as it was given
        self._waiting = 0  # tokens at the window's end whose text was not given
        before = tail(context, skipped, WINDOW_KEPT)
        if before:
            self._slide(before)

    def push(self, token_id: int) -> str:
        """As `Detokenizer.push`."""
        if token_id in self._skipped or self._vocabulary.piece(token_id) == "":
            return ""
        byte = self._vocabulary.byte(token_id)
        if byte is not None:
            before = "" if self._run is not None else self._rest()
            self._run = self._run or ByteRun()
            return before + self._run.push(byte)
        before = self._end_run()
        self._window.append(token_id)
        text = self._decode(self._window)
        self._waiting += 1
        if text.endswith("\ufffd") and self._waiting < WAITING_LIMIT:
            return before
        self._waiting = 0
        new = text[len(self._given) :]
        if len(self._window) >= WINDOW_LIMIT:
            self._slide(self._window[-WINDOW_KEPT:])
        else:
            self._given = text
        return before + new

    def flush(self) -> str:
        return self._end_run() + self._rest()

    def held(self) -> int:
        return self._run.held() if self._run is not None else 0

    def _rest(self) -> str:
        return self._decode(self._window)[len(self._given) :]

    def _end_run(self) -> str:
        if self._run is None:
            return ""
        text = self._run.end()
        self._run = None
        self._slide([])
        return text

    def _slide(self, kept: list[int]) -> None:
        """Start a new window. An anchor stands for all before, so that its first token is not a text's first."""
        anchor = self._vocabulary.anchor
        self._window = kept if anchor is None else [anchor, *kept]
        self._given = self._decode(self._window)

    def _decode(self, token_ids: list[int]) -> str:
        return self._vocabulary.decode(token_ids, skip_special_tokens=False)


LOWEST = -9999.0  # stands for minus infinity, which JSON cannot say


def positions(vocabulary: Vocabulary, logprobs: Logprobs, offsets: Sequence[int]) -> list[PositionLogprobs]:
    """One entry per position; `offsets` are where the positions' tokens begin in the choice's text, in characters.

    A token that cannot come is not among the best.
    """
    width = logprobs.width
    ids = unpack("i", logprobs.token_ids)
    values = unpack_floats(logprobs.values)
    ranks = unpack("i", logprobs.ranks)
    found = []
    for position, (rank, offset) in enumerate(zip(ranks, offsets, strict=False)):
        at = position * width
        best = [i for i in range(at + 1, at + width) if values[i] > -math.inf]
        chosen, *top = [token_logprob(vocabulary, ids[i], values[i]) for i in (at, *best)]
        found.append(PositionLogprobs(chosen, rank, tuple(top), offset))
    return found


def token_logprob(vocabulary: Vocabulary, token_id: int, value: float) -> TokenLogprob:
    raw = vocabulary.raw(token_id)
    return TokenLogprob(raw.decode(errors="replace"), token_id, max(value, LOWEST), raw)


def prompt_positions(
    vocabulary: Vocabulary, logprobs: Logprobs, token_ids: Sequence[int], *, skip_special_tokens: bool
) -> tuple[PositionLogprobs | None, ...]:
    """One entry per prompt token; None at position 0, which nothing predicts."""
    stream = detokenizer(vocabulary, skip_special_tokens=skip_special_tokens)
    offsets, length = [], 0
    for token_id in token_ids:
        offsets.append(length + stream.held())
        length += len(stream.push(token_id))
    return (None, *positions(vocabulary, logprobs, offsets[1:]))
