"""What a checkpoint's configuration says about quantized weights: which matrices, and how. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping

from penstock.engine_core.models.config_file import ConfigFile, read_json
from penstock.engine_core.models.quantization.compressed_tensors import read_compressed_tensors
from penstock.engine_core.models.quantization.methods import read_awq, read_fp8, read_gptq, read_modelopt, read_mxfp4
from penstock.engine_core.models.quantization.rules import (
    MARKERS,
    Quantization,
    either,
    flattened,
    markers,
    refuse_unread_keys,
    unwrapped,
)
from penstock.protocol.errors import ModelError

KEY = "quantization_config"
QUANTIZED_HEAD = tuple(f"lm_head{marker}" for marker in MARKERS)
MODELOPT_FILE = "hf_quant_config.json"
METHODS: Mapping[str, Callable[[ConfigFile, Collection[str]], Quantization]] = {
    "fp8": read_fp8,
    "compressed-tensors": read_compressed_tensors,
    "awq": read_awq,
    "gptq": read_gptq,
    "mxfp4": read_mxfp4,
    "modelopt": read_modelopt,
}
SAME: Mapping[str, str] = {
    "modelopt_fp4": "modelopt",
    "modelopt_mixed": "modelopt",
    "compressed_tensors": "compressed-tensors",
}


def read_quantization(file: ConfigFile, names: Collection[str] = ()) -> Quantization | None:
    """How the weights beside this config.json are quantized; None: they are not.

    names: tensors that the files hold. Where lists of the configuration are open to readings, as of the output
    embedding and of routers, these decide. Raises ModelError naming the method or key that is not served.
    """
    values = file.get(KEY)
    if file.get("quantization"):
        raise ModelError(f"{file.path}: quantization says that the weights are MLX's; {instead()}")
    beside = file.path.parent / MODELOPT_FILE
    if values is None and beside.exists():
        file = read_json(beside)
        values = {**as_object(file, "quantization"), "quant_method": "modelopt"}
    elif values is not None:
        values = as_object(file, KEY)
    if not values:
        return None
    method = str(values.get("quant_method") or ("modelopt" if "quant_algo" in values else "?"))
    read = METHODS.get(SAME.get(method, method))
    if read is None:
        raise ModelError(f"{file.path}: {KEY} says that the weights are quantized by {method}; {instead()}")
    section = ConfigFile(file.path, flattened(values, KEY))
    section.get(f"{KEY}.quant_method")
    found = read(section, names)
    refuse_unread_keys(section)
    refuse_wrong_patterns(section, found)
    refuse_quantized_head(section, found, names)
    return found.settled(markers(names)) if names else found


def refuse_wrong_patterns(file: ConfigFile, found: Quantization) -> None:
    """Raise ModelError where names are given by what is no regular expression."""
    try:
        for rule in found.rules:
            either(rule.modules.patterns)
    except re.error as error:
        raise ModelError(f"{file.path}: {KEY} names modules by a wrong pattern, {error.pattern!r}: {error}") from None


def refuse_quantized_head(file: ConfigFile, found: Quantization, names: Collection[str]) -> None:
    """Raise ModelError naming a tensor of an output embedding that is quantized though a list says that it is not."""
    tensor = next((name for name in names if unwrapped(name) in QUANTIZED_HEAD), None)
    rule = next((rule for rule in found.rules if rule.modules.matches("lm_head")), None)
    if tensor is not None and rule is not None and rule.form is None:
        why = f"says that lm_head is not quantized, and the files have {tensor}; are both of the same model?"
        raise ModelError(f"{file.path}: {KEY} {why}")


def as_object(file: ConfigFile, key: str) -> Mapping[str, object]:
    value = file.get(key)
    if not isinstance(value, dict):
        raise file.error(key, "it must be an object")
    return value


def instead() -> str:
    return f"Penstock reads {', '.join(METHODS)}, so take the model in one of these, or unquantized"
