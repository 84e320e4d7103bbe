"""One request between its arrival from an api process and the last confirmation by the scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import msgspec

from penstock.engine_core.parsers.scanning import content, leading_text, merged
from penstock.engine_core.text.choice import Choice, Delta
from penstock.engine_core.text.detokenizer import SILENT, detokenizer
from penstock.engine_core.text.outbox import Seat, merge_extras
from penstock.engine_core.text.prompts import Prepared
from penstock.engine_core.text.stops import StopScanner, compile_stops
from penstock.engine_core.tokenizer.vocabulary import Vocabulary
from penstock.protocol.columns import pack, unpack
from penstock.protocol.messages import KVTransfer, SubmitText, SubmitTokens, TraceContext, Written


def named(number: int, trace: TraceContext | None = None, **more: object) -> dict[str, object]:
    """What a line of the log about a request has beside its event, as `extra` of logging's functions."""
    traced = {} if trace is None else {"trace_id": trace.trace_id}
    return {"fields": {"request": f"{number:x}", **traced, **more}}


class Kept:
    """Deltas of a choice whose client wants its text in one piece."""

    __slots__ = ("_deltas", "token_ids")

    def __init__(self) -> None:
        self._deltas: list[Delta] = []
        self.token_ids: list[int] = []  # of all deltas

    def add(self, delta: Delta, token_ids: Sequence[int]) -> None:
        """Keep a delta; `token_ids` are its tokens."""
        self._deltas.append(delta)
        self.token_ids += token_ids

    def join(self, last: Delta, token_ids: Sequence[int]) -> Delta:
        """All deltas as one that ends as the last one does, if it does. Nothing more can be kept here."""
        self.add(last, token_ids)
        pieces = merged([piece for delta in self._deltas for piece in (*content(delta.text), *delta.pieces)])
        text, rest = leading_text(list(pieces))
        extras = [delta.extra for delta in self._deltas if delta.extra is not None]
        extra = reduce(merge_extras, extras) if extras else None
        return Delta(text, sum(delta.tokens for delta in self._deltas), last.finish, extra, pieces=rest)


class RequestPlacement:
    """Which replica a request is at, and which it has been at. Kept by the dispatch."""

    __slots__ = ("booked", "chain", "former", "mark", "refused", "replica", "transfer")

    def __init__(self) -> None:
        self.replica: int | None = None  # whose scheduler has it
        self.booked = 0  # choices that count as load there
        self.chain: list[bytes] = []  # identities of its prompt's full blocks
        self.former: dict[int, int] = {}  # replicas it was taken from: how many of its choices they have yet to end
        self.refused: set[int] = set()  # replicas that had no room for it
        self.mark = -1  # tokens that it had when it moved for want of executors; -1: it has not
        self.transfer: KVTransfer | None = None  # blocks that a prefill replica holds for it


class Request:
    """State of one request. Owned by the frontend."""

    __slots__ = (
        "_message", "_text", "aborted", "api", "choices", "confirmed", "id", "kept", "placement", "prompt_ids", "seats",
        "session", "skip_special_tokens", "token_ids", "trace",
    )  # fmt: skip

    def __init__(self, api: int, text: SubmitText) -> None:
        self.api: int | None = api  # None once its api process is gone
        self.id = text.id
        self._text: SubmitText | None = text  # until the prompt is made: it may be large
        self.skip_special_tokens = text.skip_special_tokens
        self._message: SubmitTokens | None = None  # for the scheduler, once the prompt is made
        self.aborted = False  # the scheduler was told to end it
        self.choices: tuple[Choice, ...] = ()
        self.token_ids: Sequence[int] = ()  # of the prompt, while its log-probabilities may come
        self.prompt_ids: bytes | None = None  # of the prompt, until they are told
        self.confirmed = 0  # choices that the scheduler ended
        self.seats = tuple(Seat(text.id, index) for index in range(text.n))
        self.kept = [] if text.stream else [Kept() for _ in range(text.n)]
        self.session = text.session
        self.trace = text.trace
        self.placement = RequestPlacement()

    @property
    def encoding(self) -> bool:
        """Whether its prompt is still being made, so that the scheduler does not know it."""
        return self._text is not None

    @property
    def message(self) -> SubmitTokens:
        """What a scheduler is told of it at first, once its prompt is made."""
        assert self._message is not None
        return self._message

    def start(self, vocabulary: Vocabulary, prepared: Prepared) -> None:
        """Its prompt is made: from here on tokens may come."""
        text, self._text = self._text, None
        assert text is not None
        self._message = prepared.request
        self.placement.chain = prepared.chain
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
                echo_alone=text.sampling.max_tokens == 0,
                prompt_tokens=len(prepared.token_ids),
                image_tokens=sum(image.length for image in prepared.request.images),
                min_tokens=text.sampling.min_tokens,
                include_stop=text.include_stop,
                approximations=prepared.approximations,
                parser=parsing.parser() if parsing is not None else None,
                reasons=parsing is not None and parsing.reasoning is not None,
            )
            for _ in range(text.n)
        )
        if text.written:
            self._resume(text.written)

    def handover(self, *, prefill: bool = False) -> SubmitTokens:
        """What a scheduler that knows nothing of it begins it with, or goes on with behind all that was written.
        prefill: only until each choice has its next token."""
        self.confirmed = sum(choice.ended for choice in self.choices)
        message, transfer = self.message, self.placement.transfer
        if prefill or transfer is not None:
            message = msgspec.structs.replace(message, prefill=prefill, transfer=transfer)
        if not any(choice.ended or choice.written for choice in self.choices):
            return message
        written = tuple(Written(choice.written.tobytes(), choice.ended) for choice in self.choices)
        return msgspec.structs.replace(message, written=written)

    def _resume(self, written: tuple[Written, ...]) -> None:
        """Bring each choice to where its api process knows it. What comes with a first token was told with it."""
        for choice, before in zip(self.choices, written, strict=True):
            choice.resume(unpack("i", before.token_ids))
            assert before.ended or not choice.ended, "what ended it was told together with its end"
            choice.ended = before.ended
        if written[0].ended or written[0].token_ids:
            self.token_ids, self.prompt_ids = (), None

    def open(self) -> bool:
        """Whether a choice has not ended towards the api process."""
        return self.encoding or not all(choice.ended for choice in self.choices)
