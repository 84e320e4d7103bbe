"""Design 9, rules 2, 4 and 9: inheritance depth, frozen data, constructors, `statistics()`, the drawn error tree."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

from penstock.protocol import errors
from tests.rules.source import Source, none, parse, product

ERRORS = "protocol.errors"
MOST_ATTRIBUTES = 20
RECORDS = re.compile(r"(Config|Options|Statistics|Spec|Plan|Result|Message)$")


def table(tree: Iterable[Source]) -> dict[str, tuple[Source, ast.ClassDef]]:
    """Dotted name → top-level class, re-exports of packages included."""
    found = {
        f"{source.module}.{node.name}": (source, node)
        for source in tree
        for node in source.tree.body
        if isinstance(node, ast.ClassDef)
    }
    for source in tree:
        for name, target in source.bindings.items():
            if target in found:
                found.setdefault(f"{source.module}.{name}", found[target])
    return found


def own_bases(source: Source, node: ast.ClassDef, known: dict[str, tuple[Source, ast.ClassDef]]) -> list[str]:
    return [name for base in node.bases if (name := source.resolve(base)) in known]


def depth(source: Source, node: ast.ClassDef, known: dict[str, tuple[Source, ast.ClassDef]]) -> int:
    """Edges to the farthest ancestor of ours; roots from libraries (Struct, Enum, nn.Module) count nothing."""
    return max((1 + depth(*known[base], known) for base in own_bases(source, node, known)), default=0)


def deep_classes(tree: Iterable[Source]) -> Iterator[str]:
    known = table(tree)
    for source in tree:
        if source.module == ERRORS:
            continue
        for node in source.classes():
            bases = own_bases(source, node, known)
            if depth(source, node, known) > 1:
                yield f"{source.at(node)} {node.name} is more than one step from its root"
            if len(bases) > 1:
                yield f"{source.at(node)} {node.name} mixes {' and '.join(bases)}"
            if any(base.startswith(ERRORS + ".") for base in bases):
                yield f"{source.at(node)} {node.name} belongs to the tree in protocol/errors.py"


def keyword(node: ast.expr, name: str) -> object:
    """The constant that a call or class statement gives to a keyword."""
    given = getattr(node, "keywords", [])
    return next((k.value.value for k in given if k.arg == name and isinstance(k.value, ast.Constant)), None)


def frozen(source: Source, node: ast.ClassDef, known: dict[str, tuple[Source, ast.ClassDef]]) -> bool | None:
    """Whether a struct or dataclass is frozen; None for any other class. msgspec hands `frozen` down to subclasses."""
    for decorator in node.decorator_list:
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        if source.resolve(called).endswith("dataclass"):
            return keyword(decorator, "frozen") is True
    for base in node.bases:
        name = source.resolve(base)
        if name in ("msgspec.Struct", "Struct"):
            return keyword(node, "frozen") is True
        if name in known and (inherited := frozen(*known[name], known)) is not None:
            return inherited or keyword(node, "frozen") is True
    if any(source.resolve(base).endswith(("NamedTuple", "Enum")) for base in node.bases):
        return True
    return None


def thawed_records(tree: Iterable[Source]) -> Iterator[str]:
    known = table(tree)
    for source in tree:
        for node in source.classes():
            record = source.top == "protocol" or RECORDS.search(node.name)
            if record and frozen(source, node, known) is False:
                yield f"{source.at(node)} {node.name} is data and not frozen"


def attributes(node: ast.ClassDef) -> set[str]:
    """What instances of a class hold: annotated fields, and what its methods assign to `self`."""
    fields = {n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
    assigned = (n for n in ast.walk(node) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store))
    return fields | {n.attr for n in assigned if isinstance(n.value, ast.Name) and n.value.id == "self"}


def schema(source: Source, node: ast.ClassDef, known: dict[str, tuple[Source, ast.ClassDef]]) -> bool:
    """Whether a class is the schema of a public API: a frozen struct without logic. A method may return one thing."""
    methods = [each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
    logic = [
        each for each in methods
        if not all(isinstance(step, ast.Return) for step in each.body[ast.get_docstring(each) is not None :])
    ]  # fmt: skip
    return frozen(source, node, known) is True and not logic


def large_classes(tree: Iterable[Source]) -> Iterator[str]:
    """Classes that do too much. Messages, options and statistics are records: they hold as much as they tell; and a
    schema, or the parameters that a program sets, have the fields that their API has."""
    known = table(tree)
    for source in tree:
        for node in source.classes():
            record = source.top == "protocol" or RECORDS.search(node.name) or schema(source, node, known)
            record = record or node.name.endswith("Params")
            if not record and len(attributes(node)) > MOST_ATTRIBUTES:
                yield f"{source.at(node)} {node.name} has {len(attributes(node))} attributes"


def loose_statistics(tree: Iterable[Source]) -> Iterator[str]:
    known = table(tree)
    for source in tree:
        for node in source.functions():
            if node.name != "statistics":
                continue
            name = source.resolve(node.returns) if node.returns else ""
            if isinstance(node.returns, ast.Constant):
                name = source.bindings.get(str(node.returns.value), "")
            if name not in known or not frozen(*known[name], known):
                yield f"{source.at(node)} statistics() returns {name or 'nothing named'}, not a frozen record"


def peeping_constructors(tree: Iterable[Source]) -> Iterator[str]:
    """Calls of our classes that hand over a lambda, or a bound method of the caller's own class."""
    known = table(tree)
    for source in tree:
        for owner in source.classes():
            methods = {f.name for f in owner.body if isinstance(f, ast.FunctionDef) and not f.decorator_list}
            for call in (node for node in ast.walk(owner) if isinstance(node, ast.Call)):
                if source.resolve(call.func) not in known:
                    continue
                for value in [*call.args, *(k.value for k in call.keywords)]:
                    bound = isinstance(value, ast.Attribute) and source.resolve(value.value) == "self"
                    if isinstance(value, ast.Lambda) or (bound and value.attr in methods):
                        yield f"{source.at(value)} a callback goes into {source.resolve(call.func)}"


def swapped_methods(tree: Iterable[Source]) -> Iterator[str]:
    """Assignments to attributes of a class or module of ours."""
    known = table(tree)
    modules = {source.module for source in tree}
    for source in tree:
        for node in source.nodes:
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                owner = source.resolve(node.value)
                if owner in known or owner in modules:
                    yield f"{source.at(node)} {owner}.{node.attr} is set at run time"


def drawn_edges(docstring: str) -> set[tuple[str, str]]:
    """Parent and child of each name in a tree drawn with box characters, four columns per level."""
    edges = set()
    path: list[str] = []
    for line in docstring.splitlines():
        if match := re.match(r"^    ((?:│   |    |├── |└── )*)([A-Z]\w+)\b", line):
            level = len(match[1]) // 4
            path[level:] = [match[2]]
            if level:
                edges.add((path[level - 1], match[2]))
    return edges


def test_inheritance_is_one_step() -> None:
    none(deep_classes(product()))


def test_data_is_frozen() -> None:
    none(thawed_records(product()))


def test_classes_are_of_one_responsibility() -> None:
    none(large_classes(product()))


def test_large_classes_are_found() -> None:
    fields = "".join(f" field_{number}: int\n" for number in range(11))
    body = "".join(f"  self.part_{number} = 0\n" for number in range(10))
    tree = (parse(f"class A:\n{fields} def f(self):\n{body}class BStatistics:\n{fields} def f(self):\n{body}"),)
    assert [line.split()[1] for line in large_classes(tree)] == ["A"]


def test_a_schema_has_as_many_fields_as_its_api_and_no_logic() -> None:
    fields = "".join(f" field_{number}: int\n" for number in range(21))
    text = f"import msgspec\nclass A(msgspec.Struct, frozen=True):\n{fields} def f(self):\n  return self\n"
    text += f"class B(msgspec.Struct):\n{fields}class C(A, frozen=True):\n{fields} def f(self):\n  x = 1\n  return x\n"
    assert [line.split()[1] for line in large_classes((parse(text),))] == ["B", "C"]


def test_statistics_are_frozen_records() -> None:
    none(loose_statistics(product()))


def test_constructors_take_data_and_parts() -> None:
    none(peeping_constructors(product()))


def test_methods_are_not_swapped() -> None:
    none(swapped_methods(product()))


def test_the_error_tree_is_as_drawn() -> None:
    built = {
        (kind.__bases__[0].__name__, name)
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.PenstockError) and kind is not errors.PenstockError
    }
    assert drawn_edges(errors.__doc__ or "") == built


def test_each_request_error_is_drawn_with_its_status_and_type() -> None:
    drawn = dict(re.findall(r"── (\w+) +(\d{3} \w+)", errors.__doc__ or ""))
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.RequestError)]
    assert drawn == {k.__name__: f"{k.status} {k.type}" for k in kinds if k is not errors.RequestError}


def test_depth_is_found_across_files() -> None:
    one = parse("class A: pass", "engine_core/one.py")
    two = parse("from engine_core.one import A as Root\nclass B(Root): pass\nclass C(B): pass", "engine_core/two.py")
    assert [line.split()[1] for line in deep_classes((one, two))] == ["C"]


def test_a_mixture_and_a_stray_error_are_found() -> None:
    tree = (
        parse("class E(Exception): pass", "protocol/errors.py"),
        parse("from protocol.errors import E\nclass F(E): pass\nclass A: pass\nclass B: pass\nclass C(A, B): pass"),
    )
    assert [line.split()[1] for line in deep_classes(tree)] == ["F", "C"]


def test_thawed_data_is_found() -> None:
    text = "import msgspec\nfrom dataclasses import dataclass\n"
    text += "class R(msgspec.Struct, frozen=True): pass\nclass A(R, tag=True): pass\nclass B(msgspec.Struct): pass\n"
    text += "@dataclass(frozen=True, slots=True)\nclass C: pass\n@dataclass\nclass D: pass\n"
    assert [line.split()[1] for line in thawed_records((parse(text, "protocol/x.py"),))] == ["B", "D"]


def test_loose_statistics_are_found() -> None:
    text = "class A:\n def statistics(self) -> dict[str, int]: return {}\n"
    assert len(list(loose_statistics((parse(text),)))) == 1


def test_a_callback_in_a_constructor_is_found() -> None:
    text = "class Part:\n pass\nclass A:\n def __init__(self, x):\n  self.p = Part(self.read)\n"
    text += "  self.q = Part(self.data)\n  self.r = Part(lambda: x)\n def read(self): return 1\n"
    assert len(list(peeping_constructors((parse(text),)))) == 2


def test_a_swapped_method_is_found() -> None:
    assert len(list(swapped_methods((parse("class A:\n pass\nA.run = print\n"),)))) == 1
