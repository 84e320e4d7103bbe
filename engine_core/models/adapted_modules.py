"""Names in an adapter's file and what they stand for: the matrices of a model, and its routed experts in both forms.

PEFT names matrices of single experts as it names others. Experts that transformers holds as parameters of one module,
stacked, are adapted by `target_parameters`: one A for each expert, all in one tensor, and one B, whose columns take
turns. Two parameters of one module are wrapped one in the other: the outer has the module's name, the inner is its
`base_layer`. Source: peft 0.21, `ParamWrapper`. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import NamedTuple

from penstock.engine_core.models.config_file import ConfigFile
from penstock.engine_core.models.layer_spec import EXPANSION, ExpertSpec
from penstock.engine_core.models.spec import ModelSpec, stored_name

EXPERTS = "--lora-experts"
PARAMETERS = "target_parameters"
DOWN = "down_proj"
WRAPPED = ".base_layer"
INNER = re.compile(r"^(?:(?:model|language_model|text_model|bert|roberta)\.)*")  # differs between classes of one model
SINGLE = re.compile(r"(.+\.experts\.)(\d+)(\.\w+)")
LAYER = re.compile(r"\.(\d+)\.")


class Target(NamedTuple):
    """What two tensors of a file adapt."""

    name: str  # as in a Llama
    module: str  # for which ranks and scales are given
    outputs: int
    inputs: int
    experts: int = 0  # that they adapt at once; 0: they adapt one matrix

    def shape(self, half: str, rank: int) -> tuple[int, int]:
        """Of A or B, as they are stored."""
        lines = rank * max(1, self.experts)
        return (lines, self.inputs) if half == "A" else (self.outputs, lines)


def canonical(module: str) -> str:
    """A module's name without what it begins with, which depends on the class that the model was loaded by."""
    return INNER.sub("", module.removesuffix(".weight"))


def expert_shapes(experts: ExpertSpec, hidden: int) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of one expert's matrices."""
    return {**dict.fromkeys(experts.parts, (experts.width, hidden)), DOWN: (hidden, experts.width)}


def stacks_of(experts: ExpertSpec) -> tuple[str, str]:
    """The parameters of stacked experts: of both first products, or of the only one, and of the last."""
    return "gate_up_proj" if experts.gated else experts.parts[0], DOWN


def parameters_of(file: ConfigFile) -> tuple[str, ...]:
    """`target_parameters` of a folder. Raises ModelError for what is no list of names."""
    given = file.get(PARAMETERS) or []
    if not isinstance(given, list) or not all(type(one) is str for one in given):
        raise file.error(PARAMETERS, "a list of parameters' names is expected")
    return tuple(given)


class Modules:
    """Of a model whose matrices are `shapes`, by their names in a Llama, and perhaps its routed experts."""

    def __init__(self, spec: ModelSpec, shapes: Mapping[str, tuple[int, int]], *, experts: bool) -> None:
        self._spec = spec
        self._experts = experts
        self.known = {canonical(stored_name(spec, name)): Target(name, "", *shape) for name, shape in shapes.items()}
        self._singles: dict[str, tuple[Target, int]] = {}  # of each layer's first expert, with the number of all
        self._stacks: dict[str, tuple[str, ExpertSpec]] = {}  # by the module that has them, with their name
        for at, layer in enumerate(spec.blocks):
            own, place = layer.experts, f"model.layers.{at}.mlp.experts"
            if own is None or not experts:
                continue
            for part, shape in expert_shapes(own, spec.hidden).items():
                name = f"{place}.0.{part}"
                self._singles[canonical(stored_name(spec, name))] = Target(name, "", *shape), own.count
            stored = canonical(stored_name(spec, f"{place}.{DOWN}"))
            if stored.endswith(f".{DOWN}"):
                self._stacks[stored.removesuffix(f".{DOWN}")] = place, own
            self._stacks[canonical(place)] = place, own

    def target(self, module: str, all_modules: Container[str], asked: Sequence[str]) -> Target | None:
        """What a module of the file stands for; None: nothing that is served. asked: as of `parameters_of`."""
        key = canonical(module)
        if (found := self.known.get(key)) is not None:
            return found._replace(module=module)
        if (single := SINGLE.fullmatch(key)) is not None:
            first, count = self._singles.get(f"{single[1]}0{single[3]}", (None, 0))
            if first is None or int(single[2]) >= count:
                return None
            return first._replace(name=first.name.replace(".experts.0.", f".experts.{int(single[2])}."), module=module)
        stem = module.removesuffix(WRAPPED)
        if canonical(stem) not in self._stacks:
            return None
        place, experts = self._stacks[canonical(stem)]
        both, last = stacks_of(experts)
        inner = stem != module or (
            f"{module}{WRAPPED}" not in all_modules and not any(one.endswith(last) for one in asked)
        )
        shapes, parts = expert_shapes(experts, self._spec.hidden), len(experts.parts)
        outputs, inputs = shapes[experts.parts[0]] if inner else shapes[last]
        kind = both if inner else last
        return Target(f"{place}.{kind}", f"{stem}.{kind}", outputs * (parts if inner else 1), inputs, experts.count)

    def wanted(self, target: str) -> Iterator[tuple[str, str]]:
        """Each module that an entry of `target_modules` names, with its name in a Llama."""
        own = canonical(target)
        for module, known in self.known.items():
            if module == own or module.endswith(f".{own}"):
                yield module, known.name
        for module, (known, count) in self._singles.items():
            for at in range(count):
                one, number = module.replace(".experts.0.", f".experts.{at}."), f".experts.{at}."
                if one == own or one.endswith(f".{own}"):
                    yield one, known.name.replace(".experts.0.", number)

    def wanted_parameters(self, file: ConfigFile, asked: Sequence[str]) -> Iterator[tuple[str, str]]:
        """Each parameter that `target_parameters` name, with its name in a Llama. Raises ModelError for one that is not
        of routed experts, or of such as are not adapted."""
        if asked and self._spec.sparse and not self._experts:
            raise file.error(PARAMETERS, f"adapters of routed experts are served with {EXPERTS}")
        if any(own.transposed and not own.interleaved for own in self._spec.sparse) and asked:
            raise file.error(PARAMETERS, "the model's experts are stored the other way round, which is not served")
        for parameter in asked:
            own = [(f"{module}.{kind}", f"{place}.{kind}")
                   for module, (place, experts) in self._stacks.items() for kind in stacks_of(experts)
                   if f".{module}.{kind}".endswith(f".{canonical(parameter)}")]  # fmt: skip
            if not own:
                raise file.error(PARAMETERS, f"{parameter} names no parameter of the model's routed experts")
            yield from own

    def unknown(self, module: str) -> str:
        """Why a module cannot be adapted, as a clause."""
        if SINGLE.fullmatch(canonical(module)) or module.removesuffix(WRAPPED).endswith(".experts"):
            if self._spec.sparse and not self._experts:
                return f"adapts routed experts, which are served with {EXPERTS}"
            return "adapts an expert that the model has not"
        if self._spec.sparse and module.endswith((".gate", "_gate", ".router")):
            return "adapts a router, which is not served"
        if module.endswith(EXPANSION):
            return f"adapts {EXPANSION}, which is not served: its halves are multiplied apart"
        if module.endswith("embed_tokens"):
            return "adapts an embedding, which is not served"
        return f"adapts {module}, which is no matrix of the model's text layers"
