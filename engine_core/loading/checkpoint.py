"""Safetensors files, one or several with an index, read tensor by tensor into where the model wants them.

Files are memory-mapped and of a sharded tensor only this rank's slice is touched, so host memory stays under one file
beyond the model itself. Each file is read on its own: files may be read side by side.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.engine_core.models.config_file import read_json
from penstock.engine_core.models.layers import Destination
from penstock.protocol.errors import ModelError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
STORED_TYPES = ("F64", "F32", "F16", "BF16")
STORED_INTEGERS = ("I64", "I32")
# What a checkpoint may carry beyond the model: frequencies, computed here, and the output embedding of a tied model.
LEFTOVER = re.compile(r"(\.rotary_emb\.inv_freq|^lm_head\.weight)\Z")


def read_checkpoint(folder: Path, destinations: dict[str, Destination], leftover: re.Pattern[str] = LEFTOVER) -> None:
    """Fill every destination from the files of `folder`. Raises ModelError naming the file and the tensor.

    leftover: names of tensors that may be there and are not read.
    """
    placed: dict[str, Path] = {}
    files = find_files(folder)
    for path in files:
        for name in read_file(path, destinations, leftover):
            if name in placed:
                raise ModelError(f"{path}: tensor {name} stands in {placed[name].name} too")
            placed[name] = path
    missing = [name for name in destinations if name not in placed]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(f"{indexed_file(folder, missing[0])}: tensor {missing[0]}{more} is missing")


def find_files(folder: Path) -> list[Path]:
    """The files that hold the weights, in a fixed order. Raises ModelError naming the one that is not there."""
    if (folder / INDEX).exists():
        files = [folder / name for name in dict.fromkeys(read_index(folder).values())]
    elif (folder / SINGLE).exists():
        files = [folder / SINGLE]
    elif list(folder.glob("*.safetensors")):
        raise ModelError(f"{folder / INDEX}: no such file, and no {SINGLE}: which files hold the weights is unknown")
    elif pickled := [path for pattern in PICKLES for path in sorted(folder.glob(pattern))]:
        raise ModelError(f"{pickled[0]}: pickled weights run code when they are read; Penstock reads safetensors only")
    else:
        raise ModelError(f"{folder / SINGLE}: no such file")
    for path in files:
        if not path.is_file():
            raise ModelError(f"{path}: no such file, though {INDEX} names it")
    return files


def read_index(folder: Path) -> dict[str, str]:
    """Which file holds each tensor. Files outside of the folder are refused."""
    file = read_json(folder / INDEX)
    names = file.get("weight_map")
    if not isinstance(names, dict) or not names:
        raise file.error("weight_map", "an object of tensor names and files is expected")
    for tensor, name in names.items():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelError(f"{file.path}: tensor {tensor} is in {name!r}, not a safetensors file beside it")
    return names


def indexed_file(folder: Path, tensor: str) -> Path:
    """The file in which a missing tensor should have been."""
    if (folder / INDEX).exists():
        return folder / read_index(folder).get(tensor, INDEX)
    return folder / SINGLE


def stored_names(folder: Path) -> frozenset[str]:
    """Names of the tensors that the files of `folder` hold. Raises ModelError naming the file."""
    found: set[str] = set()
    for path in find_files(folder):
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                found.update(file.keys())
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path}: truncated or not a safetensors file: {error}") from None
    return frozenset(found)


def read_file(path: Path, destinations: dict[str, Destination], leftover: re.Pattern[str]) -> list[str]:
    """Copy what one file holds to where it belongs, converting types on the way; returns the names it filled."""
    filled = []
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            names: list[str] = file.keys()
            for name in names:
                destination = destinations.get(name)
                if destination is None:
                    if leftover.search(name):
                        continue
                    raise ModelError(f"{path}: tensor {name} is not part of the model that config.json describes")
                copy_tensor(path, name, file.get_slice(name), destination)
                filled.append(name)
    except SafetensorError as error:
        raise ModelError(f"{path}: truncated or not a safetensors file: {error}") from None
    except OSError as error:
        raise ModelError(f"{path}: {error}") from None
    return filled


def copy_tensor(path: Path, name: str, stored, destination: Destination) -> None:  # type: ignore[no-untyped-def]
    """Copy this rank's slice of the stored tensor. Raises ModelError on a shape or type that does not fit."""
    shape = tuple(stored.get_shape())
    if shape != destination.shape:
        expected = f"config.json asks for {list(destination.shape)}"
        raise ModelError(f"{path}: tensor {name} has shape {list(shape)}; {expected}")
    target = destination.tensor
    if target is None:
        return
    known = STORED_TYPES if target.dtype.is_floating_point else STORED_INTEGERS
    if stored.get_dtype() not in known:
        raise ModelError(f"{path}: tensor {name} is of type {stored.get_dtype()}; Penstock reads {', '.join(known)}")
    for place, part in cuts(destination, target):
        part.copy_(stored[place])


def cuts(destination: Destination, target: Tensor) -> Iterator[tuple[tuple[slice, ...], Tensor]]:
    """Which part of the stored tensor fills which part of the target. Of stacked matrices each is a part of its own: it
    passes through the host's memory alone."""
    axis, shape = destination.axis, destination.shape
    size, whole = target.shape[axis] // destination.pieces, shape[axis] // destination.pieces
    for piece in range(destination.pieces):
        span = slice(piece * whole + destination.start, piece * whole + destination.start + size)
        place = (slice(None),) * axis + (span,)
        part = target.narrow(axis, piece * size, size)
        if len(shape) < 3:
            yield place, part
            continue
        first = place[0].start or 0
        for at in range(len(part)):
            yield (slice(first + at, first + at + 1), *place[1:]), part[at : at + 1]
