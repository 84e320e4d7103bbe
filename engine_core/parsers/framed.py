"""Calls whose arguments are JSON, between markers, anywhere in the text.

A call is an object, {"name": ..., "arguments": {...}}, alone or in a list, or a name with its arguments:

    <tool_call>{"name": "f", "arguments": {}}</tool_call>       Hermes and Qwen; Granite 4 and ERNIE too
    <|tool_call|>[{"name": "f", "arguments": {}}]               Granite 3, Phi 4; behind other words Phi-4-mini, Hunyuan
    [TOOL_CALLS]f[ARGS]{}                                       Mistral, whose older models write a list
    <|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>     Kimi K2, several in a section
    <｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>       DeepSeek V3.1, the same

Sources: NousResearch, "Hermes Function Calling"; mistral-common, "Tool calling"; the chat templates of the others.
"""

from __future__ import annotations

import re

import msgspec

from penstock.engine_core.parsers.call_object import read_object
from penstock.engine_core.parsers.scanning import BLANKS, Reading, Scan, StreamParser

LONGEST_NAME = 256  # characters from the marker to the arguments


class Frame(msgspec.Struct, frozen=True):
    """What stands around calls."""

    markers: tuple[str, ...]  # each begins one
    closings: tuple[str, ...] = ()  # that may follow one, and are dropped
    head: re.Pattern[str] | None = None  # from the marker to the arguments, where a name stands before them: group 1


class FramedParser(StreamParser):
    """Tool calls between markers."""

    __slots__ = ("_frame",)

    def __init__(self, frame: Frame) -> None:
        super().__init__()
        self._frame = frame

    def _read(self, scan: Scan) -> Reading[None]:
        while marker := (yield from scan.until(self._frame.markers)):
            before = scan.blanks + marker  # content unless a call follows
            before += yield from scan.lead()
            if scan.text.startswith("["):
                called = yield from self._read_list(scan, before + scan.take(1))
            else:
                called = yield from self._read_call(scan, before)
            if called:
                yield from self._close(scan)
        scan.end()

    def _read_list(self, scan: Scan, before: str) -> Reading[bool]:
        """Whether it is one of calls up to its end."""
        while True:
            before += yield from scan.lead()
            if not scan.text.startswith("{"):
                scan.tell(before)
                return False
            if not (yield from self._read_call(scan, before)):
                return False
            before = yield from scan.lead()
            if scan.text[:1] not in (",", "]"):
                scan.tell("" if scan.over and not scan.text else before)
                return False
            before += scan.take(1)
            if before.endswith("]"):
                return True

    def _read_call(self, scan: Scan, before: str) -> Reading[bool]:
        """Whether a call follows; what is none is content."""
        if scan.text.startswith("{"):
            text = yield from read_object(scan)
            if text is not None:
                scan.tell(before + text)
            return text is None
        name = ""
        if self._frame.head is not None and scan.text[:1] not in (*BLANKS, "]", "}"):
            name = yield from self._read_name(scan, self._frame.head)
        if not name:
            scan.tell(before)
            return False
        scan.tell_call(name)
        yield from scan.arguments()
        return True

    def _read_name(self, scan: Scan, head: re.Pattern[str]) -> Reading[str]:
        """The name, up to the brace of its arguments, which must follow within LONGEST_NAME characters; empty where it
        does not: there may be a marker in what follows instead."""
        while (brace := scan.text.find("{", 0, LONGEST_NAME)) < 0:
            if len(scan.text) >= LONGEST_NAME or not (yield from scan.more()):
                return ""
        found = head.match(scan.text[: brace + 1])
        if found is None or found.end() != brace:
            return ""
        scan.take(brace)
        return found[1]

    def _close(self, scan: Scan) -> Reading[None]:
        """Drop closing markers; anything else is text, perhaps with the next marker."""
        while True:
            blanks = yield from scan.lead()
            if not (yield from scan.mark(self._frame.closings)):
                break
        scan.text = "" if scan.may_be(self._frame.closings) or not scan.text else blanks + scan.text
        scan.trailing = True
