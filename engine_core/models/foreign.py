"""What a folder is that lacks a model's files: the formats that people have, and what to do with each."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

LAYOUT = "a model is a folder with config.json, *.safetensors and tokenizer.json, as the Hugging Face hub has them"
# A file that tells, and the rest of the sentence; the first that is there counts. {} is the file, or its folder.
FORMATS: tuple[tuple[str, str], ...] = (
    ("adapter_config.json", "{} is a LoRA adapter: serve its base model with --enable-lora --lora-modules NAME=FOLDER"),
    ("model_index.json", "{} is a diffusers pipeline, which makes images: Penstock serves language models"),
    ("**/*.incomplete", "{} is what an interrupted download left: download the model again"),
    ("*.gguf", "{} is of llama.cpp: Penstock reads safetensors, so take the model that the GGUF was made from"),
    ("*.onnx", "{} is of ONNX: Penstock reads safetensors, so take the model that it was exported from"),
    ("onnx/*.onnx", "{} is of ONNX: Penstock reads safetensors, so take the model that it was exported from"),
    ("*.npz", "{} is of MLX: Penstock reads safetensors, so take the model that it was converted from"),
    *(
        (pattern, "{} is pickled, which runs code when it is read: Penstock reads safetensors only, so convert it")
        for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt")
    ),
    ("*.h5", "{} is of TensorFlow: Penstock reads safetensors, so convert it with transformers"),
    ("*.msgpack", "{} is of Flax: Penstock reads safetensors, so convert it with transformers"),
    ("snapshots/*/config.json", "this is a repository in the hub's cache: serve {} or its hub id"),
    ("*/config.json", "the model may be one level below: serve {}"),
)
PARENTS = ("snapshots/*/config.json", "*/config.json")  # of which the folder is named
# Beside a whole model these say that its weights alone are not what its makers meant.
BESIDE: Mapping[str, str] = {
    "adapter_config.json": "a LoRA adapter lies beside the model, which nothing applies; serve it from a folder of "
    "its own with --lora-modules, or remove this file to serve the model without it",
}


def foreign(folder: Path) -> str:
    """What `folder` holds in place of a model's weights or configuration, and what to do, as a clause."""
    for pattern, text in FORMATS:
        found = sorted(folder.glob(pattern))
        if found and not (pattern == "*/config.json" and (folder / "config.json").exists()):
            return text.format(found[0].parent if pattern in PARENTS else found[0].name)
    if folder.parent.name == "snapshots":
        return "the hub has no such file of this model, and Penstock fetches neither pickles nor GGUF"
    return LAYOUT


def beside(folder: Path) -> tuple[Path, str] | None:
    """A file of `folder` that forbids to serve the rest of it, and why."""
    return next(((folder / name, text) for name, text in BESIDE.items() if (folder / name).exists()), None)
