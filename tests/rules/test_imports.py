"""Design 1: the import law, on the syntax tree and in fresh interpreters."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping

import pytest

from tests.rules.source import NAMESPACE, PRODUCT, ROOT, Source, in_folders, none, origin, parse, product, sources

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
# From the bottom up: a folder of engine_core imports only from those before it.
ENGINE_ORDER = (
    *("histogram", "kv", "embedded", "distributed", "images", "models", "folder", "loading", "placement"),
    *("tokenizer", "parsers", "grammar", "text", "speculation", "scheduling", "execution"),
)
LIGHT_PROCESSES = ("services.openai.api_server", "services.tokenizer.main", "services.scheduler.main")


def inside(module: str, packages: Iterable[str]) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def missing(known: Mapping[str, Source], importing: Iterable[Source]) -> Iterator[str]:
    """Names that are imported from known modules, and are neither bound there nor modules themselves."""
    bound = {module: set(names_of(source)) for module, source in known.items()}
    for source in importing:
        for node in source.nodes:
            if isinstance(node, ast.ImportFrom):
                module = in_folders(origin(source, node))
                names = bound.get(module, {alias.name for alias in node.names})
                for alias in node.names:
                    if not ({alias.name, "__getattr__"} & names or f"{module}.{alias.name}" in known):
                        yield f"{source.at(node)} {module} has no {alias.name}"


def names_of(source: Source) -> Iterator[str]:
    """What a file binds anywhere."""
    for node in source.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.alias):
            yield node.asname or node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def outlaws(source: Source) -> Iterator[str]:
    """Imports of our own folders that the table does not allow."""
    for name, node in source.imports:
        top = name.partition(".")[0]
        if top in OURS and top not in MAY_IMPORT[source.top]:
            yield f"{source.at(node)} {source.top} imports {name}"


# Text that may be an import of one of the product's folders: parsing every test takes ten times as long as looking.
BARE = rf"\b(?:from|import)\s+(?:[\w.]+(?:\s+as\s+\w+)?\s*,\s*)*(?:{'|'.join(PRODUCT)})\b"


def bare(source: Source) -> Iterator[str]:
    """Imports of the product's folders by their own names."""
    for node in source.nodes:
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
    for node in source.nodes:
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


def cycles(tree: Iterable[Source]) -> list[list[str]]:
    """Modules of one folder that import each other, wherever the import stands."""
    modules = {source.module: source for source in tree}
    edges = {
        name: {found for found, _ in source.imports if found in modules and found != name and same_folder(name, found)}
        for name, source in modules.items()
    }
    order: list[str] = []
    seen: set[str] = set()
    for name in edges:
        visit(name, edges, seen, order)
    back: dict[str, set[str]] = {name: set() for name in edges}
    for name, found in edges.items():
        for other in found:
            back[other].add(name)
    seen, components = set(), []
    for name in reversed(order):
        component: list[str] = []
        visit(name, back, seen, component)
        if len(component) > 1:
            components.append(sorted(component))
    return components


def visit(name: str, edges: dict[str, set[str]], seen: set[str], order: list[str]) -> None:
    """Depth first; a module comes into the order behind everything that it leads to (Kosaraju)."""
    if name in seen:
        return
    seen.add(name)
    for other in sorted(edges[name]):
        visit(other, edges, seen, order)
    order.append(name)


def same_folder(one: str, other: str) -> bool:
    return one.rpartition(".")[0] == other.rpartition(".")[0]


def upward(source: Source) -> Iterator[str]:
    """Imports from a folder of engine_core that stands above the importing one."""
    here = source.module.split(".")[1] if source.module.startswith("engine_core.") else ""
    for name, node in source.imports:
        there = name.split(".")[1] if name.startswith("engine_core.") else ""
        known = here in ENGINE_ORDER and there in ENGINE_ORDER
        if known and ENGINE_ORDER.index(there) > ENGINE_ORDER.index(here):
            yield f"{source.at(node)} {here} imports {name}, which stands above it"


def test_no_modules_of_a_folder_import_each_other() -> None:
    found = cycles(product())
    none(" ".join(cycle) for cycle in found)


def test_http_knows_no_api_and_no_engine() -> None:
    tree = [source for source in product() if inside(source.module, ["services.http"])]
    found = [(source.at(node), name) for source in tree for name, node in source.imports]
    none(f"{at} {name}" for at, name in found if inside(name, ["services.openai", "services.client"]))


def test_folders_of_engine_core_import_downwards() -> None:
    none(found for source in product() for found in upward(source))


def test_folders_of_engine_core_have_their_place() -> None:
    folders = {source.module.split(".")[1] for source in product() if source.module.startswith("engine_core.")}
    assert folders == set(ENGINE_ORDER)


def test_cycles_and_upward_imports_are_found() -> None:
    one = parse("from engine_core.kv.two import x", "engine_core/kv/one.py")
    two = parse("def f():\n from engine_core.kv.three import y", "engine_core/kv/two.py")
    three = parse("import engine_core.kv.one", "engine_core/kv/three.py")
    assert cycles((one, two, three)) == [["engine_core.kv.one", "engine_core.kv.three", "engine_core.kv.two"]]
    assert cycles((one, two)) == []
    assert len(list(upward(parse("from engine_core.execution.sampler import Sampler", "engine_core/models/x.py")))) == 2


def test_folders_import_what_they_may() -> None:
    none(found for source in product() for found in outlaws(source))


def test_the_folders_are_imported_as_one_package() -> None:
    """`services` is a user's folder as well: ours is `penstock.services`, in tests and benchmarks too."""
    every = sources(*PRODUCT, NAMESPACE, "tests", "benchmarks")
    none(found for source in every if re.search(BARE, source.text) for found in bare(source))


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
    expressions = tuple(f"engine_core.grammar.{name}" for name in ("patterns", "automata", "runs"))
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


def test_names_that_are_imported_are_there() -> None:
    """Benchmarks import within functions that only a GPU runs: nothing else finds what was renamed since."""
    known = {source.module.removesuffix(".__init__"): source for source in (*product(), *sources("benchmarks"))}
    none(missing(known, known.values()))


@pytest.mark.parametrize(
    "text",
    ["import services", "import os as o, kernels.norm", "from protocol import links", "x = 1; import services.cli"],
)
def test_bare_imports_are_found(text: str) -> None:
    assert re.search(BARE, text)
    assert len(list(bare(parse(text)))) == 1


def test_outlaws_are_found() -> None:
    text = "from services.links.link import Link\ndef f():\n import benchmarks.serve\nfrom ..services import x\n"
    assert len(list(outlaws(parse(text, "kernels/example.py")))) == 5
    assert list(outlaws(parse("import protocol.steps\nimport kernels.norm", "engine_core/kv/block_pool.py"))) == []


def test_hidden_imports_are_found() -> None:
    text = "import importlib\ndef f():\n importlib.import_module('torch.nn')\nif 0:\n __import__('torch')"
    assert len(list(forbidden(parse(text), {"torch"}))) == 2


def test_missing_names_are_found() -> None:
    text = "def f():\n from penstock.kernels.there import X, gone\n from penstock.kernels import there, lost"
    known = {"kernels": parse("", "kernels/__init__.py"), "kernels.there": parse("X = 1", "kernels/there.py")}
    assert len(list(missing(known, [parse(text, "benchmarks/example.py")]))) == 2


def test_clocks_are_found() -> None:
    text = "import time\nfrom time import monotonic as now\nfrom datetime import datetime\n"
    text += "a = time.time()\nb = now()\nc = datetime.now()\nd = time.perf_counter()\n"
    assert len(list(clock_readings(parse(text)))) == 4
    assert len(list(clock_readings(parse(text, "engine_core/execution/model_runner.py")))) == 3
