"""Responses that are made in the background, while nobody waits for them."""

from __future__ import annotations

import asyncio
import logging
import time

import msgspec

from penstock.protocol.errors import EngineFailure, RequestError
from penstock.services.client.engine_client import EngineClient
from penstock.services.client.output_collector import OutputCollector
from penstock.services.http.request_context import ClientDisconnect, RequestContext, reason_of
from penstock.services.metrics.requests import Traffic
from penstock.services.openai.generation import note, timed, whole
from penstock.services.openai.responses.output import ResponseAnswer
from penstock.services.openai.responses.turn import Turn
from penstock.services.supervisor import logs

log = logging.getLogger(__name__)


class BackgroundWork:
    """The running ones. Their bodies count as unfinished until they end."""

    def __init__(self, engine_client: EngineClient, traffic: Traffic) -> None:
        self._engine_client = engine_client
        self._traffic = traffic
        self._running: dict[str, tuple[OutputCollector, asyncio.Task[None]]] = {}

    def begin(self, turn: Turn, collector: OutputCollector, context: RequestContext) -> ResponseAnswer:
        """The response as it stands now, which is kept. The request's timeout goes on."""
        turn.keep(turn.opening)
        context.background = True
        task = asyncio.create_task(self._finish(turn, collector, context))
        self._running[turn.id] = (collector, task)
        return turn.opening

    async def end(self, name: str) -> None:
        """End what is running under this name, and wait until it has been kept; nothing happens where it has ended."""
        found = self._running.get(name)
        if found is None:
            return
        collector, task = found
        self._engine_client.abort(collector)
        collector.disconnect()
        await asyncio.shield(task)

    async def ended(self, seconds: float) -> None:
        """Wait so long for all of them to end, and to be kept."""
        if tasks := [task for _, task in self._running.values()]:
            logs.info(log, "draining_background", unfinished=len(tasks))
            await asyncio.wait(tasks, timeout=seconds)

    async def _finish(self, turn: Turn, collector: OutputCollector, context: RequestContext) -> None:
        status = "failed"
        try:
            with timed(collector, self._engine_client, context):
                await whole(collector)
            status = turn.whole(collector).status
        except ClientDisconnect:
            status = "cancelled"
            turn.keep(msgspec.structs.replace(turn.opening, status="cancelled"))
        except RequestError as error:
            turn.failed(error)
        except Exception:  # guard: design 7, one request that finds a bug of ours ends alone
            trace = context.trace.trace_id
            logs.exception(log, "request_failed", id=context.id.decode(), trace_id=trace, route=context.route)
            bug = EngineFailure("the server failed on this request", code="internal_error")
            context.outcome.reason = reason_of(bug)
            turn.failed(bug)
        finally:
            await turn.saved()
            del self._running[turn.id]
            self._engine_client.abort(collector)
            self._account(turn, collector, context, status)

    def _account(self, turn: Turn, collector: OutputCollector, context: RequestContext, status: str) -> None:
        """Count and log it, as the middleware does for requests that end with their response."""
        now, outcome = time.monotonic(), context.outcome
        context.budget.total -= context.size
        note(collector, context)
        self._traffic.ended(outcome.prompt_tokens, outcome.completion_tokens, outcome.reason)
        fields: dict[str, object] = {"id": context.id.decode(), "response": turn.id}
        if trace := context.trace.trace_id:
            fields["trace_id"] = trace
        fields.update(status=status, prompt_tokens=outcome.prompt_tokens, completion_tokens=outcome.completion_tokens)
        if outcome.reason:
            fields["reason"] = outcome.reason
        logs.info(log, "background", **fields, seconds=now - context.started)
