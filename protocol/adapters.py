"""--lora-modules: LoRA adapters and the names that clients use for them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import msgspec

from penstock.protocol.engine_config import ModelConfig
from penstock.protocol.errors import ConfigError

FLAG = "--lora-modules"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@/+-]{0,199}")  # of an adapter, as of models on a hub
FORM = 'it must be like NAME=FOLDER or {"name": "NAME", "path": "FOLDER"}'


class LoraModule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One adapter. Keys as in vLLM."""

    name: str
    path: str
    base_model_name: str | None = None  # a note: adapters are checked against the model's shapes


def host_adapters(model: ModelConfig) -> int:
    """How many executors may hold in the host's memory."""
    return model.max_cpu_loras or 4 * model.max_loras


def read_modules(text: str) -> tuple[LoraModule, ...]:
    """The option's value: modules with commas between them. Raises ConfigError naming the one that is wrong."""
    found: dict[str, LoraModule] = {}
    for part in parts(text):
        try:
            module = msgspec.json.decode(part, type=LoraModule) if part.startswith("{") else spelled(part)
        except msgspec.DecodeError as error:
            raise ConfigError(FLAG, part, f"{FORM}: {error}") from None
        if not NAME.fullmatch(module.name) or not module.path:
            raise ConfigError(FLAG, part, f"{FORM}; a name has letters, digits and . _ : @ / + -")
        if module.name in found:
            raise ConfigError(FLAG, part, f"the name {module.name!r} is given twice")
        found[module.name] = module
    return tuple(found.values())


def spelled(part: str) -> LoraModule:
    name, _, path = part.partition("=")
    return LoraModule(name.strip(), path.strip())


def parts(text: str) -> Iterator[str]:
    """The modules' texts. A JSON list has several; commas within an object separate none."""
    at = 0
    while at < len(text):
        if text[at] in ", []\t\n":
            at += 1
        elif text[at] == "{":
            try:
                end = json.JSONDecoder().raw_decode(text, at)[1]
            except ValueError as error:
                raise ConfigError(FLAG, text[at:], f"{FORM}: {error}") from None
            yield text[at:end]
            at = end
        else:
            end = text.find(",", at)
            end = len(text) if end < 0 else end
            yield text[at:end].strip()
            at = end
