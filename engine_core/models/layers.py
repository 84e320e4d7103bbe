"""The layers that all families share: plain objects over tensors that know where checkpoint tensors belong.

Fused weights (query, key and value; gate and up) are one matrix. A layer's `destinations` maps the names of the tensors
in a checkpoint, relative to the layer, to views of its own memory, so that loading copies each byte once; of quantized
weights to what they are converted from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from operator import attrgetter
from typing import Protocol, cast

import torch
from torch import Tensor

from penstock.engine_core.models.layer_spec import NormSpec
from penstock.engine_core.models.low_rank import Adapted
from penstock.engine_core.models.parts import Part, Placement, Source, whole
from penstock.engine_core.models.quantization.weight_format import Formats, Role, WeightFormat, format_of
from penstock.engine_core.models.quantized_matrix import Owner, QuantizedMatrix
from penstock.engine_core.models.weight_files import STORED_INTEGERS, STORED_TYPES
from penstock.kernels.activation import activate
from penstock.kernels.linear import Operand, gated_linear, linear, operand_bytes, prepared, rows_wanted
from penstock.kernels.low_rank import expand, shrink
from penstock.kernels.norm import add_norm, add_norm_rounded, layer_norm, rms_norm
from penstock.kernels.quantized import (
    QuantizedWeight,
    RowFormat,
    Rows,
    as_low,
    can_stack,
    stack_outputs,
)


@dataclass(frozen=True)
class Destination:
    """Where one checkpoint tensor goes: this rank's slice of it, along `axis` from `start`, fills `tensor`, or is what
    the `matrix` has of this role."""

    tensor: Tensor | None  # None: the tensor is another rank's, or a quantized matrix is made of it
    shape: tuple[int, ...]  # of the whole tensor in the checkpoint
    axis: int = 0
    start: int = 0
    fan_in: int = 0  # inputs summed into each output of a matrix; 0: a norm's weight or a bias
    runs: tuple[slice, ...] = ()  # of the axis, one behind the other in `tensor`; empty: one, from `start`
    offset: float = 0.0  # added to what the checkpoint has
    first: int = 0  # of experts in one tensor that is cut along another axis, the first that is held
    owner: Owner | None = None  # packs its weight once that is filled
    matrix: QuantizedMatrix | None = None
    role: Role = "values"
    take: Callable[[Tensor, str], None] | None = None  # is handed the whole tensor, and its name
    dtypes: tuple[str, ...] = ()  # as safetensors calls them; empty: as the tensor needs
    optional: bool = False

    @property
    def stored_types(self) -> tuple[str, ...]:
        """Types in which a file may have the tensor."""
        if self.dtypes:
            return self.dtypes
        integers = self.tensor is not None and not self.tensor.dtype.is_floating_point
        return STORED_INTEGERS if integers else STORED_TYPES


Destinations = Iterator[tuple[str, Destination]]


def held_bytes(destinations: Iterable[Destination]) -> int:
    """Memory of what this rank holds."""
    places = list(destinations)
    tensors = sum(found.tensor.nbytes for found in places if found.tensor is not None)
    return tensors + sum(owner.quantized_bytes for owner in owners_of(places))


def owners_of(destinations: Iterable[Destination]) -> dict[Owner, None]:
    return dict.fromkeys(found.owner for found in destinations if found.owner is not None)


def pack(destinations: Mapping[str, Destination]) -> None:
    """Have filled weights laid out as products on a CPU want them. They can be read no more."""
    for owner in owners_of(destinations.values()):
        owner.pack()


def reopen(destinations: Mapping[str, Destination]) -> None:
    """Have weights that were packed be filled once more, by destinations that are asked for anew."""
    for owner in owners_of(destinations.values()):
        owner.reopen()


def quantized(name: str, matrix: QuantizedMatrix) -> Destinations:
    """Of the tensors that stand for a quantized matrix of this name."""
    for stored in matrix.stored:
        part = stored.part
        yield f"{name}{part.suffix}", Destination(
            None, stored.shape, stored.axis, runs=stored.runs, owner=matrix.owner, matrix=matrix, role=part.role,
            dtypes=part.dtypes, optional=part.optional,
        )  # fmt: skip


def others(name: str, form: WeightFormat, shape: tuple[int, ...]) -> Destinations:
    """The same of a matrix of which this rank has nothing."""
    for part in form.stored(stacked=len(shape) > 2):
        whole = part.shape(*shape[-2:], *shape[:-2])
        yield f"{name}{part.suffix}", Destination(None, whole, dtypes=part.dtypes, optional=part.optional)


class Layer(Protocol):
    """Whatever has weights."""

    def destinations(self) -> Destinations:
        """Where the tensors of a checkpoint go, by their names within the layer."""
        ...


def named(*layers: tuple[str, Layer | None]) -> Destinations:
    """The same of several, behind what their names begin with; None: there is no such layer."""
    for prefix, layer in layers:
        if layer is not None:
            yield from ((prefix + name, place) for name, place in layer.destinations())


class Linear(Owner):
    """A weight `[outputs, inputs]` and perhaps a bias, stacked by output from the tensors of one or several parts.

    With `split_inputs` the ranks share the inputs instead: each then has a partial sum, and the first adds the bias.
    fused: the name of the parts' one tensor in the checkpoint, which may have them `backwards`; empty: neighbours of
    one name are one tensor. formats: of the tensors that are quantized, by their names. Parts that no one layout can
    hold are weights of their own, whose products stand side by side.
    """

    def __init__(
        self, parts: tuple[Part, ...], inputs: int, placement: Placement, *, bias: bool, split_inputs: bool = False,
        fused: str = "", backwards: bool = False, formats: Formats = (),
    ) -> None:  # fmt: skip
        self.parts = parts
        self.inputs = inputs
        self.axis = 1 if split_inputs else 0
        self.rank = placement.rank
        self.share = placement.share(inputs) if split_inputs else inputs
        outputs = sum(part.share for part in parts)
        self.sources = tuple(self.tensors(fused, formats, backwards))
        self.matrices = {one.name: self.matrix(one, one.form, placement) for one in self.sources
                         if one.form is not None and one.rows.stop > one.rows.start}  # fmt: skip
        self.weight = placement.matrix(0 if self.matrices else outputs, self.share)
        self.dense: dict[str, Tensor] = {}  # beside quantized ones
        self.runs: dict[str, Tensor] = {}  # of neighbours among those, by the name of the first
        for dense, found in groupby(self.sources if self.matrices else (), lambda one: one.name not in self.matrices):
            self.dense |= self.run(tuple(found), placement) if dense else {}
        self.operands: tuple[Operand, ...] = () if self.matrices else (self.weight,)
        self.dense_at: frozenset[int] = frozenset()  # beside quantized ones, places of dense operands
        self.bias = placement.vector(outputs) if bias and not (split_inputs and placement.rank) else None
        self.has_bias = bias
        self.invariant = placement.invariant
        self.adapted: Adapted | None = None  # what adapters add to the product
        if any(part.held < part.share for part in parts):
            for weight in (self.weight, *self.dense.values()):
                weight.zero_()  # padding is read, too

    def run(self, sources: Sequence[Source], placement: Placement) -> dict[str, Tensor]:
        """Memory of neighbours that are not quantized, one behind the other: they are one product."""
        sizes = [one.share for one in sources]
        memory = self.runs[sources[0].name] = placement.matrix(sum(sizes), self.share)
        return dict(zip((one.name for one in sources), torch.split(memory, sizes), strict=True))

    def tensors(self, fused: str, formats: Formats, backwards: bool) -> Iterator[Source]:
        """The checkpoint's, by output."""
        if fused:
            yield Source(fused, self.parts, 0, format_of(formats, fused), backwards)
            return
        row = 0
        for name, parts in groupby(self.parts, key=attrgetter("name")):
            source = Source(name, tuple(parts), row, format_of(formats, name))
            yield source
            row += source.share

    def matrix(self, source: Source, form: WeightFormat, placement: Placement) -> QuantizedMatrix:
        first = self.rank * self.share
        inputs = self.axis == 1
        runs = (slice(first, first + self.share),) if inputs else source.shares
        shape = (source.outputs, self.inputs)
        return QuantizedMatrix(form, shape, "inputs" if inputs else "outputs", runs, placement.device, self)

    @property
    def operand(self) -> Operand:
        """Of products: the weight, or what `pack` made of it."""
        assert len(self.operands) == 1, "a weight of one tensor"
        return self.operands[0]

    @property
    def rows(self) -> RowFormat | None:
        """What x may be rounded to before; None: it comes as it is."""
        if not self.matrices or len(self.operands) > 1 or (self.adapted is not None and self.adapted.active):
            return None
        return rows_wanted(self.operands[0])

    def forward(self, x: Rows) -> Tensor:
        """`[tokens, inputs] -> [tokens, outputs]`."""
        addition = None if self.adapted is None else self.adapted.of(x)
        if len(self.operands) == 1:
            return linear(x, self.operands[0], self.bias, invariant=self.invariant, addition=addition)
        shrunk = None if addition is None else shrink(*addition)
        out = torch.cat(self.pieces(x), -1)
        if shrunk is not None:
            expand(out, shrunk)
        return out

    def pieces(self, x: Rows) -> list[Tensor]:
        """The products of the operands, each `[tokens, some of the outputs]`, without what adapters add."""
        sizes = [operand.shape[0] for operand in self.operands]
        biases: Sequence[Tensor | None] = [None] * len(sizes) if self.bias is None else torch.split(self.bias, sizes)
        return [linear(x, operand, bias, invariant=self.invariant)
                for operand, bias in zip(self.operands, biases, strict=True)]  # fmt: skip

    def split(self, x: Rows, sizes: Sequence[int]) -> list[Tensor]:
        """`forward`, cut into so many outputs each: what operands compute apart is not put together for that."""
        widths = [operand.shape[0] for operand in self.operands]
        apart = len(widths) > 1 and self.adapted is None
        if not apart or not {*accumulate(sizes)}.issuperset(accumulate(widths)):
            return list(torch.split(self.forward(x), list(sizes), -1))
        left, found = iter(sizes), list[Tensor]()
        for piece in self.pieces(x):
            own: list[int] = []
            while sum(own) < piece.shape[1]:
                own.append(next(left))
            found += torch.split(piece, own, -1)
        return found

    def forward_gated(self, x: Rows, rows: RowFormat | None = None) -> Rows:
        """silu(gate) * up of the two parts' outputs, gate first: `[tokens, inputs] -> [tokens, outputs / 2]`. It may
        come as `rows` says."""
        if len(self.operands) == 1:
            addition = None if self.adapted is None else self.adapted.of(x)
            return gated_linear(x, self.operands[0], self.bias, invariant=self.invariant, rows=rows, addition=addition)
        return activate(self.forward(x))

    def gather(self) -> None:
        """Stack what the matrices have found, once all of them have: neighbours that one layout can hold are one."""
        if any(matrix.found is None for matrix in self.matrices.values()):
            return
        found: list[list[QuantizedWeight] | Tensor] = []
        for source in self.sources:
            matrix = self.matrices.get(source.name)
            if matrix is None or matrix.found is None:
                found += [self.runs[source.name]] if source.name in self.runs else []
                continue
            weight, matrix.found = source.arranged(matrix.found), None
            last = found[-1] if found else None
            low = as_low(weight, last[-1]) if isinstance(last, list) else weight
            if isinstance(last, list) and can_stack(last[-1], low):
                last.append(low)
            else:
                found.append([weight])
        self.dense_at = frozenset(at for at, one in enumerate(found) if isinstance(one, Tensor))
        self.operands = tuple(one if isinstance(one, Tensor) else stack_outputs(one) for one in found)

    def pack(self) -> None:
        """Lay the loaded weight out as products on a CPU want it. Its own memory is given back."""
        self.operands = tuple(prepared(operand, self.weight.dtype) for operand in self.operands)
        if not self.matrices and self.operands[0] is not self.weight:
            self.weight = self.weight.to("meta")

    def reopen(self) -> None:
        """Have memory again where `pack` has given it back, with what it held."""
        if self.weight.is_meta:
            (packed,) = self.operands
            assert isinstance(packed, Tensor), "a weight that is not quantized"
            self.weight = packed.to_dense(self.weight.dtype)
        self.operands = () if self.matrices else (self.weight,)

    @property
    def quantized_bytes(self) -> int:
        """Memory of weights that are no destination's tensor."""
        return sum(operand_bytes(operand) for operand in self.operands) if self.matrices else 0

    @property
    def made(self) -> tuple[object, ...]:
        """What quantized matrices have become; None in the place of a dense one."""
        made = self.operands if self.matrices else ()
        return tuple(None if at in self.dense_at else operand for at, operand in enumerate(made))

    def remake(self, made: tuple[object, ...]) -> None:
        dense = iter(self.runs.values())
        self.dense_at = frozenset(at for at, one in enumerate(made) if one is None)
        self.operands = tuple(next(dense) if one is None else cast("Operand", one) for one in made)

    def destinations(self) -> Destinations:
        """Rows of the fused weight by the parts' names."""
        for source in self.sources:
            yield from self.weight_of(source)
            if self.has_bias:
                rows = source.rows
                bias = None if self.bias is None or rows.start == rows.stop else self.bias[rows]
                shape, start = (source.outputs,), source.start if len(source.parts) == 1 else 0
                yield f"{source.name}.bias", Destination(bias, shape, 0, start, runs=source.runs)

    def weight_of(self, source: Source) -> Destinations:
        """Of the tensors that hold one source's weight."""
        if source.name in self.matrices:
            yield from quantized(source.name, self.matrices[source.name])
            return
        shape = (source.outputs, self.inputs)
        if source.form is not None:
            yield from others(source.name, source.form, shape)
            return
        rows = source.rows
        held = self.dense[source.name][: rows.stop - rows.start] if self.matrices else self.weight[rows]
        start = self.rank * self.share if self.axis else source.start if len(source.parts) == 1 else 0
        runs = () if self.axis else source.runs
        yield (
            f"{source.name}.weight",
            Destination(held if len(held) else None, shape, self.axis, start, self.inputs, runs, owner=self),
        )


class Norm:
    """Weight of an RMS norm, or weight and bias of a LayerNorm. What the spec adds to the weight is added in fp32."""

    def __init__(self, width: int, spec: NormSpec, placement: Placement, part: Part | None = None) -> None:
        self.part = part or whole("", width)
        dtype = torch.float32 if spec.offset else placement.dtype
        self.weight = torch.empty(self.part.share, dtype=dtype, device=placement.device)
        self.bias = placement.vector(width).zero_() if spec.centered else None
        self.stored_bias = spec.centered and spec.bias
        self.eps = spec.eps
        self.offset = spec.offset
        self.group = placement.group

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return rms_norm(x, self.weight, self.eps)
        return layer_norm(x, self.weight, self.bias, self.eps)

    def add(
        self, delta: Tensor, residual: Tensor, *, partial: bool = True, scale: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Add a block's output to the residual stream: the norm of residual + scale * delta, and that sum.

        The ranks' `partial` sums, `[tokens, width]`, are added here (and once more where a stage ends), in one launch
        with addition and norm where the group has a custom all-reduce for so many rows.
        """
        exchange = self.group.exchange
        if partial and exchange is not None and self.bias is None and scale == 1.0 and exchange.takes(delta):
            return exchange.add(delta, residual, self.weight, self.eps)
        if partial and self.group.ranks is not None:
            delta = self.group.all_reduce(delta)
        return add_norm(delta, residual, self.weight, self.eps, self.bias, scale)

    def add_rounded(self, delta: Tensor, residual: Tensor, rows: RowFormat, scale: float) -> tuple[Rows, Tensor]:
        """The same of no other rank's sums; the norm comes as the products behind it want it."""
        return add_norm_rounded(delta, residual, self.weight, self.eps, rows, self.bias, scale)

    def destinations(self) -> Destinations:
        runs = self.part.runs if len(self.part.order) > 1 else ()
        shape = (self.part.outputs,)
        yield "weight", Destination(self.weight, shape, 0, self.part.start, runs=runs, offset=self.offset)
        if self.stored_bias:
            yield "bias", Destination(self.bias, shape)
