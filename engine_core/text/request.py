"""One request between its arrival from an api process and the last confirmation by the scheduler."""

from __future__ import annotations

from collections.abc import Sequence

from engine_core.text.choice import Choice, Delta
from engine_core.text.columns import pack
from engine_core.text.detokenizer import SILENT, detokenizer
from engine_core.text.outbox import Seat
from engine_core.text.parsers.pieces import content, merged
from engine_core.text.prompts import Prepared
from engine_core.text.stops import StopScanner, compile_stops
from engine_core.text.vocabulary import Vocabulary
from protocol.messages import Piece, PositionLogprobs, SubmitText, TextExtra


class Kept:
    """Deltas of a choice whose client wants its text in one piece."""

    __slots__ = ("_extra", "_logprobs", "_pieces", "_prompt_logprobs", "_texts", "_token_ids", "_tokens")

    def __init__(self) -> None:
        self._texts: list[str] = []  # what comes before the pieces
        self._pieces: list[Piece] = []
        self._tokens = 0
        self._token_ids: list[int] = []  # where they were asked for
        self._extra: TextExtra | None = None  # of the first delta
        self._logprobs: list[PositionLogprobs] = []
        self._prompt_logprobs: tuple[PositionLogprobs | None, ...] | None = None

    def add(self, delta: Delta, token_ids: Sequence[int] = ()) -> None:
        """Keep what a delta brought; `token_ids` are its tokens, where they were asked for."""
        if self._pieces:
            self._pieces += content(delta.text)
        else:
            self._texts.append(delta.text)
        self._pieces += delta.pieces
        self._tokens += delta.tokens
        self._token_ids += token_ids
        if delta.extra is not None:
            self._extra = self._extra or delta.extra
            self._logprobs += delta.extra.logprobs
            if delta.extra.prompt_logprobs is not None:
                self._prompt_logprobs = delta.extra.prompt_logprobs

    def join(self, last: Delta, token_ids: Sequence[int] = ()) -> Delta:
        """All deltas as one that ends as the last one does."""
        self.add(last, token_ids)
        first = self._extra
        if first is None:
            return Delta("".join(self._texts), self._tokens, last.finish, pieces=merged(self._pieces))
        extra = TextExtra(
            row=0,
            prompt_tokens=first.prompt_tokens,
            prompt_token_ids=first.prompt_token_ids,
            token_ids=pack("i", self._token_ids),
            cached_tokens=first.cached_tokens,
            logprobs=tuple(self._logprobs),
            prompt_logprobs=self._prompt_logprobs,
            approximations=first.approximations,
            stop_reason=last.extra.stop_reason if last.extra is not None else None,
            drafted=last.extra.drafted if last.extra is not None else None,
            reasoning_tokens=last.extra.reasoning_tokens if last.extra is not None else 0,
            error=last.extra.error if last.extra is not None else None,
        )
        return Delta("".join(self._texts), self._tokens, last.finish, extra, pieces=merged(self._pieces))


class Request:
    """State of one request. Owned by the frontend."""

    __slots__ = (
        "_text", "api", "choices", "confirmed", "id", "kept", "prompt_ids", "seats", "skip_special_tokens",
        "token_ids", "with_token_ids",
    )  # fmt: skip

    def __init__(self, api: int, text: SubmitText) -> None:
        self.api: int | None = api  # None once its api process is gone
        self.id = text.id
        self._text: SubmitText | None = text  # until the prompt is made: it may be large
        self.skip_special_tokens = text.skip_special_tokens
        self.with_token_ids = text.with_token_ids
        self.choices: tuple[Choice, ...] = ()
        self.token_ids: Sequence[int] = ()  # of the prompt, while its log-probabilities may come
        self.prompt_ids: bytes | None = None  # of the prompt, until they are told
        self.confirmed = 0  # choices that the scheduler ended
        self.seats = tuple(Seat(text.id, index) for index in range(text.n))
        self.kept: tuple[Kept, ...] = () if text.stream else tuple(Kept() for _ in range(text.n))

    @property
    def encoding(self) -> bool:
        """Whether its prompt is still being made, so that the scheduler does not know it."""
        return self._text is not None

    def start(self, vocabulary: Vocabulary, prepared: Prepared) -> None:
        """Its prompt is made: from here on tokens may come."""
        text, self._text = self._text, None
        assert text is not None
        stops = compile_stops(text.stop) if text.stop else None
        if text.sampling.prompt_logprobs >= 0:
            self.token_ids = prepared.token_ids
        if text.with_token_ids:
            self.prompt_ids = pack("i", prepared.token_ids)
        parsing = prepared.parsing
        self.choices = tuple(
            Choice(
                vocabulary,
                detokenizer(
                    vocabulary,
                    skip_special_tokens=text.skip_special_tokens,
                    context=prepared.token_ids,
                    shown=parsing.shown if parsing is not None else frozenset(),
                )
                if text.detokenize
                else SILENT,
                StopScanner(stops, include_stop=text.include_stop) if stops is not None else None,
                echo=prepared.echo,
                prompt_tokens=len(prepared.token_ids),
                min_tokens=text.sampling.min_tokens,
                include_stop=text.include_stop,
                approximations=prepared.approximations,
                parser=parsing.parser() if parsing is not None else None,
            )
            for _ in range(text.n)
        )

    def open(self) -> bool:
        """Whether a choice has not ended towards the api process."""
        return self.encoding or not all(choice.ended for choice in self.choices)
