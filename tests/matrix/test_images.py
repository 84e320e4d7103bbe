"""Images in cells of the matrix: the same tokens cut in pieces, behind cached prefixes, preempted, drafted, with fewer
rows of the encoder cache than the requests need, over ranks, with quantized weights of the text half, and from files of
every mode. fp32 on a CPU; tiny random models."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import PIL.Image
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, LlamaConfig
from transformers.image_utils import load_image

from penstock.engine_core.distributed.group import ALONE, Group
from penstock.engine_core.images.picture import Picture
from penstock.engine_core.images.processor_spec import Size
from penstock.engine_core.models.families.qwen_next import HEAD
from penstock.engine_core.models.quantization.writing import write_checkpoint as write_quantized
from penstock.engine_core.models.spec import read_spec
from penstock.engine_core.models.vision_spec import VisionSpec
from penstock.protocol.images import Image
from penstock.protocol.messages import Sampling
from tests.engine_core.images.pictures import files, read_picture
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
LONG = 70  # tokens of text behind an image, in which a piece of a state ends


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """The folder and transformers' model of each family."""
    folders = {name: tmp_path_factory.mktemp(name) for name in FAMILIES}
    return {name: (folder, write(folder, *FAMILIES[name])) for name, folder in folders.items()}


@pytest.fixture(scope="module")
def folders(references: dict[str, tuple[Path, Any]]) -> dict[str, Path]:
    return {name: folder for name, (folder, _) in references.items()}


def random_picture(size: Size, seed: int) -> Picture:
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8).tobytes()
    return Picture(*size, hashlib.blake2b(pixels, digest_size=16).digest(), pixels)


def prompt(vision: VisionSpec, parts: Sequence[int | Picture], n: int = 1, seed: int = 0, most: int = 10) -> Prompt:
    """So many tokens of the same text, or a picture, one behind the other."""
    chance = np.random.default_rng(seed)
    tokens: list[int] = []
    images = []
    for part in parts:
        if isinstance(part, int):
            tokens += chance.integers(10, TEXT["vocab_size"], part).tolist()
            continue
        placeholders = image_tokens(vision, part.size)
        images.append(Image(
            position=len(tokens), length=len(placeholders), rows=vision.rows(part.size), width=part.width,
            height=part.height, digest=part.digest, pixels=part.pixels,
        ))  # fmt: skip
        tokens += placeholders
    sampling = Sampling(temperature=0.0 if n == 1 else 0.8, seed=seed, max_tokens=most, ignore_eos=True)
    return Prompt(token_ids=tuple(tokens), sampling=sampling, n=n, images=tuple(images))


def pictures(vision: VisionSpec) -> list[Picture]:
    """Two of which the third has the size of the first."""
    sizes = (Size(32, 32), Size(32, 32)) if vision.pooled else (Size(32, 32), Size(16, 40))
    return [random_picture(size, seed) for seed, size in enumerate((*sizes, sizes[0]), 1)]


def asks(vision: VisionSpec) -> list[Prompt]:
    """Shared prefixes with the same images, with another in the same place, and text."""
    first, second, other = pictures(vision)
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
    found = engine.answer(asks(seen_by(folder)), together=together)
    counted = engine.scheduler.statistics()
    assert bool(counted.draft_tokens) == bool(cell.ngram or cell.own_drafts)
    assert bool(counted.preemptions) == (cell.expected_share == 0.0)
    return found, engine.encoded


@pytest.fixture(scope="module")
def alone(folders: dict[str, Path]) -> dict[str, Answers]:
    cell = Cell(depth=1, prefix_caching=False, max_num_seqs=1)
    return {name: said(ALONE, folder, cell)[0] for name, folder in folders.items()}


def seen_by(folder: Path) -> VisionSpec:
    vision = read_spec(folder).vision
    assert vision is not None
    return vision


def processed(family: str, vision: VisionSpec, asked: Prompt) -> Any:
    """What transformers' processor makes of pictures of the size that the model sees."""
    seen = [np.frombuffer(image.pixels, np.uint8).reshape(image.height, image.width, 3) for image in asked.images]
    if not seen:
        return {}
    return oracle(family, vision.cell)(images=seen, return_tensors="pt", input_data_format="channels_last")


@torch.inference_mode()
def check(
    family: str, model: Any, vision: VisionSpec, asked: Sequence[Prompt], answers: Answers, made: Sequence[Any] = ()
) -> None:
    """Greedy answers are those of transformers' model; sampled ones have no twin there. made: what its processor made
    of each prompt's pictures, unless they are `processed`."""
    compared = 0
    for number, prompt in enumerate(asked):
        if prompt.n > 1:
            continue
        answer = answers[number, 0]
        if vision.token_id in answer:  # which transformers would take for a picture that is missing
            answer = answer[: answer.index(vision.token_id)]
        inputs = made[number] if made else processed(family, vision, prompt)
        expected, _ = told(family, model, inputs, vision.token_id, prompt.token_ids, answer)
        assert answer == expected[: len(answer)]
        compared += len(answer)
    assert compared > 30


@pytest.mark.parametrize("family", FAMILIES)
def test_alone_as_transformers_says(
    family: str, references: dict[str, tuple[Path, Any]], alone: dict[str, Answers]
) -> None:
    """What every cell is held to."""
    folder, model = references[family]
    vision = seen_by(folder)
    check(family, model, vision, asks(vision), alone[family])


@pytest.mark.sweep
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


@pytest.mark.parametrize("family", FAMILIES)
def test_prefix_hits_behind_images(family: str, folders: dict[str, Path]) -> None:
    """What follows them is long enough for a state to be kept. Another image in place of the first is no hit."""
    vision = seen_by(folders[family])
    first, second, other = pictures(vision)
    asked = [
        *(prompt(vision, (9, first, 8, second, behind)) for behind in (LONG, LONG + 7)),
        prompt(vision, (9, other, 8, second, LONG)),
    ]
    engine = Engine(Cell(block_size=4, encoder_rows=32), folders[family])
    cold = Engine(Cell(depth=1, prefix_caching=False, max_num_seqs=1), folders[family])
    assert engine.answer(asked, together=False) == cold.answer(asked)
    last = asked[0].images[-1]
    computed = [begun for begun, _ in engine.begun]
    assert computed[1] >= last.position + last.length
    assert computed[0] == 0
    assert computed[2] <= asked[0].images[0].position
    assert engine.encoded in (3, 4), "of the second request none, and of the third what had left the cache"


@pytest.mark.filterwarnings("ignore:Palette images with Transparency")
@pytest.mark.parametrize("share", [14, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("family", FAMILIES)
def test_files_of_every_mode(family: str, share: int, references: dict[str, tuple[Path, Any]]) -> None:
    """In pieces, behind cached prefixes and preempted they become the tokens of transformers. All files, or one of so
    many, others for each family."""
    folder, model = references[family]
    vision = seen_by(folder)
    asked, made = [], []
    for data in list(files().values())[3 * list(FAMILIES).index(family) % share :: share]:
        image = load_image(PIL.Image.open(io.BytesIO(data)))
        try:
            read = oracle(family, vision.cell)(images=[image], return_tensors="pt")
        except ValueError:  # of too long a side: test_pictures.py
            continue
        picture = read_picture(data, "auto", vision.processor, 1 << 30)
        if vision.rows(picture.size) == 1 and family == "mistral3":  # of one row transformers' model makes an error
            continue
        asked += [prompt(vision, (9, picture, behind), most=40) for behind in (LONG, LONG + 3)]
        made += [read, read]
    room = 2 * max(len(each.token_ids) for each in asked) // 4 + 3  # blocks for two prompts, and not for their answers
    cells = {
        "pieces": CELLS["pieces"],
        "prefixes": CELLS["prefixes"],
        "preemption": msgspec.structs.replace(CELLS["preemption"], blocks=room, budget=512, prefix_caching=False),
    }
    engines = {name: Engine(msgspec.structs.replace(cell, encoder_rows=96), folder) for name, cell in cells.items()}
    found = {name: engine.answer(asked, together=name != "prefixes") for name, engine in engines.items()}
    check(family, model, vision, asked, found["pieces"], made)
    assert found["prefixes"] == found["preemption"] == found["pieces"]
    hits = [computed for computed, _ in engines["prefixes"].begun][1::2]
    assert all(hit >= 9 + each.images[0].length for hit, each in zip(hits, asked[1::2], strict=True))
    assert engines["preemption"].scheduler.statistics().preemptions


# int8 has no twin: compressed-tensors has rows reach from -128 to 127, and kernels from -127.
QUANTIZED = [("qwen3_vl", "int4"), ("gemma3", "int4")]
MORE_QUANTIZED = [("qwen2_5_vl", "int4"), ("qwen3_5", "int4"), ("mistral3", "int4"), ("qwen3_5", "fp8")]


@pytest.mark.filterwarnings("ignore")  # of compressed-tensors
@pytest.mark.parametrize(
    ("family", "quantization"),
    [*QUANTIZED, *(pytest.param(*case, marks=pytest.mark.long) for case in MORE_QUANTIZED)],
)
def test_quantized_text_halves(
    family: str, quantization: str, folders: dict[str, Path], alone: dict[str, Answers], tmp_path: Path
) -> None:
    """Beside an encoder that is not. transformers reads the same folder."""
    write_quantized(folders[family], read_spec(folders[family], quantization), tmp_path, torch.device("cpu"), repr)
    vision = seen_by(tmp_path)
    found, _ = said(ALONE, tmp_path, Cell(depth=1, prefix_caching=False, max_num_seqs=1))
    assert found != alone[family]
    model = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32).eval()
    check(family, model, vision, asks(vision), found)
    if quantization == "int4":  # rows that are rounded, too, may differ: test_quantized.py
        assert said(ALONE, tmp_path, CELLS["preemption"])[0] == found


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
