"""What no file may hold: unfinished work, code that runs data, sleeping, async outside services (design 2 and 9)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.rules.source import Function, Source, none, parse, product, sources

UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|HACK|NotImplementedError|for now)\b")
CODE_AS_DATA = frozenset(("pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"))
RUNNERS = frozenset((
    *("eval", "exec", "compile", "__import__", "os.system", "os.popen", "torch.load", "torch.hub.load"),
    *("builtins.eval", "builtins.exec", "yaml.load", "numpy.load"),
))  # fmt: skip
OBJECTS = frozenset(("send_pyobj", "recv_pyobj"))
FLAGS = {"trust_remote_code": True, "allow_pickle": True, "shell": True, "weights_only": False}


def unfinished(source: Source) -> Iterator[str]:
    for number, line in enumerate(source.text.splitlines(), 1):
        if match := UNFINISHED.search(line):
            yield f"{source.path}:{number} {match[0]}"


def hollow(source: Source) -> Iterator[str]:
    """Functions whose body is three dots, outside protocols and overloads."""
    shells = {
        function
        for owner in source.classes()
        if any(source.resolve(base) in ("typing.Protocol", "Protocol") for base in owner.bases)
        for function in owner.body
    }
    for node in source.functions():
        last = node.body[-1]
        dots = isinstance(last, ast.Expr) and isinstance(last.value, ast.Constant) and last.value.value is ...
        overload = any(source.resolve(d) == "typing.overload" for d in node.decorator_list)
        if dots and node not in shells and not overload:
            yield f"{source.at(node)} {node.name} has no body"


def running_data(source: Source) -> Iterator[str]:
    for name, node in source.imports:
        if name.partition(".")[0] in CODE_AS_DATA:
            yield f"{source.at(node)} imports {name}"
    for node in source.nodes:
        if not isinstance(node, ast.Call):
            continue
        name = source.resolve(node.func)
        if name in RUNNERS or name.rpartition(".")[2] in OBJECTS:
            yield f"{source.at(node)} calls {name}"
        for word in node.keywords:
            flag = word.value.value if isinstance(word.value, ast.Constant) else None
            if word.arg in FLAGS and flag is FLAGS[word.arg]:
                yield f"{source.at(node)} {word.arg}={flag}"


def async_code(source: Source) -> Iterator[str]:
    for node in source.nodes:
        if isinstance(node, ast.AsyncFunctionDef | ast.Await | ast.AsyncFor | ast.AsyncWith):
            yield f"{source.at(node)} async"
    for name, node in source.imports:
        if name.partition(".")[0] == "asyncio":
            yield f"{source.at(node)} imports asyncio"


def sleeps(source: Source) -> Iterator[str]:
    """time.sleep anywhere; asyncio.sleep of a fixed time outside a loop that looks for something."""
    if "sleep" not in source.text:  # most tests are not parsed
        return
    looping = {inner for loop in source.nodes if isinstance(loop, ast.While | ast.For) for inner in ast.walk(loop)}
    for node in source.nodes:
        if isinstance(node, ast.Attribute | ast.Name) and source.resolve(node) == "time.sleep":
            yield f"{source.at(node)} time.sleep"
        if isinstance(node, ast.Call) and source.resolve(node.func) == "asyncio.sleep" and node not in looping:
            seconds = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else 0
            if seconds:
                yield f"{source.at(node)} asyncio.sleep({seconds})"


def everything() -> tuple[Source, ...]:
    """The product, the tests but these rules (they name what they forbid), and the benchmarks."""
    tests = tuple(source for source in sources("tests") if not source.path.startswith("tests/rules/"))
    return product() + tests + sources("benchmarks")


def test_nothing_is_unfinished() -> None:
    none(found for source in everything() for found in unfinished(source))


def test_no_function_is_hollow() -> None:
    none(found for source in product() for found in hollow(source))


def test_data_is_never_run() -> None:
    none(found for source in product() for found in running_data(source))


def test_async_lives_in_services() -> None:
    tree = [source for source in product() if source.top != "services"]
    none(found for source in tree for found in async_code(source))


def test_nobody_sleeps_to_wait() -> None:
    none(found for source in (*product(), *sources("tests")) for found in sleeps(source))


@pytest.mark.parametrize(
    "text",
    [
        "import pickle", "from marshal import loads", "eval('1')", "import torch\ntorch.load('x')",
        "sock.recv_pyobj()", "f(trust_remote_code=True)", "import subprocess as s\ns.run('ls', shell=True)",
    ],
)  # fmt: skip
def test_running_data_is_found(text: str) -> None:
    assert len(list(running_data(parse(text)))) >= 1
    assert list(running_data(parse("model.eval()\nre.compile('a')\nf(trust_remote_code=False)"))) == []


def test_unfinished_and_hollow_code_is_found() -> None:
    assert len(list(unfinished(parse("x = 1  # TODO: more\ny = 2  # good enough for now")))) == 2
    text = "from typing import Protocol\nclass P(Protocol):\n def f(self): ...\n"
    text += "def g(): ...\ndef h():\n 'doc'\n ...\ndef i():\n 'Stands where something is called.'"
    assert len(list(hollow(parse(text)))) == 2


def test_async_and_sleep_are_found() -> None:
    assert len(list(async_code(parse("import asyncio\nasync def f(): await g()")))) == 3
    text = "import time, asyncio\ntime.sleep(1)\nasync def f():\n await asyncio.sleep(1)\n await asyncio.sleep(0)\n"
    assert len(list(sleeps(parse(text + " while x: await asyncio.sleep(0.01)")))) == 2


def test_a_function_is_either_kind() -> None:
    assert [type(node) for node in parse("def f(): ...\nasync def g(): ...").functions()] == list(Function.__args__)
