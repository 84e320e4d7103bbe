"""The api's end of the pipeline: requests go to a tokenizer, rows of text come back to the reply they belong to.

Every internal request has one ticket from its submission until its terminal row, its rejection or its abort; then the
ticket is gone and what still arrives for its id is dropped. An abort that the link has no credit for is owed and sent
as soon as there is some, so that no request runs on for a client that left.

A ticket keeps the request and all that was delivered of it. When its tokenizer is lost the request goes on at another
one, or at its successor, behind exactly that: under a new id, so that nothing of its former life can be taken
for more of it. While a part is missing requests wait, up to HOLD seconds, unless the server has never been ready.
"""

from __future__ import annotations

import asyncio
import copy
import math
import struct
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Protocol

import msgspec

from penstock.engine_core.scheduling.poison_requests import PoisonRequests, text_signature
from penstock.protocol.errors import (
    REQUEST_ERRORS,
    ContextExceeded,
    EngineFailure,
    InvalidRequest,
    Overloaded,
    RequestError,
    Unavailable,
)
from penstock.protocol.messages import (
    Abort,
    Detokenize,
    Detokenized,
    EngineStatus,
    Message,
    MetricsSnapshots,
    Rejected,
    SubmitText,
    TextBatch,
    Tokenize,
    Tokenized,
    Written,
    request_id,
)
from penstock.services.client.output_collector import OutputCollector
from penstock.services.client.replicas import ReplicaSet
from penstock.services.client.session import affinity
from penstock.services.links.link import Arrival, Joined, Left, Peer
from penstock.services.metrics.snapshot import RemoteSnapshots
from penstock.services.tracing.names import MOVED
from penstock.services.tracing.tracer import Operations

RETRY_AFTER = 1.0  # seconds, where nothing better is known
MOST_DEATHS = 3  # of tokenizers, while a request did not get further; then it ends
KILLED_TOKENIZERS = f"{MOST_DEATHS + 1} tokenizers died while they had this request"
LIKE_POISON = "a tokenizer died of a request like this one; it is refused for ten minutes"
POISON = "condemned"  # the error code of a poison request
HOLD = 60.0  # seconds that requests wait for a missing part to come back


class TextLink(Protocol):
    """The connector's end of a text link, as far as the pipeline needs it: `async_link.AsyncLink` and test doubles."""

    @property
    def peers(self) -> tuple[Peer, ...]: ...

    def send(self, peer: Peer, message: Message) -> bool: ...


class EngineClientStatistics(msgspec.Struct, frozen=True):
    """Requests in the pipeline and what became of the others."""

    unfinished: int
    tokenizers: int
    submitted: int
    refused: int  # for want of room or of credit
    aborts_owed: int
    held: int  # of the unfinished, those that no tokenizer has
    moved: int  # requests that went on elsewhere when their tokenizer was lost


class RequestState(msgspec.Struct, eq=False):
    """One internal request: its rows go to choices `first`.. of `collector`."""

    id: int
    request: SubmitText
    collector: OutputCollector
    first: int
    written: list[bytearray]  # [n] of int32: ids of the tokens that were delivered
    peer: Peer | None = None  # None while no tokenizer has it
    ended: set[int] = set()
    deaths: int = 0  # tokenizers that died since it got further
    mark: int = 0  # how far it had got when the last one died

    def message(self) -> SubmitText:
        """What has a tokenizer begin it, or go on behind what was delivered."""
        written: tuple[Written, ...] = ()
        if self.ended or any(self.written):
            written = tuple(Written(bytes(ids), index in self.ended) for index, ids in enumerate(self.written))
        return msgspec.structs.replace(self.request, id=self.id, written=written, suspect=self.deaths > 0)

    def bereave(self) -> None:
        """Its tokenizer died. It may have been of this, unless it got further there."""
        far = sum(map(len, self.written)) + len(self.ended)
        self.deaths = self.deaths + 1 if far == self.mark else 0
        self.mark = far


class Call:
    """A call to a tokenizer that has one answer."""

    __slots__ = ("_message", "answer", "deaths", "id", "peer")

    def __init__(self, message: Tokenize | Detokenize, answer: asyncio.Future[Tokenized | Detokenized]) -> None:
        self.id = message.id
        self._message = message
        self.peer: Peer | None = None  # None while no tokenizer has it
        self.answer = answer
        self.deaths = 0  # tokenizers that died while they had it

    def message(self) -> Tokenize | Detokenize:
        """What it asks."""
        return msgspec.structs.replace(self._message, suspect=True) if self.deaths else self._message


class EngineClient:
    """Tickets by id, over one port per tokenizer. `limit` bounds the unfinished requests of this process.

    The tokenizers are shared out among the `processes` api processes, so that a step's text comes in few messages; a
    process turns to the others when its own take no more. With several `replicas` all that matters is that a
    conversation keeps to one tokenizer, which knows where it went. `ordered`: the schedulers heed priorities.
    """

    def __init__(
        self,
        ports: Sequence[TextLink],
        api_index: int,
        incarnation: int,
        limit: int,
        status_limit: float,
        *,
        processes: int,
        replicas: int = 1,
        ordered: bool = True,
        operations: Operations | None = None,
    ) -> None:
        self.replicas = ReplicaSet(replicas, status_limit)
        self.remote = RemoteSnapshots()
        self.draining = False
        self.permanent_failure = ""  # why a part that is missing will not come back, once that is known
        self._ports = tuple(ports)
        self._affine = replicas > 1
        self._ordered = ordered
        shares = 1 if self._affine else min(len(self._ports), processes)
        assert shares > 0
        own = [index % shares == api_index % shares for index in range(len(self._ports))]
        self._own = tuple(port for port, mine in zip(self._ports, own, strict=True) if mine)
        self._spare = tuple(port for port, mine in zip(self._ports, own, strict=True) if not mine)
        self._api_index = api_index
        self._incarnation = incarnation
        self._limit = limit
        self._operations = operations if operations is not None else Operations()
        self._counter = 0
        self._requests: dict[int, RequestState] = {}
        self._calls: dict[int, Call] = {}
        self._held: OrderedDict[int, RequestState | Call] = OrderedDict()  # wait for a tokenizer, in order
        self._owed: dict[Peer, deque[Abort]] = {}  # by the tokenizer that lacks the credit for them
        self._served = False  # requests were taken once
        self._missing_since: float | None = None  # monotonic seconds since when they cannot be served
        self._open_until = -math.inf  # monotonic seconds until which they can, unless a process says otherwise before
        self._poison_requests = PoisonRequests()
        self._submitted = self._refused = self._moved = 0

    @property
    def status(self) -> EngineStatus | None:
        """The engine's state and totals, as last heard."""
        return self.replicas.status

    def new_id(self) -> int:
        """An id that no other request of any api process has."""
        self._counter += 1
        return request_id(self._api_index, self._incarnation, self._counter)

    def ready(self, now: float) -> bool:
        """Whether a request would be served: an engine that is ready and was heard of lately, and not draining."""
        return self.trouble(now) == ""

    def trouble(self, now: float) -> str:
        """Why requests cannot be served; empty when they can."""
        return self._tokenizer_trouble() or self.replicas.trouble(now)

    def submit(self, requests: Sequence[SubmitText], collector: OutputCollector, now: float) -> None:
        """Send all `requests`, prompt i's choices being those from i * n on, or none of them.

        Raises Unavailable when the engine was never ready, is draining or has been missing a part for too long,
        Overloaded when too many requests are unfinished or a tokenizer takes no more, InvalidRequest when these alone
        are more than ever fit, and for a priority that nobody would heed.
        """
        if not self._ordered and any(request.priority for request in requests):
            message = "priority needs --scheduling-policy priority; this server takes requests as they come"
            raise InvalidRequest(message, param="priority", code="unsupported")
        if self.draining or now > self._open_until:
            self._check_open(self.trouble(now), now)
        if len(requests) > self._limit:
            message = f"{len(requests)} prompts in one request; the server takes {self._limit} (--max-queued-requests)"
            raise InvalidRequest(message, param="prompt", code="invalid_value")
        if self._poison_requests.until:
            for request in requests:
                self._check_poison(request, now)
        if len(self._requests) + len(requests) > self._limit:
            self._refused += 1
            raise Overloaded("too many requests are waiting; try again later", retry_after=self.retry_after())
        operation = self._operations.begin(requests, now) if self._operations.enabled else None
        if operation is not None:
            requests = operation.requests
        for number, request in enumerate(requests):
            state = RequestState(
                request.id, request, collector, number * request.n, [bytearray() for _ in range(request.n)]
            )
            if not self._place(state, request):
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

    def abort(self, collector: OutputCollector) -> None:
        """Abort what the reply still waits for; nobody will take it."""
        for number in collector.request_ids:
            state = self._requests.pop(number, None)
            self._held.pop(number, None)
            if state is not None and state.peer is not None:
                self._owed.setdefault(state.peer, deque()).append(Abort(number))
        collector.request_ids.clear()
        if self._owed or self._held:
            self.flush()

    def tick(self, now: float) -> None:
        """Do what is owed, and end what has waited too long for a missing part. Called several times a second."""
        self.flush()
        missing = self._missing(now)
        if not self.draining and missing and (self.permanent_failure or missing >= HOLD):
            self.fail_all(unavailable(self.permanent_failure or self.trouble(now)))

    def flush(self) -> None:
        """Send the requests that wait and the aborts that are owed, as far as there is credit. It is called for every
        request, so it looks at no more of them than it sends, and at the first that it cannot send."""
        while self._held:
            number, waiting = next(iter(self._held.items()))
            waiting.peer = self._send(waiting.message())
            if waiting.peer is None:
                break
            del self._held[number]
        for peer, aborts in list(self._owed.items()):
            port = self._port(peer)
            while aborts and (port is None or port.send(peer, aborts[0])):
                aborts.popleft()
            if not aborts:
                del self._owed[peer]

    async def call(self, call: Tokenize | Detokenize) -> Tokenized | Detokenized:
        """The tokenizer's answer, which needs no engine.

        Raises Unavailable without a tokenizer, Overloaded when it takes no more, and what it refuses the question with.
        """
        self._check_open(self._tokenizer_trouble(), time.monotonic())
        self._check_poison(call, time.monotonic())
        answer: asyncio.Future[Tokenized | Detokenized] = asyncio.get_running_loop().create_future()
        asked = Call(call, answer)
        if len(self._calls) >= self._limit or not self._place(asked, call):
            self._refused += 1
            raise Overloaded("the server is busy; try again later", retry_after=RETRY_AFTER)
        self._calls[call.id] = asked
        try:
            return await answer
        finally:
            del self._calls[call.id]
            self._held.pop(call.id, None)
            del asked, answer  # this frame, which an error's traceback holds, must not hold the error

    def receive(self, arrivals: list[Arrival], now: float | None = None) -> None:
        """What the ports delivered, at `now` in monotonic seconds."""
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
                case Tokenized() | Detokenized() as answer:
                    call = self._calls.get(answer.id)
                    if call is not None and not call.answer.done():
                        call.answer.set_result(answer)
                case Left():
                    self.remote.remove(arrival.peer)
                    self._lost(arrival.peer, now)
                case Joined():
                    pass  # what waits is sent below
                case other:
                    raise AssertionError(f"{type(other).__name__} does not travel down the text link")
        if self._owed or self._held:
            self.flush()

    def fail_all(self, error: Unavailable) -> None:
        """End every unfinished request with `error`: a limit is over."""
        for state in list(self._requests.values()):
            state.collector.fail(error)
        for call in self._calls.values():
            if not call.answer.done():  # raised as it is: one for all would gather the frames of all
                call.answer.set_exception(copy.copy(error))

    def retry_after(self) -> float:
        """Seconds until the engine's present queue, to which all api processes send, has probably drained by half."""
        status = self.status
        if status is None or status.drain_rate <= 0:
            return RETRY_AFTER
        return max(len(self._requests), status.running + status.waiting) / 2 / status.drain_rate

    def statistics(self) -> EngineClientStatistics:
        return EngineClientStatistics(
            unfinished=len(self._requests),
            tokenizers=sum(bool(port.peers) for port in self._ports),
            submitted=self._submitted,
            refused=self._refused,
            aborts_owed=sum(map(len, self._owed.values())),
            held=sum(state.peer is None for state in self._requests.values()),
            moved=self._moved,
        )

    def _check_open(self, trouble: str, now: float) -> None:
        """Raise Unavailable unless what comes now is served, or may wait for a missing part."""
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
        return "" if any(port.peers for port in self._ports) else "no tokenizer is connected"

    def _rows(self, batch: TextBatch, now: float) -> None:
        rows = len(batch.text)
        ids = struct.unpack(f"<{rows}q", batch.ids)
        choices = struct.unpack(f"<{rows}H", batch.choices)
        tokens = struct.unpack(f"<{rows}i", batch.tokens)
        extras = {extra.row: extra for extra in batch.extras} if batch.extras else {}
        parsed = {each.row: each.pieces for each in batch.parsed} if batch.parsed else {}
        requests = self._requests
        collectors: dict[OutputCollector, None] = {}  # those with news, once each
        ids_of_tokens, end = memoryview(batch.token_ids), 0
        columns = zip(ids, choices, batch.text, tokens, batch.finish, strict=True)
        for row, (number, choice, text, count, finish) in enumerate(columns):
            start, end = end, end + 4 * count
            state = requests.get(number)
            if state is not None:
                extra = extras.get(row) if extras else None
                pieces = parsed.get(row, ()) if parsed else ()
                written = ids_of_tokens[start:end]
                told = written if state.request.with_token_ids else b""
                state.collector.put(state.first + choice, text, count, finish, extra, now, pieces, told)
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
        error = from_rejected(rejected)
        waiting = self._calls.get(rejected.id) or self._requests.get(rejected.id)
        if waiting is not None and waiting.deaths and rejected.code == POISON:
            self._poison_requests.add(text_signature(waiting.message()), now)
        call = self._calls.get(rejected.id)
        if call is not None and not call.answer.done():
            call.answer.set_exception(error)
        state = self._requests.pop(rejected.id, None)
        if state is not None:
            state.collector.fail(error)

    def _lost(self, peer: Peer, now: float) -> None:
        """A tokenizer is gone: what it had goes on elsewhere, in the order in which it came.

        What did not get further there may be what it died of. The next one tries it in a process of its own; what
        outlives that and is still there when several have died ends.
        """
        self._open_until = -math.inf
        renamed: dict[int, int] = {}
        moved = [state for state in self._requests.values() if state.peer is peer]
        for state in moved:
            state.bereave()
            if state.deaths > MOST_DEATHS:
                self._poison_requests.add(text_signature(state.request), now)
                del self._requests[state.id]
                state.collector.fail(EngineFailure(KILLED_TOKENIZERS))
                continue
            number = self.new_id()
            renamed[state.id] = number
            del self._requests[state.id]
            state.id, state.peer = number, None
            if state.collector.operation is not None:
                state.collector.operation.add_event(MOVED, time.monotonic())
            self._requests[state.id] = state
            self._held[state.id] = state
        self._moved += len(moved)
        for collector in {state.collector: None for state in moved}:
            collector.request_ids = [renamed.get(number, number) for number in collector.request_ids]
        for call in self._calls.values():
            if call.peer is peer:
                call.peer = None
                call.deaths += 1
                if call.deaths <= MOST_DEATHS:
                    self._held[call.id] = call
                elif not call.answer.done():
                    self._poison_requests.add(text_signature(call.message()), now)
                    call.answer.set_exception(EngineFailure(KILLED_TOKENIZERS))

    def _check_poison(self, message: SubmitText | Tokenize | Detokenize, now: float) -> None:
        """Raise InvalidRequest for the like of what a tokenizer died of."""
        if self._poison_requests.until and self._poison_requests.holds(text_signature(message), now):
            self._refused += 1
            raise InvalidRequest(LIKE_POISON, code=POISON)

    def _place(self, waiting: RequestState | Call, message: SubmitText | Tokenize | Detokenize) -> bool:
        """Send `message`, or have it wait while there is no tokenizer; False when all are full."""
        if self._owed or self._held:
            self.flush()
        if not self._held:
            waiting.peer = self._send(message)
        if waiting.peer is None and not any(port.peers for port in self._ports):
            self._held[waiting.id] = waiting
            return True
        return waiting.peer is not None

    def _send(self, message: SubmitText | Tokenize | Detokenize) -> Peer | None:
        """Hand it to the tokenizer that its number falls to, or to the next with credit; None: there is none."""
        first = affinity(message) if self._affine and isinstance(message, SubmitText) else message.id
        for ports in (self._own, self._spare):
            candidates = [(port, peer) for port in ports for peer in port.peers]
            for step in range(len(candidates)):
                port, peer = candidates[(first + step) % len(candidates)]
                if port.send(peer, message):
                    return peer
        return None

    def _port(self, peer: Peer) -> TextLink | None:
        """The port that `peer` is connected by; None when it is gone, and its requests with it."""
        return next((port for port in self._ports if peer in port.peers), None)


def unavailable(trouble: str) -> Unavailable:
    """The error of a request that cannot be served now."""
    return Unavailable(trouble, code="not_ready", retry_after=RETRY_AFTER)


def from_rejected(rejected: Rejected) -> RequestError:
    """The error that a later part refused the request with."""
    if rejected.status == 429:
        return Overloaded(rejected.message, retry_after=rejected.retry_after or 1.0)
    if rejected.status == Unavailable.status:
        return Unavailable(rejected.message, code=rejected.code, retry_after=rejected.retry_after)
    if rejected.context is not None:
        length = rejected.context
        return ContextExceeded(
            rejected.message, param=rejected.param, prompt=length.prompt, wanted=length.wanted, limit=length.limit
        )
    kind = REQUEST_ERRORS.get(rejected.status, EngineFailure)
    error = kind(rejected.message, param=rejected.param)
    error.code = rejected.code or error.code
    return error
