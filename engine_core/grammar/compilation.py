"""Compile a grammar and try it, within limits on size here and on time and memory in the compile worker.

The scheduler builds its own automaton from the same source at the same cost. So a grammar that would hang, abort or
grow without end does so here first, where no other request waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from penstock.engine_core.grammar.guide import first_line
from penstock.engine_core.grammar.regexes import MOST_FORCED
from penstock.engine_core.grammar.sources import source_of
from penstock.engine_core.grammar.tokens import GrammarTokens
from penstock.protocol.errors import InvalidRequest
from penstock.protocol.messages import Grammar

OURS = "at 1(8): failed to compile JSON schema: "  # before the library's words on a schema: its place in our Lark
STEPS = 24  # of the walk that tries the automaton
STRIDE = 7919  # from the place of one step's token in its mask to that of the next
SLOW = 0.1  # seconds of CPU; an automaton that takes as long for one step would keep a whole batch waiting

Mask = npt.NDArray[np.uint32]  # a bit for each token


def nothing() -> int:
    """Bytes allocated, where they cannot be told."""
    return 0


class Compiled(msgspec.Struct, frozen=True):
    """A grammar that compiled and walked within the limits."""

    source: str  # serialised for llguidance
    approximations: tuple[str, ...]
    seconds: float  # of CPU, to compile
    memory: int = 0  # bytes that were allocated meanwhile and not freed, as far as `allocated` told
    unique: bytes = b""  # as `Automaton.unique`


def compile_grammar(grammar: Grammar, tokens: GrammarTokens, allocated: Callable[[], int] = nothing) -> Compiled:
    """`allocated` tells the bytes that this process holds: the automaton library doesn't tell what an automaton takes.

    Raises InvalidRequest, its `param` the grammar's own, saying why the grammar cannot be followed.
    """
    began = time.thread_time()
    try:
        source = source_of(grammar, tokens)
        before = allocated()
        matcher = tokens.matcher(source.text)
        sound(matcher)
        compiled = time.thread_time() - began
        walk(matcher, tokens)
        memory = max(0, allocated() - before)
        return Compiled(source.text, source.approximations, compiled, memory, source.unique)
    except InvalidRequest as error:
        error.param = grammar.param
        raise
    except RecursionError:
        raise InvalidRequest("it is nested too deep", param=grammar.param, code="invalid_grammar") from None


def walk(matcher: LLMatcher, tokens: GrammarTokens) -> None:
    """Walk along allowed tokens. Raises InvalidRequest where that fails, or a step takes too long."""
    for step in range(STEPS):
        began = time.thread_time()
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint32)
        sound(matcher)
        if len(matcher.compute_ff_tokens()) > MOST_FORCED:
            raise InvalidRequest(f"more than {MOST_FORCED} tokens follow without a choice", code="grammar_too_complex")
        taken = time.thread_time() - began
        if step and taken > SLOW:  # the first one fills tables that later ones share
            raise InvalidRequest(
                f"following it takes {taken * 1000:.0f} ms a token; the limit is {SLOW * 1000:.0f} ms",
                code="grammar_too_complex",
            )
        if matcher.is_stopped():
            break
        token = chosen(mask, step * STRIDE, tokens)
        if token is None:
            break
        matcher.consume_token(token)
        sound(matcher)


def chosen(mask: Mask, turn: int, tokens: GrammarTokens) -> int | None:
    """One of the tokens that a mask allows, another for each turn; None where it allows ends alone.

    Of one word of the mask: to list all allowed tokens takes longer than to make the mask.
    """
    words = np.flatnonzero(mask)
    for place in range(min(len(words), len(tokens.eos) + 1)):
        word = int(words[(turn + place) % len(words)])
        bits = int(mask[word])
        going = [32 * word + bit for bit in range(32) if bits >> bit & 1 and 32 * word + bit not in tokens.eos]
        if going:
            return going[turn % len(going)]
    return None


def sound(matcher: LLMatcher) -> None:
    """Raise InvalidRequest if the matcher is in error."""
    if matcher.is_error():
        raise InvalidRequest(f"it cannot be compiled: {reason(matcher)}", code="invalid_grammar")


def reason(matcher: LLMatcher) -> str:
    """The library's words, in one line and without what it says of its own state."""
    text = matcher.get_error()
    lines = [line.strip() for line in text.splitlines()]
    told = [line for line in lines if line and not line.startswith(("<", "0:", "|")) and set(line) - set("^ ")]
    detail = next((line for line in told[1:] if line.startswith("error:")), "")
    head = first_line(text.removeprefix(OURS))
    return f"{head} ({detail.removeprefix('error: ')})" if detail else head
