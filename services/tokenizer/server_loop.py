"""The tokenizer's loop between its frontend and its links, one to the api processes and one to each scheduler.

Streams come first: long prompts are encoded in threads (the tokenizers library releases the GIL), short ones on the
loop, a few milliseconds at a time, with messages from the links handled in between.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import TypeVar

import msgspec

from penstock.engine_core.images.picture import Picture
from penstock.engine_core.text.frontend import Frontend, FrontendStatistics, failure
from penstock.engine_core.text.image_prompt import check_place, unseen, without_files
from penstock.engine_core.text.prompts import Prepared
from penstock.engine_core.text.rendering import Rendered
from penstock.engine_core.text.request import named
from penstock.protocol.control import Control, Controlled, EngineStatus
from penstock.protocol.errors import RequestError, rejection
from penstock.protocol.message import Message
from penstock.protocol.messages import Abort, Automaton, Detokenize, Prefilled, Rejected, SubmitText, Tokenize
from penstock.protocol.outputs import TokenBatch
from penstock.protocol.snapshots import MetricsSnapshots
from penstock.services.links.async_link import AsyncLink
from penstock.services.links.link import Arrival, Joined, Left, Link, Peer, level_of
from penstock.services.metrics.snapshot import RemoteSnapshots
from penstock.services.supervisor import logs
from penstock.services.tokenizer.control_calls import ControlCalls
from penstock.services.tokenizer.grammar_compiler import GrammarCompiler
from penstock.services.tokenizer.image_decoder import ImageDecoder
from penstock.services.tokenizer.templates import Call, Templates
from penstock.services.tracing.tokenizer import TokenizerTraces

log = logging.getLogger(__name__)
T = TypeVar("T")

LONG_PROMPT = 4096  # bytes of text; encoding longer ones takes milliseconds, so a thread does it
SLICE = 0.002  # seconds of encoding on the loop before the links are looked at again
RETRY = 0.005  # seconds between attempts while a link has no credit


class Workers:
    """Has worker processes decode images, render requests' own templates and compile their grammars. `waiting` requests
    are being compiled."""

    def __init__(self, compiler: GrammarCompiler, templates: Templates, decoder: ImageDecoder | None = None) -> None:
        """`decoder`: None where the model sees no images."""
        self._compiler = compiler
        self._templates = templates
        self._decoder = decoder
        self.waiting = 0

    async def pictures(
        self, call: SubmitText | Tokenize, alive: Callable[[int], bool], wanted: Callable[[], bool]
    ) -> tuple[Picture, ...] | Rejected:
        """The images of a request, decoded, or the rejection. alive: whether a request has not ended. wanted: whether
        anybody waits for this one's answer."""
        return await guarded(self._pictures(call, alive, wanted), call, "images_failed")

    async def _pictures(
        self, call: SubmitText | Tokenize, alive: Callable[[int], bool], wanted: Callable[[], bool]
    ) -> tuple[Picture, ...]:
        check_place(call)
        if self._decoder is None:
            raise unseen(call)
        return await self._decoder.pictures(call.images, call.id, alive, call.client, wanted)

    async def render(self, text: SubmitText, now: float) -> Rendered | Rejected:
        """The chat rendered by the request's own template, or the rejection."""
        return await guarded(self._templates.render(text, now), text, "template_failed")

    async def refusal(
        self, call: Call, now: float, rendered: Rendered | None, pictures: Sequence[Picture]
    ) -> Rejected | None:
        """The rejection of a request that a tokenizer may have died of, if it kills a trial process too."""
        message = await self._templates.fatal(call, now, rendered, pictures)
        return Rejected(id=call.id, status=500, message=message, code="condemned") if message else None

    async def complete(self, text: SubmitText, made: Prepared) -> Prepared | Rejected:
        """The prompt with the automaton of its grammar, or the rejection."""
        assert made.grammar is not None
        self.waiting += 1
        try:
            found = await guarded(self._compiler.compile(made.grammar), text, "grammar_failed")
        finally:
            self.waiting -= 1
        if isinstance(found, Rejected):
            return found
        automaton = Automaton(source=found.source, after=made.after, memory=found.memory, unique=found.unique)
        request = msgspec.structs.replace(made.request, automaton=automaton)
        return msgspec.structs.replace(made, request=request, approximations=found.approximations)


class TokenizerLoopStatistics(msgspec.Struct, frozen=True):
    """Counters since the start, and present numbers."""

    compiling: int  # now: requests whose grammar is being compiled
    stalls: int  # times that a link had no credit for the next message
    frontend: FrontendStatistics


class TokenizerLoop:
    """Moves messages on the running asyncio loop. Owns the tasks that it starts."""

    def __init__(
        self,
        frontend: Frontend,
        text: Link | AsyncLink,
        tokens: Sequence[Link | AsyncLink],
        threads: Executor,
        workers: Workers,
        traces: TokenizerTraces,
    ) -> None:
        self.remote = RemoteSnapshots()  # of schedulers and executors on other hosts
        self._frontend = frontend
        self._text = text
        self._tokens = tuple(tokens)  # by replica
        self._threads = threads
        self._workers = workers
        self._traces = traces
        self._loop = asyncio.get_running_loop()
        self._apis: dict[Peer, int] = {}  # the frontend's number of each connection
        self._joined = 0
        self._schedulers: list[Peer | None] = [None] * len(self._tokens)
        self._controls = ControlCalls(len(self._tokens))
        self._short: deque[tuple[Peer, Call, float]] = deque()  # since when, in monotonic seconds
        self._next: asyncio.Handle | None = None
        self._work: dict[asyncio.Task[None], int] = {}  # with the id of each call
        self._retry: asyncio.TimerHandle | None = None
        self._stalls = 0
        self._drained: asyncio.Future[None] | None = None  # while draining

    def from_apis(self, arrivals: list[Arrival]) -> None:
        for arrival in arrivals:
            peer = arrival.peer
            match arrival.message:
                case SubmitText() as text:
                    self._frontend.open(self._apis[peer], without_files(text))
                    self._take(peer, text)
                case Abort(request_id):
                    self._frontend.abort(request_id)
                case Tokenize() | Detokenize() as call:
                    self._take(peer, call)
                case asked if isinstance(asked, Control):
                    self._control(peer, asked)
                case Joined():
                    self._joined += 1
                    self._apis[peer] = self._joined
                    self._frontend.join_api(self._joined)
                    logs.info(log, "api_joined", index=peer.index, pid=peer.pid)
                case Left(reason):
                    self._controls.leave(peer)
                    self._frontend.leave_api(self._apis.pop(peer))
                    logs.info(log, "api_left", index=peer.index, reason=reason)
                case other:
                    raise AssertionError(f"{type(other).__name__} does not travel up the text link")
        self._encode_short()

    def from_scheduler(self, replica: int, arrivals: list[Arrival]) -> None:
        for arrival in arrivals:
            match arrival.message:
                case TokenBatch() as batch:
                    self._frontend.batch(batch, replica)
                    self._traces.batch(batch, time.monotonic())
                case Rejected() as rejected:
                    self._frontend.reject(rejected, replica)
                case Prefilled() as prefilled:
                    self._frontend.prefilled(prefilled, replica)
                case Controlled() as answer:
                    if (done := self._controls.answered(replica, answer)) is not None:
                        self._tell(*done)
                case EngineStatus() as status:
                    self._frontend.report(status)
                case MetricsSnapshots() as snapshots:
                    self.remote.receive(arrival.peer, snapshots)
                case Joined():
                    self._schedulers[replica] = arrival.peer
                    logs.info(log, "scheduler_joined", replica=replica, pid=arrival.peer.pid)
                case Left(reason):
                    self.remote.remove(arrival.peer)
                    self._schedulers[replica] = None
                    self._frontend.leave_scheduler(replica)
                    for done in self._controls.lost(replica):
                        self._tell(*done)
                    level = level_of(arrival.peer, reason)
                    logs.write(log, level, "scheduler_left", {"replica": replica, "reason": reason})
                case other:
                    raise AssertionError(f"{type(other).__name__} does not travel down the tokens link")
        self.flush()

    def flush(self) -> None:
        """Send all messages that there is credit for; the others are tried again soon."""
        stalled = False
        for link, scheduler, upward in zip(self._tokens, self._schedulers, self._frontend.upward, strict=True):
            while upward and scheduler is not None:
                if not link.send(scheduler, upward[0]):
                    stalled = True
                    break
                upward.popleft()
        for peer, api in self._apis.items():
            outbox = self._frontend.outbox(api)
            # Rows stay open to later deltas until there is credit to send them.
            while peer.credit > 0 and (message := outbox.next()) is not None:
                if not self._text.send(peer, message):
                    break
                outbox.sent()
            stalled |= outbox.waiting() > 0
        if stalled and self._retry is None:
            self._stalls += 1
            self._retry = self._loop.call_later(RETRY, self._try_again)
        if self._drained is not None and not self._drained.done() and self._frontend.idle():
            self._drained.set_result(None)

    async def drain(self, limit: float) -> None:
        """Refuse new requests and wait until the others have ended, `limit` seconds at most."""
        self._frontend.draining = True
        self._drained = self._loop.create_future()
        self.flush()
        with contextlib.suppress(TimeoutError):  # what is left ends with the process, as a lost part
            await asyncio.wait_for(self._drained, limit)

    def statistics(self) -> TokenizerLoopStatistics:
        return TokenizerLoopStatistics(
            compiling=self._workers.waiting,
            stalls=self._stalls,
            frontend=self._frontend.statistics(),
        )

    def close(self) -> None:
        for handle in (self._retry, self._next):
            if handle is not None:
                handle.cancel()
        for work in self._work:
            work.cancel()

    def _control(self, peer: Peer, asked: Control) -> None:
        """Pass on what the operator asks, if it would reach every scheduler."""
        missing = [replica for replica, scheduler in enumerate(self._schedulers) if scheduler is None]
        if missing:
            self._tell(peer, Controlled(asked.id, f"replica {missing[0]} has no scheduler now; ask again"))
            return
        self._controls.begin(peer, asked.id)
        for upward in self._frontend.upward:
            upward.append(asked)

    def _tell(self, peer: Peer, answer: Controlled) -> None:
        if peer in self._apis:
            self._frontend.outbox(self._apis[peer]).post(answer)

    def _try_again(self) -> None:
        self._retry = None
        self.flush()

    def _take(self, peer: Peer, call: Call) -> None:
        if length(call) <= LONG_PROMPT and not structured(call):
            self._short.append((peer, call, time.monotonic()))
            return
        task = self._loop.create_task(self._in_thread(peer, call))
        self._work[task] = call.id
        task.add_done_callback(self._done)

    def _encode_short(self) -> None:
        """Encode queued prompts for SLICE seconds; the others follow in the loop's next iteration."""
        end = time.perf_counter() + SLICE
        while self._short:
            peer, call, since = self._short.popleft()
            self._finish(peer, call, self._make(peer, call), since)
            if time.perf_counter() > end:
                break
        self.flush()
        if self._short and self._next is None:
            self._next = self._loop.call_soon(self._encode_next)

    def _encode_next(self) -> None:
        self._next = None
        self._encode_short()

    def _make(
        self, peer: Peer, call: Call, rendered: Rendered | None = None, pictures: Sequence[Picture] = ()
    ) -> Prepared | Message | None:
        """The answer, or None once nobody waits for it. May run in a thread."""
        now = moment(call)
        if not self._wanted(peer, call):
            return None
        if isinstance(call, SubmitText):
            return self._frontend.make(call, now, rendered, pictures)
        return self._frontend.answer(call, now, pictures)

    def _finish(self, peer: Peer, call: Call, made: Prepared | Message | None, since: float) -> None:
        if made is None:
            return
        if isinstance(call, SubmitText):
            assert isinstance(made, Prepared | Rejected)
            self._traces.tokenized(call, made, since, time.monotonic())
            self._traces.prune(self._frontend.wants)
            self._frontend.close(call.id, made)
        elif peer in self._apis:
            assert not isinstance(made, Prepared)
            self._frontend.outbox(self._apis[peer]).post(made)

    async def _in_thread(self, peer: Peer, call: Call) -> None:
        since = time.monotonic()
        made: Prepared | Message | None = None
        pictures: tuple[Picture, ...] | Rejected = ()
        if not isinstance(call, Detokenize) and call.images:
            pictures = await self._workers.pictures(call, self._alive, partial(self._wanted, peer, call))
            call = without_files(call)
        if isinstance(pictures, Rejected):
            made = pictures
        else:
            made = await self._made(peer, call, pictures)
        if isinstance(made, Prepared) and isinstance(call, SubmitText) and made.grammar is not None:
            asked = time.monotonic()
            made = await self._workers.complete(call, made)
            self._traces.compiled(call, made, asked, time.monotonic())
        self._finish(peer, call, made, since)
        self.flush()

    async def _made(self, peer: Peer, call: Call, pictures: tuple[Picture, ...]) -> Prepared | Message | None:
        """As `_make`, for a request that may need worker processes first."""
        rendered: Rendered | Rejected | None = None
        if isinstance(call, SubmitText) and call.chat_template is not None:
            rendered = await self._workers.render(call, moment(call))
        if call.suspect and not isinstance(rendered, Rejected):
            rendered = await self._workers.refusal(call, moment(call), rendered, pictures) or rendered
        if isinstance(rendered, Rejected):
            return rendered
        return await self._loop.run_in_executor(self._threads, self._make, peer, call, rendered, pictures)

    def _wanted(self, peer: Peer, call: Call) -> bool:
        """Whether anybody waits for the answer."""
        return peer in self._apis and (not isinstance(call, SubmitText) or self._frontend.wants(call.id))

    def _alive(self, request_id: int) -> bool:
        """Whether a request has not ended, or a call is in work."""
        return self._frontend.wants(request_id) or request_id in self._work.values()

    def _done(self, task: asyncio.Task[None]) -> None:
        del self._work[task]
        if not task.cancelled() and task.exception() is not None:
            self._loop.call_exception_handler({"message": "a prompt's end failed", "exception": task.exception()})


def moment(call: Call) -> float:
    """The time that templates see, in unix seconds: the arrival, so that a prompt rendered again is the same."""
    return (call.arrival if isinstance(call, SubmitText) else 0.0) or time.time()


def structured(call: Call) -> bool:
    """Whether it may wait for a worker process: for its images, its grammar, its own template, or its trial."""
    if call.suspect or (not isinstance(call, Detokenize) and call.images):
        return True
    return isinstance(call, SubmitText) and (
        call.grammar is not None
        or call.tool_use is not None
        or call.reasoning.budget is not None
        or call.chat_template is not None
    )


def length(message: Call) -> int:
    """How much there is to encode or decode, in bytes."""
    if isinstance(message, Detokenize):
        return len(message.token_ids)
    parts = (message.messages, message.tools, message.template_arguments, message.prompt)
    predicted = len(message.prediction) if isinstance(message, SubmitText) else 0
    return predicted + sum(len(part) for part in parts if part is not None)


async def guarded(work: Awaitable[T], call: SubmitText | Tokenize, event: str) -> T | Rejected:
    """The result of `work` for a request, or the rejection that its error becomes; `event` is logged for a bug."""
    try:
        return await work
    except RequestError as error:
        return rejection(call.id, error)
    except Exception:  # guard: design 7, one request ends and its neighbours go on
        log.exception(event, extra=named(call.id, call.trace if isinstance(call, SubmitText) else None))
        return failure(call.id)
