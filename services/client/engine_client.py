"""The engine client: sends requests to tokenizers, and gives the rows of text that come back to their collectors.

Every internal request has a state from its submission until its terminal row, its rejection or its abort; what arrives
for its id after that is dropped.

The state holds the request and all that was delivered of it. When a tokenizer is lost its requests continue at another
one, or at its successor, after exactly that, and under a new id, so that nothing from before is taken for more of them.
While a part is missing requests wait, up to HOLD seconds, unless the server has never been ready.
"""

from __future__ import annotations

import asyncio
import copy
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import msgspec

from penstock.engine_core.scheduling.poison_requests import PoisonRequests, text_signature
from penstock.protocol.control import Control, Controlled, EngineStatus
from penstock.protocol.errors import EngineFailure, InvalidRequest, Overloaded, Unavailable, Unsupported, error_of
from penstock.protocol.messages import Detokenize, Detokenized, Rejected, SubmitText, Tokenize, Tokenized
from penstock.protocol.outputs import TextBatch
from penstock.protocol.request_ids import COUNTER_MASK, request_id
from penstock.protocol.snapshots import MetricsSnapshots
from penstock.services.client.output_collector import OutputCollector
from penstock.services.client.replicas import ReplicaSet
from penstock.services.client.tokenizer_router import Call, RequestState, TokenizerRouter
from penstock.services.links.async_link import AsyncLink
from penstock.services.links.link import Arrival, Joined, Left, Link, Peer
from penstock.services.metrics.snapshot import RemoteSnapshots
from penstock.services.tracing.names import MOVED
from penstock.services.tracing.tracer import Operations

RETRY_AFTER = 1.0  # seconds, where nothing better is known
LOAD_SECONDS = 30.0  # that a model takes to be loaded, before it was measured
MOST_DEATHS = 3  # of tokenizers, while a request did not get further; then it ends
KILLED_TOKENIZERS = f"{MOST_DEATHS + 1} tokenizers died while they had this request"
LIKE_POISON = "a tokenizer died of a request like this one; it is refused for ten minutes"
POISON = "condemned"  # the error code of a poison request
HOLD = 60.0  # seconds that requests wait for a missing part to come back


class Limits(NamedTuple):
    """Most requests that have not ended."""

    unfinished: int
    unloaded: int | None  # while the model is not loaded; None: as many


class EngineClientStatistics(msgspec.Struct, frozen=True):
    """Requests that have not ended, and counters since the start."""

    unfinished: int
    tokenizers: int
    submitted: int
    refused: int  # for want of room or of credit
    aborts_owed: int
    held: int  # of the unfinished, those that no tokenizer has
    moved: int  # requests that continued elsewhere when their tokenizer was lost


class EngineClient:
    """The requests and calls of one api process, by id, and the state of the engine as it reports it.

    `limit` bounds the unfinished requests of this process, one of `processes`; `unloaded` those for a model that others
    share its memory with, while it is not loaded; `ordered`: the schedulers heed priorities.
    """

    def __init__(
        self,
        links: Sequence[Link | AsyncLink],
        api_index: int,
        incarnation: int,
        limit: int,
        status_limit: float,
        *,
        processes: int,
        replicas: int = 1,
        ordered: bool = True,
        operations: Operations | None = None,
        unloaded: int | None = None,
    ) -> None:
        self.replicas = ReplicaSet(replicas, status_limit)
        self.remote = RemoteSnapshots()
        self.draining = False
        self.permanent_failure = ""  # why a part that is missing will not come back, once that is known
        self._router = TokenizerRouter(links, api_index, processes=processes, keep_conversations=replicas > 1)
        self._ordered = ordered
        self._limits = Limits(limit, unloaded)
        self._operations = operations if operations is not None else Operations()
        self._counter = 0
        self._first_id = request_id(api_index, incarnation, 0)
        self._requests: dict[int, RequestState] = {}
        self._calls: dict[int, Call] = {}
        self._served = False  # the engine has been ready once
        self._missing_since: float | None = None  # monotonic seconds since when they cannot be served
        self._open_until = -math.inf  # monotonic seconds until which they can, unless a process reports otherwise
        self._poison_requests = PoisonRequests()
        self._submitted = self._refused = self._moved = 0
        self._reserved = 0  # places of requests whose images are being read

    @property
    def status(self) -> EngineStatus | None:
        """The engine's state and totals, as last heard."""
        return self.replicas.status

    def ready(self, now: float) -> bool:
        """Whether a request would be served: an engine that is ready and was heard of lately, and not draining."""
        return self.trouble(now) == ""

    def trouble(self, now: float) -> str:
        """Why requests cannot be served; empty when they can."""
        return self._tokenizer_trouble() or self.replicas.trouble(now)

    def submit(self, requests: Sequence[SubmitText], collector: OutputCollector, now: float) -> None:
        """Number and send all `requests`, whose prompt i has the choices from i * n on, or none of them.

        Raises Unavailable when the engine was never ready, is draining or has lacked a part for too long, Overloaded
        when too many requests are unfinished or no tokenizer accepts more, InvalidRequest when these alone exceed the
        limit, and for a priority that the schedulers ignore.
        """
        if not self._ordered and any(request.priority for request in requests):
            message = "priority needs --scheduling-policy priority; this server takes requests as they come"
            raise Unsupported(message, param="priority")
        if self.draining or now > self._open_until:
            self._check_open(self.trouble(now), now)
        if len(requests) > (most := self._limits.unfinished):
            message = f"{len(requests)} prompts in one request; the server takes {most} (--max-queued-requests)"
            raise InvalidRequest(message, param="prompt")
        if self._poison_requests.until:
            for request in requests:
                self._check_poison(request, now)
        self._check_room(len(requests))
        requests = [msgspec.structs.replace(request, id=self._new_id()) for request in requests]
        operation = self._operations.begin(requests, now) if self._operations.enabled else None
        if operation is not None:
            requests = operation.requests
        for number, request in enumerate(requests):
            state = RequestState(
                request.id, request, collector, number * request.n, [bytearray() for _ in range(request.n)]
            )
            if not self._router.route(state, request):
                self.abort(collector)
                self._refused += 1
                error = Overloaded("the server is busy; try again later", retry_after=self.retry_after())
                if operation is not None:
                    operation.end(collector, now, error)
                raise error
            self._requests[request.id] = state
            collector.request_ids.append(request.id)
        self._submitted += len(requests)
        collector.operation = operation

    @contextmanager
    def reserved(self, now: float, *, engine: bool = True) -> Iterator[None]:
        """While inside, there is a place for one request more, whose images are being read; without `engine` it needs a
        tokenizer alone. Raises Unavailable and Overloaded as `submit` does."""
        self._check_open(self.trouble(now) if engine else self._tokenizer_trouble(), now)
        self._check_room(1)
        self._reserved += 1
        try:
            yield
        finally:
            self._reserved -= 1

    def abort(self, collector: OutputCollector) -> None:
        """Abort the collector's unfinished requests."""
        for number in collector.request_ids:
            if (state := self._requests.pop(number, None)) is not None:
                self._router.abort(state)
        collector.request_ids.clear()
        if self._router.aborts or self._router.waiting:
            self._router.flush()

    def tick(self, now: float) -> None:
        """Send what waits, and fail what has waited too long for a missing part. Called several times a second."""
        self._router.flush()
        missing = self._missing(now)
        if not self.draining and missing and (self.permanent_failure or missing >= HOLD):
            self.fail_all(unavailable(self.permanent_failure or self.trouble(now)))

    async def call(self, call: Tokenize | Detokenize) -> Tokenized | Detokenized:
        """Number and send a call; a tokenizer's answer, which needs no engine.

        Raises Unavailable without a tokenizer, Overloaded when none accepts more, and the error of a rejection.
        """
        self._check_poison(call, time.monotonic())
        found = await self._call(call)
        assert not isinstance(found, Controlled), "answers are of their calls' kind"
        return found

    async def control(self, message: Control) -> Controlled:
        """Ask all schedulers for something that the operator wants, however long it takes. The answer says what they
        have not done. Raises as `call` does."""
        found = await self._call(message)
        assert isinstance(found, Controlled), "answers are of their calls' kind"
        return found

    async def _call(self, call: Tokenize | Detokenize | Control) -> Tokenized | Detokenized | Controlled:
        self._check_open(self._tokenizer_trouble(), time.monotonic())
        call = msgspec.structs.replace(call, id=self._new_id())
        answer: asyncio.Future[Tokenized | Detokenized | Controlled] = asyncio.get_running_loop().create_future()
        state = Call(call.id, call, answer)
        if len(self._calls) >= self._limits.unfinished or not self._router.route(state, call):
            self._refused += 1
            raise Overloaded("the server is busy; try again later", retry_after=RETRY_AFTER)
        self._calls[call.id] = state
        try:
            return await answer
        finally:
            del self._calls[call.id]
            self._router.waiting.pop(call.id, None)
            del state, answer  # this frame, which an error's traceback holds, must not hold the error

    def receive(self, arrivals: list[Arrival], now: float | None = None) -> None:
        """Messages from the tokenizers, at `now` in monotonic seconds."""
        now = time.monotonic() if now is None else now
        for arrival in arrivals:
            match arrival.message:
                case TextBatch() as batch:
                    self._rows(batch, now)
                case EngineStatus() as status:
                    self.replicas.report(status, now)
                    self._open_until = -math.inf
                case MetricsSnapshots() as snapshots:
                    self.remote.receive(arrival.peer, snapshots)
                case Rejected() as rejected:
                    self._rejected(rejected, now)
                case Tokenized() | Detokenized() | Controlled() as answer:
                    call = self._calls.get(answer.id)
                    if call is not None and not call.answer.done():
                        call.answer.set_result(answer)
                case Left():
                    self.remote.remove(arrival.peer)
                    self._lost(arrival.peer, now)
                case Joined():
                    pass  # flushed below
                case other:
                    raise AssertionError(f"{type(other).__name__} does not travel down the text link")
        if self._router.aborts or self._router.waiting:
            self._router.flush()

    def fail_all(self, error: Unavailable) -> None:
        """End every unfinished request and call with `error`."""
        for state in list(self._requests.values()):
            state.collector.fail(error)
        for call in self._calls.values():
            if not call.answer.done():  # a copy each: a raised error gathers its frames
                call.answer.set_exception(copy.copy(error))

    def retry_after(self) -> float:
        """Seconds until the engine's queue, which all api processes share, has probably drained by half."""
        status = self.status
        if status is None or status.drain_rate <= 0:
            return RETRY_AFTER
        return max(len(self._requests), status.running + status.waiting) / 2 / status.drain_rate

    def statistics(self) -> EngineClientStatistics:
        return EngineClientStatistics(
            unfinished=len(self._requests) + self._reserved,
            tokenizers=self._router.connected,
            submitted=self._submitted,
            refused=self._refused,
            aborts_owed=sum(map(len, self._router.aborts.values())),
            held=sum(state.peer is None for state in self._requests.values()),
            moved=self._moved,
        )

    def _check_room(self, count: int) -> None:
        """Raise Overloaded where so many requests more would be too many."""
        unfinished, most = len(self._requests) + self._reserved, self._limits.unfinished
        if unfinished + count > most:
            self._refused += 1
            told = (
                f"{unfinished} requests are unfinished; at most {most} may be (--max-queued-requests); try again later"
            )
            raise Overloaded(told, retry_after=self.retry_after())
        unloaded = self._limits.unloaded
        if unloaded is not None and unfinished + count > unloaded:
            status = self.replicas.status
            if status is not None and not status.loaded:
                self._refused += 1
                why = f"{unloaded} requests wait for this model to be loaded already (--max-unloaded-requests)"
                raise Unavailable(why, code="not_loaded", retry_after=status.load_seconds or LOAD_SECONDS)

    def _new_id(self) -> int:
        """An id that no other request of any api process has."""
        self._counter += 1
        return self._first_id + (self._counter & COUNTER_MASK)

    def _check_open(self, trouble: str, now: float) -> None:
        """Raise Unavailable unless a new request is served, or may wait for a missing part."""
        missing = self._missing(now)
        if trouble and (self.draining or not self._served or self.permanent_failure or missing >= HOLD):
            raise unavailable(self.permanent_failure or trouble)

    def _missing(self, now: float) -> float:
        """Seconds since when requests cannot be served."""
        if not self.trouble(now):
            self._served, self._missing_since = True, None
            self._open_until = self.replicas.open_until
            return 0.0
        if self._missing_since is None:
            self._missing_since = now
        return now - self._missing_since

    def _tokenizer_trouble(self) -> str:
        if self.draining:
            return "the server is shutting down"
        return "" if self._router.connected else "no tokenizer is connected"

    def _rows(self, batch: TextBatch, now: float) -> None:
        extras = {extra.row: extra for extra in batch.extras} if batch.extras else {}
        parsed = {each.row: each.pieces for each in batch.parsed} if batch.parsed else {}
        requests = self._requests
        collectors: dict[OutputCollector, None] = {}  # that got rows, once each
        for row, (number, choice, text, count, written, finish) in enumerate(batch.rows()):
            state = requests.get(number)
            if state is not None:
                extra = extras.get(row) if extras else None
                pieces = parsed.get(row, ()) if parsed else ()
                token_ids = written if state.request.with_token_ids else b""
                state.collector.put(state.first + choice, text, count, finish, extra, now, pieces, token_ids)
                collectors[state.collector] = None
                if not finish:
                    state.written[choice] += written
                    continue
                state.written[choice].clear()
                state.ended.add(choice)
                if len(state.ended) == state.request.n:
                    del requests[number]
        for collector in collectors:
            collector.notify()

    def _rejected(self, rejected: Rejected, now: float) -> None:
        error = error_of(rejected)
        waiting = self._calls.get(rejected.id) or self._requests.get(rejected.id)
        if waiting is not None and waiting.deaths and rejected.code == POISON:
            message = waiting.message()
            assert isinstance(message, SubmitText | Tokenize | Detokenize), "tokenizers pass on all others"
            self._poison_requests.add(text_signature(message), now)
        call = self._calls.get(rejected.id)
        if call is not None and not call.answer.done():
            call.answer.set_exception(error)
        state = self._requests.pop(rejected.id, None)
        if state is not None:
            state.collector.fail(error)

    def _lost(self, peer: Peer, now: float) -> None:
        """A tokenizer is gone: its requests and calls continue elsewhere, in order of arrival.

        A request that made no progress there may be what killed it: the next tokenizer tries it in a process of its own
        first. A request that had more than MOST_DEATHS tokenizers die without progress ends.
        """
        self._open_until = -math.inf
        renamed: dict[int, int] = {}
        moved = [state for state in self._requests.values() if state.peer is peer]
        for state in moved:
            state.count_death()
            if state.deaths > MOST_DEATHS:
                self._poison_requests.add(text_signature(state.request), now)
                del self._requests[state.id]
                state.collector.fail(EngineFailure(KILLED_TOKENIZERS))
                continue
            number = self._new_id()
            renamed[state.id] = number
            del self._requests[state.id]
            state.id = number
            if state.collector.operation is not None:
                state.collector.operation.add_event(MOVED, time.monotonic())
            self._requests[state.id] = state
            self._router.requeue(state)
        self._moved += len(moved)
        for collector in {state.collector: None for state in moved}:
            collector.request_ids = [renamed.get(number, number) for number in collector.request_ids]
        for call in self._calls.values():
            if call.peer is peer:
                call.deaths += 1
                if call.deaths <= MOST_DEATHS:
                    self._router.requeue(call)
                elif not call.answer.done():
                    if isinstance(call.request, Tokenize | Detokenize):
                        self._poison_requests.add(text_signature(call.request), now)
                    call.answer.set_exception(EngineFailure(KILLED_TOKENIZERS))

    def _check_poison(self, message: SubmitText | Tokenize | Detokenize, now: float) -> None:
        """Raise InvalidRequest for a request like one that a tokenizer died of."""
        if self._poison_requests.until and self._poison_requests.holds(text_signature(message), now):
            self._refused += 1
            raise InvalidRequest(LIKE_POISON, code=POISON)


def unavailable(trouble: str) -> Unavailable:
    """The error of a request that cannot be served now."""
    return Unavailable(trouble, code="not_ready", retry_after=RETRY_AFTER)
