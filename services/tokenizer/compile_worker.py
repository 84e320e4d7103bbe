"""A compile worker: a process that compiles grammars one after the other, so that a bomb harms no other request.

It limits itself: CPU seconds by a timer whose signal ends the process, memory by its address space, the stack by a
thread smaller than any that runs the same automaton later. Its owner (`grammar_compiler`) replaces it when it ends.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec

from penstock.engine_core.grammar import automata
from penstock.engine_core.grammar.compilation import compile_grammar
from penstock.engine_core.grammar.tokens import GrammarTokens, read_tokens
from penstock.engine_core.tokenizer.vocabulary import read_vocabulary
from penstock.protocol.errors import InvalidRequest
from penstock.protocol.messages import Grammar
from penstock.services.supervisor.process import PARENT, follow_parent
from penstock.services.tokenizer.worker_protocol import Done, Refusal, allocated, limit_memory, reply, requests

STACK = 1 << 20  # bytes; the scheduler's threads have more
MOST_REMEMBERED = 32 << 20  # bytes that compilations may leave behind
BLOCK = 64  # bytes of one of Python's small objects; measured on trees of patterns


class Bounds(msgspec.Struct, frozen=True):
    """What one compilation may use."""

    seconds: float  # of CPU
    memory: int  # bytes beyond what the worker has when it begins


USUAL = Grammar(
    kind="json_schema",
    source='{"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "array", "items": {"enum": [1]}}, '
           '"c": {"type": "integer"}}, "required": ["a", "c"], "additionalProperties": false}',
)  # fmt: skip
GRAMMAR = msgspec.msgpack.Decoder(Grammar)


def main(arguments: Sequence[str]) -> None:
    """FOLDER PARENT SECONDS MEMORY: tell that the model's tokens are read, then answer until the input ends."""
    folder, parent, seconds, memory = arguments
    follow_parent(signal.SIGKILL, {PARENT: parent})
    path = Path(folder)
    tokens = read_tokens(path, read_vocabulary(path))
    threading.stack_size(STACK)
    bounds = Bounds(float(seconds), int(memory))
    outcome(USUAL, tokens)  # tables that the first compilation would fill, and modules that it would import
    remembered = Remembered()
    for frame in requests():
        reply(msgspec.msgpack.encode(bounded(frame, tokens, bounds)))
        remembered.trim()


class Remembered:
    """Bounds what compilations leave behind for the next ones: each may add as much as one compilation may take."""

    def __init__(self) -> None:
        self._least = held()

    def trim(self) -> None:
        """Called between two compilations."""
        if held() - self._least > MOST_REMEMBERED:
            automata.forget()
            self._least = held()  # what stays is not for us to give up


def held() -> int:
    """Bytes that this process holds, about: the C library's, and Python's own of small objects."""
    return allocated() + sys.getallocatedblocks() * BLOCK


def bounded(frame: bytes, tokens: GrammarTokens | None, bounds: Bounds) -> Done | Refusal:
    """The outcome of one compilation, unless a limit ends this process first."""
    limit_memory(bounds.memory)
    signal.setitimer(signal.ITIMER_PROF, bounds.seconds)
    outcomes: list[Done | Refusal] = []
    thread = threading.Thread(target=lambda: outcomes.append(outcome(GRAMMAR.decode(frame), tokens)))
    thread.start()
    thread.join()
    signal.setitimer(signal.ITIMER_PROF, 0)
    return outcomes[0]


def outcome(grammar: Grammar, tokens: GrammarTokens | None) -> Done | Refusal:
    """What came of a grammar."""
    if tokens is None:
        return Refusal("this model names no token that ends an output, so none can be structured", "unsupported")
    try:
        found = compile_grammar(grammar, tokens, allocated)
    except InvalidRequest as error:
        return Refusal(error.message, error.code)
    except MemoryError:
        os._exit(os.EX_UNAVAILABLE)  # the owner reads it as the memory limit; what is left here cannot be trusted
    except Exception as error:  # guard: design 7, one request's grammar
        return Refusal(f"it cannot be compiled ({type(error).__name__})", "invalid_grammar")
    return Done(found.source, found.approximations, found.seconds, found.slowest, found.memory)


if __name__ == "__main__":
    main(sys.argv[1:])
