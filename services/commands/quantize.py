"""`penstock quantize`: writes a model's folder with quantized weights, and tells what each layer lost.

Scales come from the weights alone, as with `serve --quantization`; no text is needed. The folder has the format of
compressed-tensors, which other engines read, too.
"""

from __future__ import annotations

import argparse
import math
import re
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from penstock.engine_core import folder
from penstock.engine_core.models.quantization.online import ONLINE
from penstock.engine_core.models.quantization.writing import Rounded, write_checkpoint
from penstock.engine_core.models.spec import read_spec
from penstock.engine_core.models.tensors import check_weights
from penstock.protocol.errors import ConfigError
from penstock.services.executor.startup import take_device
from penstock.services.supervisor.options import Effective
from penstock.services.supervisor.process import ExitCode

LAYER = re.compile(r"layers?\.(\d+)\.")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", metavar="OUT", help="folder to write; it must be empty, or not exist")
    parser.add_argument(
        "--format", choices=tuple(ONLINE), default="fp8",
        help="fp8 and int8: 8 bits with a scale for each output, activations with a scale for each row; int4: 4-bit "
        "integers in groups of 128 inputs, symmetric",
    )  # fmt: skip


def command(namespace: argparse.Namespace, effective: Effective) -> int:
    """Write the folder, and print a table. Raises ConfigError for OUT, and ModelError for the model's folder."""
    if "model" not in effective.origins:
        raise ConfigError("OUT", None, f"it is missing: `penstock quantize {namespace.out} OUT` writes the folder OUT")
    config, out, began = effective.config, Path(namespace.out), time.monotonic()
    path = folder.resolve(config.model.model, config.model.revision)
    spec = read_spec(path, namespace.format)
    check_weights(path, spec)
    device = take_device(config, 0)
    try:
        out.mkdir(parents=True, exist_ok=True)
        if any(out.iterdir()):
            raise ConfigError("OUT", namespace.out, "it has files in it; name a folder that is empty or not there")
        found = write_checkpoint(path, spec, out, device, lambda file: print(f"{file.name} is done", flush=True))
    except OSError as error:
        raise ConfigError("OUT", namespace.out, f"it cannot be written: {error}") from None
    print(text(found))
    before, after = weight_bytes(path), weight_bytes(out)
    print(f"{before / 2**20:,.1f} MiB became {after / 2**20:,.1f} MiB in {time.monotonic() - began:.1f} s: {out}")
    return ExitCode.ORDERLY


def text(found: Sequence[Rounded]) -> str:
    """A table with a line for each layer: by how much its matrices differ from what they were."""
    layers: Mapping[int, list[Rounded]] = defaultdict(list)
    for one in found:
        number = LAYER.search(one.name)
        layers[int(number[1]) if number is not None else -1].append(one)
    lines = [f"{'layer':>5}  {'matrices':>8}  {'error':>8}  most of it in"]
    for layer, matrices in sorted(layers.items()):
        worst = max(matrices, key=lambda one: share([one]))
        name = LAYER.split(worst.name)[-1]
        lines.append(f"{layer:>5}  {len(matrices):>8}  {share(matrices):>8.2%}  {name} ({share([worst]):.2%})")
    return "\n".join([*lines, f"{'all':>5}  {len(found):>8}  {share(found):>8.2%}"])


def share(found: Sequence[Rounded]) -> float:
    """The root of the squared differences over that of the squares."""
    size = sum(one.size for one in found)
    return math.sqrt(sum(one.error for one in found) / size) if size else 0.0


def weight_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.glob("*.safetensors"))
