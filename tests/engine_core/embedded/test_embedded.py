"""The folders that ship are whole, small and alike where they must be."""

import hashlib
import json
from pathlib import Path

import pytest
from safetensors import safe_open

from penstock.engine_core.embedded import demo_folder, draft_folder, eagle_folder

FILES = {
    "README.md", "SHA256SUMS", "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors",
    "tokenizer.json", "tokenizer_config.json",
}  # fmt: skip


@pytest.mark.parametrize(("folder", "megabytes"), [(demo_folder(), 24), (draft_folder(), 3)])
def test_a_folder_is_whole_and_small(folder: Path, megabytes: int) -> None:
    canary = {"self_test.json"} if folder == demo_folder() else set()
    assert {path.name for path in folder.iterdir()} == FILES | canary
    assert (folder / "model.safetensors").stat().st_size < megabytes * 1_000_000
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["max_position_embeddings"] == 4096
    with safe_open(folder / "model.safetensors", "pt") as weights:
        assert {str(weights.get_slice(name).get_dtype()) for name in weights.keys()} == {"BF16"}  # noqa: SIM118


@pytest.mark.parametrize("folder", [demo_folder(), draft_folder(), eagle_folder()])
def test_weights_are_those_that_the_folder_names(folder: Path) -> None:
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert (folder / "SHA256SUMS").read_text() == f"{digest}  model.safetensors\n"


def parameters(folder: Path) -> int:
    with safe_open(folder / "model.safetensors", "pt") as weights:
        return sum(weights.get_tensor(name).numel() for name in weights.keys())  # noqa: SIM118


def test_the_draft_is_a_tenth_of_the_demo_model() -> None:
    assert 8e6 <= parameters(demo_folder()) <= 12e6
    assert parameters(draft_folder()) * 10 <= parameters(demo_folder())


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_the_draft_speaks_the_same_tokens(name: str) -> None:
    assert (demo_folder() / name).read_bytes() == (draft_folder() / name).read_bytes()


def test_the_template_is_the_recipes() -> None:
    recipe = Path(__file__).parents[3] / "benchmarks/demo_model/chat_template.jinja"
    assert (demo_folder() / "chat_template.jinja").read_bytes() == recipe.read_bytes()


def test_generation_ends_at_either_end_token() -> None:
    added = json.loads((demo_folder() / "tokenizer.json").read_text())["added_tokens"]
    tokens = {token["content"]: token["id"] for token in added}
    generation = json.loads((demo_folder() / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [tokens["<|im_end|>"], tokens["<|endoftext|>"]]
