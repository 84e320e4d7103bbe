"""`AsyncLLM`: an engine on the caller's own loop; outputs as they grow."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any

from penstock.protocol.columns import pack, unpack
from penstock.protocol.messages import Detokenize, Detokenized, EngineStatus, Tokenize, Tokenized
from penstock.services.client.model_info import ServedModel
from penstock.services.llm.ending import Ending
from penstock.services.llm.engine import Engine
from penstock.services.llm.keywords import configured
from penstock.services.llm.outputs import RequestOutput
from penstock.services.llm.params import RequestOutputKind, SamplingParams
from penstock.services.llm.prompts import Order, PromptForm, chat_order, listed, orders, traced
from penstock.services.openai.completions import check_ids


class AsyncLLM:
    """An engine of its own for one model: `async with AsyncLLM(model) as llm`, or `close()` at the end.

    `options` are those of `penstock serve`, by name. The processes start when the object is made; the first request
    waits for them. Raises ConfigError and ModelError at once, and whatever a process ends with when it is awaited.
    """

    def __init__(self, model: str = "", **options: object) -> None:
        self._engine = Engine(configured(model, options))
        self._end = Ending(self, self._engine.end)
        self._counter = 0

    @property
    def model(self) -> ServedModel:
        """Names, sizes and defaults of the model."""
        return self._engine.model

    @property
    def status(self) -> EngineStatus | None:
        """The engine's last heartbeat, once it has started: what runs and waits, blocks, totals since it started."""
        return self._engine.pipeline.status

    async def start(self) -> None:
        """Wait until requests are served."""
        await self._engine.start()

    async def generate(
        self,
        prompt: PromptForm,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        trace_headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """The outputs of one prompt as it grows, the last one `finished`. Leaving the loop early aborts the request.
        It is part of the trace that `trace_headers` name (`traceparent`, `tracestate`), else of the caller's.

        Raises RequestError when it is refused or fails.
        """
        (only,) = listed([prompt])
        (order,) = orders([only], sampling_params, self.model, [priority])
        async with aclosing(self._stream(order, request_id, trace_headers)) as outputs:
            async for output in outputs:
                yield output

    async def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        trace_headers: Mapping[str, str] | None = None,
        **fields: Any,
    ) -> AsyncIterator[RequestOutput]:
        """As `generate`, of one conversation. `fields` are as those of `LLM.chat`."""
        order = chat_order(messages, sampling_params, self.model, **fields)
        async with aclosing(self._stream(order, request_id, trace_headers)) as outputs:
            async for output in outputs:
                yield output

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text."""
        await self._engine.start()
        found = await self._engine.ask(Tokenize(id=0, prompt=text, add_special_tokens=add_special_tokens))
        assert isinstance(found, Tokenized)
        return unpack("i", found.token_ids)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of token ids."""
        if not token_ids:
            return ""
        check_ids(list(token_ids), "token_ids", self.model)
        await self._engine.start()
        found = await self._engine.ask(Detokenize(0, pack("i", token_ids)))
        assert isinstance(found, Detokenized)
        return found.text

    async def close(self) -> None:
        """Abort what runs and end every process. Safe to call twice."""
        await self._engine.close()

    async def __aenter__(self) -> AsyncLLM:
        try:
            await self.start()
        except BaseException:  # guard: design 7, the processes do not outlive a start that failed or was cancelled
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _stream(
        self, order: Order, name: str | None, headers: Mapping[str, str] | None
    ) -> AsyncGenerator[RequestOutput, None]:
        await self._engine.start()
        if headers:
            order = traced(order, headers)
        known = name or str(self._counter)  # before we wait: others come meanwhile
        self._counter += 1
        kind = order.params.output_kind
        streaming = kind is not RequestOutputKind.FINAL_ONLY
        async with self._engine.request(order, stream=streaming) as reply:
            reply.name = known
            gathering = self._engine.gathering(reply, order, known, kind)
            finished = False
            while not finished:
                news = await reply.news()
                if (failure := reply.failure) is not None:
                    error = await self._engine.reason(failure)
                    del failure
                    try:
                        raise error
                    finally:
                        del error  # this frame, which the traceback holds, must not hold the error
                output = gathering.take(news)
                finished = output.finished
                yield output
