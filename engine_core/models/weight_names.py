"""Names of the tensors in a model folder, read from the headers alone. Imports no torch: every process may ask.

Source: the safetensors format: eight bytes of length, then a JSON object by tensor.
"""

from __future__ import annotations

import struct
from pathlib import Path

import msgspec

from penstock.engine_core.models.config_file import read_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
LONGEST = 100 << 20  # bytes of a header, the format's own bound


def read_names(folder: Path) -> frozenset[str]:
    """What the index or the one file names; nothing where neither can be read, which loading will complain about."""
    if (folder / INDEX).exists():
        names = read_json(folder / INDEX).get("weight_map")
        return frozenset(names) if isinstance(names, dict) else frozenset()
    try:
        with (folder / SINGLE).open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            found = msgspec.json.decode(file.read(min(size, LONGEST)), type=dict[str, msgspec.Raw])
    except (OSError, struct.error, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return frozenset()
    return frozenset(found)
