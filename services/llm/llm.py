"""`LLM`: an engine for programs without a loop of their own; whole outputs, in the order of the prompts."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Coroutine, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

import uvloop

from penstock.protocol.columns import pack, unpack
from penstock.protocol.messages import Detokenize, Detokenized, EngineStatus, SubmitText, Tokenize, Tokenized
from penstock.services.client.model_info import ServedModel
from penstock.services.commands.progress import Meter
from penstock.services.llm import batch, vectors
from penstock.services.llm.ending import Ending
from penstock.services.llm.engine import Engine
from penstock.services.llm.keywords import configured
from penstock.services.llm.outputs import RequestOutput
from penstock.services.llm.prompts import Params, PromptForm, chat_order, conversations, listed, orders, shared_out
from penstock.services.llm.vectors import (
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
    embedding_request,
    prompt_submissions,
    score_sheet,
    shaped_outputs,
)
from penstock.services.openai.completions import check_ids
from penstock.services.openai.embeddings import Vector

T = TypeVar("T")


class LLM:
    """An engine of its own for one model. Ready when the constructor returns.

    `options` are those of `penstock serve`, by name. The links live on a thread of their own, so they stand however
    long the program computes in between, and nothing minds a loop that runs already. The processes end with `close()`,
    the `with` block, the object, or the program, however it ends.

    With `otlp_endpoint` (or OpenTelemetry's OTEL_ variables) each request is a trace: a new one, or a part of the
    caller's where a span of OpenTelemetry's API is current.

    Raises ConfigError and ModelError, and whatever a process that failed to start ended with.
    """

    def __init__(self, model: str = "", **options: object) -> None:
        self._engine = Engine(configured(model, options))
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="penstock", daemon=True)
        self._thread.start()
        self._end = Ending(self, functools.partial(end, self._engine, self._loop, self._thread))
        self._counter = 0
        try:
            self._call(self._engine.start())
        except BaseException:  # guard: design 7, the processes do not outlive a start that failed or was interrupted
            self._end()
            raise

    @property
    def model(self) -> ServedModel:
        """Names, sizes and defaults of the model."""
        return self._engine.model

    @property
    def status(self) -> EngineStatus | None:
        """The engine's last heartbeat: what runs and waits, blocks, totals since it started."""
        return self._engine.pipeline.status

    def generate(
        self,
        prompts: PromptForm | Sequence[PromptForm],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        return_errors: bool = False,
    ) -> list[RequestOutput]:
        """One output per prompt, in order. A prompt is text, token ids, or a dict with `prompt` or `prompt_token_ids`
        and, if wanted, `cache_salt`, `prediction` and `traceparent`; `sampling_params` is one for all or one for each.

        Raises RequestError for the first prompt that is refused or fails, which ends the others; with `return_errors`
        it stands in its own output instead.
        """
        found = listed(prompts)
        made = orders(found, sampling_params, self.model, priority)
        return self._run(made, len(found), use_tqdm, return_errors)

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
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | None = None,
        return_errors: bool = False,
    ) -> list[RequestOutput]:
        """As `generate`, for a conversation or a list of them; `tools` and what follows mean what they mean in a chat
        over HTTP. Each choice has its reasoning and its calls of tools beside its text, and `message()` is all of it
        for the next turn; without `split` they stand in the text, as the model wrote them.

        Without `sampling_params` the answer may take the room that the prompt leaves.
        """
        found = conversations(messages)
        more = {
            "tools": tools, "tool_choice": tool_choice, "parallel_tool_calls": parallel_tool_calls,
            "reasoning_effort": reasoning_effort, "thinking_token_budget": thinking_token_budget,
            "chat_template_kwargs": chat_template_kwargs, "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }  # fmt: skip
        each = shared_out(sampling_params, len(found))
        made = [
            chat_order(one, params, self.model, split=split, **more) for one, params in zip(found, each, strict=True)
        ]
        return self._run(iter(made), len(made), use_tqdm, return_errors)

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text."""
        found = self._call(self._engine.ask(Tokenize(id=0, prompt=text, add_special_tokens=add_special_tokens)))
        assert isinstance(found, Tokenized)
        return unpack("i", found.token_ids)

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of token ids."""
        if not token_ids:
            return ""
        check_ids(list(token_ids), "token_ids", self.model)
        found = self._call(self._engine.ask(Detokenize(0, pack("i", token_ids))))
        assert isinstance(found, Detokenized)
        return found.text

    def embed(
        self,
        prompts: PromptForm | Sequence[PromptForm],
        *,
        use_tqdm: bool = True,
        dimensions: int | None = None,
        normalize: bool | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """A vector per prompt, in order: pooled and scaled as the model's folder or its options say.

        Raises RequestError for the first prompt that is refused or fails, which ends the others.
        """
        request = embedding_request(
            dimensions=dimensions, normalize=normalize, truncate_prompt_tokens=truncate_prompt_tokens
        )
        found, first = self._vectors("embed", prompt_submissions(prompts, request, self.model), use_tqdm)
        return shaped_outputs(request, found, self.model, first)

    def encode(
        self,
        prompts: PromptForm | Sequence[PromptForm],
        *,
        use_tqdm: bool = True,
        truncate_prompt_tokens: int | None = None,
    ) -> list[PoolingRequestOutput]:
        """As `embed`, the pooled hidden states as they are: float32 arrays of any length."""
        request = embedding_request(truncate_prompt_tokens=truncate_prompt_tokens)
        found, first = self._vectors("encode", prompt_submissions(prompts, request, self.model), use_tqdm)
        return [PoolingRequestOutput(str(number), PoolingOutput(vector)) for number, vector in enumerate(found, first)]

    def score(
        self,
        data_1: str | list[str],
        data_2: str | list[str],
        *,
        use_tqdm: bool = True,
        truncate_prompt_tokens: int | None = None,
    ) -> list[ScoringRequestOutput]:
        """How well texts go together: one of `data_1` with each of `data_2`, or pair by pair.

        Raises RequestError as `embed` does.
        """
        sheet = score_sheet(data_1, data_2, truncate_prompt_tokens, self.model)
        found, first = self._vectors("score", sheet.submits, use_tqdm)
        return [
            ScoringRequestOutput(str(number), ScoringOutput(score))
            for number, score in enumerate(sheet.scores(found), first)
        ]

    def close(self) -> None:
        """Abort what runs and end every process. Safe to call twice. In a forked child nothing ends."""
        self._end()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, made: Any, count: int, shown: bool, return_errors: bool) -> list[RequestOutput]:
        first, self._counter = self._counter, self._counter + count
        with Meter("generate", count, shown=shown and count > 0) as meter:
            return self._call(
                batch.run(self._engine, made, count, first=first, meter=meter, return_errors=return_errors)
            )

    def _vectors(self, name: str, submits: Sequence[SubmitText], shown: bool) -> tuple[list[Vector], int]:
        """The vectors, and the number in the first one's name."""
        first, self._counter = self._counter, self._counter + len(submits)
        with Meter(name, len(submits), shown=shown and len(submits) > 1) as meter:
            return self._call(vectors.run(self._engine, submits, meter)), first

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine on the engine's loop; interrupted, it is cancelled there."""
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
        except BaseException:  # guard: design 7, what was interrupted is aborted
            future.cancel()
            raise


def end(engine: Engine, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    """Close the links, stop the loop, end the processes. Waits for the loop's thread, so never called on it.

    Does nothing in a forked child, where that thread does not exist and the processes are the parent's.
    """
    if not engine.owned():
        return

    async def disconnect() -> None:
        engine.disconnect()

    asyncio.run_coroutine_threadsafe(disconnect(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
    engine.end()
