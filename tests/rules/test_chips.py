"""Kernels ask `kernels.chip` alone what a device is: no other file asks the driver, or takes one chip for granted."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.rules.source import Source, none, parse, product

HOME = "kernels/chip.py"
DRIVER = frozenset((
    *("is_cuda", "get_device_capability", "get_device_properties", "get_device_name", "multi_processor_count"),
    "shared_memory_per_block_optin",
))  # fmt: skip
COMPUTING = ("kernels/", "engine_core/")
OF_ONE_CHIP = frozenset((132, 227 << 10))


def assumptions(source: Source) -> Iterator[str]:
    for node in source.nodes:
        name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in DRIVER:
            name = node.value  # getattr
        if name in DRIVER:
            yield f"{source.at(node)} asks for {name}: take it from penstock.kernels.chip"
        if isinstance(node, ast.Constant) and type(node.value) is int and node.value in OF_ONE_CHIP:
            yield f"{source.at(node)} has {node.value}, which is one chip's: take it from penstock.kernels.chip"
        asked = isinstance(node, ast.Compare) and any(
            getattr(one, "attr", "") == "capability" for one in ast.walk(node)
        )
        if asked and source.path.startswith(COMPUTING):
            yield f"{source.at(node)} compares a capability: name what follows from it in penstock.kernels.chip"
        of_numbers = isinstance(node, ast.BinOp) and isinstance(node.left, ast.Constant)
        if of_numbers and ast.unparse(node) in ("227 << 10", "227 * 1024", "1024 * 227"):
            yield f"{source.at(node)} has the shared memory of one chip: take it from penstock.kernels.chip"


def test_nothing_else_asks_what_a_device_is() -> None:
    none(found for source in product() if source.path != HOME for found in assumptions(source))


@pytest.mark.parametrize(
    "text",
    [
        "a = x.is_cuda", "a = torch.cuda.get_device_capability(d)[0]", "a = 132", "a = 227 << 10", "a = 232448",
        "from torch.cuda import get_device_properties as p\nget_device_properties(0)", "a = getattr(x, 'is_cuda')",
        "a = f(d).multi_processor_count", "a = 227 * 1024", "a = chip.capability >= 90", "a = 0 < chip.capability < b",
    ],
)  # fmt: skip
def test_an_assumption_is_found(text: str) -> None:
    assert len(list(assumptions(parse(text)))) == 1


@pytest.mark.parametrize("text", ["a = chip.num_sms", "a = 133", "a = True", "a = x.device", "a = '132'"])
def test_other_code_is_none(text: str) -> None:
    assert list(assumptions(parse(text))) == []
