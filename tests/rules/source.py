"""The tree as the rules see it: every Python file parsed once, names resolved through imports."""

from __future__ import annotations

import ast
import fnmatch
import functools
import io
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("services", "engine_core", "kernels", "protocol")
NAMESPACE = "penstock"  # which every module of the product is imported from; the rules name modules by their folders

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """One Python file: its path relative to the root, its dotted name and its text. It is parsed when a rule asks."""

    path: str
    module: str
    text: str

    @functools.cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @functools.cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """The whole tree, as ast.walk goes through it."""
        return tuple(ast.walk(self.tree))

    @property
    def package(self) -> str:
        """The package that relative imports of this file start from."""
        return self.module if self.path.endswith("__init__.py") else self.module.rpartition(".")[0]

    @property
    def top(self) -> str:
        return self.module.partition(".")[0]

    def at(self, node: ast.AST) -> str:
        """Where a violation stands, as editors understand it."""
        return f"{self.path}:{getattr(node, 'lineno', 1)}"

    @functools.cached_property
    def comments(self) -> dict[int, str]:
        """Comment of each line that has one."""
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        return {token.start[0]: token.string for token in tokens if token.type == tokenize.COMMENT}

    @functools.cached_property
    def imports(self) -> tuple[tuple[str, ast.AST], ...]:
        """Every module this file may import, wherever the import stands, as dotted names with their nodes.

        `from a import b` counts as `a` and as `a.b`; a literal handed to import_module or __import__ counts too.
        """
        return tuple(imported(self))

    @functools.cached_property
    def bindings(self) -> dict[str, str]:
        """Local name → dotted origin, for every import and every class of the file."""
        found: dict[str, str] = {}
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    found[alias.asname or alias.name.partition(".")[0]] = (
                        in_folders(alias.name) if alias.asname else alias.name.partition(".")[0]
                    )
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    found[alias.asname or alias.name] = in_folders(f"{origin(self, node)}.{alias.name}")
        for node in self.tree.body:
            if isinstance(node, ast.ClassDef):
                found[node.name] = f"{self.module}.{node.name}"
        return found

    def resolve(self, node: ast.expr) -> str:
        """Dotted origin of a name or attribute chain; empty for any other expression."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if isinstance(node, ast.Subscript):
            return self.resolve(node.value)
        if not isinstance(node, ast.Name):
            return ""
        return in_folders(".".join([self.bindings.get(node.id, node.id), *reversed(parts)]))

    def classes(self) -> Iterator[ast.ClassDef]:
        return (node for node in self.nodes if isinstance(node, ast.ClassDef))

    def functions(self) -> Iterator[Function]:
        return (node for node in self.nodes if isinstance(node, Function))


def in_folders(name: str) -> str:
    """A module of the product by its folder: `services.links.link` is services/links/link.py."""
    first, _, rest = name.partition(".")
    return rest if first == NAMESPACE and rest.partition(".")[0] in PRODUCT else name


def origin(source: Source, node: ast.ImportFrom) -> str:
    """The absolute module that a from-import names."""
    if not node.level:
        return node.module or ""
    parts = source.package.split(".")
    base = parts[: len(parts) - node.level + 1]
    return ".".join([*base, node.module] if node.module else base)


def imported(source: Source) -> Iterator[tuple[str, ast.AST]]:
    for node in source.nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield in_folders(alias.name), node
        elif isinstance(node, ast.ImportFrom):
            base = origin(source, node)
            yield in_folders(base), node
            for alias in node.names:
                yield in_folders(f"{base}.{alias.name}"), node
        elif isinstance(node, ast.Call) and node.args:
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            literal = node.args[0]
            if name in ("import_module", "__import__") and isinstance(literal, ast.Constant):
                yield in_folders(str(literal.value)), node


def parse(text: str, path: str = "engine_core/example.py") -> Source:
    module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return Source(path, module, text)


@functools.lru_cache(maxsize=1)
def ignored() -> tuple[str, ...]:
    """Patterns of .gitignore; this tree uses bare names and suffixes alone."""
    return tuple(line.strip().rstrip("/") for line in (ROOT / ".gitignore").read_text().splitlines() if line.strip())


def files(start: Path = ROOT) -> Iterator[Path]:
    """Every file of the tree that git would keep, sorted, without asking git: an export has no repository."""
    for path in sorted(start.iterdir()):
        if path.name == ".git" or any(fnmatch.fnmatch(path.name, pattern) for pattern in ignored()):
            continue
        if path.is_symlink():  # penstock/ links to the four folders, which are read where they are
            continue
        if path.is_dir():
            yield from files(path)
        else:
            yield path


@functools.cache
def source_of(path: Path) -> Source:
    return parse(path.read_text(), path.relative_to(ROOT).as_posix())


@functools.cache
def sources(*folders: str) -> tuple[Source, ...]:
    """The Python files under the folders."""
    paths = [path for folder in folders if (ROOT / folder).is_dir() for path in files(ROOT / folder)]
    return tuple(source_of(path) for path in paths if path.suffix == ".py")


def product() -> tuple[Source, ...]:
    return sources(*PRODUCT, NAMESPACE)


def none(violations: Iterable[str]) -> None:
    """Fail with one line per violation."""
    found = list(violations)
    assert not found, "\n".join([f"{len(found)} against the rule:", *found])
