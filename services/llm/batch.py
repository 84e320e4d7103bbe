"""Many requests through one engine: so many at a time as its window has room for, results in order, none lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence

import msgspec

from penstock.protocol.errors import InvalidRequest, RequestError
from penstock.services.commands.progress import Meter
from penstock.services.llm.engine import Engine
from penstock.services.llm.outputs import RequestOutput
from penstock.services.llm.params import RequestOutputKind
from penstock.services.llm.prompts import Order


class Tally(msgspec.Struct):
    """What has been done so far."""

    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0

    def add(self, output: RequestOutput) -> None:
        self.requests += 1
        self.prompt_tokens += len(output.prompt_token_ids)
        self.output_tokens += sum(len(choice.token_ids) for choice in output.outputs)

    def said(self, seconds: float) -> str:
        per_second = 1 / max(seconds, 1e-9)
        return f"in {self.prompt_tokens * per_second:,.0f} tok/s, out {self.output_tokens * per_second:,.0f} tok/s"


async def run(
    engine: Engine, orders: Iterator[Order], count: int, *, first: int, meter: Meter, return_errors: bool
) -> list[RequestOutput]:
    """The outputs of `count` orders, in their order; `first` is the number in the first one's name.

    Raises the first error of any of them, which ends the others, unless errors are to be returned as outputs.
    """
    outputs: list[RequestOutput | None] = [None] * count
    numbered = enumerate(orders)
    tally = Tally()

    async def work() -> None:
        for number, order in numbered:  # shared: each order is taken by one worker
            outputs[number] = output = await one(engine, order, str(first + number), number, return_errors)
            tally.add(output)
            meter.show(tally.requests, tally.said(time.monotonic() - meter.start))

    await share_out(work, min(count, engine.window))
    if count > 1:
        meter.conclude(tally.said(time.monotonic() - meter.start))
    return complete(outputs)


async def share_out(work: Callable[[], Coroutine[None, None, None]], workers: int) -> None:
    """Have so many workers do it. The first error of any of them is raised, and the others end."""
    tasks = [asyncio.ensure_future(work()) for _ in range(workers)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def complete(outputs: Sequence[RequestOutput | None]) -> list[RequestOutput]:
    """The outputs: every order has one."""
    found = [output for output in outputs if output is not None]
    assert len(found) == len(outputs)
    return found


async def one(engine: Engine, order: Order, name: str, number: int, return_errors: bool) -> RequestOutput:
    """The output of one order."""
    try:
        async with engine.request(order) as reply:
            reply.name = name
            gathering = engine.gathering(reply, order, name, RequestOutputKind.FINAL_ONLY)
            news = await reply.news()
            if (failure := reply.failure) is None:
                return gathering.take(news)
            error = await engine.reason(failure)
            del failure
            if return_errors and isinstance(error, RequestError):
                return gathering.failed(error)
            try:
                raise error
            finally:
                del error  # this frame, which the traceback holds, must not hold the error
    except InvalidRequest as refused:
        raise named(refused, number) from refused


def named(error: InvalidRequest, number: int) -> InvalidRequest:
    """The error with the number of its prompt."""
    return InvalidRequest(f"prompts[{number}]: {error.message}", param=error.param, code=error.code)
