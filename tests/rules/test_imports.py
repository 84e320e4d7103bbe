"""Design 1: the import law, on the syntax tree and in fresh interpreters."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator

import pytest

from tests.rules.source import NAMESPACE, PRODUCT, ROOT, Source, none, parse, product, sources

MAY_IMPORT = {
    "protocol": {"protocol"},
    "kernels": {"kernels", "protocol"},
    "engine_core": {"engine_core", "kernels", "protocol"},
    "services": {"services", "engine_core", "kernels", "protocol"},
    "penstock": {"services", "engine_core", "kernels", "protocol"},
}
OURS = frozenset({*PRODUCT, NAMESPACE, "tests", "benchmarks", "deploy"})
NETWORK = frozenset((
    *("zmq", "asyncio", "starlette", "uvicorn", "uvloop", "fastapi", "socket", "selectors", "socketserver"),
    *("http", "urllib", "requests", "httpx", "aiohttp"),
))  # fmt: skip
CLOCKS = (
    *("time.time", "time.time_ns", "time.monotonic", "time.monotonic_ns"),
    *("datetime.datetime.now", "datetime.datetime.utcnow", "datetime.datetime.today", "datetime.date.today"),
)
MEASURES = ("time.perf_counter", "time.perf_counter_ns", "time.process_time")
MAY_MEASURE = ("engine_core.execution.", "engine_core.loading.")  # how long the device worked, how long a load took
BRAIN = (
    *("engine_core.scheduling", "engine_core.kv", "engine_core.grammar", "engine_core.speculation"),
    "engine_core.placement",
)
LIGHT_PROCESSES = ("services.http.main", "services.tokenizer.main", "services.scheduler.main")


def inside(module: str, packages: Iterable[str]) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def outlaws(source: Source) -> Iterator[str]:
    """Imports of our own folders that the table does not allow."""
    for name, node in source.imports:
        top = name.partition(".")[0]
        if top in OURS and top not in MAY_IMPORT[source.top]:
            yield f"{source.at(node)} {source.top} imports {name}"


def bare(source: Source) -> Iterator[str]:
    """Imports of the product's folders by their own names."""
    for node in ast.walk(source.tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        yield from (f"{source.at(node)} imports {name}" for name in names if name.partition(".")[0] in PRODUCT)


def forbidden(source: Source, names: Iterable[str]) -> Iterator[str]:
    for name, node in source.imports:
        if name.partition(".")[0] in names:
            yield f"{source.at(node)} imports {name}"


def clock_readings(source: Source) -> Iterator[str]:
    banned = CLOCKS if source.module.startswith(MAY_MEASURE) else CLOCKS + MEASURES
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute | ast.Name) and source.resolve(node) in banned:
            yield f"{source.at(node)} reads {source.resolve(node)}"


def modules(*packages: str) -> list[str]:
    return [source.module for source in product() if inside(source.module, packages)]


def loaded(names: list[str], suspects: Iterable[str]) -> list[str]:
    """Which suspects stand in sys.modules once a fresh interpreter has imported the names."""
    script = "import importlib, sys\nfor name in sys.argv[2:]: importlib.import_module(f'penstock.{name}')\n"
    script += "print(*[s for s in sys.argv[1].split(',') if s in sys.modules])"
    command = [sys.executable, "-c", script, ",".join(suspects), *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_folders_import_what_they_may() -> None:
    none(found for source in product() for found in outlaws(source))


def test_the_folders_are_imported_as_one_package() -> None:
    """`services` is a user's folder as well: ours is `penstock.services`, in tests and benchmarks too."""
    none(found for source in sources(*PRODUCT, NAMESPACE, "tests", "benchmarks") for found in bare(source))


def test_engine_core_and_kernels_have_no_network() -> None:
    tree = [source for source in product() if source.top in ("engine_core", "kernels")]
    none(found for source in tree for found in forbidden(source, NETWORK))


def test_engine_core_and_kernels_read_no_clock() -> None:
    tree = [source for source in product() if source.top in ("engine_core", "kernels")]
    none(found for source in tree for found in clock_readings(source))


def test_protocol_knows_no_tensor_and_no_socket() -> None:
    tree = [source for source in product() if source.top == "protocol"]
    none(found for source in tree for found in forbidden(source, {*NETWORK, "torch", "transformers"}))


def test_the_brain_names_no_torch() -> None:
    tree = [source for source in product() if inside(source.module, BRAIN)]
    none(found for source in tree for found in forbidden(source, {"torch", "triton", "transformers"}))


def test_the_schema_compiler_stands_alone() -> None:
    """It imports nothing of the engine but regular expressions, which import nothing, and has one public function."""
    compiler = "engine_core.grammar.schema"
    expressions = ("engine_core.grammar.patterns", "engine_core.grammar.automata")
    allowed = {compiler: (compiler, *expressions, "protocol.errors"), **dict.fromkeys(expressions, expressions)}
    for package, names in allowed.items():
        tree = [source for source in product() if inside(source.module, [package])]
        found = [(source.at(node), name) for source in tree for name, node in source.imports]
        ours = [(at, name) for at, name in found if name.partition(".")[0] in PRODUCT and not inside(name, names)]
        none(f"{at} {name}" for at, name in ours if not any(inside(each, [name]) for each in names))
    outside = [source for source in product() if not inside(source.module, [compiler])]
    found = [(source.at(node), name) for source in outside for name, node in source.imports if inside(name, [compiler])]
    assert found, "somebody uses it"
    none(f"{at} {name}" for at, name in found if name not in (compiler, f"{compiler}.compile_schema"))


def test_the_product_uses_no_model_of_transformers() -> None:
    tree = [source for source in product() if source.top != "penstock"]
    names = [(s.at(node), name) for s in tree for name, node in s.imports if name.startswith("transformers.")]
    allowed = ("transformers.AutoTokenizer", "transformers.AutoConfig")
    none(f"{at} {name}" for at, name in names if name not in allowed)


def test_the_brain_loads_no_torch() -> None:
    names = modules(*BRAIN)
    assert loaded(names, ["torch", "triton", "transformers", "zmq", "asyncio"]) == []


@pytest.mark.parametrize("name", LIGHT_PROCESSES)
def test_only_the_executor_loads_torch(name: str) -> None:
    assert modules(name) == [name], f"{name} is a process of the table in design section 2"
    assert loaded([name], ["torch", "triton", "transformers"]) == []


def test_protocol_loads_none_of_the_others() -> None:
    others = [f"penstock.{name}" for name in sorted(set(PRODUCT) - {"protocol"})]
    assert loaded(modules("protocol"), [*others, "tests", "benchmarks", "torch", "zmq"]) == []


def test_every_module_can_be_imported_alone() -> None:
    """A module that only works when another was imported first hides a cycle."""
    script = """
import importlib, sys
known = set(sys.modules)
for name in sys.argv[1:]:
    importlib.import_module("penstock." + name)
    for loaded in [m for m in sys.modules if m.startswith("penstock.")]:
        del sys.modules[loaded]
"""
    names = modules("protocol", *BRAIN)
    done = subprocess.run([sys.executable, "-c", script, *names], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_outlaws_are_found() -> None:
    text = "from services.links.link import Port\ndef f():\n import benchmarks.serve\nfrom ..services import x\n"
    assert len(list(outlaws(parse(text, "kernels/example.py")))) == 5
    assert list(outlaws(parse("import protocol.steps\nimport kernels.norm", "engine_core/kv/block_pool.py"))) == []


def test_hidden_imports_are_found() -> None:
    text = "import importlib\ndef f():\n importlib.import_module('torch.nn')\nif 0:\n __import__('torch')"
    assert len(list(forbidden(parse(text), {"torch"}))) == 2


def test_clocks_are_found() -> None:
    text = "import time\nfrom time import monotonic as now\nfrom datetime import datetime\n"
    text += "a = time.time()\nb = now()\nc = datetime.now()\nd = time.perf_counter()\n"
    assert len(list(clock_readings(parse(text)))) == 4
    assert len(list(clock_readings(parse(text, "engine_core/execution/model_runner.py")))) == 3
