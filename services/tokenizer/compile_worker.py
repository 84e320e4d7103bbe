"""A compile worker: a process that compiles one grammar at a time, so that a malicious one harms no other request.

It limits its CPU time with a timer whose signal ends the process, its memory with its address space, and its stack with
a thread whose stack is smaller than any on which the automaton runs later. `grammar_compiler` replaces it when it ends.
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
MOST_REMEMBERED = 32 << 20  # bytes that compilations may leave in caches
BLOCK = 64  # average bytes of Python's small objects, measured on trees of patterns


USUAL = Grammar(
    kind="json_schema",
    source='{"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "array", "items": {"enum": [1]}}, '
           '"c": {"type": "integer"}}, "required": ["a", "c"], "additionalProperties": false}',
)  # fmt: skip
GRAMMAR = msgspec.msgpack.Decoder(Grammar)


def main(arguments: Sequence[str]) -> None:
    """FOLDER PARENT SECONDS MEMORY: report that the model's tokens are read, then answer until the input ends."""
    folder, parent, seconds, memory = arguments
    follow_parent({PARENT: parent})
    path = Path(folder)
    tokens = read_tokens(path, read_vocabulary(path))
    threading.stack_size(STACK)
    outcome(USUAL, tokens)  # fills caches and imports modules that the first compilation would otherwise
    caches = CacheLimit()
    for frame in requests():
        reply(msgspec.msgpack.encode(bounded(frame, tokens, float(seconds), int(memory))))
        caches.trim()


class CacheLimit:
    """Bounds what compilations leave in caches for the next ones; each may add as much as one compilation may use."""

    def __init__(self) -> None:
        self._least = memory_used()

    def trim(self) -> None:
        """Clear the caches if they are too large. Called between two compilations."""
        if memory_used() - self._least > MOST_REMEMBERED:
            automata.forget()
            self._least = memory_used()  # the rest is not in caches


def memory_used() -> int:
    """About the bytes that this process has allocated: by the C library, and by Python for small objects."""
    return allocated() + sys.getallocatedblocks() * BLOCK


def bounded(frame: bytes, tokens: GrammarTokens | None, seconds: float, memory: int) -> Done | Refusal:
    """The outcome of one compilation, unless a limit ends this process first: seconds of CPU, and bytes beyond what
    this process has now."""
    limit_memory(memory)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    outcomes: list[Done | Refusal] = []
    thread = threading.Thread(target=lambda: outcomes.append(outcome(GRAMMAR.decode(frame), tokens)))
    thread.start()
    thread.join()
    signal.setitimer(signal.ITIMER_PROF, 0)
    return outcomes[0]


def outcome(grammar: Grammar, tokens: GrammarTokens | None) -> Done | Refusal:
    """The compiled grammar, or why it is refused."""
    if tokens is None:
        return Refusal("this model names no token that ends an output, so none can be structured", "unsupported")
    try:
        found = compile_grammar(grammar, tokens, allocated)
    except InvalidRequest as error:
        return Refusal(error.message, error.code)
    except MemoryError:
        os._exit(os.EX_UNAVAILABLE)  # read as the memory limit; this process's state cannot be trusted
    except Exception as error:  # guard: design 7, one request's grammar
        return Refusal(f"it cannot be compiled ({type(error).__name__})", "invalid_grammar")
    return Done(found.source, found.approximations, found.seconds, found.memory, found.unique)


if __name__ == "__main__":
    main(sys.argv[1:])
