"""The code blocks of a page, and how each is run or checked.

A page is one session: its Python blocks are one program, its console blocks one shell, both in one empty folder. What
Python prints is what the `text` block behind it shows; what a command prints stands below it. A comment right above a
block makes an exception: `<!-- not run: WHY -->` has it checked alone, `<!-- output varies: WHY -->` has it run alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

FENCE = re.compile(
    r"^(?:<!-- (?P<mark>not run|output varies): (?P<why>[^\n]+) -->\n)?"
    r"(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
HERE = re.compile(r"<<-?\s*(['\"]?)(\w+)\1")


@dataclass(frozen=True)
class Block:
    """One fenced block: its line on the page, and the exception that stands above it."""

    line: int
    language: str
    text: str
    mark: str
    why: str
    shown: str | None = None  # of Python: the block of output behind it

    @property
    def runs(self) -> bool:
        return self.mark != "not run"

    @property
    def varies(self) -> bool:
        return self.mark == "output varies"


@dataclass(frozen=True)
class Command:
    """One command of a console block, and what the page shows of its output."""

    line: int
    text: str
    shown: str


def blocks(page: str) -> list[Block]:
    """Every block of a page, in order; output behind Python belongs to it."""
    found: list[Block] = []
    for match in FENCE.finditer(page):
        line = page.count("\n", 0, match.start("language")) + 1
        text = re.sub(rf"^{match['indent']}", "", match["text"], flags=re.MULTILINE)
        last = found[-1] if found else None
        if match["language"] == "text" and not match["mark"] and last and last.language == "python" and not last.shown:
            found[-1] = Block(last.line, last.language, last.text, last.mark, last.why, text)
            continue
        found.append(Block(line, match["language"], text, match["mark"] or "", match["why"] or ""))
    return found


def commands(block: Block) -> list[Command]:
    """The commands of a console block: `$ ` begins one, a backslash or a here-document continues it."""
    found: list[Command] = []
    lines = list(enumerate(block.text.split("\n")[:-1], block.line + 1))
    while lines:
        number, line = lines.pop(0)
        assert line.startswith("$ "), f"line {number}: {line!r} is output of no command"
        words = [line[2:]]
        while words[-1].endswith("\\"):
            words.append(lines.pop(0)[1])
        for _, end in HERE.findall("\n".join(words)):
            while words[-1].strip() != end:
                words.append(lines.pop(0)[1])
        shown = []
        while lines and not lines[0][1].startswith("$ "):
            shown.append(lines.pop(0)[1] + "\n")
        found.append(Command(number, "\n".join(words), "".join(shown)))
    return found
