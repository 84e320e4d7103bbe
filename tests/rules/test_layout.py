"""Design 1: the top level is fixed, tests mirror the tree, deploy/ holds no logic; and what a clone must not carry."""

from __future__ import annotations

import ast
import os
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from tests.rules.source import NAMESPACE, PRODUCT, ROOT, Source, files, in_folders, none, parse, product, sources

TOP = frozenset((
    *("pyproject.toml", "README.md", "services", "engine_core", "kernels", "protocol", "deploy", "docs", "examples"),
    *("tests", "benchmarks", "penstock", "LICENSE", "Makefile", "mkdocs.yml"),
    *("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"),
))  # fmt: skip
SHORT = 40  # a module of so many lines may be tested through its neighbours
MIRROR = (*PRODUCT,)
KINDS_OF_TEST = frozenset((*PRODUCT, "penstock", "deploy", "benchmarks", "sim", "matrix", "e2e", "rules", "security"))
TESTED_ELSEWHERE: dict[str, str] = {}  # product module → where it is tested and why not beside its mirror
MEGABYTES = 40
PLACES = re.compile(r"(?<![\w.])/(root|home/[a-z]|Users/[A-Za-z]|work/|opt/wheels|opt/pypi)")
REGISTRIES = re.compile(
    r"(pypi\.org|pythonhosted|download\.pytorch|artifactory|index-url|find-links|FIND_LINKS|trusted-host|INDEX_URL)"
)
TEXT = frozenset(
    (".py", ".toml", ".md", ".json", ".yaml", ".yml", ".jinja", ".service", ".target", ".conf", ".txt", ".sh", "")
)


def untested(tree: tuple[Source, ...], tests: tuple[Source, ...]) -> Iterator[str]:
    """Modules with no mirrored test file, where no test in the mirrored folder imports them or names them in its
    docstring as `stem.py`."""
    paths = {source.path for source in tests}
    for source in tree:
        if len(source.text.splitlines()) <= SHORT or source.module in TESTED_ELSEWHERE:
            continue
        path = Path(source.path)
        stem = path.parent.name if path.name == "__init__.py" else path.stem
        folder = (Path("tests") / path.parent).as_posix()
        if f"{folder}/test_{stem}.py" in paths:
            continue
        beside = (folder + "/", folder + "_", f"{folder}.py")
        if not any(tells_of(test, source, stem) for test in tests if test.path.startswith(beside)):
            yield source.path


def tells_of(test: Source, source: Source, stem: str) -> bool:
    if stem not in test.text:  # as of most, which need not be parsed
        return False
    named = re.search(rf"\b{stem}\.py\b", ast.get_docstring(test.tree) or "")
    return bool(named) or any(source.module == name for name, _ in test.imports)


def strays(tests: tuple[Source, ...]) -> Iterator[str]:
    """Test folders that mirror nothing."""
    for folder in sorted({Path(source.path).parent for source in tests}):
        parts = folder.parts[1:]
        if parts and (parts[0] not in KINDS_OF_TEST or (parts[0] in MIRROR and not (ROOT / Path(*parts)).is_dir())):
            yield folder.as_posix()


def machine_traces(path: Path) -> Iterator[str]:
    name = path.relative_to(ROOT).as_posix()
    if path.suffix not in TEXT or name == Path(__file__).resolve().relative_to(ROOT).as_posix():
        return
    for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
        if match := PLACES.search(line) or REGISTRIES.search(line):
            yield f"{name}:{number} {match[0]}"


def test_the_top_level_is_fixed() -> None:
    names = {path.relative_to(ROOT).parts[0] for path in files()}
    assert {name for name in names if not name.startswith(".")} - TOP == set()


def test_tests_mirror_the_tree() -> None:
    none(untested(product(), sources("tests")))
    none(strays(sources("tests")))


def test_exceptions_to_the_mirror_still_exist() -> None:
    assert set(TESTED_ELSEWHERE) <= {source.module for source in product()}


def test_deploy_holds_no_logic() -> None:
    found = list(files(ROOT / "deploy")) if (ROOT / "deploy").is_dir() else []
    assert [path.name for path in found if path.suffix == ".py" or b"python" in path.read_bytes()[:40]] == []


def test_folders_of_the_product_are_packages() -> None:
    folders = {Path(source.path).parent for source in product()} - {Path()}
    assert [folder.as_posix() for folder in sorted(folders) if not (ROOT / folder / "__init__.py").is_file()] == []


def test_no_trace_of_a_machine() -> None:
    none(found for path in files() for found in machine_traces(path))


def test_the_clone_is_small() -> None:
    assert sum(path.stat().st_size for path in files()) < MEGABYTES << 20


def test_ci_runs_the_tests() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    *before, last = [line for line in script.read_text().splitlines() if "make" in line]
    assert last == "exec make test"
    for line in before:  # what the tests can do without may fail
        assert line.endswith("||"), line


def test_warnings_are_errors_and_types_are_strict() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    assert settings["mypy"]["strict"] is True
    assert settings["pytest"]["ini_options"]["filterwarnings"][0] == "error"
    assert settings["ruff"]["line-length"] == 120


def test_the_wheel_holds_the_product_alone() -> None:
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert tools["packages"]["find"]["include"] == [f"{NAMESPACE}*"]
    links = {path.name: path.resolve() for path in (ROOT / NAMESPACE).iterdir() if path.is_symlink()}
    assert links == {folder: ROOT / folder for folder in PRODUCT}
    carried = {
        path
        for package, patterns in tools["package-data"].items()
        for pattern in patterns
        for path in (ROOT / in_folders(package).replace(".", "/")).glob(pattern)
    }
    data = [path for folder in PRODUCT for path in files(ROOT / folder) if path.suffix != ".py"]
    none(f"{path} is left out" for path in data if path not in carried)


def test_traces_are_found(tmp_path: Path) -> None:
    for line in ("x = '/home/ann/models'", "cd /work/main", "pip --index-url http://x", "/root/.cache"):
        assert PLACES.search(line) or REGISTRIES.search(line), line
    for line in ("/opt/penstock/bin", "/run/penstock", "https://example.org/rooted", "framework/x", "ProtectHome=true"):
        assert PLACES.search(line) is None, line
        assert REGISTRIES.search(line) is None, line


def test_an_untested_module_is_found() -> None:
    module = parse("x = 1\n" * 41, "kernels/norm.py")
    assert list(untested((module,), ())) == ["kernels/norm.py"]
    assert list(untested((module,), (parse("", "tests/kernels/test_norm.py"),))) == []
    assert list(untested((module,), (parse("from kernels.norm import rms", "tests/kernels/test_all.py"),))) == []
    assert list(untested((module,), (parse("'Tests norm.py and rope.py.'", "tests/kernels/test_all.py"),))) == []
    assert list(untested((module,), (parse("from kernels.norm import rms", "tests/e2e/test_all.py"),))) != []
