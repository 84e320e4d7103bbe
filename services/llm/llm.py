"""`LLM`: a synchronous engine for batches of prompts."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any, TypeVar

import uvloop

from penstock.protocol.errors import InvalidRequest
from penstock.protocol.messages import SubmitText
from penstock.services.commands.progress import ProgressBar
from penstock.services.llm.engine import Engine, EngineProperties, Finalizer
from penstock.services.llm.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from penstock.services.llm.params import RequestOutputKind
from penstock.services.llm.prompts import (
    LoRARequest,
    Loras,
    Params,
    PromptForm,
    Request,
    adapted,
    chat_request,
    classify_submissions,
    completion_requests,
    conversations,
    embedding_request,
    embedding_submissions,
    params_of_each,
    parse_prompts,
    score_sheet,
    with_adapters,
)
from penstock.services.openai.classification import activated
from penstock.services.openai.embeddings import Vector, vectors

T = TypeVar("T")
R = TypeVar("R")


class LLM(EngineProperties):
    """An engine of its own for one model. Ready when the constructor returns.

    `options` are those of `penstock serve`, by name. The links have a thread and an event loop of their own, so they
    stay up while the program computes, and the caller may run a loop as well. The processes end with `close()`, the
    `with` block, the object, or the program, however it ends.

    With `otlp_endpoint` (or OpenTelemetry's OTEL_ variables) each request is a trace: a new one, or a part of the
    caller's current span.

    Raises ConfigError and ModelError, and the error of a process that failed to start.
    """

    def __init__(self, model: str = "", **options: object) -> None:
        self._engine = Engine(model, options)
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="penstock", daemon=True)
        self._thread.start()
        self._end = Finalizer(self, functools.partial(end, self._engine, self._loop, self._thread))
        self._counter = 0
        try:
            self._call(self._engine.start())
        except BaseException:  # guard: design 7, the processes do not outlive a start that failed or was interrupted
            self._end()
            raise

    def generate(
        self,
        prompts: PromptForm | Sequence[PromptForm],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        lora_request: Loras = None,
        return_errors: bool = False,
    ) -> list[RequestOutput]:
        """One output per prompt, in order. A prompt is text, token ids, or a dict with `prompt` or `prompt_token_ids`
        and optionally `cache_salt`, `prediction` and `traceparent`; `sampling_params` is one for all or one for each,
        and so is `lora_request`.

        Raises RequestError for the first prompt that is refused or fails, which ends the others; with `return_errors`
        the error is in that prompt's output instead.
        """
        found = parse_prompts(prompts)
        requests = completion_requests(found, sampling_params, self.model, priority)
        named = with_adapters(requests, lora_request, len(found), self.model)
        return self._generate(named, len(found), use_tqdm, return_errors)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
        tools: list[dict[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
        reasoning_effort: str | None = None,
        thinking_token_budget: int | None = None,
        split: bool = True,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | None = None,
        lora_request: Loras = None,
        return_errors: bool = False,
    ) -> list[RequestOutput]:
        """As `generate`, for a conversation or a list of them; `tools` and the options after it are those of chat
        completions. Each choice has its reasoning and tool calls beside its text, and `message()` returns all three for
        the next turn; without `split` they remain in the text, as the model wrote them. `chat_template` is a template,
        not a file.

        Without `sampling_params` the output may fill the context.
        """
        found = conversations(messages)
        fields = {
            "tools": tools, "tool_choice": tool_choice, "parallel_tool_calls": parallel_tool_calls,
            "reasoning_effort": reasoning_effort, "thinking_token_budget": thinking_token_budget,
            "chat_template": chat_template, "chat_template_kwargs": chat_template_kwargs,
            "add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message,
        }  # fmt: skip
        each = zip(found, params_of_each(sampling_params, len(found)), strict=True)
        requests = [chat_request(one, params, self.model, split=split, **fields) for one, params in each]
        named = with_adapters(requests, lora_request, len(requests), self.model)
        return self._generate(named, len(requests), use_tqdm, return_errors)

    def get_tokenizer(self) -> Any:
        """The model's tokenizer as transformers loads it, with the chat template that is in effect.

        Raises ModelError.
        """
        return self._engine.tokenizer

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text."""
        return self._call(self._engine.tokenize(text, add_special_tokens=add_special_tokens))

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of token ids."""
        return self._call(self._engine.detokenize(token_ids))

    def embed(
        self,
        prompts: PromptForm | Sequence[PromptForm],
        *,
        use_tqdm: bool = True,
        dimensions: int | None = None,
        normalize: bool | None = None,
        truncate_prompt_tokens: int | None = None,
        lora_request: Loras = None,
    ) -> list[EmbeddingRequestOutput]:
        """A vector per prompt, in order: pooled and scaled as the model's folder or its options say. `lora_request` is
        one for all or one for each.

        Raises RequestError for the first prompt that is refused or fails, which ends the others.
        """
        request = embedding_request(
            dimensions=dimensions, normalize=normalize, truncate_prompt_tokens=truncate_prompt_tokens
        )
        submits = embedding_submissions(prompts, request, self.model)
        states, first = self._embed("embed", submits, use_tqdm, lora_request)
        return [
            EmbeddingRequestOutput(str(number), EmbeddingOutput(vector.tolist()))
            for number, vector in enumerate(vectors(request, states, self.model), first)
        ]

    def encode(
        self,
        prompts: PromptForm | Sequence[PromptForm],
        *,
        use_tqdm: bool = True,
        truncate_prompt_tokens: int | None = None,
        lora_request: Loras = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """As `embed`, but the pooled hidden states as they are: float32 arrays of any length."""
        request = embedding_request(truncate_prompt_tokens=truncate_prompt_tokens)
        submits = embedding_submissions(prompts, request, self.model)
        states, first = self._embed("encode", submits, use_tqdm, lora_request)
        return [PoolingRequestOutput(str(number), PoolingOutput(state)) for number, state in enumerate(states, first)]

    def score(
        self,
        data_1: str | list[str],
        data_2: str | list[str],
        *,
        use_tqdm: bool = True,
        truncate_prompt_tokens: int | None = None,
        lora_request: LoRARequest | None = None,
    ) -> list[ScoringRequestOutput]:
        """How similar texts are: one of `data_1` with each of `data_2`, or pair by pair, with one adapter for all.

        Raises RequestError as `embed` does.
        """
        sheet = score_sheet(data_1, data_2, truncate_prompt_tokens, self.model)
        states, first = self._embed("score", sheet.submits, use_tqdm, lora_request)
        return [
            ScoringRequestOutput(str(number), ScoringOutput(score))
            for number, score in enumerate(sheet.scores(states), first)
        ]

    def classify(
        self,
        prompts: str | list[str],
        *,
        use_tqdm: bool = True,
        truncate_prompt_tokens: int | None = None,
        lora_request: Loras = None,
    ) -> list[ClassificationRequestOutput]:
        """The chance of each of the model's labels, per text.

        Raises RequestError as `embed` does, and Unsupported for a model without a head for classification.
        """
        submits, classifier = classify_submissions(prompts, truncate_prompt_tokens, self.model)
        states, first = self._embed("classify", submits, use_tqdm, lora_request)
        return [
            ClassificationRequestOutput(str(number), ClassificationOutput(activated(state, classifier)))
            for number, state in enumerate(states, first)
        ]

    def close(self) -> None:
        """Abort open requests and end every process. Safe to call twice. In a forked child nothing ends."""
        self._end()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _generate(
        self, requests: Iterable[Request], count: int, shown: bool, return_errors: bool
    ) -> list[RequestOutput]:
        first = self._take_numbers(count)
        tokens = [0, 0]  # of prompts and outputs

        async def one(number: int, request: Request) -> RequestOutput:
            generated = self._engine.generate(
                request, str(first + number), RequestOutputKind.FINAL_ONLY, return_errors=return_errors
            )
            try:
                async with aclosing(generated) as outputs:
                    output = await anext(outputs)
            except InvalidRequest as error:
                message = f"prompts[{number}]: {error.message}"
                raise InvalidRequest(message, param=error.param, code=error.code) from error
            tokens[0] += len(output.prompt_token_ids)
            tokens[1] += sum(len(choice.token_ids) for choice in output.outputs)
            return output

        def rates() -> str:
            prompt, output = (count / max(time.monotonic() - progress.start, 1e-9) for count in tokens)
            return f"in {prompt:,.0f} tok/s, out {output:,.0f} tok/s"

        with ProgressBar("generate", count, shown=shown and count > 0) as progress:
            outputs = self._call(self._each(one, requests, count, lambda done: progress.show(done, rates())))
            if count > 1:
                progress.conclude(rates())
        return outputs

    def _embed(self, title: str, submits: Sequence[SubmitText], shown: bool, loras: Loras) -> tuple[list[Vector], int]:
        """The vectors, and the number of the first request."""
        count, submits = len(submits), adapted(submits, loras, self.model)
        first = self._take_numbers(count)

        async def one(number: int, submit: SubmitText) -> Vector:
            return await self._engine.embed(submit)

        with ProgressBar(title, count, shown=shown and count > 1) as progress:
            return self._call(self._each(one, submits, count, lambda done: progress.show(done, ""))), first

    def _take_numbers(self, count: int) -> int:
        first, self._counter = self._counter, self._counter + count
        return first

    async def _each(
        self,
        call: Callable[[int, R], Coroutine[Any, Any, T]],
        requests: Iterable[R],
        count: int,
        show: Callable[[int], None],
    ) -> list[T]:
        """The results of all requests in order, run as the window has room for them.

        Raises the first error, which ends the other requests.
        """
        results: dict[int, T] = {}
        numbered = enumerate(requests)

        async def work() -> None:
            for number, request in numbered:  # shared, so that one worker takes each request
                results[number] = await call(number, request)
                show(len(results))

        tasks = [asyncio.ensure_future(work()) for _ in range(min(count, self._engine.window))]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return [results[number] for number in range(count)]

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the engine's loop; an interrupt cancels it."""
        try:
            self._engine.check_process()
            if not self._end.alive:
                raise RuntimeError("this LLM was closed")
        except RuntimeError:
            work.close()
            raise
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:  # guard: design 7, an interrupted call is aborted
            future.cancel()
            raise


def end(engine: Engine, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    """Close the links, stop the loop, end the processes. Must not be called on the loop's thread, which it joins.

    Does nothing in a forked child: the thread and the processes are the parent's.
    """
    if not engine.owned:
        return

    async def disconnect() -> None:
        engine.disconnect()

    asyncio.run_coroutine_threadsafe(disconnect(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
    engine.end()
