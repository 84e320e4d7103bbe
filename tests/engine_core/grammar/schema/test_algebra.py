"""Terms and cells: the laws of the algebra, emptiness as a least fixed point, and flat terms; with the
conjunction and complement of cells.py and scalars.py, by membership of sample values."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine_core.grammar.patterns import read
from penstock.engine_core.grammar.schema.algebra import (
    MAX_STEPS,
    Algebra,
    Allowance,
    CircularTerm,
    check_size,
    children,
    meet,
)
from penstock.engine_core.grammar.schema.assertions import constant, constants
from penstock.engine_core.grammar.schema.cells import (
    ANY,
    FULL,
    NEVER,
    AllOf,
    AnyOf,
    Array,
    Cell,
    Count,
    Layer,
    Not,
    Object,
    Other,
    Place,
    Term,
    Union,
    all_of,
    any_of,
    negation,
    without,
)
from penstock.engine_core.grammar.schema.document import Document
from penstock.engine_core.grammar.schema.reading import Reader
from penstock.engine_core.grammar.schema.scalars import Boolean, Null, Number, String
from penstock.engine_core.grammar.schema.writing import rewrite
from penstock.engine_core.grammar.schema.writing_scalars import write_string
from penstock.protocol.errors import UnsupportedSchema

INTEGER = Union((Number(whole=True),))
STRING = Union((String(),))
NULL = Union((Null(),))


def algebra(schema: dict[str, Any] | None = None) -> tuple[Algebra, Document]:
    document = Document(schema or {})
    return Algebra(Reader(document), document.path), document


def test_terms_are_flat() -> None:
    a, b = Place(1), Place(2)
    assert all_of() == ANY
    assert any_of() == NEVER
    assert all_of(a) == a == any_of(a)
    assert all_of(a, all_of(b, a)) == AllOf((a, b))
    assert any_of(a, any_of(b, a)) == AnyOf((a, b))
    assert all_of(a, ANY) == a
    assert all_of(a, NEVER) == NEVER
    assert any_of(a, NEVER) == a
    assert any_of(a, ANY) == ANY
    assert negation(negation(a)) == a
    assert negation(a) == Not(a)
    assert (negation(ANY), negation(NEVER)) == (NEVER, ANY)


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
    Union((Boolean((True,)),)),
    Union((String(among=("a", "b")), Null())),
    Union((String(min_length=2),)),
    Union((Array(items=INTEGER), Number())),
    Union((Object(required=("a",)),)),
    Union((Object((Layer((("a", INTEGER),), rest=NEVER),)),)),
)


@pytest.mark.parametrize("term", SAMPLES)
def test_a_term_and_its_inverse_are_apart(term: Term) -> None:
    one, _ = algebra()
    assert one.disjoint(term, negation(term)) or any(isinstance(c, Array | Object) for c in one.cells(term))
    assert one.cells(negation(term)) != ()
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
    assert one.covers(STRING, Union((String(among=("x",)),)))
    assert one.covers(any_of(STRING, NULL), NULL)


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


def text_holds(cell: String, text: str) -> bool:
    found = (cell.meet(String(among=(text,))) or String(among=())).narrowed()
    return found.among == (text,)


WORDS = ("", "a", "b", "ab", "ba", "aab", "abc", "c")
TEXT_CELLS = st.builds(
    String,
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
def test_texts(a: String, b: String) -> None:
    both = a.meet(b)
    rest = a.complement()
    for word in WORDS:
        assert (both is not None and text_holds(both, word)) is (text_holds(a, word) and text_holds(b, word)), word
        assert any(text_holds(one, word) for one in rest) is not text_holds(a, word), word
    if a.empty():
        assert not any(text_holds(a, word) for word in WORDS)


def test_formats_apart() -> None:
    assert String(formats=("date",)).meet(String(formats=("date-time",))) is None
    assert String(formats=("ipv4",)).meet(String(formats=("hostname",))) is not None
    assert String(formats=("date",)).meet(String(not_formats=("date",))) is None


def test_texts_are_written() -> None:
    assert write_string(String()) == ({"type": "string"}, "")
    assert write_string(String(1, 3, (read("^a"),))) == (
        {"type": "string", "minLength": 1, "maxLength": 3, "pattern": "^a"},
        "",
    )
    two, trouble = write_string(String(patterns=(read("^a"), read("b$"))))
    assert (two["pattern"], two["allOf"], trouble) == ("^a", [{"type": "string", "pattern": "b$"}], "")
    assert write_string(String(among=("x", "y")))[0] == {"enum": ["x", "y"]}
    assert write_string(String(max_length=1, excluded=("abc",)))[0] == {"type": "string", "maxLength": 1}
    assert write_string(String(not_formats=("date",)))[1].startswith("not: ")
    assert write_string(String(patterns=(read("a(?=b)"),)))[1].startswith("pattern: ")
    assert write_string(String(excluded=("x" * 9000,)))[1].startswith("not: ")


def test_series() -> None:
    a = Array((INTEGER,), STRING, 1, 5)
    b = Array((ANY, NULL), ANY, 0, 3, evaluated=2)
    both = a.meet(b)
    assert both == Array((INTEGER, all_of(STRING, NULL)), STRING, 1, 3, evaluated=2)
    assert a.item(0) == INTEGER
    assert a.item(4) == STRING
    assert Array(min_items=3).meet(Array(max_items=2)) is None
    assert Array((INTEGER, NEVER, NULL)).shortened().max_items == 1
    assert Array((INTEGER,), NEVER).shortened().max_items == 1


def test_the_complement_of_series() -> None:
    rest = Array((INTEGER,), ANY, 2, 4).complement()
    assert rest == [Array(max_items=1), Array(min_items=5), Array((negation(INTEGER),), min_items=1)]
    assert Array(items=INTEGER).complement() == [Array(counts=(Count(negation(INTEGER)),))]
    assert Array(counts=(Count(NULL, 2, 3),)).complement() == [
        Array(counts=(Count(NULL, 0, 1),)),
        Array(counts=(Count(NULL, 4),)),
    ]
    assert all(cell.obstacles for cell in Array(unique=True).complement())


def test_records() -> None:
    closed = Object((Layer((("a", INTEGER),), rest=NEVER),), ("a",))
    open_ = Object((Layer((("b", STRING),), ((read("^x"), NULL),), ANY),), ("b",))
    assert Object((*closed.layers, *open_.layers), ("z", "a")).known_names() == ("a", "b", "z")
    assert closed.terms_of(("a", "q")) == {"a": INTEGER, "q": NEVER}
    assert open_.terms_of(("b", "xy", "q")) == {"b": STRING, "xy": NULL, "q": ANY}
    both = closed.meet(open_)
    assert both is not None
    assert both.required == ("a", "b")
    assert algebra()[0].hollow(both)
    assert Object(required=("a",)).meet(without("a")) is None
    assert Object(required=("a", "b")).meet(Object(max_properties=1)) is None


def test_the_complement_of_records() -> None:
    rest = Object((Layer((("a", INTEGER),)),), ("b",), 1, 3).complement()
    assert without("b") in rest
    assert Object(max_properties=0) in rest
    assert Object(min_properties=4) in rest
    assert Object((Layer((("a", negation(INTEGER)),), annotates=False),), ("a",)) in rest
    assert Object((Layer(rest=NEVER),)).complement() == [Object(min_properties=1)]
    unlike = Other(negation(INTEGER))
    assert Object((Layer(rest=INTEGER),)).complement() == [Object(min_properties=1, others=(unlike,))]
    assert Object(min_properties=0, others=(unlike,)).complement() == [Object((Layer(rest=INTEGER, annotates=False),))]
    assert Object(names=(STRING,)).complement()[0].obstacles


def test_other_cells_of_a_type() -> None:
    assert tuple(Boolean((True,)).complement()) == (Boolean((False,)),)
    assert tuple(Boolean().complement()) == tuple(Null().complement()) == ()
    assert meet(Boolean((True,)), Boolean((False,))) is None
    assert meet(Boolean(), Boolean((False,))) == Boolean((False,))
    assert meet(Null(), String()) is None


@pytest.mark.parametrize("value", [None, True, 0, 1.5, "x", [], [1, ["a"]], {}, {"a": {"b": None}}])
def test_constants(value: Any) -> None:
    cell: Cell = constant(value)
    one, _ = algebra()
    assert not one.hollow(cell)
    assert one.empty(all_of(Union((cell,)), Union((constant("other"),))))
    assert constants([value, value]) == (cell,)


def test_equal_numbers_are_one_constant() -> None:
    assert constant(1) == constant(1.0)
    assert constant(1) != constant(True)
    assert constants(["a", "b", "a", 1]) == (String(among=("a", "b")), constant(1))


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
