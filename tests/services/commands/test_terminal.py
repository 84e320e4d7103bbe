"""What is read from a terminal and shown there; fields of the command line."""

from __future__ import annotations

import argparse
import io
from collections.abc import Callable

import pytest

from penstock.protocol.errors import ConfigError
from penstock.services.commands.chat import (
    DIM,
    PLAIN,
    Screen,
    add_request_arguments,
    lines,
    piped,
    request_fields,
)


class Stream(io.StringIO):
    """Text that says whether it is a terminal."""

    def __init__(self, text: str = "", *, terminal: bool = False) -> None:
        super().__init__(text)
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


def typing(*keys: str | type[BaseException]) -> Callable[[str], str]:
    waiting = list(keys)

    def read(prompt: str) -> str:
        del prompt
        key = waiting.pop(0)
        if isinstance(key, str):
            return key
        raise key

    return read


def test_an_answer_ends_with_one_line_break() -> None:
    for pieces, shown in (("a", "a\n"), ("a\n", "a\n"), ("", "")):
        out = Stream()
        screen = Screen(out)
        for piece in pieces:
            screen.say(piece)
        screen.end()
        assert out.getvalue() == shown


def test_thoughts_are_dim_on_a_terminal_and_silent_in_a_pipe() -> None:
    for terminal, shown in ((True, f"{DIM}hm{PLAIN}\nyes\n"), (False, "yes\n")):
        out = Stream(terminal=terminal)
        screen = Screen(out)
        screen.think("h")
        screen.think("m")
        screen.say("yes")
        screen.end()
        assert out.getvalue() == shown
    out = Stream(terminal=True)
    screen = Screen(out)
    screen.think("cut")
    screen.end()
    assert out.getvalue() == f"{DIM}cut{PLAIN}\n"


def test_lines_go_on_are_dropped_and_end() -> None:
    read = typing("one", "two \\", "more", KeyboardInterrupt, "   ", "three", EOFError)
    assert list(lines("> ", read)) == ["one", "two \nmore", "three"]


@pytest.mark.parametrize(
    ("given", "source", "found"),
    [
        (None, Stream("text\n"), "text"), ("ask", Stream("text\n"), "ask\n\ntext"), ("ask", Stream(""), "ask"),
        (None, Stream(""), ""), (None, Stream(terminal=True), None), ("ask", Stream(terminal=True), "ask"),
    ],
)  # fmt: skip
def test_what_is_piped_in(given: str | None, source: Stream, found: str | None) -> None:
    assert piped(given, source) == found


def test_fields() -> None:
    parser = argparse.ArgumentParser()
    add_request_arguments(parser)
    words = ["--temperature", "0.5", "--max-tokens", "7", "--set", "stop=END", "--set", 'logit_bias={"5": 1}']
    words += ["--set", "seed=3", "--set", "empty="]
    assert request_fields(parser.parse_args(words)) == {
        "temperature": 0.5, "max_tokens": 7, "stop": "END", "logit_bias": {"5": 1}, "seed": 3, "empty": "",
    }  # fmt: skip
    with pytest.raises(ConfigError):
        request_fields(parser.parse_args(["--set", "=1"]))
