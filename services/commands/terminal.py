"""Questions from a terminal or a pipe, and answers as they come."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import TextIO

DIM, PLAIN = "\x1b[2m", "\x1b[0m"


class Screen:
    """Writes an answer piece by piece. Thoughts are dim on a terminal, and not part of a pipe's output."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._terminal = out.isatty()
        self._thinking = False
        self._last = "\n"

    def say(self, text: str) -> None:
        """A piece of the answer."""
        if self._thinking:
            self._thinking = False
            self._out.write(f"{PLAIN}\n")
        self._write(text)

    def think(self, text: str) -> None:
        """A piece of the reasoning before it."""
        if not self._terminal:
            return
        if not self._thinking:
            self._thinking = True
            self._out.write(DIM)
        self._write(text)

    def end(self) -> None:
        """The answer is over: the next line begins."""
        if self._thinking:
            self._thinking = False
            self._out.write(PLAIN)
        if self._last != "\n":
            self._write("\n")

    def _write(self, text: str) -> None:
        if text:
            self._last = text[-1]
            self._out.write(text)
            self._out.flush()


def lines(prompt: str, read: Callable[[str], str] = input) -> Iterator[str]:
    """What is typed, line by line; a line that ends with a backslash goes on. Ctrl-C drops the line, Ctrl-D ends."""
    while True:
        try:
            line = read(prompt)
            while line.endswith("\\"):
                line = line[:-1] + "\n" + read("… ")
        except KeyboardInterrupt:
            print(file=sys.stderr)
            continue
        except EOFError:
            return
        if line.strip():
            yield line


def piped(given: str | None, source: TextIO) -> str | None:
    """The one question of a command that is no conversation: --prompt, standard input if it is a pipe, or both."""
    text = "" if source.isatty() else source.read()
    parts = [part for part in (given, text.rstrip("\n")) if part]
    if not parts and source.isatty():
        return None
    return "\n\n".join(parts)
