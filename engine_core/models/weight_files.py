"""Safetensors files by their headers: which tensors a folder holds, and whether they are those that a model needs.

Reads no weight and imports no torch, so that a server checks its model before it starts a process. Source of the
format: safetensors' README. Eight bytes give the length of a JSON header, which names each tensor's type, shape and
place in the bytes behind it.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from pathlib import Path

import msgspec

from penstock.engine_core.models.config_file import POINTER, pointer_error, read_json, unreadable
from penstock.engine_core.models.foreign import foreign
from penstock.engine_core.models.quantization.weight_format import DENSE_TYPES, trimmed
from penstock.protocol.errors import ModelError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
LONGEST = 100 << 20  # bytes of a header, the format's own bound
STORED_TYPES = DENSE_TYPES
STORED_INTEGERS = ("I64", "I32")
METADATA = "__metadata__"
BITS = re.compile(r"[A-Z]+(\d+)(?:_\w+)?")  # of a type, in its name: BF16, F8_E4M3
# What a checkpoint may carry beyond the model: frequencies, computed here, and the output embedding of a tied model.
FREQUENCIES = re.compile(r"\.rotary_emb\.inv_freq\Z")
LEFTOVER = re.compile(rf"{FREQUENCIES.pattern}|^(model\.)?(language_model\.)?lm_head\.weight\Z")
AGAIN = "download it again"


class WantedTensor(msgspec.Struct, frozen=True):
    """A tensor that a model reads."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...] = STORED_TYPES
    optional: bool = False

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether a stored tensor of this shape is it: libraries differ in trailing axes of one scale."""
        return shape == self.shape or (self.dtypes != STORED_TYPES and trimmed(shape) == trimmed(self.shape))


Wanted = Mapping[str, WantedTensor]


class StoredTensor(msgspec.Struct, frozen=True):
    """A tensor as a header describes it; `data_offsets` are its first byte and the one behind it."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


RAW = msgspec.json.Decoder(dict[str, msgspec.Raw])
STORED = msgspec.json.Decoder(StoredTensor)


def find_files(folder: Path) -> list[Path]:
    """The files that hold the weights, in a fixed order. Raises ModelError naming the one that is not there."""
    if (folder / INDEX).exists():
        files = [folder / name for name in dict.fromkeys(read_index(folder).values())]
    elif (folder / SINGLE).exists():
        files = [folder / SINGLE]
    elif list(folder.glob("*.safetensors")) and not (folder / "adapter_config.json").exists():
        raise ModelError(f"{folder / INDEX}: no such file, and no {SINGLE}: without it shards are not a model; {AGAIN}")
    else:
        raise ModelError(f"{folder / SINGLE}: no such file; {foreign(folder)}")
    for path in files:
        if not path.is_file():
            raise ModelError(f"{path}: no such file, though {INDEX} names it; {AGAIN}")
    return files


def read_index(folder: Path) -> dict[str, str]:
    """Which file holds each tensor. Files outside of the folder are refused."""
    file = read_json(folder / INDEX)
    names = file.get("weight_map")
    if not isinstance(names, dict) or not names:
        raise file.error("weight_map", f"an object of tensor names and files is expected; {AGAIN}")
    for tensor, name in names.items():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelError(f"{file.path}: tensor {tensor} is in {name!r}, not a safetensors file beside it")
    return names


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one file. Raises ModelError for a file that is cut off or of another kind."""
    try:
        with path.open("rb") as file:
            start = file.read(8)
            if POINTER.startswith(start) and start:
                raise pointer_error(path)
            if not start:
                raise ValueError("it is empty")
            (length,) = struct.unpack("<Q", start)
            if length > LONGEST:
                raise ValueError(f"its header would be of {length} bytes")
            header = RAW.decode(file.read(length))
        size = path.stat().st_size
        header.pop(METADATA, None)
        found = {name: STORED.decode(raw) for name, raw in header.items()}
    except OSError as error:
        raise unreadable(path, error) from None
    except (struct.error, ValueError, RecursionError) as error:  # msgspec's and UnicodeDecodeError are ValueErrors
        raise ModelError(f"{path}: truncated or not a safetensors file ({error}); {AGAIN}") from None
    end = 0
    for name, tensor in sorted(found.items(), key=lambda item: item[1].data_offsets):
        if tensor.data_offsets[0] != end or tensor.data_offsets[1] < end:
            raise ModelError(f"{path}: damaged: tensor {name} does not begin where the one before ends; {AGAIN}")
        end = tensor.data_offsets[1]
    wanted = 8 + length + end
    if wanted != size:
        raise ModelError(
            f"{path}: truncated or damaged: its header tells of {wanted} bytes, and it has {size}; {AGAIN}"
        )
    for name, tensor in found.items():
        bits, (begin, end) = BITS.fullmatch(tensor.dtype), tensor.data_offsets
        if bits is not None and math.prod(tensor.shape) * int(bits[1]) != 8 * (end - begin):
            raise ModelError(f"{path}: damaged: tensor {name} is not of the bytes that its shape needs; {AGAIN}")
    return found


def read_names(folder: Path) -> frozenset[str]:
    """What the index or the one file names; nothing where neither can be read, which `check_tensors` will refuse."""
    if (folder / INDEX).exists():
        names = read_json(folder / INDEX).get("weight_map")
        return frozenset(names) if isinstance(names, dict) else frozenset()
    try:
        return frozenset(read_header(folder / SINGLE))
    except ModelError:
        return frozenset()


def read_shape(folder: Path, ending: str) -> tuple[int, ...] | None:
    """Of the first tensor whose name ends so; None where there is none, or its file cannot be read."""
    try:
        index = read_index(folder) if (folder / INDEX).exists() else dict.fromkeys(read_header(folder / SINGLE), SINGLE)
        found = next((name for name in index if name.endswith(ending)), None)
        return None if found is None else read_header(folder / index[found])[found].shape
    except (ModelError, KeyError):
        return None


def stored_names(folder: Path) -> frozenset[str]:
    """Names of the tensors that the files of `folder` hold. Raises ModelError naming the file."""
    return frozenset(name for path in find_files(folder) for name in read_header(path))


def check_tensors(folder: Path, wanted: Wanted, leftover: re.Pattern[str] = LEFTOVER) -> dict[Path, list[str]]:
    """Which of the tensors `wanted` each file of `folder` holds: every one once, in the right shape and in a type that
    can be read, and none beside them but those that `leftover` names. Raises ModelError naming the file and the tensor.
    """
    placed: dict[str, Path] = {}
    files = find_files(folder)
    for path in files:
        for name, tensor in read_header(path).items():
            expected = wanted.get(name)
            if expected is None:
                if leftover.search(name):
                    continue
                why = "is not part of the model that config.json describes; are both of the same model?"
                raise ModelError(f"{path}: tensor {name} {why}")
            if not expected.fits(tensor.shape):
                asked = f"config.json asks for {list(expected.shape)}; are both of the same model?"
                raise ModelError(f"{path}: tensor {name} has shape {list(tensor.shape)}; {asked}")
            if tensor.dtype not in expected.dtypes:
                why = f"is of type {tensor.dtype}; Penstock reads {', '.join(expected.dtypes)}"
                raise ModelError(f"{path}: tensor {name} {why}, so take a version of the model in one of these")
            if name in placed:
                raise ModelError(f"{path}: tensor {name} stands in {placed[name].name} too; {AGAIN}")
            placed[name] = path
    missing = [name for name, tensor in wanted.items() if name not in placed and not tensor.optional]
    if missing:
        more = f" and {len(missing) - 1} more are" if len(missing) > 1 else " is"
        why = "missing; is config.json of the same model?"
        raise ModelError(f"{file_of(folder, missing[0])}: tensor {missing[0]}{more} {why}")
    found: dict[Path, list[str]] = {path: [] for path in files}
    for name, path in placed.items():
        found[path].append(name)
    return found


def file_of(folder: Path, tensor: str) -> Path:
    """The file in which a missing tensor should have been."""
    if (folder / INDEX).exists():
        return folder / read_index(folder).get(tensor, INDEX)
    return folder / SINGLE
