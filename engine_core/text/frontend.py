"""The tokenizer process without its sockets: requests in, token ids up, tokens back, text out.

Every (id, choice) that came in gets exactly one terminal row, or its request one `Rejected`. A choice that a stop
string ends is answered at once; the scheduler's own end of it is awaited and swallowed. An abort wins over a prompt
that is still being made.

Requests outlive their scheduler: all that their choices have written is kept here until they end, and goes with them
to the scheduler that comes next. How long they wait for one is for their api process to bound.
"""

from __future__ import annotations

import logging
from collections import deque

import msgspec

from engine_core.text.choice import Choice, Delta
from engine_core.text.columns import unpack
from engine_core.text.logprobs import prompt_positions
from engine_core.text.outbox import Outbox
from engine_core.text.prompts import Prepared, Prompter
from engine_core.text.request import Kept, Request
from engine_core.text.vocabulary import Vocabulary
from protocol.errors import RequestError, Unavailable
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

MOST_KEPT = 256  # tokens of a choice that is wanted in one piece; so many are written again at most if we are lost


class FrontendStatistics(msgspec.Struct, frozen=True):
    """Counters since start, and what stands now."""

    requests: int  # now
    held: int  # now: requests that wait for a scheduler
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
        self._held: dict[int, Request] = {}  # wait for a scheduler that takes requests, in order
        self._taking = False  # the scheduler has been ready, and not said that it ends
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

    def leave_scheduler(self) -> None:
        """The scheduler is gone. Its requests wait for another one, which gets them with all that was written."""
        self._taking = False
        if self._status is not None:
            self.report(msgspec.structs.replace(self._status, ready=False))
        self._status = None
        self.upward.clear()
        self._held.clear()
        for request in [request for request in self._requests.values() if not request.encoding]:
            if request.aborted or not request.open():
                self._drop(request)
            else:
                self._held[request.id] = request

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
        elif self.draining:
            self._reject(request, unavailable(request_id, "the server is shutting down"))
        else:
            self._submitted += 1
            self._prompt_tokens += len(made.token_ids)
            self._begin(request, made)

    def abort(self, request_id: int) -> None:
        """End every choice of a request. Unknown ids are ignored: the end may have crossed."""
        request = self._requests.get(request_id)
        if request is None:
            return
        self._aborted += 1
        if request.encoding or request_id in self._held:
            self._drop(request)
        else:
            request.aborted = True
            self.upward.append(Abort(request_id))

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
        """The scheduler refuses a request. One that it was not ready for waits until it is, or another one."""
        request = self._requests.get(rejected.id)
        if request is None:
            return
        if rejected.status != Unavailable.status:
            self._reject(request, rejected)
        elif request.aborted:
            self._drop(request)
        else:
            self._held[request.id] = request

    def report(self, status: EngineStatus) -> None:
        """The scheduler's heartbeat. Once it is ready it gets what waits for it."""
        self._status = status
        self._taking = (self._taking or status.ready) and not status.draining
        if status.ready:
            for request in self._held.values():
                self.upward.append(request.handover())
            self._held.clear()
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
        taken = token_ids if len(token_ids) == delta.tokens else token_ids[: delta.tokens]
        if request.prompt_ids is not None and index == 0:
            delta = with_extra(delta, prompt_token_ids=request.prompt_ids)
            request.prompt_ids = None
        if request.kept:
            kept = request.kept[index]
            if not delta.finish and len(kept.token_ids) + delta.tokens < MOST_KEPT:
                kept.add(delta, taken)
                return
            delta, taken = kept.join(delta, taken), kept.token_ids
            request.kept[index] = Kept()
        outbox = self._outbox_of(request)
        if outbox is not None:
            outbox.add(request.seats[index], delta, taken)

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

    def _begin(self, request: Request, made: Prepared) -> None:
        """From here on the scheduler has it, or will."""
        try:
            request.start(self._vocabulary, made)
        except Exception:  # guard: design 7, one request ends and its neighbours go on
            log.exception("request %x: what was written of it could not be read again", request.id)
            self._failed += 1
            del self._requests[request.id]
            if (outbox := self._outbox_of(request)) is not None:
                outbox.post(failure(request.id))
            return
        if self._taking:
            self.upward.append(request.handover())
        else:
            self._held[request.id] = request

    def _drop(self, request: Request) -> None:
        """End a request that the scheduler does not have."""
        del self._requests[request.id]
        self._held.pop(request.id, None)
        outbox = self._outbox_of(request)
        if outbox is None:
            return
        for index, seat in enumerate(request.seats):
            if request.encoding or not request.choices[index].ended:
                outbox.add(seat, Delta("", 0, Finish.ABORT))

    def _reject(self, request: Request, rejected: Rejected) -> None:
        del self._requests[request.id]
        self._held.pop(request.id, None)
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
            held=len(self._held),
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
    return Rejected(id=request_id, status=error.status, message=error.message, param=error.param, code=error.code)


def failure(request_id: int) -> Rejected:
    return Rejected(id=request_id, status=500, message="the text of this request could not be processed")


def unavailable(request_id: int, reason: str) -> Rejected:
    return Rejected(id=request_id, status=503, message=reason, code="unavailable", retry_after=1.0)
