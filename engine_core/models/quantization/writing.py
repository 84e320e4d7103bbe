"""A checkpoint with its matrices quantized, as compressed-tensors stores them: what `penstock quantize` writes.

Files are made one after the other, so that memory holds the tensors of one. Other engines and transformers read them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from penstock.engine_core.models.config_file import read_json
from penstock.engine_core.models.families import families
from penstock.engine_core.models.quantization.rounding import round_matrix
from penstock.engine_core.models.quantization.weight_format import WeightFormat
from penstock.engine_core.models.spec import OUTPUT, ModelSpec, stored_name
from penstock.engine_core.models.tensors import model_weights, named_as
from penstock.engine_core.models.vision_kinds import vision_shapes
from penstock.engine_core.models.weight_files import INDEX, find_files, read_names
from penstock.kernels.quantized import QuantizedWeight
from penstock.protocol.errors import ModelError

WEIGHT = ".weight"
READABLE = 0o644  # the library leaves files to their owner
STACKED = (".gate_up_proj", ".down_proj")  # of all experts
WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")


@dataclass(frozen=True)
class Rounded:
    """What one matrix lost."""

    name: str  # of the matrix in the new checkpoint
    error: float  # sum of squared differences
    size: float  # sum of squares before


def write_checkpoint(
    folder: Path, spec: ModelSpec, out: Path, device: torch.device, told: Callable[[Path], object]
) -> list[Rounded]:
    """Write the model of `folder` to the folder `out` in the formats of `spec`, as `read_spec` gives it for
    `--quantization`; `told` is called behind each file. config.json comes last: without it a folder is no model.

    Raises ModelError for what cannot be written so, and OSError.
    """
    forms = matrices(folder, spec)
    found: list[Rounded] = []
    places: dict[str, str] = {}
    dense = {stored_name(spec, OUTPUT).removesuffix(WEIGHT)}  # other readers quantize a tied one, which no file names
    if spec.vision is not None:  # modules may have longer names than tensors: Gemma 3's and Mistral 3's in transformers
        dense |= {rf"re:.*{name.partition('.')[0]}\..*" for name in vision_shapes(spec.vision)}
    total = 0
    for path in find_files(folder):
        tensors: dict[str, Tensor] = {}
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in file.keys():  # noqa: SIM118  # the file is no mapping
                tensor = file.get_tensor(name)
                if name not in forms:
                    tensors[name] = tensor
                    if tensor.dim() == 2 and name.endswith(WEIGHT):
                        dense.add(name.removesuffix(WEIGHT))
                    continue
                for module, part in parts_of(spec, name, tensor):
                    matrix = part.to(device)
                    rounded = round_matrix(forms[name], matrix)
                    tensors |= {f"{module}.{key}": value.cpu() for key, value in stored(rounded, forms[name]).items()}
                    found.append(loss(module, matrix, rounded))
        save_file(tensors, out / path.name, {"format": "pt"})
        (out / path.name).chmod(READABLE)
        places |= dict.fromkeys(tensors, path.name)
        total += sum(tensor.nbytes for tensor in tensors.values())
        told(path)
    if (folder / INDEX).exists():
        write_json(out / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))})
    copy_others(folder, out)
    form = next(iter(forms.values()))
    config = {**read_json(folder / "config.json").values, "quantization_config": configuration(form, sorted(dense))}
    write_json(out / "config.json", config)
    return found


def matrices(folder: Path, spec: ModelSpec) -> dict[str, WeightFormat]:
    """The tensors of a checkpoint that are to be rounded, and how: in groups of one size, which divides the inputs of
    each."""
    wanted = {stored_name(spec, name): weight.form for name, weight in model_weights(spec) if weight.form is not None}
    if not wanted:
        raise ModelError(f"{folder}: no matrix of the model can be quantized so")
    least = min(wanted.values(), key=lambda form: form.group)
    return {name: replace(form, group=least.group) for name, form in named_as(spec, read_names(folder), wanted).items()}


def parts_of(spec: ModelSpec, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """The matrices of a tensor by the names of their modules: of a stack of experts those of each, called as the
    family calls them in files that have a tensor for each."""
    if tensor.dim() == 2:
        return [(name.removesuffix(WEIGHT), tensor)]
    experts = spec.sparse[0]
    if experts.transposed or experts.interleaved or not name.endswith(STACKED):
        raise ModelError(f"tensor {name} has experts in an order that compressed-tensors has no format for")
    single = replace(spec, names=families()[spec.family].names)
    base, found = name.rpartition(".")[0], list[tuple[str, Tensor]]()
    for expert, matrix in enumerate(tensor):
        halves = zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True)
        for part, half in halves if name.endswith(STACKED[0]) else [("down_proj", matrix)]:
            module = stored_name(single, f"{base}.{expert}.{part}{WEIGHT}")
            found.append((module.removesuffix(WEIGHT), half))
    return found


def stored(weight: QuantizedWeight, form: WeightFormat) -> dict[str, Tensor]:
    """The tensors of a matrix, by what follows its name."""
    if form.kind != "grouped":
        return {"weight": weight.values, "weight_scale": weight.scales[:, None].contiguous()}
    shape = torch.tensor(weight.shape)
    return {"weight_packed": weight.values.view(torch.int32), "weight_scale": weight.scales, "weight_shape": shape}


def loss(name: str, dense: Tensor, rounded: QuantizedWeight) -> Rounded:
    dense = dense.double()
    return Rounded(
        name,
        float((dense - rounded.dequantized(torch.float32)).square().sum()),
        float(dense.square().sum()),
    )


def configuration(form: WeightFormat, ignore: list[str]) -> dict[str, Any]:
    """`quantization_config` as llm-compressor writes it."""
    kind = "float" if form.kind == "float8" else "int"
    weights = {
        "num_bits": form.bits, "type": kind, "symmetric": True, "dynamic": False,
        "strategy": "group" if form.group else "channel", "group_size": form.group or None,
    }  # fmt: skip
    rows = {"num_bits": 8, "type": kind, "symmetric": True, "dynamic": True, "strategy": "token"}
    names = {"float8": "float-quantized", "int8": "int-quantized", "grouped": "pack-quantized"}
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": rows if form.activations == "row" else None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": names[form.kind],
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ignore,
    }


def copy_others(folder: Path, out: Path) -> None:
    """Everything that is no weight and no code: tokenizer, template, settings of generation and of pooling."""
    for path in sorted(folder.iterdir()):
        name = path.name
        if path.is_dir():
            for inner in sorted(path.glob("*.json")):
                (out / name).mkdir(exist_ok=True)
                shutil.copyfile(inner, out / name / inner.name)
        elif not name.startswith(".") and not name.endswith((*WEIGHT_FILES, ".py")) and name not in (
            "config.json", "SHA256SUMS",
        ):  # fmt: skip
            shutil.copyfile(path, out / name)


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n")
