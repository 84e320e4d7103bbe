"""Images in cells of the matrix: the same tokens cut in pieces, behind cached prefixes, preempted, drafted, with fewer
rows of the encoder cache than the requests need, over ranks. fp32 on a CPU; tiny random models."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from penstock.engine_core.distributed.group import ALONE, Group
from penstock.engine_core.images.processor_spec import Size
from penstock.engine_core.models.families.qwen_next import HEAD
from penstock.engine_core.models.spec import read_spec
from penstock.engine_core.models.vision_spec import VisionSpec
from penstock.protocol.images import Image
from penstock.protocol.messages import Sampling
from tests.engine_core.models.parity import write_checkpoint
from tests.engine_core.models.vision.vision_families import FAMILIES, image_tokens, oracle, told
from tests.engine_core.models.vision.vision_folders import TEXT, write
from tests.matrix.engine import Answers, Cell, Engine, Prompt
from tests.ranks import Ranks

CELLS = {
    "pieces": Cell(depth=2, budget=24, prefix_caching=False, max_num_seqs=8),
    "prefixes": Cell(depth=2, block_size=4, max_num_seqs=8),
    "preemption": Cell(depth=2, block_size=4, blocks=40, budget=32, max_num_seqs=8, expected_share=0.0),
    "few rows": Cell(depth=1, encoder_rows=32, max_num_seqs=8),
    "drafts": Cell(depth=1, ngram=3, max_num_seqs=8),
}


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """The folder and transformers' model of each family."""
    folders = {name: tmp_path_factory.mktemp(name) for name in FAMILIES}
    return {name: (folder, write(folder, *FAMILIES[name])) for name, folder in folders.items()}


@pytest.fixture(scope="module")
def folders(references: dict[str, tuple[Path, Any]]) -> dict[str, Path]:
    return {name: folder for name, (folder, _) in references.items()}


def image(vision: VisionSpec, size: Size, seed: int, position: int) -> Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8).tobytes()
    digest = hashlib.blake2b(pixels, digest_size=16).digest()
    return Image(
        position=position, length=len(image_tokens(vision, size)), rows=vision.rows(size), width=size.width,
        height=size.height, digest=digest, pixels=pixels,
    )  # fmt: skip


def prompt(vision: VisionSpec, parts: tuple[int | tuple[Size, int], ...], n: int = 1, seed: int = 0) -> Prompt:
    """So many tokens of the same text, or a picture of a size and a seed, one behind the other."""
    chance = np.random.default_rng(seed)
    tokens: list[int] = []
    images = []
    for part in parts:
        if isinstance(part, int):
            tokens += chance.integers(10, TEXT["vocab_size"], part).tolist()
        else:
            images.append(image(vision, *part, len(tokens)))
            tokens += image_tokens(vision, part[0])
    sampling = Sampling(temperature=0.0 if n == 1 else 0.8, seed=seed, max_tokens=10, ignore_eos=True)
    return Prompt(token_ids=tuple(tokens), sampling=sampling, n=n, images=tuple(images))


def asks(vision: VisionSpec) -> list[Prompt]:
    """Shared prefixes with the same images, with another in the same place, and text."""
    sizes = (Size(32, 32), Size(32, 32)) if vision.pooled else (Size(32, 32), Size(16, 40))
    first, second, other = (sizes[0], 1), (sizes[1], 2), (sizes[0], 3)
    return [
        prompt(vision, (9, first, 8, second, 5)), prompt(vision, (9, first, 8, second, 12), n=2),
        prompt(vision, (9, other, 8, second, 5)), prompt(vision, (20,)), prompt(vision, (first, 7), seed=4),
        prompt(vision, (9, first, 8)),
    ]  # fmt: skip


def said(
    group: Group, folder: Path, cell: Cell, *, together: bool = True, draft: Path | None = None
) -> tuple[Answers, int]:
    """What is said, and how many images were encoded."""
    engine = Engine(cell, folder, group=group, draft=draft)
    spec = read_spec(folder)
    assert spec.vision is not None
    found = engine.answer(asks(spec.vision), together=together)
    counted = engine.scheduler.statistics()
    assert bool(counted.draft_tokens) == bool(cell.ngram or cell.own_drafts)
    assert bool(counted.preemptions) == (cell.expected_share == 0.0)
    return found, engine.encoded


@pytest.fixture(scope="module")
def alone(folders: dict[str, Path]) -> dict[str, Answers]:
    cell = Cell(depth=1, prefix_caching=False, max_num_seqs=1)
    return {name: said(ALONE, folder, cell)[0] for name, folder in folders.items()}


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_alone_as_transformers_says(
    family: str, references: dict[str, tuple[Path, Any]], alone: dict[str, Answers]
) -> None:
    """What every cell is held to. The sampled answers have no twin there."""
    folder, model = references[family]
    vision = read_spec(folder).vision
    assert vision is not None
    processor, compared = oracle(family, vision.cell), 0
    for number, asked in enumerate(asks(vision)):
        if asked.n > 1:
            continue
        pictures = [
            np.frombuffer(image.pixels, np.uint8).reshape(image.height, image.width, 3) for image in asked.images
        ]
        made = processor(images=pictures, return_tensors="pt", input_data_format="channels_last") if pictures else {}
        (answer,) = (said for (request, _), said in alone[family].items() if request == number)
        if vision.token_id in answer:  # which transformers would take for a picture that is missing
            answer = answer[: answer.index(vision.token_id)]
        expected, _ = told(family, model, made, vision.token_id, asked.token_ids, answer)
        assert answer == expected[: len(answer)]
        compared += len(answer)
    assert compared > 30


@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize("family", FAMILIES)
def test_cells(family: str, name: str, folders: dict[str, Path], alone: dict[str, Answers]) -> None:
    found, encoded = said(ALONE, folders[family], CELLS[name])
    assert found == alone[family]
    assert encoded >= 3


def test_prefix_hits_over_images_encode_nothing(folders: dict[str, Path], alone: dict[str, Answers]) -> None:
    """One request behind another: of nine images four are encoded, though rows are there for two at a time."""
    cell = Cell(block_size=4, encoder_rows=32)
    found, encoded = said(ALONE, folders["qwen3_vl"], cell, together=False)
    assert found == alone["qwen3_vl"]
    assert encoded == 4


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5", "gemma3"])
def test_drafts_of_a_model_without_eyes(
    family: str, folders: dict[str, Path], alone: dict[str, Answers], tmp_path: Path
) -> None:
    """It reads the placeholders of images as tokens."""
    config = LlamaConfig(**{**TEXT, "num_attention_heads": 2, "num_key_value_heads": 2})
    write_checkpoint(tmp_path, config)
    cell = Cell(depth=2, block_size=4, own_drafts=2, max_num_seqs=8)
    found, encoded = said(ALONE, folders[family], cell, draft=tmp_path)
    assert found == alone[family]
    assert encoded >= 3


@pytest.mark.parametrize("name", ["pieces", "preemption"])
def test_drafts_of_a_head(name: str, folders: dict[str, Path], alone: dict[str, Answers], tmp_path: Path) -> None:
    """Of multi-token prediction, behind states of a layer that saw images."""
    headed = tmp_path / "headed"
    shutil.copytree(folders["qwen3_5"], headed)
    path = headed / "model.safetensors"
    tensors, chance = load_file(path), torch.Generator().manual_seed(5)
    last = max((name for name in tensors if "self_attn.q_proj" in name), key=len).partition("self_attn")[0]
    block = {name: tensor for name, tensor in tensors.items() if name.startswith(last)}
    head = {
        HEAD.place + HEAD.block + name.removeprefix(last): torch.randn(tensor.shape, generator=chance) * 0.1
        for name, tensor in block.items()
    }
    hidden = TEXT["hidden_size"]
    for norm in (HEAD.embedding_norm, HEAD.state_norm, HEAD.norm):
        head[f"{HEAD.place}{norm}.weight"] = torch.randn(hidden, generator=chance) * 0.1
    head[f"{HEAD.place}{HEAD.projection}.weight"] = torch.randn(hidden, 2 * hidden, generator=chance) * 0.1
    save_file({**tensors, **head}, path, {"format": "pt"})
    config = json.loads((headed / "config.json").read_text())
    config["text_config"]["mtp_num_hidden_layers"] = 1
    (headed / "config.json").write_text(json.dumps(config))
    cell = msgspec.structs.replace(CELLS[name], own_drafts=2, method="mtp")
    found, encoded = said(ALONE, headed, cell, draft=headed)
    assert found == alone["qwen3_5"]
    assert encoded >= 3


@pytest.mark.parametrize(
    "family",
    [
        "qwen3_vl",
        "gemma3",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("qwen2_5_vl", "qwen3_5", "mistral3")),
    ],
)
def test_ranks(family: str, folders: dict[str, Path], alone: dict[str, Answers], ranks: Ranks) -> None:
    """That the stages of a pipeline say the same: tests/engine_core/execution/test_images.py."""
    for found, _ in ranks.run(2, said, folders[family], CELLS["pieces"]):
        assert found == alone[family]
