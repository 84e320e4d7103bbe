"""Hugging Face folders: a trained network written as Qwen3, and read back."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from benchmarks.demo_model.network import Network, Shape
from benchmarks.demo_model.tokenizer import END, END_OF_TEXT, START

TEMPLATE = Path(__file__).parent / "chat_template.jinja"
WEIGHTS = "model.safetensors"
SUMS = "SHA256SUMS"


def _name(parameter: str) -> str:
    return f"model.{parameter}"


def _config(shape: Shape, end: int, padding: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": end,
        "pad_token_id": padding,
        "dtype": "bfloat16",
        "head_dim": shape.head,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate,
        "max_position_embeddings": shape.context,
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "rms_norm_eps": shape.epsilon,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "sliding_window": None,
        "use_sliding_window": False,
        "tie_word_embeddings": True,
        "use_cache": True,
        "vocab_size": shape.vocabulary,
    }


def _dump(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def write_sums(folder: Path) -> None:
    """Hashes of the folder's weights as sha256sum writes them: a server checks its weights against them."""
    weights = sorted(folder.glob("*.safetensors"))
    lines = (f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in weights)
    (folder / SUMS).write_text("".join(lines))


def write_tokenizer(folder: Path, tokenizer: Path, context: int) -> None:
    """tokenizer.json, its configuration and the chat template."""
    target = folder / "tokenizer.json"
    if tokenizer.resolve() != target.resolve():
        shutil.copyfile(tokenizer, target)
    shutil.copyfile(TEMPLATE, folder / TEMPLATE.name)
    _dump(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": context,
            "bos_token": None,
            "eos_token": END,
            "pad_token": END_OF_TEXT,
            "unk_token": None,
            "additional_special_tokens": [START, END],
            "add_bos_token": False,
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
        },
    )


def write(network: Network, tokenizer: Path, folder: Path) -> None:
    """The whole folder but its model card. Weights are rounded to bf16."""
    folder.mkdir(parents=True, exist_ok=True)
    shape = network.shape
    ids = Tokenizer.from_file(str(tokenizer))
    end, padding = ids.token_to_id(END), ids.token_to_id(END_OF_TEXT)
    write_tokenizer(folder, tokenizer, shape.context)
    _dump(folder / "config.json", _config(shape, end, padding))
    # A low temperature: a tale differs from the last, a sum does not.
    generation = {"do_sample": True, "temperature": 0.3, "eos_token_id": [end, padding], "pad_token_id": padding}
    _dump(folder / "generation_config.json", generation)
    weights = {_name(key): value.detach().bfloat16().cpu().contiguous() for key, value in network.named_parameters()}
    save_file(weights, str(folder / WEIGHTS), metadata={"format": "pt"})
    (folder / WEIGHTS).chmod(0o644)
    write_sums(folder)


def read_shape(folder: Path) -> Shape:
    """The sizes that config.json says."""
    config = json.loads((folder / "config.json").read_text())
    return Shape(
        hidden=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        intermediate=config["intermediate_size"],
        head=config["head_dim"],
        vocabulary=config["vocab_size"],
        context=config["max_position_embeddings"],
        rope_theta=config["rope_theta"],
        epsilon=config["rms_norm_eps"],
    )


def read(folder: Path) -> Network:
    """The network of a folder, weights in fp32. A folder may hold its weights in several files (as they travel)."""
    network = Network(read_shape(folder))
    stored: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        stored.update(load_file(str(path)))
    with torch.no_grad():
        for key, parameter in network.named_parameters():
            parameter.copy_(stored[_name(key)].float())
    return network
