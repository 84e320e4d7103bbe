"""Random weights for speed work: made on the device, the same for the same seed, of a scale that keeps logits alive."""

from __future__ import annotations

import math
import zlib

import torch
from torch import Tensor

from penstock.engine_core.loading.checkpoint import cuts
from penstock.engine_core.models.layers import Destination
from penstock.engine_core.models.quantized_matrix import QuantizedMatrix

CHUNK = 1 << 24  # numbers that are made at a time


def fill_random(destinations: dict[str, Destination], seed: int, dtype: torch.dtype = torch.float32) -> None:
    """Matrices are normal with variance 1 / fan-in, norms are one and biases zero: every sum keeps unit scale.

    However many ranks there are, each has its slice of the same whole tensors. Quantized matrices are such matrices of
    `dtype`, rounded one by one.
    """
    generators: dict[torch.device, torch.Generator] = {}
    matrices = {place.matrix: name for name, place in reversed(destinations.items()) if place.matrix is not None}
    for matrix, name in matrices.items():
        dense = dense_place(matrix, dtype)
        generator = generators.setdefault(matrix.device, torch.Generator(matrix.device))
        random = RandomTensor(matrix.dense_name(name), seed, dense, dtype, generator)
        assert dense.tensor is not None, "it has memory"
        for at, part in cuts(dense, dense.tensor):
            random.copy(at, part)
        matrix.round(dense.tensor)
    for name, destination in destinations.items():
        tensor = destination.tensor
        if tensor is None:
            continue
        if not destination.fan_in:
            tensor.fill_(1.0 if name.endswith(".weight") else 0.0)
            continue
        generator = generators.setdefault(tensor.device, torch.Generator(tensor.device))
        stored = RandomTensor(name, seed, destination, tensor.dtype, generator)
        for place, part in cuts(destination, tensor):
            stored.copy(place, part)


def dense_place(matrix: QuantizedMatrix, dtype: torch.dtype) -> Destination:
    """New memory for this rank's share of a quantized matrix before it is rounded."""
    axis = {"experts": 0, "outputs": len(matrix.shape) - 2, "inputs": len(matrix.shape) - 1}[matrix.counts]
    shape = list(matrix.shape)
    shape[axis] = sum(run.stop - run.start for run in matrix.runs)
    made = torch.empty(shape, dtype=dtype, device=matrix.device)
    return Destination(made, matrix.shape, axis, fan_in=matrix.shape[-1], runs=matrix.runs)


class RandomTensor:
    """A whole tensor as a checkpoint would hold it, of which only those rows are made that somebody wants.

    Rows are made in chunks, each with a seed of its own, so that a row does not depend on who asks for it.
    """

    def __init__(
        self, name: str, seed: int, destination: Destination, dtype: torch.dtype, generator: torch.Generator
    ) -> None:
        self._name = name
        self._seed = seed
        self._shape = destination.shape
        self._scale = destination.fan_in**-0.5
        self._dtype = dtype
        self._generator = generator
        self._rows = max(1, CHUNK // math.prod(self._shape[1:]))  # of a chunk

    def copy(self, place: tuple[slice, ...], target: Tensor) -> None:
        """Fill `target` with the slice that stands at `place`."""
        first, end, step = place[0].indices(self._shape[0])
        for chunk in range(first // self._rows, -(-end // self._rows)):
            start = chunk * self._rows
            low, high = (-(-(row - first) // step) for row in (max(first, start), min(end, start + self._rows)))
            if low < high:
                rows = slice(first + low * step - start, first + (high - 1) * step - start + 1, step)
                target[low:high].copy_(self._make(chunk)[(rows, *place[1:])])

    def _make(self, chunk: int) -> Tensor:
        rows = min(self._rows, self._shape[0] - chunk * self._rows)
        generator = self._generator.manual_seed(self._seed ^ zlib.crc32(f"{self._name}:{chunk}".encode()))
        made = torch.empty(rows, *self._shape[1:], dtype=self._dtype, device=generator.device)
        return made.normal_(std=self._scale, generator=generator)
