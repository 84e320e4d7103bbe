"""A template worker: renders chats by requests' own templates, each in a child process, and tries there requests that
a tokenizer may have died of.

The CPU time and memory of a child are limited for good. The worker compiles templates within the same limits and caches
them; nothing else of a request stays here. Its owner (`services.tokenizer.templates`) replaces it when it ends.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jinja2
import msgspec

from penstock.engine_core.images.picture import Picture
from penstock.engine_core.parsers.dialect import Dialect
from penstock.engine_core.text.controls import Controls
from penstock.engine_core.text.prompts import Prompter, PromptLimits
from penstock.engine_core.text.rendering import Rendered, Renderer
from penstock.engine_core.text.request import Request
from penstock.engine_core.text.template import DEFAULT, ChatTemplate, read_template
from penstock.engine_core.tokenizer.vocabulary import read_vocabulary
from penstock.protocol.errors import InvalidRequest
from penstock.protocol.messages import Detokenize, SubmitText, Tokenize
from penstock.services.supervisor.process import PARENT, follow_parent
from penstock.services.tokenizer.confinement import (
    MEMORY_CODES,
    OUT_OF_MEMORY,
    TIME_CODES,
    in_child,
    unlimit_memory,
)
from penstock.services.tokenizer.worker_protocol import Refusal, limit_memory, refusal, reply, requests

log = logging.getLogger(__name__)

PARAM = "chat_template"
TOO_MUCH = "template_too_complex"
MOST_SOURCE = 1 << 20  # bytes of cached sources; compiled they take about 30 times as much
TRIAL_SECONDS = 60.0
TRIAL_MEMORY = 16 << 30  # bytes
POISON = "condemned"
KILLER = "a tokenizer died while it had this request, and a process that did the same with it alone died too"


class TemplateSettings(msgspec.Struct, frozen=True):
    """What a template worker needs of the model, and the limits of one rendering."""

    folder: str  # of the model
    chat_template: str  # the file of --chat-template, or empty
    limits: PromptLimits
    names: dict[str, Any]  # of ChatTemplate
    dialect: Dialect
    controls: frozenset[str] | None  # control tokens that are escaped in contents; None: none are
    seconds: float  # of CPU
    memory: int  # bytes


class Render(msgspec.Struct, frozen=True, tag=True):
    """Render a chat by the request's own template."""

    request: SubmitText
    now: float  # unix seconds


class Trial(msgspec.Struct, frozen=True, tag=True):
    """Do what a tokenizer does with this call, to find out whether it kills the process."""

    call: SubmitText | Tokenize | Detokenize
    now: float  # unix seconds
    rendered: Rendered | None = None  # if the request has its own template
    pictures: tuple[Picture, ...] = ()  # its images, without pixels


class Rendering(msgspec.Struct, frozen=True, tag=True):
    """A rendered chat."""

    rendered: Rendered


class Survived(msgspec.Struct, frozen=True, tag=True):
    """A trial that killed no process."""


class Answer(msgspec.Struct, frozen=True):
    """The outcome of a job."""

    outcome: Rendering | Refusal | Survived
    remembered: int = 0  # bytes of the template sources that the worker has cached
    pid: int = 0
    ended: bool = False  # the child exceeded a limit or died


SETTINGS = msgspec.msgpack.Decoder(TemplateSettings)
JOB: msgspec.msgpack.Decoder[Render | Trial] = msgspec.msgpack.Decoder(Render | Trial)
ANSWER = msgspec.msgpack.Decoder(Answer)
Outcome = Rendering | Refusal | Survived
OUTCOME: msgspec.msgpack.Decoder[Outcome] = msgspec.msgpack.Decoder(Outcome)


def main(arguments: Sequence[str]) -> None:
    """PARENT: read the settings, then answer until the input ends."""
    (parent,) = arguments
    follow_parent({PARENT: parent})
    time.tzset()  # children cannot open the file of the time zone
    frames = requests()
    settings = next(frames, None)
    if settings is None:
        return
    worker = TemplateWorker(SETTINGS.decode(settings))
    for frame in frames:
        reply(msgspec.msgpack.encode(worker.answer(JOB.decode(frame))))


class TemplateWorker:
    """Runs jobs in child processes, and caches compiled templates."""

    def __init__(self, settings: TemplateSettings) -> None:
        self._settings = settings
        self._controls = None if settings.controls is None else Controls(settings.controls)
        self._cache: OrderedDict[str, ChatTemplate] = OrderedDict()
        self._bytes = 0
        self._trials: TrialTokenizer | None = None  # made for the first trial

    def answer(self, job: Render | Trial) -> Answer:
        """The outcome of one job, unless compiling its template ends this process."""
        return self._render(job) if isinstance(job, Render) else self._try(job)

    def _answer(self, outcome: Outcome, ended: bool = False) -> Answer:
        return Answer(outcome, self._bytes, os.getpid(), ended)

    def _try(self, trial: Trial) -> Answer:
        if self._trials is None:
            self._trials = TrialTokenizer(self._settings)
        outcome, ended = self._in_child(functools.partial(self._trials.run, trial), TRIAL_SECONDS, TRIAL_MEMORY)
        return self._answer(Refusal(KILLER, POISON) if ended else outcome, ended)

    def _render(self, job: Render) -> Answer:
        source = job.request.chat_template
        assert source is not None
        try:
            template = self._compiled(source)
        except InvalidRequest as error:
            return self._answer(refusal(error))
        settings = self._settings
        rendered = functools.partial(self._outcome, template, job)
        outcome, ended = self._in_child(rendered, settings.seconds, settings.memory)
        return self._answer(outcome, ended)

    def _compiled(self, source: str) -> ChatTemplate:
        """Raises InvalidRequest."""
        template = self._cache.get(source)
        if template is not None:
            self._cache.move_to_end(source)
            return template
        settings = self._settings
        limit_memory(settings.memory)
        signal.setitimer(signal.ITIMER_PROF, settings.seconds)
        try:
            template = ChatTemplate({DEFAULT: source}, settings.names, trusted=False)
        except (jinja2.TemplateSyntaxError, RecursionError) as error:
            message = f"chat_template is no jinja template: {str(error)[:200]}"
            raise InvalidRequest(message, param=PARAM, code="invalid_value") from None
        except MemoryError:
            os._exit(OUT_OF_MEMORY)  # this process's state cannot be trusted
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            unlimit_memory()
        self._cache[source] = template
        self._bytes += len(source.encode(errors="replace"))
        while self._bytes > MOST_SOURCE:
            oldest, _ = self._cache.popitem(last=False)
            self._bytes -= len(oldest.encode(errors="replace"))
        return template

    def _in_child(self, work: Callable[[], Outcome], seconds: float, memory: int) -> tuple[Outcome, bool]:
        """The outcome of `work` in a child process, and whether the child failed to complete it."""
        body, code = in_child(lambda: msgspec.msgpack.encode(work()), seconds, memory)
        if code == os.EX_OK:
            with contextlib.suppress(msgspec.DecodeError):
                return OUTCOME.decode(body), False
        return limit_passed(code, self._settings), True

    def _outcome(self, template: ChatTemplate, job: Render) -> Rendering | Refusal:
        try:
            found = Renderer(template, self._settings.dialect, self._controls).render(job.request, job.now)
        except InvalidRequest as error:
            return refusal(error)
        except MemoryError:
            raise
        except Exception as error:  # guard: design 7, one request's template
            return Refusal(f"chat_template cannot be rendered ({type(error).__name__})", "invalid_value", PARAM)
        return Rendering(msgspec.structs.replace(found, tools=None))  # the owner has them


class TrialTokenizer:
    """Does what a tokenizer does with a request before its first token."""

    def __init__(self, settings: TemplateSettings) -> None:
        folder = Path(settings.folder)
        self._vocabulary = read_vocabulary(folder)
        template = read_template(folder, settings.names, settings.chat_template)
        controls = None if settings.controls is None else Controls(settings.controls)
        self._prompter = Prompter(self._vocabulary, template, settings.limits, settings.dialect, controls)

    def run(self, trial: Trial) -> Survived:
        """Return if the process survives; an error would end only its request in a tokenizer, too."""
        try:
            match trial.call:
                case SubmitText() as text:
                    made = self._prompter.prepare(text, trial.now, trial.rendered, trial.pictures)
                    Request(0, text).start(self._vocabulary, made)
                case Tokenize() as call:
                    self._prompter.tokenize(call, trial.now, trial.pictures)
                case Detokenize() as call:
                    self._prompter.detokenize(call)
        except MemoryError:
            raise
        except Exception:  # guard: design 7, as the frontend's
            log.debug("trial_raised", exc_info=True)
        return Survived()


def limit_passed(code: int, settings: TemplateSettings) -> Refusal:
    """Why a rendering did not complete, by its process's exit code."""
    if code in TIME_CODES:
        return too_slow(settings.seconds)
    if code in MEMORY_CODES:
        return too_large(settings.memory)
    return Refusal("chat_template cannot be rendered", "invalid_value", PARAM)


def too_slow(seconds: float) -> Refusal:
    limit = f"{seconds:g} s (--template-timeout)"
    return Refusal(f"chat_template: rendering it takes more than {limit}", TOO_MUCH, PARAM)


def too_large(memory: int) -> Refusal:
    limit = f"{memory >> 20} MiB (--template-memory)"
    return Refusal(f"chat_template: rendering it takes more than {limit}", TOO_MUCH, PARAM)


if __name__ == "__main__":
    main(sys.argv[1:])
