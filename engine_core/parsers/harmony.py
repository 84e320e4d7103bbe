"""Harmony, in which gpt-oss writes: messages one behind another, each on a channel and perhaps to somebody.

    <|channel|>analysis<|message|>They ask for the weather.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Rome"}<|call|>

The prompt has written the first <|start|>assistant, and a token that ends the output takes the place of the last mark.
Analysis is reasoning, and so is what goes to tools of the model's own from there; what goes to a function of the
request is a call; everything else is content. The recipient may stand before the channel as well.
Source: OpenAI, "harmony response format".
"""

from __future__ import annotations

import re
from collections.abc import Container

from penstock.engine_core.parsers.scanning import Reading, Scan, StreamParser, ValueEnd
from penstock.protocol.messages import PieceKind

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)
HEADS = (START, CHANNEL, MESSAGE, CONSTRAIN, "to=", " to=")  # what a message begins with, if not with its text
LONGEST_HEADER = 512  # characters
TO_FUNCTION = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
ANALYSIS = re.compile(r"<\|channel\|>\s*analysis\b")


class HarmonyParser(StreamParser):
    """Messages of one output. `names`: functions of the request, None where it has none; `reasons`: whether analysis is
    told as reasoning, else it is content; `inside`: the output begins within it."""

    __slots__ = ("_end", "_inside", "_joint", "_kind", "_names", "_reasoning", "_told")

    def __init__(self, names: Container[str] | None, *, reasons: bool, inside: bool = False) -> None:
        super().__init__()
        self._names = names
        self._inside = inside
        self._reasoning = PieceKind.REASONING if reasons else PieceKind.CONTENT
        self._kind = self._reasoning if inside else PieceKind.CONTENT
        self.thinking = inside and reasons
        self._told: set[int] = set()  # kinds of earlier messages
        self._joint = ""  # what parts this message from an earlier one of its kind
        self._end = ValueEnd()  # of a call's arguments

    def _read(self, scan: Scan) -> Reading[None]:
        marker = (yield from self._read_body(scan)) if self._inside else None
        while marker != "":
            scan.text = (START if marker == START else "") + scan.text
            while not scan.text.startswith(HEADS) and any(each.startswith(scan.text) for each in HEADS):
                if not (yield from scan.more()):
                    self._tell("" if marker else scan.text)  # behind a message it is half a mark
                    return
            if not scan.text.startswith(HEADS):
                self._enter(PieceKind.CONTENT)
            elif not (yield from self._read_header(scan)):
                return
            marker = yield from self._read_body(scan)

    def _read_header(self, scan: Scan) -> Reading[bool]:
        """Whether a message follows. A header that breaks off is no text."""
        while (at := scan.text.find(MESSAGE, 0, LONGEST_HEADER)) < 0:
            if len(scan.text) >= LONGEST_HEADER:
                self._enter(PieceKind.CONTENT)
                self._tell(scan.take(LONGEST_HEADER))
                return True
            if not (yield from scan.more()):
                return False
        header = scan.take(at + len(MESSAGE))[:at].rpartition(START)[2]
        to = TO_FUNCTION.search(header)
        self._enter(self._reasoning if ANALYSIS.search(header) else PieceKind.CONTENT)
        if to is None or self._names is None or not ("to=functions." in header or to[1] in self._names):
            return True
        blanks = yield from scan.lead()
        if not scan.text.startswith("{"):  # it goes where its channel says
            scan.text = blanks + scan.text
            return True
        scan.tell_call(to[1])
        self._kind, self._joint, self._end, self._scan.open = PieceKind.ARGUMENTS, "", ValueEnd(), True
        return True

    def _enter(self, kind: PieceKind) -> None:
        self._kind, self._joint = kind, "\n" if kind in self._told else ""

    def _read_body(self, scan: Scan) -> Reading[str]:
        """The mark that ends the message; empty: the output does."""
        self.thinking = self._kind == PieceKind.REASONING
        marker = yield from scan.until((START, END, CALL, RETURN), self._tell)
        if not marker:
            over = self._kind == PieceKind.ARGUMENTS and not self._scan.open  # half a mark, or blanks
            self._tell("" if over else scan.text)
            return ""
        if self._kind != PieceKind.ARGUMENTS:
            self._tell(scan.blanks)
        self._scan.open = self.thinking = False
        return marker

    def _tell(self, text: str) -> None:
        if text:
            if self._kind == PieceKind.ARGUMENTS and self._scan.open and self._end.find(text) >= 0:
                self._scan.open = False
            self._scan.tell(self._joint + text, self._kind)
            self._told.add(self._kind)
            self._joint = ""
