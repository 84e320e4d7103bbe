"""Every kernel fits every chip of the README: what the product would launch on each is in the file of compiled kernels,
from the sources as they are, within the chip's limits; and a sample of it compiles anew to the same."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

from benchmarks.chip_table import REGISTERS, Row, Source, Table, exceeded, read, write
from penstock.kernels.chip import CHIPS
from tests.rules import source

L4 = CHIPS["sm_89"]


def run(*command: str, cache: Path) -> list[str]:
    """Lines that Python says with these arguments, in a process of its own: Triton's interpreter is chosen once for a
    process."""
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environ["TRITON_CACHE_DIR"] = str(cache)
    done = subprocess.run([sys.executable, *command], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    return [*done.stdout.splitlines(), str(done.returncode)]


SEVERAL = """
import functools, sys
from benchmarks import chips
chips.launches = functools.cache(chips.launches)  # what takes longest
for options in sys.argv[1:]:
    print(f"exit code {chips.main(['--check', *options.split()])}")
"""


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A file with a row of more shared memory than the chip has, one that is not there, and a kernel of another
    source; and what is said of them."""
    table = read()
    names = [name for name in table.rows if all("sm_89" in taken for taken in table.rows[name].values())]
    large, missing, changed = (
        next(name for name in names if word in name) for word in ("norm", "activ", "gather_kernel")
    )
    label, taken = next(iter(table.rows[large].items()))
    taken["sm_89"] = taken["sm_89"]._replace(shared=119 << 10)
    lost = next(iter(table.rows[missing]))
    del table.rows[missing][lost]["sm_89"]
    path = tmp_path_factory.mktemp("broken") / "chips.json"
    write(path, Table({**table.sources, changed: Source("another", "3.9.0")}, table.rows))
    return path, sorted((
        f"{large} {label}: takes {119 << 10} bytes of shared memory, and NVIDIA L4 has {99 << 10}",
        f"{missing} {lost}: not compiled for sm_89: run python -m benchmarks.chips",
        f"{changed}: its source has changed since it was compiled: run python -m benchmarks.chips",
    ))  # fmt: skip


@pytest.fixture(scope="module")
def said(broken: tuple[Path, list[str]], tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], list[str]]:
    """Of the file that holds, with a sample that is compiled anew, and of the broken one."""
    of_broken = f"--sample 0 --file {broken[0]}"
    *lines, _ = run("-c", SEVERAL, "--sample 3", of_broken, cache=tmp_path_factory.mktemp("triton"))
    first = next(at for at, line in enumerate(lines, 1) if line.startswith("exit code"))
    return lines[:first], lines[first:]


def test_every_kernel_is_compiled_for_every_chip_and_fits(said: tuple[list[str], list[str]]) -> None:
    assert said[0] == ["exit code 0"]


def test_what_does_not_fit_or_was_not_compiled_is_found(
    said: tuple[list[str], list[str]], broken: tuple[Path, list[str]]
) -> None:
    *found, code = said[1]
    assert (sorted(found), code) == (broken[1], "exit code 1")


def test_the_file_has_every_chip() -> None:
    table = read()
    assert {chip for rows in table.rows.values() for taken in rows.values() for chip in taken} == set(CHIPS)
    assert table.sources.keys() == table.rows.keys()


def launched(file: source.Source) -> set[str]:
    """Functions that `name[grid](...)` calls, by module and name."""
    return {
        file.bindings.get(name.id, f"{file.module}.{name.id}")
        for call in file.nodes if isinstance(call, ast.Call) and isinstance(call.func, ast.Subscript)
        for name in ast.walk(call.func.value) if isinstance(name, ast.Name)
    }  # fmt: skip


def test_the_file_has_every_kernel_that_something_launches() -> None:
    files = [file for file in source.product() if file.top == "kernels"]
    kernels = {
        f"{file.module}.{node.name}"
        for file in files for node in file.tree.body
        if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(one) for one in node.decorator_list)
    }  # fmt: skip
    found = set.union(*map(launched, files)) & kernels
    assert {name.removeprefix("kernels.") for name in found} == set(read().rows)


def test_a_launch_is_found() -> None:
    text = "from penstock.kernels.a import other\n(one if x else two)[(1, 2)](3)\nother[grid](x)\nf(x)[0]\n"
    assert {name.rpartition(".")[2] for name in launched(source.parse(text))} == {"one", "two", "x", "other"}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (Row(99 << 10, 128, 256, 0), ""),
        (
            Row((99 << 10) + 1, 32, 128, 0),
            f"takes {(99 << 10) + 1} bytes of shared memory, and NVIDIA L4 has {99 << 10}",
        ),
        (Row(0, 255, 256, 0), ""),
        (Row(0, 129, 512, 0), f"takes {136 * 512} registers, and a multiprocessor of NVIDIA L4 has {REGISTERS}"),
    ],
)
def test_limits(row: Row, expected: str) -> None:
    assert exceeded(L4, row) == expected


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "chips.json"
    assert read(path) == Table({}, {})
    table = Table(
        {"k": Source("d", "3.9.0")}, {"k": {"b": {"sm_80": Row(1, 2, 3, 4)}, "a": {"sm_90": Row(5, 6, 7, 8)}}}
    )
    write(path, table)
    assert read(path) == table
    assert list(json.loads(path.read_text())["k"]["rows"]) == ["a", "b"]


@pytest.mark.long
def test_every_kernel_compiles_anew(tmp_path: Path) -> None:
    """With the Triton that is installed, within every chip's limits; with that of the file, to what the file has."""
    path = tmp_path / "chips.json"
    assert run("-m", "benchmarks.chips", "--all", "--file", str(path), cache=tmp_path) == ["0"]
    held, found = read(), read(path)
    for name in (name for name, one in held.sources.items() if one.triton == triton.__version__):
        assert found.rows[name] == held.rows[name]
