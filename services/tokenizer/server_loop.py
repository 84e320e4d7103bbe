"""Between the frontend and its links, one to the api processes and one to each scheduler.

What arrives goes in, what waits goes out as far as there is credit.

Streams come first: long prompts are encoded in threads (the tokenizers library releases the GIL), short ones on the
loop, a few milliseconds at a time, with what the links delivered in between.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Executor
from typing import Protocol

import msgspec

from penstock.engine_core.text.frontend import Frontend, FrontendStatistics
from penstock.engine_core.text.prompts import Prepared
from penstock.engine_core.text.rendering import Rendered
from penstock.protocol.messages import (
    Abort,
    Detokenize,
    EngineStatus,
    Message,
    MetricsSnapshots,
    Rejected,
    SubmitText,
    TokenBatch,
    Tokenize,
)
from penstock.services.links.link import Arrival, Joined, Left, Peer
from penstock.services.metrics.snapshot import RemoteSnapshots
from penstock.services.supervisor import logs
from penstock.services.tokenizer.structure import Structure
from penstock.services.tracing.tokenizer import TokenizerTraces
from penstock.services.tracing.tracer import Tracer

log = logging.getLogger(__name__)

Question = SubmitText | Tokenize | Detokenize

LONG_PROMPT = 4096  # bytes of text; encoding longer ones takes milliseconds, so a thread does it
SLICE = 0.002  # seconds of encoding on the loop before the links are looked at again
RETRY = 0.005  # seconds between attempts while a link has no credit


class Link(Protocol):
    """A link's end as far as the relay needs it: `services.links.async_link.AsyncLink` and test doubles."""

    def send(self, peer: Peer, message: Message) -> bool: ...


class RelayStatistics(msgspec.Struct, frozen=True):
    """Counters since start, and what stands now."""

    apis: int  # now
    queued: int  # now: short prompts that wait for their turn on the loop
    in_threads: int  # now: long prompts that are being encoded
    compiling: int  # now: requests whose grammar is being compiled
    stalls: int  # times that a link had no credit for what waited
    frontend: FrontendStatistics


class Relay:
    """Moves messages on the running loop. Owns the threads' work that it started."""

    def __init__(
        self,
        frontend: Frontend,
        text: Link,
        tokens: Sequence[Link],
        threads: Executor,
        structure: Structure | None = None,
        traces: TokenizerTraces | None = None,
    ) -> None:
        self.remote = RemoteSnapshots()  # of schedulers and executors on other hosts
        self._frontend = frontend
        self._text = text
        self._tokens = tuple(tokens)  # by replica
        self._threads = threads
        self._structure = structure
        self._traces = traces if traces is not None else TokenizerTraces(Tracer())
        self._loop = asyncio.get_running_loop()
        self._apis: dict[Peer, int] = {}  # the number by which the frontend knows a connection
        self._joined = 0
        self._schedulers: list[Peer | None] = [None] * len(self._tokens)
        self._short: deque[tuple[Peer, Question, float]] = deque()  # since when, in monotonic seconds
        self._turn: asyncio.Handle | None = None
        self._work: set[asyncio.Task[None]] = set()
        self._retry: asyncio.TimerHandle | None = None
        self._stalls = 0
        self._drained: asyncio.Future[None] | None = None  # while draining

    def from_apis(self, arrivals: list[Arrival]) -> None:
        """What the text link delivered."""
        for arrival in arrivals:
            peer = arrival.peer
            match arrival.message:
                case SubmitText() as text:
                    self._frontend.open(self._apis[peer], text)
                    self._take(peer, text)
                case Abort(request_id):
                    self._frontend.abort(request_id)
                case Tokenize() | Detokenize() as question:
                    self._take(peer, question)
                case Joined():
                    self._joined += 1
                    self._apis[peer] = self._joined
                    self._frontend.join_api(self._joined)
                    logs.info(log, "api_joined", index=peer.index, pid=peer.pid)
                case Left(reason):
                    self._frontend.leave_api(self._apis.pop(peer))
                    logs.info(log, "api_left", index=peer.index, reason=reason)
                case other:
                    raise AssertionError(f"{type(other).__name__} does not travel up the text link")
        self._encode_short()

    def from_scheduler(self, replica: int, arrivals: list[Arrival]) -> None:
        """What the tokens link of a replica delivered."""
        for arrival in arrivals:
            match arrival.message:
                case TokenBatch() as batch:
                    self._frontend.batch(batch, replica)
                    self._traces.batch(batch, time.monotonic())
                case Rejected() as rejected:
                    self._frontend.reject(rejected, replica)
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
                    logs.warning(log, "scheduler_left", replica=replica, reason=reason)
                case other:
                    raise AssertionError(f"{type(other).__name__} does not travel down the tokens link")
        self.flush()

    def flush(self) -> None:
        """Send what waits. What finds no credit stays and is tried again soon."""
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
        """Refuse what is new and wait until the rest has ended, `limit` seconds at most."""
        self._frontend.draining = True
        self._drained = self._loop.create_future()
        self.flush()
        with contextlib.suppress(TimeoutError):  # the rest ends with the process: its clients hear of a lost part
            await asyncio.wait_for(self._drained, limit)

    def statistics(self) -> RelayStatistics:
        """Counters for metrics and tests."""
        return RelayStatistics(
            apis=len(self._apis),
            queued=len(self._short),
            in_threads=len(self._work),
            compiling=0 if self._structure is None else self._structure.waiting,
            stalls=self._stalls,
            frontend=self._frontend.statistics(),
        )

    def close(self) -> None:
        """Send nothing more."""
        for handle in (self._retry, self._turn):
            if handle is not None:
                handle.cancel()
        for work in self._work:
            work.cancel()

    def _try_again(self) -> None:
        self._retry = None
        self.flush()

    def _take(self, peer: Peer, question: Question) -> None:
        if length(question) <= LONG_PROMPT and not structured(question):
            self._short.append((peer, question, time.monotonic()))
            return
        task = self._loop.create_task(self._in_thread(peer, question))
        self._work.add(task)
        task.add_done_callback(self._done)

    def _encode_short(self) -> None:
        """Encode queued prompts for one slice of time; the rest gets another turn of the loop."""
        end = time.perf_counter() + SLICE
        while self._short:
            peer, question, since = self._short.popleft()
            self._finish(peer, question, self._make(peer, question), since)
            if time.perf_counter() > end:
                break
        self.flush()
        if self._short and self._turn is None:
            self._turn = self._loop.call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._turn = None
        self._encode_short()

    def _make(self, peer: Peer, question: Question, rendered: Rendered | None = None) -> Prepared | Message | None:
        """The answer, or None when nobody waits for it any more. May run in a thread."""
        now = moment(question)
        if peer not in self._apis or (isinstance(question, SubmitText) and not self._frontend.wants(question.id)):
            return None
        if isinstance(question, SubmitText):
            return self._frontend.make(question, now, rendered)
        return self._frontend.answer(question, now)

    def _finish(self, peer: Peer, question: Question, made: Prepared | Message | None, since: float) -> None:
        if made is None:
            return
        if isinstance(question, SubmitText):
            assert isinstance(made, Prepared | Rejected)
            self._traces.tokenized(question, made, since, time.monotonic())
            self._traces.prune(self._frontend.wants)
            self._frontend.close(question.id, made)
        elif peer in self._apis:
            assert not isinstance(made, Prepared)
            self._frontend.outbox(self._apis[peer]).post(made)

    async def _in_thread(self, peer: Peer, question: Question) -> None:
        since = time.monotonic()
        rendered: Rendered | Rejected | None = None
        if isinstance(question, SubmitText) and question.chat_template is not None:
            assert self._structure is not None
            rendered = await self._structure.render(question, moment(question))
        if question.suspect and not isinstance(rendered, Rejected):
            assert self._structure is not None
            rendered = await self._structure.refusal(question, moment(question), rendered) or rendered
        made = (
            rendered
            if isinstance(rendered, Rejected)
            else await self._loop.run_in_executor(self._threads, self._make, peer, question, rendered)
        )
        if isinstance(made, Prepared) and isinstance(question, SubmitText) and made.grammar is not None:
            assert self._structure is not None
            asked = time.monotonic()
            made = await self._structure.complete(question, made)
            self._traces.compiled(question, made, asked, time.monotonic())
        self._finish(peer, question, made, since)
        self.flush()

    def _done(self, task: asyncio.Future[None]) -> None:
        self._work.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._loop.call_exception_handler({"message": "a prompt's end failed", "exception": task.exception()})


def moment(question: Question) -> float:
    """What a template knows as the time, in unix seconds: when its request came, so that a prompt made once more is
    the same."""
    return (question.arrival if isinstance(question, SubmitText) else 0.0) or time.time()


def structured(question: Question) -> bool:
    """Whether it may have to wait for a worker: for its grammar to be compiled, its own template to be rendered, or for
    its own trial."""
    if question.suspect or not isinstance(question, SubmitText):
        return question.suspect
    return (
        question.grammar is not None
        or question.tool_use is not None
        or question.reasoning.budget is not None
        or question.chat_template is not None
    )


def length(message: Question) -> int:
    """How much there is to encode or decode, in bytes."""
    if isinstance(message, Detokenize):
        return len(message.token_ids)
    parts = (message.messages, message.tools, message.template_arguments, message.prompt)
    predicted = len(message.prediction) if isinstance(message, SubmitText) else 0
    return predicted + sum(len(part) for part in parts if part is not None)
