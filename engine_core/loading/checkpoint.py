"""Safetensors files, one or several with an index, read tensor by tensor into where the model wants them.

Files are memory-mapped and of a sharded tensor only this rank's slice is touched, so host memory stays under one file
beyond the model itself. Each file is read on its own: files may be read side by side.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.engine_core.loading.streaming import WeightStream
from penstock.engine_core.models.layers import Destination
from penstock.engine_core.models.quantized_matrix import QuantizedMatrix
from penstock.engine_core.models.weight_files import LEFTOVER, WantedTensor, check_tensors
from penstock.protocol.errors import ModelError


def read_checkpoint(
    folder: Path, destinations: Mapping[str, Destination], leftover: re.Pattern[str] = LEFTOVER
) -> None:
    """Fill every destination from the files of `folder`. Raises ModelError naming the file and the tensor.

    leftover: names of tensors that may be there and are not read.
    """
    files = check_tensors(folder, wanted_tensors(destinations), leftover)
    for name in (name for names in files.values() for name in names):
        place = destinations[name]
        if place.matrix is not None and place.role != "unread":
            place.matrix.expected.add(place.role)
    on_gpu = {place.tensor.device for place in destinations.values() if place.tensor is not None}
    stream = next((WeightStream(device) for device in on_gpu if device.type == "cuda"), None)
    try:
        for path, names in files.items():
            read_file(path, names, destinations, stream)
    finally:
        if stream is not None:
            stream.close()


def wanted_tensors(destinations: Mapping[str, Destination]) -> dict[str, WantedTensor]:
    """What files must hold to fill them."""
    return {name: WantedTensor(place.shape, place.stored_types, place.optional) for name, place in destinations.items()}


def read_file(
    path: Path, names: Sequence[str], destinations: Mapping[str, Destination], stream: WeightStream | None = None
) -> None:
    """Copy this rank's slices of these tensors of one file to where they belong, converting types on the way. stream:
    large ones go by it."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in names:
                destination = destinations[name]
                if destination.take is not None:
                    destination.take(file.get_tensor(name), name)
                if destination.matrix is not None:
                    read_raw(file, name, destination, destination.matrix)
                if destination.tensor is not None:
                    fill(destination, destination.tensor, file.get_slice(name), stream)
            if stream is not None:
                stream.flush()
    except SafetensorError as error:
        raise ModelError(f"{path}: truncated or not a safetensors file: {error}") from None
    except (OSError, ModelError) as error:
        raise ModelError(f"{path}: {error}") from None


def fill(destination: Destination, tensor: Tensor, stored: Any, stream: WeightStream | None = None) -> None:
    """Copy this rank's slices of a whole tensor, or of a file's, to where they belong; those that go by `stream` are
    there once it is flushed."""
    for place, part in cuts(destination, tensor):
        found = stored_part(stored, place)
        if stream is not None and not destination.offset and stream.takes(part, found):
            stream.copy(part, found)
        else:
            part.copy_(found)
    if destination.offset:
        tensor.add_(destination.offset)


def read_raw(file: Any, name: str, destination: Destination, matrix: QuantizedMatrix) -> None:
    """Hand this rank's slice to the matrix, as the file has it."""
    if destination.role == "unread":
        return
    if not destination.runs:
        found: Tensor = file.get_tensor(name)
    else:
        stored, before = file.get_slice(name), (slice(None),) * destination.axis
        parts = [stored[(*before, run)] for run in destination.runs]
        found = parts[0] if len(parts) == 1 else torch.cat(parts, destination.axis)
    matrix.take(destination.role, found, name)


def stored_part(stored: Any, place: tuple[slice, ...]) -> Tensor:
    """A slice of a stored tensor. The file's own slices have no steps."""
    found: Tensor = stored[tuple(slice(one.start, one.stop) for one in place)]
    return found[tuple(slice(None, None, one.step) for one in place)] if any(one.step for one in place) else found


def cuts(destination: Destination, target: Tensor) -> Iterator[tuple[tuple[slice, ...], Tensor]]:
    """Which part of the stored tensor fills which part of the target. Of stacked matrices each is a part of its own: it
    passes through the host's memory alone."""
    axis, shape, first = destination.axis, destination.shape, 0
    held = slice(destination.first, destination.first + len(target))
    before = (held, *(slice(None),) * (axis - 1)) if axis else ()
    for run in destination.runs or (slice(destination.start, destination.start + target.shape[axis]),):
        size = len(range(run.start, run.stop, run.step or 1))
        part, place = target[(*(slice(None),) * axis, slice(first, first + size))], (*before, run)
        first += size
        if len(shape) < 3:
            yield place, part
            continue
        start = place[0].start
        for at in range(len(part)):
            yield (slice(start + at, start + at + 1), *place[1:]), part[at : at + 1]
