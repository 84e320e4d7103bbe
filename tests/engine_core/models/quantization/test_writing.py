"""What `penstock quantize` writes is the model as `--quantization` serves it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from penstock.engine_core import loading
from penstock.engine_core.embedded import demo_folder
from penstock.engine_core.models import registry
from penstock.engine_core.models.decoder import Decoder
from penstock.engine_core.models.layers import pack
from penstock.engine_core.models.quantization.writing import Rounded, write_checkpoint
from penstock.engine_core.models.spec import read_spec

CPU = torch.device("cpu")
FORMATS = ("fp8", "int8", "int4")


def quantize(folder: Path, out: Path, form: str) -> list[Rounded]:
    out.mkdir()
    return write_checkpoint(folder, read_spec(folder, form), out, CPU, lambda path: None)


def loaded(folder: Path, quantization: str = "none") -> Decoder:
    spec = read_spec(folder, quantization)
    model = registry.build(spec, torch.float32, CPU, 64)
    loading.load(model, folder)
    pack(model.destinations())
    return model


def mlp_outputs(model: Decoder) -> torch.Tensor:
    torch.manual_seed(2)
    x = torch.randn(5, model.spec.hidden)
    return torch.stack([block.mlp.forward(x) for block in model.blocks])


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its experts are one tensor a layer, as transformers writes them."""
    torch.manual_seed(1)
    config = Qwen3MoeConfig(
        hidden_size=64, intermediate_size=96, moe_intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2, vocab_size=128, norm_topk_prob=True,
    )  # fmt: skip
    found = tmp_path_factory.mktemp("mixture")
    Qwen3MoeForCausalLM(config).save_pretrained(found)
    return found


@pytest.mark.parametrize("form", FORMATS)
def test_the_folder_is_the_model_as_it_is_rounded_while_it_loads(form: str, tmp_path: Path) -> None:
    assert quantize(demo_folder(), tmp_path / "out", form)
    written, online = loaded(tmp_path / "out"), loaded(demo_folder(), form)
    assert written.spec.quantization is not None
    assert written.spec.quantization.method == "compressed-tensors"
    found, exact = mlp_outputs(written), mlp_outputs(loaded(demo_folder()))
    if form == "int4":  # its groups have one size in a folder, and the largest that fits each matrix while it loads
        assert 0.01 < (found - exact).norm() / exact.norm() < 0.3
    else:
        assert torch.allclose(found, mlp_outputs(online), atol=1e-6)
        assert not torch.equal(found, exact)


@pytest.mark.parametrize("form", FORMATS)
def test_transformers_reads_what_is_written(form: str, tmp_path: Path) -> None:
    """The same numbers, and an output embedding that is the input's, which no tensor of the file shows."""
    quantize(demo_folder(), tmp_path / "out", form)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    theirs(torch.zeros(1, 1, dtype=torch.long))  # which has the library dequantize
    assert torch.equal(theirs.lm_head.weight, theirs.model.embed_tokens.weight)
    spec = read_spec(tmp_path / "out")
    model = registry.build(spec, torch.float32, CPU, 64)
    loading.load(model, tmp_path / "out")
    for block, layer in zip(model.blocks, theirs.model.layers, strict=True):
        found = block.mlp.down.operand.dequantized(torch.float32)  # type: ignore[union-attr]
        torch.testing.assert_close(found, layer.mlp.down_proj.weight.float(), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("form", FORMATS)
def test_experts_of_a_stack_become_a_tensor_each(form: str, mixture: Path, tmp_path: Path) -> None:
    save_file({**load_file(mixture / "model.safetensors")}, tmp_path / "copy.safetensors")
    assert quantize(mixture, tmp_path / "out", form)
    names = load_file(tmp_path / "out" / "model.safetensors").keys()
    suffix = "weight_packed" if form == "int4" else "weight_scale"
    assert f"model.layers.1.mlp.experts.3.up_proj.{suffix}" in names
    assert "model.layers.1.mlp.gate.weight" in names  # the router stays
    written, online = loaded(tmp_path / "out"), loaded(mixture, form)
    assert torch.allclose(mlp_outputs(written), mlp_outputs(online), atol=1e-6)


def test_what_is_no_weight_comes_along(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert quantize(demo_folder(), out, "fp8")
    for path in demo_folder().iterdir():
        left = path.suffix == ".py" or path.name in ("__pycache__", "SHA256SUMS")  # sums of other files
        assert (out / path.name).exists() != left
    config = json.loads((out / "config.json").read_bytes())
    assert config["quantization_config"]["ignore"] == ["lm_head", "model.embed_tokens"]
    assert (out / "tokenizer.json").read_bytes() == (demo_folder() / "tokenizer.json").read_bytes()
    assert (out / "model.safetensors").stat().st_mode & 0o444 == 0o444


def test_shards_stay_shards(tmp_path: Path) -> None:
    folder, out = tmp_path / "model", tmp_path / "out"
    folder.mkdir()
    (folder / "config.json").write_bytes((demo_folder() / "config.json").read_bytes())
    tensors = load_file(demo_folder() / "model.safetensors")
    halves = [dict(list(tensors.items())[at::2]) for at in range(2)]
    places = {}
    for at, half in enumerate(halves):
        save_file(half, folder / f"model-{at}.safetensors")
        places |= dict.fromkeys(half, f"model-{at}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert quantize(folder, out, "int8")
    index = json.loads((out / "model.safetensors.index.json").read_bytes())
    assert set(index["weight_map"].values()) == {"model-0.safetensors", "model-1.safetensors"}
    assert index["metadata"]["total_size"] < 0.6 * sum(tensor.nbytes for tensor in tensors.values())
    assert torch.equal(mlp_outputs(loaded(out)), mlp_outputs(loaded(demo_folder(), "int8")))
