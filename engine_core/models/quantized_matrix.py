"""A quantized matrix on its way from the tensors of a checkpoint to a layout of `kernels.quantized`.

What a rank reads of the tensors is kept as the files have it until the last of them is there, then converted on the
device and dropped: memory stays under one matrix beyond the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from msgspec import structs
from torch import Tensor

from penstock.engine_core.models.quantization.convert import check_numbers, read_matrix
from penstock.engine_core.models.quantization.rounding import round_matrix
from penstock.engine_core.models.quantization.weight_format import (
    Counts,
    Role,
    StoredPart,
    WeightFormat,
)
from penstock.kernels.chip import Chip, chip_of
from penstock.kernels.quantized import Float8Weight, QuantizedWeight, stack_experts


class Owner:
    """A layer with weights. As it is here none of them is quantized, and filled ones stay as they are."""

    def gather(self) -> None:
        """Take what its matrices have found, once all of them have."""

    def pack(self) -> None:
        """Lay filled weights out as products want them. They can be read no more."""

    def reopen(self) -> None:
        """Be as before anything was packed, so that weights can be filled once more. Those that are not quantized keep
        what they hold."""

    @property
    def quantized_bytes(self) -> int:
        """Memory of weights that are no destination's tensor."""
        return 0

    @property
    def made(self) -> tuple[object, ...]:
        """Those weights: tensors and records of tensors of `kernels`, as `pack` left them."""
        return ()

    def remake(self, made: tuple[object, ...]) -> None:
        """Have such weights in place of those that `gather` and `pack` make. Not called where a model that was just
        built has tensors of the same shapes: those are filled."""
        raise AssertionError("none are made: they are there from the beginning")


@dataclass(frozen=True)
class StoredSlice:
    """What a rank reads of one stored tensor."""

    part: StoredPart
    shape: tuple[int, ...]  # of the whole tensor
    axis: int
    runs: tuple[slice, ...]  # of the axis, one behind the other; empty: all of it


class QuantizedMatrix:
    """`[outputs, inputs]` of a checkpoint, or `[experts, outputs, inputs]`, of which a rank reads `runs` of what is
    counted."""

    def __init__(
        self, form: WeightFormat, shape: tuple[int, ...], counts: Counts, runs: Sequence[slice], device: torch.device,
        owner: Owner, *, transposed: bool = False,
    ) -> None:  # fmt: skip
        self.form = form
        self.shape = shape
        self.counts = counts
        self.runs = joined(runs)
        self.device = device
        self.owner = owner
        self.transposed = transposed  # inputs stand before outputs in the file
        self.expected: set[Role] = set()  # tensors that the files have
        self.raw: dict[Role, Tensor] = {}
        self.found: QuantizedWeight | None = None

    @property
    def stored(self) -> Iterator[StoredSlice]:
        """The tensors that stand for the matrix."""
        experts, outputs, inputs = (1, *self.shape)[-3:]
        whole = {"experts": experts, "outputs": outputs, "inputs": inputs}[self.counts]
        for part in stored_parts(self.form, len(self.shape) > 2, self.transposed):
            axis = part.axis(self.counts)
            runs = () if axis is None or self.runs == (slice(0, whole),) else self.runs
            if axis is not None:
                per = part.axes[axis].per
                assert all(run.start % per == 0 for run in runs), "check_ranks refuses such shares"
                runs = tuple(slice(run.start // per, -(-run.stop // per)) for run in runs)
            yield StoredSlice(part, part.shape(outputs, inputs, experts), axis or 0, runs)

    def dense_name(self, first: str) -> str:
        """Of the tensor that the matrix would be without quantization. first: of the first that stand for it."""
        stacked = len(self.shape) > 2
        stem = first.removesuffix(self.form.stored(stacked=stacked)[0].suffix)
        return stem if stacked else f"{stem}.weight"

    def take(self, role: Role, tensor: Tensor, name: str) -> None:
        """What this rank has of one of the `expected` tensors, which has this name, as the file has it. Raises
        ModelError where tensors contradict the format or their numbers are none."""
        check_numbers(self.form, role, tensor, self.shape[-1], name)
        self.raw[role] = tensor.to(self.device)
        if not self.raw.keys() >= self.expected:
            return
        raw, self.raw = self.raw, {}
        if self.form.packing == "dense":
            self.round(raw["values"].transpose(-1, -2) if self.transposed else raw["values"])
        else:
            self.keep(read_matrix(self.form, raw, name.rpartition(".")[0]))

    def round(self, dense: Tensor) -> None:
        """Become this matrix, this rank's share of the dense one, rounded expert by expert."""
        if dense.dim() == 2:
            self.keep(round_matrix(self.form, dense))
        else:
            self.keep(stack_experts([round_matrix(self.form, one) for one in dense]))

    def keep(self, weight: QuantizedWeight) -> None:
        """This is the matrix."""
        if isinstance(weight, Float8Weight) and not multiplies_float8(chip_of(self.device)):
            weight = replace(weight, activations="none", input_scale=None)
        self.found = weight
        self.owner.gather()


def multiplies_float8(chip: Chip) -> bool:
    """Whether products round rows to e4m3, too: a CPU computes what they mean."""
    return not chip.runs_triton or chip.float8


def stored_parts(form: WeightFormat, stacked: bool, transposed: bool) -> tuple[StoredPart, ...]:
    """The tensors of a matrix in the file; of stacked experts inputs may stand before outputs."""
    parts = form.stored(stacked=stacked)
    if not transposed:
        return parts
    return tuple(structs.replace(part, axes=(part.axes[0], *part.axes[:0:-1])) for part in parts)


def joined(runs: Sequence[slice]) -> tuple[slice, ...]:
    """The same runs with neighbours as one."""
    found: list[slice] = []
    for run in runs:
        if found and found[-1].stop == run.start:
            found[-1] = slice(found[-1].start, run.stop)
        else:
            found.append(run)
    return tuple(found)
