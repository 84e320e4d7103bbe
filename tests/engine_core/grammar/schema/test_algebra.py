"""Terms and cells: the laws of the algebra, emptiness as a least fixed point, and cells.py's flat terms; with the
conjunction and complement of texts.py, series.py and records.py, by membership of sample values."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine_core.grammar.patterns import read
from penstock.engine_core.grammar.schema import records, rewrite, series, texts
from penstock.engine_core.grammar.schema.algebra import Algebra, CircularTerm, meet, others
from penstock.engine_core.grammar.schema.assertions import constant, constants
from penstock.engine_core.grammar.schema.bounds import MAX_STEPS, Allowance, check_size, children
from penstock.engine_core.grammar.schema.cells import (
    ANY,
    FULL,
    NEVER,
    Cell,
    Count,
    Every,
    Inverse,
    Layer,
    Null,
    Number,
    Other,
    Place,
    Record,
    Series,
    Some,
    Term,
    Text,
    Truth,
    Union,
    every,
    inverse,
    some,
)
from penstock.engine_core.grammar.schema.document import Document
from penstock.engine_core.grammar.schema.reading import Reader
from penstock.protocol.errors import UnsupportedSchema

INTEGER = Union((Number(whole=True),))
STRING = Union((Text(),))
NULL = Union((Null(),))


def algebra(schema: dict[str, Any] | None = None) -> tuple[Algebra, Document]:
    document = Document(schema or {})
    reader = Reader(document)
    return Algebra(reader, reader.path), document


def test_terms_are_flat() -> None:
    a, b = Place(1), Place(2)
    assert every() == ANY
    assert some() == NEVER
    assert every(a) == a == some(a)
    assert every(a, every(b, a)) == Every((a, b))
    assert some(a, some(b, a)) == Some((a, b))
    assert every(a, ANY) == a
    assert every(a, NEVER) == NEVER
    assert some(a, NEVER) == a
    assert some(a, ANY) == ANY
    assert inverse(inverse(a)) == a
    assert inverse(a) == Inverse(a)
    assert (inverse(ANY), inverse(NEVER)) == (NEVER, ANY)


def test_any_and_never() -> None:
    one, _ = algebra()
    assert one.cells(ANY) == FULL
    assert one.cells(NEVER) == ()
    assert one.empty(NEVER)
    assert not one.empty(ANY)


SAMPLES: tuple[Term, ...] = (
    INTEGER,
    STRING,
    NULL,
    Union((Truth((True,)),)),
    Union((Text(among=("a", "b")), Null())),
    Union((Text(shortest=2),)),
    Union((Series(items=INTEGER), Number())),
    Union((Record(required=("a",)),)),
    Union((Record((Layer((("a", INTEGER),), rest=NEVER),)),)),
)


@pytest.mark.parametrize("term", SAMPLES)
def test_a_term_and_its_inverse_are_apart(term: Term) -> None:
    one, _ = algebra()
    assert one.disjoint(term, inverse(term)) or any(isinstance(c, Series | Record) for c in one.cells(term))
    assert one.cells(inverse(term)) != ()
    assert one.covers(term, term)
    assert one.covers(ANY, term)
    assert one.covers(term, NEVER)


@pytest.mark.parametrize(("a", "b"), list(itertools.combinations(SAMPLES, 2)))
def test_conjunction_commutes_on_emptiness(a: Term, b: Term) -> None:
    one, _ = algebra()
    assert one.disjoint(a, b) is one.disjoint(b, a)


def test_cover() -> None:
    one, _ = algebra()
    assert one.covers(Union((Number(),)), INTEGER)
    assert not one.covers(INTEGER, Union((Number(),)))
    assert one.covers(STRING, Union((Text(among=("x",)),)))
    assert one.covers(some(STRING, NULL), NULL)


RECURSION: dict[str, tuple[Any, bool]] = {
    "a list without an end": ({"type": "object", "properties": {"n": {"$ref": "#"}}, "required": ["n"]}, True),
    "a list with an end": (
        {"type": "object", "properties": {"n": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["n"]},
        False,
    ),
    "an optional tail": ({"type": "object", "properties": {"n": {"$ref": "#"}}}, False),
    "arrays of arrays": ({"type": "array", "items": {"$ref": "#"}}, False),
    "arrays of arrays that are not empty": ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, True),
    "mutual": (
        {
            "type": "array",
            "prefixItems": [{"type": "object", "properties": {"b": {"$ref": "#"}}, "required": ["b"]}],
            "minItems": 1,
        },
        True,
    ),
    "through a conjunction": (
        {"allOf": [{"type": "object", "required": ["n"]}, {"properties": {"n": {"$ref": "#"}}}]},
        True,
    ),
    "a conflict deep inside": (
        {"type": "object", "properties": {"a": {"allOf": [{"type": "string"}, {"type": "null"}]}}, "required": ["a"]},
        True,
    ),
}


@pytest.mark.parametrize("name", list(RECURSION))
def test_emptiness_is_a_least_fixed_point(name: str) -> None:
    schema, wanted = RECURSION[name]
    one, document = algebra(schema)
    root = Place(document.root)
    assert one.empty(root) is wanted
    assert one.empty(root) is wanted


def test_a_circle_without_a_level_is_told() -> None:
    one, document = algebra({"allOf": [{"$ref": "#"}]})
    with pytest.raises(CircularTerm):
        one.cells(Place(document.root))
    assert not one.empty(Place(document.root))


def test_steps_are_bounded() -> None:
    allowance = Allowance()
    allowance.spend(MAX_STEPS)
    with pytest.raises(UnsupportedSchema, match="alternatives"):
        allowance.spend()


def test_sizes_are_bounded() -> None:
    assert children({"a": 1}) == [1]
    assert children([1, 2]) == [1, 2]
    assert children("ab") == []
    check_size({"a": [1] * 1000})
    with pytest.raises(UnsupportedSchema, match="values"):
        check_size([[0] * 1000] * 300)


def text_holds(cell: Text, text: str) -> bool:
    found = texts.narrowed(texts.intersect(cell, Text(among=(text,))) or Text(among=()))
    return found.among == (text,)


WORDS = ("", "a", "b", "ab", "ba", "aab", "abc", "c")
TEXT_CELLS = st.builds(
    Text,
    st.integers(0, 2),
    st.one_of(st.none(), st.integers(0, 3)),
    st.lists(st.sampled_from([read("^a"), read("b$")]), max_size=2).map(tuple),
    st.lists(st.sampled_from([read("^ab?$"), read("c")]), max_size=1).map(tuple),
    st.just(()),
    st.just(()),
    st.one_of(st.none(), st.lists(st.sampled_from(WORDS), max_size=4, unique=True).map(tuple)),
    st.lists(st.sampled_from(WORDS), max_size=2, unique=True).map(tuple),
)


@settings(max_examples=150, derandomize=True, deadline=None)
@given(TEXT_CELLS, TEXT_CELLS)
def test_texts(a: Text, b: Text) -> None:
    both = texts.intersect(a, b)
    rest = texts.complement(a)
    for word in WORDS:
        assert (both is not None and text_holds(both, word)) is (text_holds(a, word) and text_holds(b, word)), word
        assert any(text_holds(one, word) for one in rest) is not text_holds(a, word), word
    if texts.empty(a):
        assert not any(text_holds(a, word) for word in WORDS)


def test_formats_apart() -> None:
    assert texts.intersect(Text(formats=("date",)), Text(formats=("date-time",))) is None
    assert texts.intersect(Text(formats=("ipv4",)), Text(formats=("hostname",))) is not None
    assert texts.intersect(Text(formats=("date",)), Text(not_formats=("date",))) is None


def test_texts_are_written() -> None:
    assert texts.write(Text()) == ({"type": "string"}, "")
    assert texts.write(Text(1, 3, (read("^a"),))) == (
        {"type": "string", "minLength": 1, "maxLength": 3, "pattern": "^a"},
        "",
    )
    two, trouble = texts.write(Text(patterns=(read("^a"), read("b$"))))
    assert (two["pattern"], two["allOf"], trouble) == ("^a", [{"type": "string", "pattern": "b$"}], "")
    assert texts.write(Text(among=("x", "y")))[0] == {"enum": ["x", "y"]}
    assert texts.write(Text(longest=1, excluded=("abc",)))[0] == {"type": "string", "maxLength": 1}
    assert texts.write(Text(not_formats=("date",)))[1].startswith("not: ")
    assert texts.write(Text(patterns=(read("a(?=b)"),)))[1].startswith("pattern: ")
    assert texts.write(Text(excluded=("x" * 9000,)))[1].startswith("not: ")


def test_series() -> None:
    a = Series((INTEGER,), STRING, 1, 5)
    b = Series((ANY, NULL), ANY, 0, 3, evaluated=2)
    both = series.intersect(a, b)
    assert both == Series((INTEGER, every(STRING, NULL)), STRING, 1, 3, evaluated=2)
    assert series.item(a, 0) == INTEGER
    assert series.item(a, 4) == STRING
    assert series.intersect(Series(fewest=3), Series(most=2)) is None
    assert series.shortened(Series((INTEGER, NEVER, NULL))).most == 1
    assert series.shortened(Series((INTEGER,), NEVER)).most == 1


def test_the_complement_of_series() -> None:
    rest = series.complement(Series((INTEGER,), ANY, 2, 4))
    assert rest == [Series(most=1), Series(fewest=5), Series((inverse(INTEGER),), fewest=1)]
    assert series.complement(Series(items=INTEGER)) == [Series(counts=(Count(inverse(INTEGER)),))]
    assert series.complement(Series(counts=(Count(NULL, 2, 3),))) == [
        Series(counts=(Count(NULL, 0, 1),)),
        Series(counts=(Count(NULL, 4),)),
    ]
    assert all(cell.obstacles for cell in series.complement(Series(unique=True)))


def test_records() -> None:
    closed = Record((Layer((("a", INTEGER),), rest=NEVER),), ("a",))
    open_ = Record((Layer((("b", STRING),), ((read("^x"), NULL),), ANY),), ("b",))
    assert records.known_names(Record((*closed.layers, *open_.layers), ("z", "a"))) == ("a", "b", "z")
    assert records.terms_of(closed, ("a", "q")) == {"a": INTEGER, "q": NEVER}
    assert records.terms_of(open_, ("b", "xy", "q")) == {"b": STRING, "xy": NULL, "q": ANY}
    both = records.intersect(closed, open_)
    assert both is not None
    assert both.required == ("a", "b")
    assert algebra()[0].hollow(both)
    assert records.intersect(Record(required=("a",)), records.absent("a")) is None
    assert records.intersect(Record(required=("a", "b")), Record(most=1)) is None


def test_the_complement_of_records() -> None:
    rest = records.complement(Record((Layer((("a", INTEGER),)),), ("b",), 1, 3))
    assert records.absent("b") in rest
    assert Record(most=0) in rest
    assert Record(fewest=4) in rest
    assert Record((Layer((("a", inverse(INTEGER)),), annotates=False),), ("a",)) in rest
    assert records.complement(Record((Layer(rest=NEVER),))) == [Record(fewest=1)]
    unlike = Other(inverse(INTEGER))
    assert records.complement(Record((Layer(rest=INTEGER),))) == [Record(fewest=1, others=(unlike,))]
    assert records.complement(Record(fewest=0, others=(unlike,))) == [Record((Layer(rest=INTEGER, annotates=False),))]
    assert records.complement(Record(names=(STRING,)))[0].obstacles


def test_other_cells_of_a_type() -> None:
    assert others(Truth((True,))) == (Truth((False,)),)
    assert others(Truth()) == others(Null()) == ()
    assert meet(Truth((True,)), Truth((False,))) is None
    assert meet(Truth(), Truth((False,))) == Truth((False,))
    assert meet(Null(), Text()) is None


@pytest.mark.parametrize("value", [None, True, 0, 1.5, "x", [], [1, ["a"]], {}, {"a": {"b": None}}])
def test_constants(value: Any) -> None:
    cell: Cell = constant(value)
    one, _ = algebra()
    assert not one.hollow(cell)
    assert one.empty(every(Union((cell,)), Union((constant("other"),))))
    assert constants([value, value]) == (cell,)


def test_equal_numbers_are_one_constant() -> None:
    assert constant(1) == constant(1.0)
    assert constant(1) != constant(True)
    assert constants(["a", "b", "a", 1]) == (Text(among=("a", "b")), constant(1))


LOOP = {"$ref": "#/$defs/loop"}


@pytest.mark.parametrize(
    "loop",
    [
        {"type": "object", "properties": {"next": LOOP}, "required": ["next"]},
        {"type": "array", "items": LOOP, "minItems": 1},
        {"type": "array", "prefixItems": [{"type": "integer"}, LOOP], "minItems": 2},
        {"type": "object", "additionalProperties": LOOP, "minProperties": 1},
        {"type": "object", "properties": {"a": LOOP}, "additionalProperties": LOOP, "minProperties": 1},
        {"type": "object", "patternProperties": {"^x": LOOP}, "additionalProperties": LOOP, "minProperties": 1},
        {"anyOf": [{"type": "array", "items": LOOP, "minItems": 3}, {"type": "object", "required": ["a"],
         "additionalProperties": LOOP}]},
    ],
)  # fmt: skip
def test_recursion_without_a_base_is_refused(loop: dict[str, object]) -> None:
    with pytest.raises(UnsupportedSchema, match="no value can match") as caught:
        rewrite({**LOOP, "$defs": {"loop": loop}})
    assert caught.value.status == 400
    assert rewrite({"type": "array", "items": LOOP, "$defs": {"loop": loop}}).schema, "the empty list needs none of it"


@pytest.mark.parametrize(
    "loop",
    [
        {"type": "object", "additionalProperties": LOOP},
        {"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": LOOP, "minProperties": 1},
        {"type": "object", "patternProperties": {"^x": LOOP, "^y": {"type": "null"}}, "additionalProperties": False,
         "minProperties": 1},
        {"anyOf": [{"type": "null"}, {"type": "array", "items": LOOP, "minItems": 2}]},
    ],
)  # fmt: skip
def test_recursion_with_a_base_is_written(loop: dict[str, object]) -> None:
    assert "$ref" in str(rewrite({**LOOP, "$defs": {"loop": loop}}).schema)
