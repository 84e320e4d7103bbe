"""`AsyncLLM`: an engine on the caller's event loop, with streamed outputs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any

from penstock.services.llm.engine import Engine, EngineProperties, Finalizer
from penstock.services.llm.outputs import EmbeddingOutput, EmbeddingRequestOutput, RequestOutput
from penstock.services.llm.params import SamplingParams
from penstock.services.llm.prompts import (
    LoRARequest,
    PromptForm,
    Request,
    adapted,
    chat_request,
    completion_requests,
    embedding_request,
    embedding_submissions,
    in_trace,
    parse_prompts,
    with_adapters,
)
from penstock.services.openai.embeddings import vectors


class AsyncLLM(EngineProperties):
    """An engine of its own for one model: `async with AsyncLLM(model) as llm`, or `close()` at the end.

    `options` are those of `penstock serve`, by name. The processes start with the object; the first request waits for
    them. Raises ConfigError and ModelError at once; awaiting raises the error that ended a process.
    """

    def __init__(self, model: str = "", **options: object) -> None:
        self._engine = Engine(model, options)
        self._end = Finalizer(self, self._engine.end)
        self._counter = 0

    async def start(self) -> None:
        """Wait until the engine is ready."""
        await self._engine.start()

    async def generate(
        self,
        prompt: PromptForm,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
        trace_headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Stream the outputs of one prompt, the last one `finished`. Leaving the loop early aborts the request. Its
        trace is that of `trace_headers` (`traceparent`, `tracestate`), else the caller's.

        Raises RequestError if it is refused or fails.
        """
        requests = completion_requests(parse_prompts([prompt]), sampling_params, self.model, [priority])
        (request,) = with_adapters(requests, lora_request, 1, self.model)
        async with aclosing(self._stream(request, request_id, trace_headers)) as outputs:
            async for output in outputs:
                yield output

    async def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        trace_headers: Mapping[str, str] | None = None,
        **fields: Any,
    ) -> AsyncIterator[RequestOutput]:
        """As `generate`, for one conversation. `fields` are those of `LLM.chat`."""
        requests = [chat_request(messages, sampling_params, self.model, **fields)]
        (request,) = with_adapters(requests, lora_request, 1, self.model)
        async with aclosing(self._stream(request, request_id, trace_headers)) as outputs:
            async for output in outputs:
                yield output

    async def embed(
        self,
        prompt: PromptForm,
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        truncate_prompt_tokens: int | None = None,
        lora_request: LoRARequest | None = None,
    ) -> EmbeddingRequestOutput:
        """The vector of one prompt, as `LLM.embed` makes it. Raises RequestError."""
        await self._engine.start()
        request = embedding_request(
            dimensions=dimensions, normalize=normalize, truncate_prompt_tokens=truncate_prompt_tokens
        )
        (submit,) = adapted(embedding_submissions([prompt], request, self.model), lora_request, self.model)
        request_id = self._next_number()
        (vector,) = vectors(request, [await self._engine.embed(submit)], self.model)
        return EmbeddingRequestOutput(request_id, EmbeddingOutput(vector.tolist()))

    async def get_tokenizer(self) -> Any:
        """As `LLM.get_tokenizer`; loaded on another thread."""
        return await asyncio.to_thread(lambda: self._engine.tokenizer)

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text."""
        await self._engine.start()
        return await self._engine.tokenize(text, add_special_tokens=add_special_tokens)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of token ids."""
        await self._engine.start()
        return await self._engine.detokenize(token_ids)

    async def close(self) -> None:
        """Abort open requests and end every process. Safe to call twice."""
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
        self, request: Request, request_id: str | None, headers: Mapping[str, str] | None
    ) -> AsyncGenerator[RequestOutput, None]:
        await self._engine.start()
        if headers:
            request = in_trace(request, headers)
        request_id = request_id or self._next_number()
        async with aclosing(self._engine.generate(request, request_id, request.params.output_kind)) as outputs:
            async for output in outputs:
                yield output

    def _next_number(self) -> str:
        """The request's id unless the caller gave one."""
        self._counter += 1
        return str(self._counter - 1)
