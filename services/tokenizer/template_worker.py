"""A template worker: renders chats by requests' own templates, each in a child process, and tries there requests that
a tokenizer may have died of.

The CPU time and memory of a child are limited for good, and nothing of a request stays here. Its owner
(`services.tokenizer.templates`) replaces it when it ends.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import time
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
from penstock.services.tokenizer.confinement import in_child, limit_passed
from penstock.services.tokenizer.worker_protocol import Limits, Refusal, refusal, reply, requests

log = logging.getLogger(__name__)

PARAM = "chat_template"
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

    @property
    def of_rendering(self) -> Limits:
        work = f"{PARAM}: rendering it"
        return Limits(self.seconds, self.memory, work, "--template", "template_too_complex", PARAM)


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
    """Runs jobs in child processes."""

    def __init__(self, settings: TemplateSettings) -> None:
        self._settings = settings
        self._controls = None if settings.controls is None else Controls(settings.controls)
        self._trials: TrialTokenizer | None = None  # made for the first trial
        for source in ("{{ 'a' }}", "{% if %}"):  # jinja imports what children, who open no files, could not
            with contextlib.suppress(jinja2.TemplateSyntaxError):
                ChatTemplate({DEFAULT: source}, {}, trusted=False)

    def answer(self, job: Render | Trial) -> Answer:
        """The outcome of one job."""
        settings = self._settings
        if isinstance(job, Render):
            return self._in_child(functools.partial(self._render, job), settings.seconds, settings.memory)
        if self._trials is None:
            self._trials = TrialTokenizer(settings)
        found = self._in_child(functools.partial(self._trials.run, job), TRIAL_SECONDS, TRIAL_MEMORY)
        return Answer(Refusal(KILLER, POISON), ended=True) if found.ended else found

    def _in_child(self, work: Callable[[], Outcome], seconds: float, memory: int) -> Answer:
        """The outcome of `work` in a child process, or why the child failed to complete it."""
        body, code = in_child(lambda: msgspec.msgpack.encode(work()), seconds, memory)
        if code == os.EX_OK:
            with contextlib.suppress(msgspec.DecodeError):
                return Answer(OUTCOME.decode(body))
        failed = Refusal("chat_template cannot be rendered", "invalid_value", PARAM)
        return Answer(limit_passed(code, self._settings.of_rendering) or failed, ended=True)

    def _render(self, job: Render) -> Rendering | Refusal:
        source = job.request.chat_template
        assert source is not None
        try:
            template = ChatTemplate({DEFAULT: source}, self._settings.names, trusted=False)
            found = Renderer(template, self._settings.dialect, self._controls).render(job.request, job.now)
        except InvalidRequest as error:
            return refusal(error)
        except (jinja2.TemplateSyntaxError, RecursionError) as error:
            return Refusal(f"chat_template is no jinja template: {str(error)[:200]}", "invalid_value", PARAM)
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


if __name__ == "__main__":
    main(sys.argv[1:])
