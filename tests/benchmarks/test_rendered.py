"""Blocks and figures of a document, made from results."""

from __future__ import annotations

import pytest

from benchmarks.rendered import Mistake, Sentence, rendered, table

TEXT = """Before.

<!-- figures: speed -->
old
<!-- /figures -->

It took 1,234.5 ms and
then -3 % more. 1,234.5 ms is no figure here.
"""


def test_a_block_and_a_sentence_are_rendered() -> None:
    sentence = Sentence("took {} ms and then {} % more.", ("7", "+12.5"))
    found = rendered(TEXT, {"speed": lambda: "| new |"}, [sentence])
    assert found == TEXT.replace("old", "| new |").replace("took 1,234.5", "took 7").replace("-3 %", "+12.5 %")
    assert rendered(found, {"speed": lambda: "| new |"}, [sentence]) == found


@pytest.mark.parametrize("blocks", [{}, {"other": str}, {"speed": str, "other": str}])
def test_blocks_of_document_and_declarations_are_the_same(blocks: dict[str, type[str]]) -> None:
    with pytest.raises(Mistake, match="blocks"):
        rendered(TEXT, blocks, [])


@pytest.mark.parametrize(
    ("words", "figures"), [("took {} s", ("1",)), ("{} ms", ("1",)), ("took {} ms", ("1", "2")), ("took {} ms", ())]
)
def test_a_sentence_stands_once_with_all_its_figures(words: str, figures: tuple[str, ...]) -> None:
    with pytest.raises(Mistake):
        rendered(TEXT, {"speed": str}, [Sentence(words, figures)])


def test_a_table_in_markdown() -> None:
    assert table(["a", "b"], [["1", "2"]]) == "| a | b |\n|---|---|\n| 1 | 2 |"
