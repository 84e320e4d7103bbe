"""Vision encoders, a module each: what the `vision_config` of a config.json means, and which tensors there are.

A module of this folder has `KINDS`, a tuple of `VisionKind`, and for specs of its own `shapes`, the tensors.
Nothing else lists them. `models/vision` has the module of the same name that computes. Imports no torch.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import msgspec

from penstock.engine_core.images.processor_spec import ProcessorSpec
from penstock.engine_core.models.layer_spec import NormSpec
from penstock.engine_core.models.reading import ModelFile
from penstock.engine_core.models.vision_spec import VisionSpec

Shapes: TypeAlias = Iterator[tuple[str, tuple[int, ...]]]


class BlockNames(NamedTuple):
    """Modules of a layer by their names in the checkpoint. Those of `qkv` and of `up` are one tensor, or one for each
    part."""

    attention_norm: str
    qkv: tuple[str, ...]
    output: str
    mlp_norm: str
    up: tuple[str, ...]  # the gate first
    down: str


Processor: TypeAlias = Callable[[int], ProcessorSpec]  # the folder's, for cells of so many pixels


class VisionKind(msgspec.Struct, frozen=True, kw_only=True):
    """A vision encoder. `read` makes its spec of a `vision_config`, whose silent keys `defaults` answer, and of the
    whole config.json."""

    wrappers: tuple[str, ...]  # architectures that have it
    types: tuple[str, ...]  # the `model_type` of its `vision_config`
    read: Callable[[ModelFile, ModelFile, Processor], VisionSpec]
    defaults: Mapping[str, Any]
    keys: Mapping[str, str] = {}  # other names of its keys, and those that `read` has
    ignored: tuple[str, ...] = ()  # keys that the encoder's code in transformers does not read either
    # Of M-RoPE, where the file is silent: see RopeSpec.
    sections: tuple[int, ...] = ()
    sections_alternate: bool = False


@lru_cache(maxsize=1)
def vision_kinds() -> tuple[VisionKind, ...]:
    """Every kind, in the order of the modules' names."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return tuple(kind for name in names for kind in importlib.import_module(f"{__name__}.{name}").KINDS)


def vision_kind(architectures: Collection[str], model_type: object) -> VisionKind | None:
    """The kind of encoder that a model of these architectures has, if its `vision_config` is of this type, or of
    None."""
    for kind in vision_kinds():
        if any(name in kind.wrappers for name in architectures) and (model_type is None or model_type in kind.types):
            return kind
    return None


def vision_shapes(spec: VisionSpec) -> dict[str, tuple[int, ...]]:
    """The encoder's tensors by their names in a checkpoint, without the `model.` that may stand before them all."""
    return dict(importlib.import_module(f"{__name__}.{spec.kind}").shapes(spec))


def linear(name: str, outputs: int, inputs: int, *, bias: bool) -> Shapes:
    yield f"{name}.weight", (outputs, inputs)
    if bias:
        yield f"{name}.bias", (outputs,)


def norm(name: str, width: int, spec: NormSpec) -> Shapes:
    yield f"{name}.weight", (width,)
    if spec.centered and spec.bias:
        yield f"{name}.bias", (width,)


def block(name: str, spec: VisionSpec, names: BlockNames) -> Shapes:
    """A layer's tensors. name: of the layer, with a dot."""
    yield from norm(name + names.attention_norm, spec.hidden, spec.norm)
    for part in names.qkv:
        yield from linear(name + part, 3 // len(names.qkv) * spec.hidden, spec.hidden, bias=spec.bias)
    yield from linear(name + names.output, spec.hidden, spec.hidden, bias=spec.bias)
    yield from norm(name + names.mlp_norm, spec.hidden, spec.norm)
    for part in names.up:
        yield from linear(name + part, spec.width, spec.hidden, bias=spec.bias)
    yield from linear(name + names.down, spec.hidden, spec.width, bias=spec.bias)
