"""Triton's private names stand in two files, each behind a check: a release that changes one is met there."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.rules.source import Source, none, parse, product

HOMES = ("kernels/triton_names.py", "kernels/gluon_names.py")
PRIVATE = frozenset((
    "jit_cache_hook", "jit_post_compile_hook", "specialization_data", "CudaLauncher", "CudaUtils",
    "set_active", "thread_barrier", "async_copy_global_to_shared", "knobs",
))  # fmt: skip
MACHINERY = ("triton.backends", "triton.compiler", "triton.runtime")


def private(source: Source) -> Iterator[str]:
    for node in source.nodes:
        match node:
            case ast.Attribute(attr=name) | ast.alias(name=name) | ast.Constant(value=str(name)):
                if name in PRIVATE or name.startswith(MACHINERY):
                    yield f"{source.at(node)} has Triton's {name}: it belongs into {HOMES[0]}"
            case ast.ImportFrom(module=str(name)) if name.startswith(MACHINERY):
                yield f"{source.at(node)} has Triton's {name}: it belongs into {HOMES[0]}"


def test_triton_is_reached_into_in_one_place() -> None:
    none(found for source in product() if source.path not in HOMES for found in private(source))


@pytest.mark.parametrize(
    "text",
    [
        "runtime.jit_cache_hook = f", "from triton.backends.nvidia.driver import Other", "import triton.runtime.driver",
        "a = triton.knobs.cache.dir", "import_module('triton.compiler.compiler')",
        "driver.set_active(d)", "compile['specialization_data']", "from a import thread_barrier as barrier",
    ],
)  # fmt: skip
def test_a_private_name_is_found(text: str) -> None:
    assert len(list(private(parse(text)))) == 1
