"""What of a request workers do for the tokenizer process: its own template rendered, its grammar compiled."""

from __future__ import annotations

import logging
from typing import Protocol

import msgspec

from penstock.engine_core.text.frontend import failure
from penstock.engine_core.text.prompts import Prepared
from penstock.engine_core.text.rendering import Rendered
from penstock.engine_core.text.request import named
from penstock.protocol.errors import Overloaded, RequestError
from penstock.protocol.messages import Automaton, Detokenize, Grammar, Rejected, SubmitText, Tokenize
from penstock.services.tokenizer.worker_protocol import Done

log = logging.getLogger(__name__)


class GrammarCompiler(Protocol):
    """`services.tokenizer.grammar_compiler.Compiler` and test doubles."""

    async def compile(self, grammar: Grammar) -> Done: ...


class TemplateRenderer(Protocol):
    """`services.tokenizer.templates.Templates` and test doubles."""

    async def render(self, request: SubmitText, now: float) -> Rendered: ...

    async def fatal(
        self, question: SubmitText | Tokenize | Detokenize, now: float, rendered: Rendered | None
    ) -> str: ...


class Structure:
    """Has chats rendered by templates of their own, and completes prompts with automata. `waiting` requests are at
    that."""

    def __init__(self, compiler: GrammarCompiler, templates: TemplateRenderer) -> None:
        self._compiler = compiler
        self._templates = templates
        self.waiting = 0

    async def render(self, text: SubmitText, now: float) -> Rendered | Rejected:
        """The chat's text by the request's own template, or why there is none."""
        try:
            return await self._templates.render(text, now)
        except RequestError as error:
            return rejected(text, error)
        except Exception:  # guard: design 7, one request ends and its neighbours go on
            log.exception("template_failed", extra=named(text.id, text.trace))
            return failure(text.id)

    async def refusal(
        self, question: SubmitText | Tokenize | Detokenize, now: float, rendered: Rendered | None
    ) -> Rejected | None:
        """Of what a tokenizer may have died of: its end, where it kills another process too."""
        message = await self._templates.fatal(question, now, rendered)
        return Rejected(id=question.id, status=500, message=message, code="condemned") if message else None

    async def complete(self, text: SubmitText, made: Prepared) -> Prepared | Rejected:
        """The prompt with the automaton of the answer's grammar, or why there is none."""
        assert made.grammar is not None
        self.waiting += 1
        try:
            found = await self._compiler.compile(made.grammar)
        except RequestError as error:
            return rejected(text, error)
        except Exception:  # guard: design 7, one request ends and its neighbours go on
            log.exception("grammar_failed", extra=named(text.id, text.trace))
            return failure(text.id)
        finally:
            self.waiting -= 1
        automaton = Automaton(source=found.source, after=made.after, memory=found.memory)
        request = msgspec.structs.replace(made.request, automaton=automaton)
        return msgspec.structs.replace(made, request=request, approximations=found.approximations)


def rejected(text: SubmitText, error: RequestError) -> Rejected:
    return Rejected(
        id=text.id, status=error.status, message=error.message, param=error.param, code=error.code,
        retry_after=error.retry_after if isinstance(error, Overloaded) else None,
    )  # fmt: skip
