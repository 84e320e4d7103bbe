"""Calls as Llama 3 models write them: the output is {"name": ..., "parameters": {...}}, several with ";" between them.

A call stands at the beginning of the output or behind <|python_tag|>. JSON there is a call only if it names a function
of the request: a model may answer in JSON as well. Source: Meta, "Llama 3.1: model cards and prompt formats".
"""

from __future__ import annotations

from collections.abc import Container

from penstock.engine_core.parsers.call_object import read_object
from penstock.engine_core.parsers.scanning import BLANKS, Reading, Scan, StreamParser

MARKER = "<|python_tag|>"
BETWEEN = BLANKS + ";"


class LlamaParser(StreamParser):
    """Tool calls of Llama 3 models. `names`: functions of the request."""

    __slots__ = ("_names",)

    def __init__(self, names: Container[str]) -> None:
        super().__init__()
        self._names = names

    def _read(self, scan: Scan) -> Reading[None]:
        before, called = "", False  # the marker with its blanks, content unless a call follows; whether a call has come
        while True:
            blanks = yield from scan.lead(BETWEEN if called else BLANKS)
            if not scan.text:
                scan.tell("" if called else before + blanks)
                return
            text: str | None = ""
            if scan.text.startswith("{"):
                text = yield from read_object(scan, self._names)
            if text is None:
                before, called = "", True
                continue
            if text or before:
                scan.tell(before + blanks + text)
            else:  # blanks may belong to a marker
                scan.text = blanks + scan.text
            if not (yield from scan.until((MARKER,))):
                scan.tell(scan.text)
                return
            before, called = scan.blanks + MARKER, False
