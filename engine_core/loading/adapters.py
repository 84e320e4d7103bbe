"""LoRA adapters from their folders into host memory, as they will lie in a place.

They are read in a thread beside the steps. Each call of PyTorch lets go of the interpreter and asks for it again, which
delays the steps' thread when there are thousands; so what is cut and copied are NumPy's arrays of the same memory.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.engine_core.loading.checkpoint import cuts
from penstock.engine_core.models.adapter_folder import AdaptedMatrix, read_adapter_folder
from penstock.engine_core.models.adapters import AdapterPlaces
from penstock.engine_core.models.weight_files import read_header
from penstock.protocol.errors import ModelError

TYPES: Mapping[str, torch.dtype] = {
    "BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64,
}  # fmt: skip
# By the bytes of a number.
WORDS: Mapping[int, tuple[torch.dtype, type[np.generic]]] = {
    2: (torch.int16, np.int16), 4: (torch.int32, np.int32), 8: (torch.int64, np.int64),
}  # fmt: skip
Words = NDArray[Any]  # a tensor's numbers as integers of their size


def read_adapter(folder: Path, places: AdapterPlaces, memory: Tensor | None = None) -> Tensor:
    """This rank's share of the adapter in a folder: host memory `[numbers of a place]`, B times the adapter's scale.

    memory: zeros to read it into, for which there is memory of its own otherwise. Raises ModelError naming the file and
    the key or the tensor; numbers that are not finite in the model's type, too.
    """
    found = read_adapter_folder(folder, places.whole, places.max_rank, experts=places.experts)
    memory = places.host_memory() if memory is None else memory
    try:
        with found.weights.open("rb") as file:
            read_tensors(StoredTensors(found.weights, file), found.matrices, places, memory)
    except OSError as error:
        raise ModelError(f"{found.weights}: {error.strerror}") from None
    return memory


def read_tensors(
    stored: StoredTensors, matrices: Sequence[AdaptedMatrix], places: AdapterPlaces, memory: Tensor
) -> None:
    """Copy what a place holds of these matrices to its memory, zeros so far. Raises ModelError."""
    room = words_of(memory)
    parts, scaled = list[tuple[str, Words]](), dict[float, list[Tensor]]()
    for matrix in matrices:
        for half, place in places.destinations(room, matrix.name, matrix.rank):
            name, scale = f"{matrix.stored}.lora_{half}.weight", matrix.scale if half == "B" else 1.0
            if place.tensor is None:
                continue
            values = stored.words(name, memory.dtype, scale)
            values = stacked(values, half, matrix) if matrix.experts else values
            part: Any
            for run, part in cuts(place, place.tensor):
                part[...] = values[run]
                parts.append((name, part))
                if scale != 1.0 and stored.type(name) == memory.dtype:
                    scaled.setdefault(scale, []).append(numbers_of(part, memory.dtype))
    for scale, tensors in scaled.items():
        torch._foreach_mul_(tensors, torch.tensor(scale))  # a number would be rounded to the tensors' type first
    if not all_finite(memory):
        name = next(name for name, part in parts if not all_finite(numbers_of(part, memory.dtype)))
        raise ModelError(f"{stored.path}: tensor {name} has numbers that are not finite")


class StoredTensors:
    """Those of a file that has been checked. It is read and not mapped: one that is cut off meanwhile would end the
    process."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        """Raises ModelError."""
        self.path, self._file, self._found = path, file, read_header(path)
        end = max(tensor.data_offsets[1] for tensor in self._found.values())
        self._first = os.fstat(file.fileno()).st_size - end

    def type(self, name: str) -> torch.dtype:
        return TYPES[self._found[name].dtype]

    def words(self, name: str, dtype: torch.dtype, scale: float) -> Words:
        """The tensor as words of a type: as they stand if it is the file's, else times the scale and rounded once.
        Raises ModelError."""
        tensor, own = self._found[name], self.type(name)
        values = np.empty(tensor.shape, WORDS[own.itemsize][1])
        self._file.seek(self._first + tensor.data_offsets[0])
        if self._file.readinto(values.reshape(-1).view(np.uint8)) != values.nbytes:  # type: ignore[attr-defined]
            raise ModelError(f"{self.path}: truncated: tensor {name} is not there as a whole")
        return values if own == dtype else words_of((numbers_of(values, own).float() * scale).to(dtype))


def words_of(memory: Tensor) -> Words:
    found: Words = memory.view(WORDS[memory.itemsize][0]).numpy()
    return found


def numbers_of(words: Words, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(words).view(dtype)


def all_finite(values: Tensor) -> bool:
    """Whether no number is infinite or NaN. Extremes are found in one vectorized pass, and NaN is one: `isfinite` of
    bfloat16 takes 20 times as long on a CPU."""
    low, high = values.aminmax()
    return bool(low.isfinite() & high.isfinite())


def stacked(values: Words, half: str, matrix: AdaptedMatrix) -> Words:
    """A or B of all experts, `[experts, outputs, inputs]`, as PEFT has them in one matrix."""
    if half == "A":
        return values.reshape(matrix.experts, matrix.rank, -1)
    return values.reshape(len(values), matrix.rank, matrix.experts).transpose(2, 0, 1)
