"""LoRA adapters from their folders into host memory, as they will lie in a place."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.engine_core.loading.checkpoint import cuts, stored_part
from penstock.engine_core.models.adapter_folder import AdaptedMatrix, read_adapter_folder
from penstock.engine_core.models.adapters import AdapterPlaces
from penstock.protocol.errors import ModelError


def read_adapter(folder: Path, places: AdapterPlaces, memory: Tensor | None = None) -> Tensor:
    """This rank's share of the adapter in a folder: host memory `[numbers of a place]`, B times the adapter's scale.

    memory: zeros to read it into, for which there is memory of its own otherwise. Raises ModelError naming the file and
    the key or the tensor; numbers that are not finite in the model's type, too.
    """
    found = read_adapter_folder(folder, places.whole, places.max_rank, experts=places.experts)
    memory = places.host_memory() if memory is None else memory
    names, parts, values, scales = list[str](), list[Tensor](), list[Tensor](), list[float]()
    try:
        with safe_open(found.weights, framework="pt", device="cpu") as file:
            for matrix in found.matrices:
                for half, place in places.destinations(memory, matrix.name, matrix.rank):
                    name = f"{matrix.stored}.lora_{half}.weight"
                    stored = stacked(file.get_tensor(name), half, matrix) if matrix.experts else file.get_slice(name)
                    for run, part in cuts(place, place.tensor) if place.tensor is not None else ():
                        names.append(name)
                        parts.append(part)
                        values.append(stored_part(stored, run))
                        scales.append(matrix.scale if half == "B" else 1.0)
            fill(memory, parts, values, scales)
    except SafetensorError as error:
        raise ModelError(f"{found.weights}: truncated or not a safetensors file: {error}") from None
    except OSError as error:
        raise ModelError(f"{found.weights}: {error}") from None
    if not all_finite(memory):
        name = next(name for name, part in zip(names, parts, strict=True) if not all_finite(part))
        raise ModelError(f"{found.weights}: tensor {name} has numbers that are not finite")
    return memory


def fill(memory: Tensor, parts: list[Tensor], values: list[Tensor], scales: list[float]) -> None:
    """Copy values, times their scales, to parts of the memory, rounded once. A thread that calls for each of them would
    take the interpreter from the steps' thread each time."""
    exact = (memory.dtype, torch.float32)
    values = [one if one.dtype in exact else one.float() for one in values]
    torch._foreach_copy_(parts, torch._foreach_mul(values, scales))


def all_finite(values: Tensor) -> bool:
    """Whether no number is infinite or NaN. Extremes are found in one vectorized pass, and NaN is one: `isfinite` of
    bfloat16 takes 20 times as long on a CPU."""
    low, high = values.aminmax()
    return bool(low.isfinite() & high.isfinite())


def stacked(values: Tensor, half: str, matrix: AdaptedMatrix) -> Tensor:
    """A or B of all experts, `[experts, outputs, inputs]`, as PEFT has them in one matrix."""
    if half == "A":
        return values.view(matrix.experts, matrix.rank, -1)
    return values.view(len(values), matrix.rank, matrix.experts).permute(2, 0, 1)
