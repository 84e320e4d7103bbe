"""Text that is made from result files: blocks between markers, and figures in sentences.

A block is what stands between `<!-- figures: NAME -->` and `<!-- /figures -->`, each on a line of its own; it is
rendered as a whole. A sentence is prose whose figures are compared: a pattern in which `{}` stands for each figure, and
the values that belong there. Whoever owns a document declares both (benchmarks/readme_figures.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import msgspec

BLOCK = re.compile(r"(<!-- figures: ([\w-]+) -->\n).*?(\n<!-- /figures -->)", re.DOTALL)
FIGURE = r"([+-]?\d(?:[\d,]*\d)?(?:\.\d+)?)"
Blocks = Mapping[str, Callable[[], str]]


class Sentence(msgspec.Struct, frozen=True):
    """Words of a document with `{}` for each figure, and the figures as they should stand there.

    Any run of whitespace in the document matches a space, so that lines may be broken anywhere.
    """

    words: str
    figures: tuple[str, ...]

    @property
    def pattern(self) -> re.Pattern[str]:
        parts = [r"\s+".join(re.escape(word) for word in re.split(r"\s+", part)) for part in self.words.split("{}")]
        return re.compile(FIGURE.join(parts))


class Mistake(Exception):
    """A document and its declarations do not fit: a block or a sentence is unknown, missing or there twice."""


def rendered(text: str, blocks: Blocks, sentences: Sequence[Sentence]) -> str:
    """The document with every block and every figure as the results have it. Raises Mistake."""
    names = [match[2] for match in BLOCK.finditer(text)]
    if sorted(names) != sorted(blocks):
        raise Mistake(f"the document has the blocks {sorted(names)}, declared are {sorted(blocks)}")
    text = BLOCK.sub(lambda match: match[1] + blocks[match[2]]() + match[3], text)
    for sentence in sentences:
        text = replaced(text, sentence)
    return text


def replaced(text: str, sentence: Sentence) -> str:
    """The text with the sentence's figures in the only place where its words stand."""
    found = list(sentence.pattern.finditer(text))
    if len(found) != 1:
        raise Mistake(f"{len(found)} places read {sentence.words!r}")
    if found[0].re.groups != len(sentence.figures):
        raise Mistake(f"{len(sentence.figures)} figures for {sentence.words!r}")
    for group in range(len(sentence.figures), 0, -1):
        start, end = found[0].span(group)
        text = text[:start] + sentence.figures[group - 1] + text[end:]
    return text


def table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    head, *rest = ("| " + " | ".join(cells) + " |" for cells in (heads, *lines))
    return "\n".join([head, "|---" * len(heads) + "|", *rest])
