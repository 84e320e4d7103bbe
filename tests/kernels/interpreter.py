"""Triton's interpreter with products and roundings as GPUs make them, and without a search that it repeats: a
quarter of the time that kernels take in it.

To run a kernel it puts functions of its own in the place of those of the language, and for that goes through all that
the language's modules and classes have, once for each launch and for each call of one function of a kernel by another.
Which of them it replaces is the same each time.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter


@functools.cache
def builtins(place: Any) -> tuple[str, ...]:
    """Names in a module or class of the language of what stands for an operation, while none is replaced."""
    return tuple(name for name, member in inspect.getmembers(place) if tl.core.is_builtin(member))


def replace_builtins(place: Any, *rest: Any) -> None:
    """Replace those that are not replaced yet, as the interpreter does."""
    for name in builtins(place):
        member = getattr(place, name)
        if tl.core.is_builtin(member):
            interpreter._patch_attr(place, name, member, *rest)


def place_free(dot: Any) -> Any:
    """The interpreter's product of tiles, made so that an element does not depend on where in its tile it stands: a
    matrix unit keeps that promise, numpy's libraries keep it on some processors. Products in double precision are
    rounded once, which hides the order of their sums."""

    @functools.wraps(dot)
    def product(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        if tl.float8e4nv in (a.dtype.scalar, b.dtype.scalar):
            a, b = (interpreter.TensorHandle(float8_values(one.data), tl.float32) for one in (a, b))
        if d.data.dtype != np.float32 or a.data.dtype not in (np.float32, np.float16):
            return dot(self, a, b, d, *rest)
        made = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64)).astype(np.float32)
        return interpreter.TensorHandle(made + d.data, d.dtype.scalar)

    return product


def float8_values(codes: Any) -> Any:
    return torch.from_numpy(codes.view(np.uint8).copy()).view(torch.float8_e4m3fn).float().numpy()


def rounded(convert: Any) -> Any:
    """The interpreter's conversion of floats, with E4M3 as a GPU makes it: the interpreter cuts off and loses what is
    subnormal."""

    @functools.wraps(convert)
    def conversion(data: Any, source: Any, target: Any, *rest: Any) -> Any:
        if target == tl.float8e4nv and source == tl.float32:
            found = torch.from_numpy(data.astype(np.float32)).to(torch.float8_e4m3fn)
            return found.view(torch.uint8).numpy()
        if source == tl.float8e4nv and target == tl.float32:
            return float8_values(data).view(np.uint32)
        return convert(data, source, target, *rest)

    return conversion


def quicken() -> None:
    """Before any kernel runs: what has been replaced within a kernel's function may stay so."""
    interpreter._convert_float = rounded(interpreter._convert_float)
    builder = interpreter.InterpreterBuilder
    builder.create_dot = place_free(builder.create_dot)
    for place in (tl, tl.core, tl.tensor, tl.math, tl.core.tensor_descriptor_base):
        assert builtins(place)
    interpreter._patch_builtin = replace_builtins
