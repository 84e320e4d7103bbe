"""Design 9, rule 3: no module globals except constants and loggers."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

import pytest

from tests.rules.source import Source, none, parse, product
from tests.rules.test_classes import frozen, table

CONSTANT = re.compile(r"_?[A-Z][A-Z0-9_]*$")
ALIAS = re.compile(r"_?[A-Z][A-Za-z0-9]*$")
LOGGERS = frozenset(("log", "logger", "_log", "_logger", "LOG", "LOGGER"))
PURE_CALLS = re.compile(
    r"^(frozenset|tuple|int|float|str|bytes|bool|len|min|max|sum|ord|range|slice|object|re\.compile|struct\.Struct"
    r"|operator\.\w+|math\.\w+|pathlib\.Path|types\.MappingProxyType|typing\.(TypeVar|ParamSpec|NewType)"
    r"|triton\.language\.constexpr|numpy\.dtype|hashlib\.\w+|logging\.getLogger"
    r"|msgspec\.(json|msgpack)\.(Encoder|Decoder)|importlib\.metadata\.version)$"
)
FROZEN_ANNOTATION = re.compile(
    r"^(Final\[)?(tuple|frozenset|Mapping|Sequence|Set|int|float|str|bytes|bool|Pattern|re\.Pattern|type|Callable"
    r"|collections\.abc\.(Mapping|Sequence|Set)|TypeAlias|Final)\b"
)
Known = dict[str, tuple[Source, ast.ClassDef]]


def immutable(source: Source, value: ast.expr, known: Known) -> bool:
    """Whether an expression can only give something that nobody can change."""
    match value:
        case ast.Constant() | ast.Attribute() | ast.Name() | ast.JoinedStr() | ast.Compare() | ast.Lambda():
            return True
        case ast.GeneratorExp(elt=part):
            return immutable(source, part, known)  # unpacked into names
        case ast.Tuple(elts=parts):
            return all(immutable(source, part, known) for part in parts)
        case ast.Starred(value=inner) | ast.UnaryOp(operand=inner) | ast.Subscript(value=inner):
            return immutable(source, inner, known) or isinstance(value, ast.Starred)
        case ast.BinOp(left=left, right=right):
            return immutable(source, left, known) and immutable(source, right, known)
        case ast.BoolOp(values=parts):
            return all(immutable(source, part, known) for part in parts)
        case ast.IfExp(body=left, orelse=right):
            return immutable(source, left, known) and immutable(source, right, known)
        case ast.Call(func=called):
            name = source.resolve(called)
            if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Constant):
                return True  # a method of a literal string
            return bool(PURE_CALLS.match(name)) or (name in known and frozen(*known[name], known) is True)
    return False


def statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Module-level statements, with those under `if` and `try`."""
    for node in body:
        match node:
            case ast.If(body=first, orelse=second):
                yield from statements([*first, *second])
            case ast.Try(body=first, handlers=handlers, orelse=second, finalbody=last):
                yield from statements([*first, *(s for h in handlers for s in h.body), *second, *last])
            case _:
                yield node


def is_entry(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)


def module_state(source: Source, known: Known) -> Iterator[str]:
    for node in statements(node for node in source.tree.body if not is_entry(node)):
        where = source.at(node)
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                yield from (f"{where} {name} {why}" for why in assignment(source, name, "", value, known))
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation, value=ast.expr() as value):
                said = ast.unparse(annotation)
                yield from (f"{where} {name} {why}" for why in assignment(source, name, said, value, known))
            case ast.Assign(targets=[ast.Tuple(elts=names)], value=value):
                plain = all(isinstance(n, ast.Name) and CONSTANT.match(n.id) for n in names)
                if not (plain and immutable(source, value, known)):
                    yield f"{where} several names are bound to what can change"
            case ast.Assign() | ast.AugAssign() | ast.AnnAssign() | ast.Delete() | ast.For() | ast.While() | ast.With():
                yield f"{where} a statement runs at import"
            case ast.Expr(value=value) if not isinstance(value, ast.Constant):
                yield f"{where} a call runs at import"


def assignment(source: Source, name: str, annotation: str, value: ast.expr, known: Known) -> Iterator[str]:
    if name == "__all__":
        return
    if name in LOGGERS:
        if not (isinstance(value, ast.Call) and source.resolve(value.func).endswith("getLogger")):
            yield "is named like a logger and is none"
    elif CONSTANT.match(name):
        if not (immutable(source, value, known) or FROZEN_ANNOTATION.match(annotation)):
            yield "is a constant of a kind that can change: use a tuple, a frozenset, or annotate a Mapping"
    elif ALIAS.match(name):
        if not isinstance(value, ast.BinOp | ast.Subscript | ast.Name | ast.Attribute | ast.Call):
            yield "looks like a type alias and is none"
        elif isinstance(value, ast.Call) and not immutable(source, value, known):
            yield "is no type alias"
    elif not (isinstance(value, ast.Call) and source.resolve(value.func) == "functools.partial"):  # a function
        yield "is module state"


def class_state(source: Source) -> Iterator[str]:
    """Lists, dicts and sets that all instances of a class would share, and caches that never forget."""
    for owner in source.classes():
        # msgspec copies an empty default.
        copies = any(source.resolve(base) == "msgspec.Struct" for base in owner.bases)
        for node in owner.body:
            value = getattr(node, "value", None)
            if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(value, ast.List | ast.Dict | ast.Set):
                if copies and isinstance(node, ast.AnnAssign):
                    continue
                yield f"{source.at(node)} {owner.name} shares a mutable attribute"
    for node in source.nodes:
        if isinstance(node, ast.Global):
            yield f"{source.at(node)} global {', '.join(node.names)}"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from (f"{source.at(d)} an unbounded cache" for d in node.decorator_list if unbounded(source, d))
            defaults = [*node.args.defaults, *(d for d in node.args.kw_defaults if d)]
            if any(isinstance(d, ast.List | ast.Dict | ast.Set) for d in defaults):
                yield f"{source.at(node)} {node.name} shares a mutable default"


def unbounded(source: Source, decorator: ast.expr) -> bool:
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    name = source.resolve(called)
    if name == "functools.lru_cache" and isinstance(decorator, ast.Call):
        sizes = [*decorator.args, *(k.value for k in decorator.keywords if k.arg == "maxsize")]
        return any(isinstance(size, ast.Constant) and size.value is None for size in sizes)
    return name == "functools.cache"


def test_modules_hold_no_state() -> None:
    known = table(product())
    none(found for source in product() for found in module_state(source, known))


def test_classes_and_functions_share_no_state() -> None:
    none(found for source in product() for found in class_state(source))


@pytest.mark.parametrize(
    "text",
    [
        "LIMIT = 3 << 4", "NAMES = ('a', 'b')", "log = logging.getLogger(__name__)", "Alias = int | str",
        "import re\nPATTERN = re.compile('a')",
        "from collections.abc import Mapping\nTABLE: Mapping[int, str] = {1: 'a'}",
        "__all__ = ['a']", "WORDS = frozenset({'a'})", "if x:\n LIMIT = 1\nelse:\n LIMIT = 2", "A, B = 1, 2",
        "A, B = (1 << bit for bit in range(2))",
        "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass P: pass\nDEFAULT = P()",
    ],
)  # fmt: skip
def test_constants_are_allowed(text: str) -> None:
    source = parse(text)
    assert list(module_state(source, table([source]))) == []


@pytest.mark.parametrize(
    "text",
    [
        "counter = 0", "CACHE = {}", "QUEUE: list[int] = []", "SEEN = set()", "POOL = Pool()", "A, B = [], 1",
        "a, b = 1, 2",
        "print('hello')", "for x in y: pass", "LIMIT += 1",
        "try:\n state = 1\nexcept ImportError:\n pass", "class P: pass\nDEFAULT = P()",
    ],
)  # fmt: skip
def test_module_state_is_found(text: str) -> None:
    source = parse(text)
    assert len(list(module_state(source, table([source])))) == 1


@pytest.mark.parametrize(
    "text",
    [
        "class A:\n seen = []", "def f():\n global x\n x = 1", "import functools\n@functools.cache\ndef f(x): return x",
        "def f(x={}): return x", "from functools import lru_cache\n@lru_cache(maxsize=None)\ndef f(x): return x",
    ],
)  # fmt: skip
def test_shared_state_is_found(text: str) -> None:
    assert len(list(class_state(parse(text)))) == 1
