"""The tokenizer process without its sockets: requests in, token ids up, tokens back, text out.

Every (id, choice) that came in gets exactly one terminal row, or its request one `Rejected`. A choice that a stop
string ends is answered at once; the scheduler's own end of it is awaited and swallowed. An abort wins over a prompt
that is still being made.

Requests outlive their scheduler: all that their choices have written is kept here until they end, and goes with them
to the scheduler that has them next (dispatch.py). How long they wait for one is for their api process to bound.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence

import msgspec

from penstock.engine_core.images.picture import Picture
from penstock.engine_core.placement.placement import Placement
from penstock.engine_core.text.choice import Choice, Delta
from penstock.engine_core.text.detokenizer import prompt_positions
from penstock.engine_core.text.dispatch import Dispatch, DispatchStatistics
from penstock.engine_core.text.outbox import Outbox
from penstock.engine_core.text.prompts import Prepared, Prompter
from penstock.engine_core.text.rendering import Rendered
from penstock.engine_core.text.request import Kept, Request, named
from penstock.engine_core.tokenizer.vocabulary import Vocabulary
from penstock.protocol.control import EngineStatus
from penstock.protocol.errors import Overloaded, RequestError, Unavailable, rejection
from penstock.protocol.message import Message
from penstock.protocol.messages import (
    Abort,
    Detokenize,
    Finish,
    Prefilled,
    Rejected,
    StopHit,
    SubmitText,
    Tokenize,
)
from penstock.protocol.outputs import TextExtra, TokenBatch, TokenExtra

log = logging.getLogger(__name__)

ELSEWHERE = (Overloaded.status, Unavailable.status)  # what one scheduler refuses another may take
MOST_KEPT = 256  # tokens of a choice that is wanted in one piece; so many are written again at most if we are lost


class FrontendStatistics(msgspec.Struct, frozen=True):
    """Counters since start, and what stands now."""

    requests: int  # now
    encoding: int  # now: prompts being made
    outward: int  # now: rows and messages waiting for api processes
    submitted: int
    rejected: int
    aborted: int
    failed: int
    stop_hits: int
    prompt_tokens: int
    output_tokens: int
    dispatch: DispatchStatistics


class Frontend:
    """All requests of one tokenizer process. `api` numbers name connections of api processes; the caller makes them.
    `replica` is the number of a scheduler."""

    def __init__(self, vocabulary: Vocabulary, prompter: Prompter, placement: Placement) -> None:
        self._vocabulary = vocabulary
        self._prompter = prompter
        self._requests: dict[int, Request] = {}
        self._outboxes: dict[int, Outbox] = {}
        self._statuses: dict[int, EngineStatus] = {}  # by replica
        self._dispatch = Dispatch(placement)
        self.draining = False  # set by the owner: what comes from now on is refused
        self._submitted = self._rejected = self._aborted = self._failed = self._stop_hits = 0
        self._prompt_tokens = self._output_tokens = 0

    # Connections

    @property
    def upward(self) -> tuple[deque[Message], ...]:
        """What waits for each scheduler, in order; the caller takes from the left."""
        return self._dispatch.upward

    def join_api(self, api: int) -> None:
        outbox = self._outboxes[api] = Outbox()
        for status in self._statuses.values():
            outbox.report(status)

    def leave_api(self, api: int) -> None:
        """The api process is gone: nobody waits for its requests."""
        self._outboxes.pop(api, None)
        for request in [request for request in self._requests.values() if request.api == api]:
            request.api = None
            self.abort(request.id)

    def leave_scheduler(self, replica: int = 0) -> None:
        """A scheduler is gone. Its requests go to another one, now or when there is one, with all that was written."""
        status = self._statuses.pop(replica, None)
        if status is not None:
            for outbox in self._outboxes.values():
                outbox.report(msgspec.structs.replace(status, ready=False))
        for request in self._dispatch.leave(replica):
            if request.aborted or not request.open():
                self._drop(request)
            else:
                self._dispatch.send(request)

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

    def make(
        self, text: SubmitText, now: float, rendered: Rendered | None = None, pictures: Sequence[Picture] = ()
    ) -> Prepared | Rejected:
        """The prompt of a request, or why there is none. `now` in unix seconds is what a template knows as the time,
        `rendered` what a template of the request's own made elsewhere, `pictures` its images, decoded elsewhere.

        Touches no request's state: may run in any thread.
        """
        try:
            made = self._prompter.prepare(text, now, rendered, pictures)
            return msgspec.structs.replace(made, chain=self._dispatch.chain(made.request))
        except RequestError as error:
            return rejection(text.id, error)
        except Exception:  # guard: design 7, one request ends and its neighbours go on
            log.exception("prompt_failed", extra=named(text.id, text.trace))
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
        if request.encoding or self._dispatch.holds(request):
            self._drop(request)
        else:
            request.aborted = True
            self._dispatch.tell(request, Abort(request_id))

    def answer(self, request: Tokenize | Detokenize, now: float, pictures: Sequence[Picture] = ()) -> Message:
        """Ids of a text or text of ids. Touches no request's state: may run in any thread."""
        try:
            if isinstance(request, Tokenize):
                return self._prompter.tokenize(request, now, pictures)
            return self._prompter.detokenize(request)
        except RequestError as error:
            return rejection(request.id, error)
        except Exception:  # guard: design 7, one request ends and its neighbours go on
            log.exception("question_failed", extra=named(request.id))
            return failure(request.id)

    # From schedulers

    def reject(self, rejected: Rejected, replica: int = 0) -> None:
        """A scheduler refuses a request. Who else takes requests is asked before its client hears of a full queue; one
        that nobody was ready for waits until somebody is."""
        request = self._requests.get(rejected.id)
        if request is None or self._dispatch.is_former(request, replica, rows=len(request.choices)):
            return
        self._dispatch.take_back(request)
        if rejected.status == Unavailable.status:
            self._dispatch.unwilling(replica)
        elif rejected.status == Overloaded.status:
            request.placement.refused.add(replica)
        if rejected.status not in ELSEWHERE or (request.placement.refused and not self._dispatch.willing(request)):
            self._reject(request, rejected)
        elif request.aborted:
            self._drop(request)
        else:
            self._dispatch.send(request)

    def prefilled(self, message: Prefilled, replica: int) -> None:
        """A prefill replica has computed the prompt of a request and given the first tokens."""
        request = self._requests.get(message.id)
        if request is None or self._dispatch.is_former(request, replica, rows=len(request.choices)):
            self._dispatch.decline(message, replica)
        elif request.aborted or not request.open():
            request.placement.transfer = message.transfer
            self._drop(request)
        else:
            self._dispatch.hand_over(request, message.transfer)

    def report(self, status: EngineStatus) -> None:
        """A scheduler's heartbeat. Who is ready gets what waits."""
        self._statuses[status.replica] = status
        for request in self._dispatch.report(status):
            if request.aborted or not request.open():
                self._drop(request)
            else:
                self._dispatch.move(request)
        for outbox in self._outboxes.values():
            outbox.report(status)

    def batch(self, batch: TokenBatch, replica: int = 0) -> None:
        """Turn the tokens of a replica's step into rows of text."""
        extras = {extra.row: extra for extra in batch.extras}
        for row, (request_id, index, token_ids, finish) in enumerate(batch.rows()):
            request = self._requests.get(request_id)
            if request is None or self._dispatch.is_former(request, replica, rows=finish != Finish.NONE):
                continue
            if request.placement.transfer is not None:
                self._dispatch.end_transfer(request)
            choice = request.choices[index]
            if not choice.ended:
                self._advance(request, index, choice, token_ids, finish, extras.get(row))
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
            log.exception("text_failed", extra=named(request.id, request.trace, choice=index))
            self._failed += 1
            delta = choice.end(Finish.ERROR, "the text of this request could not be made")
            if not finish:
                self._dispatch.tell(request, StopHit(request.id, index, choice.tokens))
        self._output_tokens += delta.tokens
        if delta.stop_hit:
            self._stop_hits += 1
            self._dispatch.tell(request, StopHit(request.id, index, choice.tokens))
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
            self._forget(request)

    def _begin(self, request: Request, made: Prepared) -> None:
        """From here on the scheduler has it, or will."""
        try:
            request.start(self._vocabulary, made)
        except Exception:  # guard: design 7, one request ends and its neighbours go on
            log.exception("resumption_failed", extra=named(request.id, request.trace))
            self._failed += 1
            self._forget(request)
            if (outbox := self._outbox_of(request)) is not None:
                outbox.post(failure(request.id))
            return
        self._dispatch.send(request)

    def _drop(self, request: Request) -> None:
        """End a request that no scheduler has, or whose end the one that has it knows of."""
        self._forget(request)
        outbox = self._outbox_of(request)
        if outbox is None:
            return
        for index, seat in enumerate(request.seats):
            if request.encoding or not request.choices[index].ended:
                outbox.add(seat, Delta("", 0, Finish.ABORT))

    def _forget(self, request: Request) -> None:
        del self._requests[request.id]
        self._dispatch.end(request)

    def _reject(self, request: Request, rejected: Rejected) -> None:
        self._forget(request)
        self._rejected += 1
        outbox = self._outbox_of(request)
        if outbox is not None and request.open():
            outbox.post(rejected)

    def _outbox_of(self, request: Request) -> Outbox | None:
        return self._outboxes.get(request.api) if request.api is not None else None

    def idle(self) -> bool:
        """Whether every request has ended and its end has gone out."""
        waiting = self._requests or not self._dispatch.idle()
        return not (waiting or any(outbox.waiting() for outbox in self._outboxes.values()))

    def statistics(self) -> FrontendStatistics:
        """Counters since start, and what stands now."""
        return FrontendStatistics(
            requests=len(self._requests),
            encoding=sum(request.encoding for request in self._requests.values()),
            outward=sum(outbox.waiting() for outbox in self._outboxes.values()),
            submitted=self._submitted,
            rejected=self._rejected,
            aborted=self._aborted,
            failed=self._failed,
            stop_hits=self._stop_hits,
            prompt_tokens=self._prompt_tokens,
            output_tokens=self._output_tokens,
            dispatch=self._dispatch.statistics(),
        )


def with_extra(delta: Delta, **fields: object) -> Delta:
    """The delta with more beside its text."""
    extra = delta.extra if delta.extra is not None else TextExtra(row=0)
    return msgspec.structs.replace(delta, extra=msgspec.structs.replace(extra, **fields))


def failure(request_id: int) -> Rejected:
    return Rejected(id=request_id, status=500, message="the text of this request could not be processed")


def unavailable(request_id: int, reason: str) -> Rejected:
    return Rejected(id=request_id, status=503, message=reason, code="unavailable", retry_after=1.0)
