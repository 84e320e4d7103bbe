"""Calls as a list of Python calls: [f(city="Rome"), g(days=[1, 2])], as Llama 3.2 and Llama 4 models write them.

The list is the whole output, perhaps between <|python_start|> and <|python_end|>, and names functions of the request;
anything else is text. A call goes out when it is complete, since only then its arguments can be written as JSON.
Source: Meta, "Llama 3.2: model cards and prompt formats"; Llama 4's of the same.
"""

from __future__ import annotations

import re
from collections.abc import Container

from penstock.engine_core.parsers.scanning import PYTHON_SIGNS, Reading, Scan, StreamParser, ValueEnd
from penstock.engine_core.parsers.values import keywords_json

OPENING, CLOSING = "<|python_start|>", "<|python_end|>"
NAME = re.compile(r"[A-Za-z_][\w.-]*")
LONGEST_NAME = 256
MOST_HELD = 1 << 16  # characters of a call


class PythonicParser(StreamParser):
    """Tool calls in Python's syntax. `names`: functions of the request."""

    __slots__ = ("_names",)

    def __init__(self, names: Container[str]) -> None:
        super().__init__()
        self._names = names

    def _read(self, scan: Scan) -> Reading[None]:
        before = yield from scan.lead()  # content unless a call follows
        before += yield from scan.mark((OPENING,))
        before += yield from scan.lead()
        if scan.text.startswith("["):
            before = yield from self._read_list(scan, before)
        scan.tell(before)
        yield from scan.all()

    def _read_list(self, scan: Scan, before: str) -> Reading[str]:
        """Tell the calls of a list and drop what ends it. Returns what was taken behind the last one and is content."""
        while True:
            before += scan.take(1)  # the bracket, or a comma
            before += yield from scan.lead()
            if not (yield from self._read_call(scan)):
                return before
            before = yield from scan.lead()
            if not scan.text.startswith(","):
                break
        if not scan.text.startswith("]"):
            return before if scan.text else ""
        scan.take(1)
        before = yield from scan.lead()
        closed = yield from scan.mark((CLOSING,))
        if scan.may_be((CLOSING,)):
            scan.text = ""
        return "" if closed or not scan.text else before

    def _read_call(self, scan: Scan) -> Reading[bool]:
        """Whether a call of a function of the request comes next, which is told."""
        while (at := scan.text.find("(", 0, LONGEST_NAME)) < 0:
            begun = len(scan.text) < LONGEST_NAME and NAME.fullmatch(scan.text)
            if not begun or not (yield from scan.more()):
                return False
        name, end, known = scan.text[:at], ValueEnd(PYTHON_SIGNS), at
        if not NAME.fullmatch(name) or name not in self._names:
            return False
        while (size := end.find(scan.text[known : at + MOST_HELD])) < 0:
            known = len(scan.text)
            if known >= at + MOST_HELD or not (yield from scan.more()):
                return False
        arguments = keywords_json(scan.text[at + 1 : known + size - 1])
        if arguments is not None:
            scan.take(known + size)
            scan.tell_call(name, arguments)
        return arguments is not None
