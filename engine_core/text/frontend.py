"""The tokenizer process without its sockets: requests in, token ids up, tokens back, text out.

Every (id, choice) that came in gets exactly one terminal row, or its request one `Rejected`. A choice that a stop
string ends is answered at once; the scheduler's own end of it is awaited and swallowed. An abort wins over a prompt
that is still being made.
"""

from __future__ import annotations

import logging
from collections import deque

import msgspec

from engine_core.text.choice import Choice, Delta
from engine_core.text.columns import pack, unpack
from engine_core.text.logprobs import prompt_positions
from engine_core.text.outbox import Outbox
from engine_core.text.prompts import Prepared, Prompter
from engine_core.text.request import Request
from engine_core.text.vocabulary import Vocabulary
from protocol.errors import RequestError
from protocol.messages import (
    Abort,
    Detokenize,
    EngineStatus,
    Finish,
    Message,
    Rejected,
    StopHit,
    SubmitText,
    TextExtra,
    TokenBatch,
    TokenExtra,
    Tokenize,
)

log = logging.getLogger(__name__)


class FrontendStatistics(msgspec.Struct, frozen=True):
    """Counters since start, and what stands now."""

    requests: int  # now
    encoding: int  # now: prompts being made
    upward: int  # now: messages waiting for the scheduler
    outward: int  # now: rows and messages waiting for api processes
    submitted: int
    rejected: int
    aborted: int
    failed: int
    stop_hits: int
    prompt_tokens: int
    output_tokens: int


class Frontend:
    """All requests of one tokenizer process. `api` numbers name connections of api processes; the caller makes them."""

    def __init__(self, vocabulary: Vocabulary, prompter: Prompter) -> None:
        self._vocabulary = vocabulary
        self._prompter = prompter
        self._requests: dict[int, Request] = {}
        self._outboxes: dict[int, Outbox] = {}
        self._status: EngineStatus | None = None
        self._linked = False
        self.draining = False  # set by the owner: what comes from now on is refused
        self.upward: deque[Message] = deque()  # for the scheduler, in order; the caller takes from the left
        self._submitted = self._rejected = self._aborted = self._failed = self._stop_hits = 0
        self._prompt_tokens = self._output_tokens = 0

    # Connections

    def join_api(self, api: int) -> None:
        outbox = self._outboxes[api] = Outbox()
        if self._status is not None:
            outbox.report(self._status)

    def leave_api(self, api: int) -> None:
        """The api process is gone: nobody waits for its requests."""
        self._outboxes.pop(api, None)
        for request in [request for request in self._requests.values() if request.api == api]:
            request.api = None
            self.abort(request.id)

    def join_scheduler(self) -> None:
        self._linked = True

    def leave_scheduler(self) -> None:
        """The scheduler is gone, and with it every request that it had."""
        self._linked = False
        self._status = None
        self.upward.clear()
        for request in [request for request in self._requests.values() if not request.encoding]:
            self._reject(request, unavailable(request.id, "the scheduler was lost; try again"))

    def outbox(self, api: int) -> Outbox:
        return self._outboxes[api]

    # Towards the scheduler

    def open(self, api: int, text: SubmitText) -> None:
        """Take a request whose prompt will be made by `make` and handed to `close`."""
        assert text.id not in self._requests
        self._requests[text.id] = Request(api, text)

    def wants(self, request_id: int) -> bool:
        """Whether the prompt of this request is still to be made; False once it was aborted."""
        return request_id in self._requests

    def make(self, text: SubmitText, now: float) -> Prepared | Rejected:
        """The prompt of a request, or why there is none. `now` in unix seconds is what a template knows as the time.

        Touches no request's state: may run in any thread.
        """
        try:
            return self._prompter.prepare(text, now)
        except RequestError as error:
            return rejection(text.id, error)
        except Exception:  # guard: design 7, one request ends and its neighbours go on
            log.exception("request %x: its prompt could not be made", text.id)
            return failure(text.id)

    def close(self, request_id: int, made: Prepared | Rejected) -> None:
        """The prompt is made. Nothing happens when the request was aborted meanwhile."""
        request = self._requests.get(request_id)
        if request is None:
            return
        if isinstance(made, Rejected):
            self._reject(request, made)
        elif not self._linked or self.draining:
            reason = "the server is shutting down" if self.draining else "the scheduler is not there; try again"
            self._reject(request, unavailable(request_id, reason))
        else:
            self._submitted += 1
            self._prompt_tokens += len(made.token_ids)
            request.start(self._vocabulary, made)
            self.upward.append(made.request)

    def abort(self, request_id: int) -> None:
        """End every choice of a request. Unknown ids are ignored: the end may have crossed."""
        request = self._requests.get(request_id)
        if request is None:
            return
        self._aborted += 1
        if not request.encoding:
            self.upward.append(Abort(request_id))
            return
        del self._requests[request_id]
        outbox = self._outbox_of(request)
        for seat in request.seats:
            if outbox is not None:
                outbox.add(seat, Delta("", 0, Finish.ABORT))

    def answer(self, request: Tokenize | Detokenize, now: float) -> Message:
        """Ids of a text or text of ids. Touches no request's state: may run in any thread."""
        try:
            if isinstance(request, Tokenize):
                return self._prompter.tokenize(request, now)
            return self._prompter.detokenize(request)
        except RequestError as error:
            return rejection(request.id, error)
        except Exception:  # guard: design 7, one request ends and its neighbours go on
            log.exception("request %x: not answered", request.id)
            return failure(request.id)

    # From the scheduler

    def reject(self, rejected: Rejected) -> None:
        request = self._requests.get(rejected.id)
        if request is not None:
            self._reject(request, rejected)

    def report(self, status: EngineStatus) -> None:
        self._status = status
        for outbox in self._outboxes.values():
            outbox.report(status)

    def batch(self, batch: TokenBatch) -> None:
        """Turn a step's tokens into rows of text."""
        extras = {extra.row: extra for extra in batch.extras}
        token_ids = unpack("i", batch.token_ids)
        rows = zip(
            unpack("q", batch.ids),
            unpack("H", batch.choices),
            unpack("i", batch.counts),
            unpack("B", batch.finish),
            strict=True,
        )
        end = 0
        for row, (request_id, index, count, finish) in enumerate(rows):
            start, end = end, end + count
            request = self._requests.get(request_id)
            if request is None:
                continue
            choice = request.choices[index]
            if not choice.ended:
                self._advance(request, index, choice, token_ids[start:end], finish, extras.get(row))
            if finish:
                self._confirm(request)

    def _advance(
        self,
        request: Request,
        index: int,
        choice: Choice,
        token_ids: list[int],
        finish: int,
        extra: TokenExtra | None,
    ) -> None:
        try:
            delta = choice.advance(token_ids, finish, extra)
            if request.token_ids and extra is not None:
                delta = self._with_prompt_logprobs(request, index, delta, extra)
        except Exception:  # guard: design 7, one request ends and its neighbours go on
            log.exception("request %x choice %d: its text could not be made", request.id, index)
            self._failed += 1
            delta = choice.end(Finish.ERROR, "the text of this request could not be made")
            if not finish:
                self.upward.append(StopHit(request.id, index, choice.tokens))
        self._output_tokens += delta.tokens
        if delta.stop_hit:
            self._stop_hits += 1
            self.upward.append(StopHit(request.id, index, choice.tokens))
        taken: list[int] = token_ids[: delta.tokens] if request.with_token_ids else []
        if request.prompt_ids is not None and index == 0:
            delta = with_extra(delta, prompt_token_ids=request.prompt_ids)
            request.prompt_ids = None
        if request.kept:
            if not delta.finish:
                request.kept[index].add(delta, taken)
                return
            delta = request.kept[index].join(delta, taken)
        elif taken:
            delta = with_extra(delta, token_ids=pack("i", taken))
        outbox = self._outbox_of(request)
        if outbox is not None:
            outbox.add(request.seats[index], delta)

    def _with_prompt_logprobs(self, request: Request, index: int, delta: Delta, extra: TokenExtra) -> Delta:
        """The delta with the prompt's log-probabilities, when they came or when a prompt of one token has none."""
        if extra.prompt_logprobs is not None:
            found = prompt_positions(
                self._vocabulary,
                extra.prompt_logprobs,
                request.token_ids,
                skip_special_tokens=request.skip_special_tokens,
            )
        elif len(request.token_ids) == 1 and index == 0:
            found = (None,)
        else:
            return delta
        request.token_ids = ()
        return with_extra(delta, prompt_logprobs=found)

    def _confirm(self, request: Request) -> None:
        request.confirmed += 1
        if request.confirmed == len(request.choices):
            del self._requests[request.id]

    def _reject(self, request: Request, rejected: Rejected) -> None:
        del self._requests[request.id]
        self._rejected += 1
        outbox = self._outbox_of(request)
        if outbox is not None and request.open():
            outbox.post(rejected)

    def _outbox_of(self, request: Request) -> Outbox | None:
        return self._outboxes.get(request.api) if request.api is not None else None

    def idle(self) -> bool:
        """Whether every request has ended and its end has gone out."""
        return not (self._requests or self.upward or any(outbox.waiting() for outbox in self._outboxes.values()))

    def statistics(self) -> FrontendStatistics:
        """Counters for metrics and tests."""
        return FrontendStatistics(
            requests=len(self._requests),
            encoding=sum(request.encoding for request in self._requests.values()),
            upward=len(self.upward),
            outward=sum(outbox.waiting() for outbox in self._outboxes.values()),
            submitted=self._submitted,
            rejected=self._rejected,
            aborted=self._aborted,
            failed=self._failed,
            stop_hits=self._stop_hits,
            prompt_tokens=self._prompt_tokens,
            output_tokens=self._output_tokens,
        )


def with_extra(delta: Delta, **fields: object) -> Delta:
    """The delta with more beside its text."""
    extra = delta.extra if delta.extra is not None else TextExtra(row=0)
    return msgspec.structs.replace(delta, extra=msgspec.structs.replace(extra, **fields))


def rejection(request_id: int, error: RequestError) -> Rejected:
    return Rejected(
        id=request_id, status=error.status, message=error.message, param=error.param, code=error.code
    )


def failure(request_id: int) -> Rejected:
    return Rejected(id=request_id, status=500, message="the text of this request could not be processed")


def unavailable(request_id: int, reason: str) -> Rejected:
    return Rejected(id=request_id, status=503, message=reason, code="unavailable", retry_after=1.0)
