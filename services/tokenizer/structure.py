"""Structured output on its way through the tokenizer process: a prompt that is made, and the automaton it goes with."""

from __future__ import annotations

import logging
from typing import Protocol

import msgspec

from engine_core.text.frontend import failure
from engine_core.text.prompts import Prepared
from engine_core.text.request import named
from protocol.errors import Overloaded, RequestError
from protocol.messages import Automaton, Grammar, Rejected, SubmitText
from services.tokenizer.orders import Done

log = logging.getLogger(__name__)


class GrammarCompiler(Protocol):
    """`services.tokenizer.compiler.Compiler` and test doubles."""

    async def compile(self, grammar: Grammar) -> Done: ...


class Structure:
    """Completes prompts with automata. `waiting` requests are at it."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self.waiting = 0

    async def complete(self, text: SubmitText, made: Prepared) -> Prepared | Rejected:
        """The prompt with the automaton of the answer's grammar, or why there is none."""
        assert made.grammar is not None
        self.waiting += 1
        try:
            found = await self._compiler.compile(made.grammar)
        except RequestError as error:
            return Rejected(
                id=text.id, status=error.status, message=error.message, param=error.param, code=error.code,
                retry_after=error.retry_after if isinstance(error, Overloaded) else None,
            )  # fmt: skip
        except Exception:  # guard: design 7, one request ends and its neighbours go on
            log.exception("grammar_failed", extra=named(text.id, text.trace))
            return failure(text.id)
        finally:
            self.waiting -= 1
        automaton = Automaton(source=found.source, after=made.after)
        request = msgspec.structs.replace(made.request, automaton=automaton)
        return msgspec.structs.replace(made, request=request, approximations=found.approximations)
