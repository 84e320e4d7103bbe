"""Files of every mode and odd shape, from their bytes to tokens, for each family that sees: the pixels, the rows of the
encoder and the tokens are those of transformers' processor and model, wherever a prompt is cut."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from PIL import Image
from transformers.image_utils import load_image

from penstock.engine_core.images.picture import Picture
from penstock.engine_core.loading.adapters import read_adapter
from penstock.protocol.errors import InvalidRequest
from penstock.protocol.images import EncodeImage
from tests.engine_core.execution.harness import column, tokens_of
from tests.engine_core.execution.image_scene import Prompt, Scene, scores
from tests.engine_core.execution.test_images import ADAPTED, stored
from tests.engine_core.images.pictures import files, read_picture
from tests.engine_core.models.vision.vision_families import FAMILIES, image_tokens, oracle, told
from tests.engine_core.models.vision.vision_folders import write

COUNT = 4  # tokens of an answer
ROWS = 64  # of the encoder cache
BEFORE, AFTER = [31, 12, 47], [22, 60, 13, 9]


def rows_of(family: str, model: Any, made: Any) -> torch.Tensor:
    """transformers' rows of one picture."""
    if family.startswith("qwen"):
        found = model.model.visual(made["pixel_values"], grid_thw=made["image_grid_thw"])
        return torch.cat((found.pooler_output, *(getattr(found, "deepstack_features", None) or ())), dim=1)
    sizes = {"image_sizes": made["image_sizes"]} if family == "mistral3" else {}
    pooled = model.model.get_image_features(made["pixel_values"], return_dict=True, **sizes).pooler_output
    rows: torch.Tensor = pooled[0]
    return rows.view(-1, rows.shape[-1])


def encode(scene: Scene, picture: Picture) -> None:
    """Put its rows into the cache."""
    assert scene.encoder is not None
    rows = scene.vision.rows(picture.size)
    scene.encoder.begin(
        EncodeImage(number=1, first_row=0, rows=rows, width=picture.width, height=picture.height, pixels=picture.pixels)
    )
    while not scene.encoder.launch().last:
        pass
    assert not scene.encoder.trouble()


def said(
    scene: Scene, picture: Picture, tokens: list[int], cut: int, adapter: int = 0
) -> tuple[list[int], torch.Tensor]:
    """Our answer to a prompt that is cut at a position; log-probabilities of all tokens behind the first. adapter: its
    place."""
    vision, known = scene.vision, len(tokens)
    length = known - len(BEFORE) - len(AFTER)
    table = np.array((len(BEFORE), length, 0, picture.width, picture.height), "<i4").tobytes()
    start = msgspec.structs.replace(Prompt(tokens, adapter=adapter).start(vision), images=table)
    found = [scene.launch(starts=(start,), chunks=column(0, 0, cut, 0))]
    found.append(scene.launch(chunks=column(0, cut, known - cut, 1)))
    found += [scene.launch(decode_on=column(0) if step == 0 else b"") for step in range(COUNT - 1)]
    scene.launch(decode_off=column(0))
    return [token for result in found for token in tokens_of(result)], scores(found)


@pytest.mark.filterwarnings("ignore:Palette images with Transparency")
@pytest.mark.parametrize("share", [4, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_files_become_the_tokens_of_transformers(family: str, share: int, tmp_path: Path) -> None:
    """All files, or one of so many, others for each family."""
    config, settings = FAMILIES[family]
    model, scene = write(tmp_path, config, settings), stored(tmp_path)
    assert scene.encoder is not None
    vision, processor = scene.vision, oracle(family, scene.vision.cell)
    compared, last = 0, []
    for number, (name, data) in list(enumerate(files().items()))[list(FAMILIES).index(family) % share :: share]:
        try:
            made = processor(images=[load_image(Image.open(io.BytesIO(data)))], return_tensors="pt")
        except ValueError:
            with pytest.raises(InvalidRequest):
                read_picture(data, "auto", vision.processor, 1 << 30)
            continue
        picture = read_picture(data, "auto", vision.processor, 1 << 30)
        rows = vision.rows(picture.size)
        if rows > ROWS or (rows == 1 and family == "mistral3"):  # of one row transformers' model makes an error
            continue
        encode(scene, picture)
        expected = rows_of(family, model, made)
        torch.testing.assert_close(scene.encoder.cache[:rows], expected, atol=1e-4, rtol=1e-4, msg=name)
        tokens = [*BEFORE, *image_tokens(vision, picture.size), *AFTER]
        cut = len(BEFORE) if vision.mutual else 1 + number % (len(tokens) - 1)
        answer, scored = said(scene, picture, tokens, cut)
        if vision.token_id in answer:  # which transformers would take for a picture that is missing
            answer = answer[: answer.index(vision.token_id)]
            scored = scored[: len(tokens) - 1 + len(answer)]
        said_there, scored_there = told(family, model, made, vision.token_id, tokens, answer)
        assert answer == said_there, (name, cut)
        torch.testing.assert_close(scored, scored_there, atol=1e-4, rtol=1e-4, msg=f"{name}, cut at {cut}")
        last.append(float(scored[-1]))
        compared += 1
    assert compared >= 12 // share * 3
    assert np.std(last) > 1e-3, "the answers depend on the pictures"


@pytest.mark.filterwarnings("ignore")  # peft asks transformers for what is deprecated
@pytest.mark.parametrize(
    "family",
    ["gemma3", "mistral3", *(pytest.param(name, marks=pytest.mark.long) for name in FAMILIES if "qwen" in name)],
)
@torch.inference_mode()
def test_an_adapter_of_the_text_half_is_pefts(family: str, tmp_path: Path) -> None:
    """Two rows with adapters in one step: test_images.py."""
    model, scene = write(tmp_path / "base", *FAMILIES[family]), stored(tmp_path / "base", adapters=True)
    with torch.inference_mode(mode=False):
        settings = LoraConfig(target_modules=ADAPTED, r=4, lora_alpha=8, init_lora_weights=False)
        adapted = get_peft_model(model, settings).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    assert scene.runner.adapters is not None
    scene.adapt(read_adapter(tmp_path / "adapter", scene.runner.adapters.places))
    picture = read_picture(files()["square"], "auto", scene.vision.processor, 1 << 30)
    encode(scene, picture)
    tokens = [*BEFORE, *image_tokens(scene.vision, picture.size), *AFTER]
    answer, scored = said(scene, picture, tokens, len(BEFORE), adapter=1)
    image = load_image(Image.open(io.BytesIO(files()["square"])))
    made = oracle(family, scene.vision.cell)(images=[image], return_tensors="pt")
    assert scene.vision.token_id not in answer
    expected, scored_there = told(family, adapted, made, scene.vision.token_id, tokens, answer)
    assert answer == expected
    torch.testing.assert_close(scored, scored_there, atol=1e-4, rtol=1e-4)
    assert said(scene, picture, tokens, len(BEFORE))[1].sub(scored).abs().max() > 0.1, "the adapter changes something"
