"""Families of models, a module each: what a family's config.json means, and how its tensors are called.

A module of this folder has `FAMILIES`, a tuple of `Family`. Nothing else lists them: reading, planning, loading, the
checks before a start and the documentation ask `families()`. Imports no torch.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import msgspec

from penstock.engine_core.models.layer_spec import Body
from penstock.engine_core.models.reading import ModelFile

HEADS = re.compile(r"For(CausalLM|MaskedLM|ConditionalGeneration)\Z")


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of model. `name` is its `model_type`, `architecture` its class with an output embedding. `read` makes
    the layers of a file, whose silent keys `defaults` answer.

    An encoder's output embedding is for training alone.
    """

    name: str
    architecture: str
    read: Callable[[ModelFile], Body]
    defaults: Mapping[str, Any]
    wrappers: tuple[str, ...] = ()  # classes that have the family's text model beside encoders of images or audio
    texts: tuple[str, ...] = ()  # the text model's `model_type` in these, where it is not `name`
    names: tuple[tuple[str, str], ...] = ()  # parts of tensor names as `models.tensors` has them, and the checkpoint's
    keys: Mapping[str, str] = {}  # of config.json by names of the family's own, and what others call them
    ignored: tuple[str, ...] = ()  # keys that the family's code in transformers does not read either
    same: tuple[str, ...] = ()  # keys whose true says what the family does anyway
    published_code: bool = False  # files name code of the model's own (`auto_map`), which is not needed any more

    @property
    def base(self) -> str:
        """The class without an output embedding, as embedding models are saved."""
        return HEADS.sub("TextModel" if self.name.endswith("_text") else "Model", self.architecture)

    @property
    def sequence_classifier(self) -> str:
        """The class with a head for classification."""
        return self.base.removesuffix("Model") + "ForSequenceClassification"

    @property
    def classes(self) -> tuple[str, ...]:
        """Its architectures, without those of wrappers."""
        return self.architecture, self.base, self.sequence_classifier


@lru_cache(maxsize=1)
def families() -> Mapping[str, Family]:
    """Every family by its name, in the order of the modules' names."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    modules = [importlib.import_module(f"{__name__}.{name}") for name in names]
    return {family.name: family for module in modules for family in module.FAMILIES}
