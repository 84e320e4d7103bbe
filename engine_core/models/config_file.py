"""JSON files of a model folder, read value by value with complaints that name the file and the key."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from penstock.protocol.errors import ModelError


class ConfigFile(msgspec.Struct, frozen=True):
    """A JSON object and where it stands; complaints name the file and the key. `defaults` answer for silent keys."""

    path: Path
    values: Mapping[str, Any]
    defaults: Mapping[str, Any] = {}

    def get(self, key: str) -> Any:
        """The value, or the family's default, or None."""
        return self.values.get(key, self.defaults.get(key))

    def error(self, key: str, complaint: str) -> ModelError:
        return ModelError(f"{self.path}: {key} is {self.get(key)!r}; {complaint}")

    def integer(self, key: str, default: int | None = None, low: int = 1, high: int = 2**31 - 1) -> int:
        value = self.get(key)
        if value is None:
            value = default
        if type(value) is not int or not low <= value <= high:
            raise self.error(key, f"it must be an integer of {low} to {high}")
        return value

    def number(self, key: str, default: float | None = None, low: float = 0.0, high: float = math.inf) -> float:
        value = self.get(key)
        if value is None:
            value = default
        if type(value) not in (int, float) or not math.isfinite(value) or not low <= value <= high:
            raise self.error(key, f"it must be a number of {low:g} to {high:g}")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key)
        if value is None:
            return default
        if type(value) is not bool:
            raise self.error(key, "it must be true or false")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One token id, a list of them, or nothing."""
        value = self.get(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(type(token) is int and 0 <= token < 2**31 for token in ids):
            raise self.error(key, "it must be a token id or a list of token ids")
        return tuple(ids)


def read_json(path: Path) -> ConfigFile:
    """A JSON object as a ConfigFile. Raises ModelError that names the file when it is missing or not an object."""
    try:
        values = msgspec.json.decode(path.read_bytes())
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file") from None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"{path}: {error}") from None
    if not isinstance(values, dict):
        raise ModelError(f"{path}: a JSON object is expected")
    return ConfigFile(path, values)
