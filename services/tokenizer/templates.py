"""Renders requests' own templates in worker processes, with limits on CPU time and memory, and tries there requests
that a tokenizer may have died of.

Workers are started for the first such request, and stay.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import msgspec

from penstock.engine_core.images.picture import Picture
from penstock.engine_core.text.rendering import Rendered, read_list
from penstock.protocol.config import TokenizerConfig
from penstock.protocol.errors import EngineFailure, InvalidRequest, Overloaded
from penstock.protocol.messages import Detokenize, SubmitText, Tokenize
from penstock.services.tokenizer.confinement import environment
from penstock.services.tokenizer.template_worker import (
    ANSWER,
    TRIAL_SECONDS,
    Answer,
    Render,
    Rendering,
    TemplateSettings,
    Trial,
)
from penstock.services.tokenizer.worker_pool import MOST_WAITING, PATIENCE, WorkerKind, WorkerPool
from penstock.services.tokenizer.worker_protocol import Refusal

SLACK = 5.0  # seconds beyond the CPU limit: compiling the template, decoding a long conversation and its text

Call = SubmitText | Tokenize | Detokenize


class TemplateStatistics(msgspec.Struct, frozen=True):
    """Counters since the start, and present numbers."""

    workers: int  # now
    rendered: int
    refused: int
    ended: int  # renderings that exceeded a limit or died, some with their worker


class Templates:
    """Owns the workers. Used on one asyncio loop."""

    def __init__(self, settings: TemplateSettings, options: TokenizerConfig) -> None:
        self._options = options
        kind = WorkerKind(
            "template", "templates of requests cannot be rendered at this time",
            "penstock.services.tokenizer.template_worker", settings.of_rendering, (str(os.getpid()),),
            environment(os.environ), greeting=msgspec.msgpack.encode(settings),
        )  # fmt: skip
        self._pool = WorkerPool(kind, options.template_workers)
        self._rendered = self._refused = self._ended = 0

    async def render(self, request: SubmitText, now: float) -> Rendered:
        """The chat rendered by the request's own template, which sees `now` (unix seconds) as the time.

        Raises InvalidRequest, Overloaded, EngineFailure.
        """
        if self._pool.waiting >= MOST_WAITING:
            raise Overloaded("too many templates of requests wait to be rendered")
        answer = await self._answer(Render(request, now), self._options.template_timeout)
        self._ended += answer.ended
        if isinstance(answer.outcome, Refusal):
            self._refused += 1
            raise InvalidRequest(answer.outcome.message, param=answer.outcome.param, code=answer.outcome.code)
        assert isinstance(answer.outcome, Rendering)
        self._rendered += 1
        return msgspec.structs.replace(answer.outcome.rendered, tools=read_list(request.tools, "tools"))

    async def fatal(self, call: Call, now: float, rendered: Rendered | None, pictures: Sequence[Picture] = ()) -> str:
        """Why a process dies that does with this call what a tokenizer does; empty if none dies."""
        sizes = tuple(msgspec.structs.replace(picture, pixels=b"") for picture in pictures)
        try:
            answer = await self._answer(Trial(call, now, rendered, sizes), TRIAL_SECONDS)
        except EngineFailure:  # no trial is possible: the api process still counts deaths
            return ""
        return answer.outcome.message if isinstance(answer.outcome, Refusal) else ""

    def close(self) -> None:
        self._pool.close()

    def statistics(self) -> TemplateStatistics:
        return TemplateStatistics(
            workers=len(self._pool.workers),
            rendered=self._rendered,
            refused=self._refused,
            ended=self._ended,
        )

    async def _answer(self, job: Render | Trial, seconds: float) -> Answer:
        """A worker's answer; a worker that exceeds a limit itself makes a refusal."""
        found = await self._pool.ask(msgspec.msgpack.encode(job), seconds * PATIENCE + SLACK)
        return Answer(found, ended=True) if isinstance(found, Refusal) else ANSWER.decode(found.body)
