"""Heads of multi-token prediction, by eagle.py and draft_spec.py: what they compute, what is read, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import linear

from penstock.engine_core.embedded import demo_folder
from penstock.engine_core.models.decoder import Decoder
from penstock.engine_core.models.draft_spec import HeadSpec, check_mtp, read_draft
from penstock.engine_core.models.eagle import EagleHead, build_head
from penstock.engine_core.models.kv_cache import with_draft_cache
from penstock.engine_core.models.layers import pack
from penstock.engine_core.models.spec import read_spec
from penstock.engine_core.models.tensors import check_weights
from penstock.engine_core.models.weight_files import stored_names
from penstock.protocol.errors import ModelError
from tests.engine_core.models.eagle_heads import load_head
from tests.engine_core.models.mtp_heads import KINDS, LAYERS, PLACE, Oracle, Weights, configure, write_headed
from tests.engine_core.models.parity import CHUNKS, PagedRun, ours, random_prompts
from tests.engine_core.models.test_eagle import Driven

PROMPTS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("glm")


@pytest.fixture(scope="module")
def weights(folder: Path) -> Weights:
    return write_headed(folder)


def head_spec(folder: Path, quantization: str = "none", *, named: bool = True) -> HeadSpec:
    spec = read_spec(folder, quantization)
    found = read_draft("mtp", folder, spec, stored_names(folder) if named else None).head
    assert found is not None
    return found


def head_of(folder: Path, target: Decoder, **options: Any) -> EagleHead:
    return load_head(folder, target, 256, spec=head_spec(folder, **options))


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_states_are_those_of_transformers_layer(kind: str, tmp_path: Path) -> None:
    folder, weights = tmp_path, write_headed(tmp_path, kind)
    target = ours(folder, length=256)
    head = head_of(folder, target)
    pack(head.destinations())
    generator = torch.Generator().manual_seed(2)
    given = torch.randn(PROMPTS, sum(CHUNKS), target.spec.hidden, generator=generator)
    prompts, oracle = random_prompts(PROMPTS), Oracle(weights, kind)
    assert target.head is not None
    embedding, output = target.embedding.weight.double(), target.head.weight.double()
    run = PagedRun(Driven(head, given), prompts)  # type: ignore[arg-type]
    pack(target.destinations())
    run.prefill()
    for sequence, prompt, before in zip(run.sequences, prompts, given, strict=True):
        expected = linear(oracle.states(embedding[prompt], before.double()), output)
        torch.testing.assert_close(torch.cat(sequence.logits).double(), expected, atol=1e-4, rtol=1e-4)


def test_the_model_itself_leaves_the_head_and_its_copies(folder: Path, weights: Weights) -> None:
    """And the head leaves the model's tensors, and the copies of its embeddings."""
    spec = read_spec(folder)
    check_weights(folder, spec)
    assert spec.layers == LAYERS
    head = head_spec(folder)
    check_mtp(folder, head)
    found = build_head(head, ours(folder, length=64), 64).destinations()
    assert found.keys() == weights.keys()
    counted = sum(tensor.numel() for tensor in weights.values())
    assert read_draft("mtp", folder, spec, None).weight_bytes(4) == 4 * counted
    assert head_of(folder, ours(folder, length=64)).weight_bytes == 4 * counted


def altered(folder: Path, place: Path, changes: dict[str, Tensor | None]) -> Path:
    """A copy whose files have other tensors, or lack some."""
    place.mkdir(exist_ok=True)
    (place / "config.json").write_text((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors") | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, place / "model.safetensors")
    return place


@pytest.mark.parametrize(
    ("name", "tensor", "said"),
    [
        (
            "eh_proj.weight",
            torch.zeros(64, 64),
            r"eh_proj.weight has shape \[64, 64\]; config.json asks for \[64, 128\]",
        ),
        ("hnorm.weight", None, "layers.2.hnorm.weight is missing"),
        ("enorm.weight", torch.zeros(64, dtype=torch.int64), "enorm.weight is of type I64"),
        ("extra.weight", torch.zeros(1), "layers.2.extra.weight is not part of the model"),
    ],
)
@pytest.mark.usefixtures("weights")
def test_what_does_not_fit_is_named(name: str, tensor: Tensor | None, said: str, folder: Path, tmp_path: Path) -> None:
    """Before the start by headers, and where it is read."""
    place = altered(folder, tmp_path / "altered", {f"{PLACE}{name}": tensor})
    head, target = head_spec(place), ours(folder, length=64)
    with pytest.raises(ModelError, match=said):
        check_mtp(place, head)
    with pytest.raises(ModelError, match=said):
        load_head(place, target, 64, spec=head)


def test_a_checkpoint_without_the_tensors(folder: Path, weights: Weights, tmp_path: Path) -> None:
    place = altered(folder, tmp_path / "without", dict.fromkeys(weights))
    with pytest.raises(ModelError, match=r"head of multi-token prediction, model.layers.2.\*, and these files"):
        head_spec(place)
    configure(place, num_nextn_predict_layers=0)
    with pytest.raises(ModelError, match=r"method mtp drafts by the model's own head .* glm4_moe has none"):
        head_spec(place, named=False)


def test_a_family_without_such_heads() -> None:
    with pytest.raises(ModelError, match=r"method mtp drafts by the model's own head .* qwen3 has none"):
        head_spec(demo_folder())


@pytest.mark.parametrize("quantization", ["fp8", "int8", "int4"])
@pytest.mark.usefixtures("weights")
@torch.inference_mode()
def test_a_head_is_quantized_as_its_model(quantization: str, folder: Path) -> None:
    """Its projection and the matrices of its layer; random tensors, too."""
    head = head_spec(folder, quantization)
    assert head.form is not None
    assert head.layers.blocks[0].attention.formats
    experts = head.layers.blocks[0].experts
    assert experts is not None
    assert experts.formats
    target = ours(folder, length=64)
    states = torch.randn(3, target.spec.hidden)
    for load_format in ("auto", "dummy"):
        found = load_head(folder, target, 64, load_format, spec=head)
        pack(found.destinations())
        assert found.logits(states).isfinite().all()


@pytest.mark.usefixtures("weights")
def test_its_pages_are_of_the_options_type(folder: Path) -> None:
    draft = read_draft("mtp", folder, read_spec(folder), None)
    found = with_draft_cache(draft, "fp8")
    assert found is not None
    assert found.head is not None
    assert found.head.layers.attention.kv_fp8
