"""Triton's interpreter with products and roundings as GPUs make them, and without what it repeats, which is most of the
time that kernels take in it.

To run a kernel it puts functions of its own in the place of those of the language, and for that goes through all that
the language's modules and classes have, once for each launch and for each call of one function of a kernel by another.
Which of them it replaces is the same each time, and a launch replaces all. Each value of a kernel has its type and its
shape made anew, of which there are few.
"""

from __future__ import annotations

import functools
import inspect
import os
from types import SimpleNamespace
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


def replaced_once(replace: Any) -> Any:
    """The interpreter's replacement of the language as a kernel's function sees it: a launch makes it for all
    functions, which find it made."""
    language = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})

    @functools.wraps(replace)
    def replacement(function: Any) -> Any:
        begun = not tl.core.is_builtin(getattr(tl, builtins(tl)[0]))
        return interpreter._LangPatchScope() if begun else replace(language)

    return replacement


def numpy_types(made: Any) -> Any:
    """numpy's type of one of Triton's, which is one for each element's name."""
    known: dict[str, Any] = {}

    @functools.wraps(made)
    def numpy_type(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in known:
            known[name] = made(kind)
        return known[name]

    return numpy_type


def begin_block_type(plain: Any) -> Any:
    """What begins a type of blocks: the same for the same shape and element."""
    known: dict[Any, dict[str, Any]] = {}

    @functools.wraps(plain)
    def begin(self: Any, element: Any, shape: Any) -> None:
        key = (element.name, *shape) if all(type(size) is int for size in shape) else None
        if key not in known:
            plain(self, element, shape)
            if key is not None:
                known[key] = {"shape": self.shape, "numel": self.numel, "name": self.name}
        else:
            self.__dict__.update(known[key], element_ty=element)

    return begin


def begin_tensor(plain: Any) -> Any:
    """What begins a value of a kernel: its sizes, as the language has them, are the same for the same shape."""
    known: dict[Any, dict[str, Any]] = {}

    @functools.wraps(plain)
    def begin(self: Any, handle: Any, kind: Any) -> None:
        shape = (*kind.shape.values,) if kind.is_block() else ()
        if shape not in known:
            plain(self, handle, kind)
            known[shape] = {"numel": self.numel, "shape": self.shape}
        else:
            self.__dict__.update(known[shape], handle=handle, type=kind, dtype=kind.scalar)

    return begin


def equal_types(plain: Any) -> Any:
    """Whether two types are the same one, which is asked several times for each operation."""

    @functools.wraps(plain)
    def equal(self: Any, other: Any) -> bool:
        return self is other or (self.name == other.name if isinstance(other, tl.dtype) else plain(self, other))

    return equal


def broadcast_once(plain: Any) -> Any:
    """Two values as they are, where they have the same shape; else what they become."""

    @functools.wraps(plain)
    def broadcast(self: Any, one: Any, other: Any) -> Any:
        kinds = one.type, other.type
        blocks = [kind.shape.values if kind.is_block() else None for kind in kinds]
        return (one, other) if blocks[0] == blocks[1] else plain(self, one, other)

    return broadcast


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
    if os.environ.get("TRITON_INTERPRET") == "1":  # the compiler's values are let alone
        interpreter._patch_lang = replaced_once(interpreter._patch_lang)
        interpreter._get_np_dtype = numpy_types(interpreter._get_np_dtype)
        tl.block_type.__init__ = begin_block_type(tl.block_type.__init__)
        tl.tensor.__init__ = begin_tensor(tl.tensor.__init__)
        tl.dtype.__eq__ = equal_types(tl.dtype.__eq__)
        semantic = type(interpreter.interpreter_semantic)
        semantic.broadcast_impl_value = broadcast_once(semantic.broadcast_impl_value)
