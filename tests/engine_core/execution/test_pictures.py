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
from PIL import Image
from transformers import (
    Gemma3Config,
    Gemma3ImageProcessorPil,
    PixtralImageProcessorPil,
    PreTrainedConfig,
    Qwen2VLImageProcessorPil,
)
from transformers.image_utils import load_image

from penstock.engine_core.images.picture import Picture
from penstock.engine_core.models.vision_spec import VisionSpec
from penstock.protocol.errors import InvalidRequest
from penstock.protocol.images import EncodeImage
from tests.engine_core.execution.harness import column, tokens_of
from tests.engine_core.execution.image_scene import Prompt, Scene, scores
from tests.engine_core.execution.test_images import stored
from tests.engine_core.images.pictures import files, read_picture
from tests.engine_core.models.vision import test_pixtral as pixtral
from tests.engine_core.models.vision import test_qwen as qwen
from tests.engine_core.models.vision import test_siglip as gemma
from tests.engine_core.models.vision.vision_folders import TEXT, write

COUNT = 4  # tokens of an answer
ROWS = 64  # of the encoder cache
BEFORE, AFTER = [31, 12, 47], [22, 60, 13, 9]
LINE_END, END = 70, 71
QWEN = {**qwen.PROCESSOR, "size": {"shortest_edge": 64, "longest_edge": 2048}}
PIXTRAL = {**pixtral.PROCESSOR, "size": {"longest_edge": 56}}
FAMILIES: dict[str, tuple[PreTrainedConfig, dict[str, Any]]] = {
    **{name: (qwen.CASES[name], QWEN) for name in ("qwen2_5_vl", "qwen3_vl", "qwen3_5")},
    "gemma3": (
        Gemma3Config(text_config=TEXT, vision_config=gemma.VISION, mm_tokens_per_image=16, **gemma.TOKENS),
        gemma.PROCESSOR,
    ),
    "mistral3": (pixtral.CASES["mistral"], PIXTRAL),
}


def oracle(family: str, settings: dict[str, Any], cell: int) -> Any:
    """transformers' image processor."""
    given = {key: settings[key] for key in ("image_mean", "image_std", "size")}
    if family == "gemma3":
        return Gemma3ImageProcessorPil(**given)
    if family == "mistral3":
        return PixtralImageProcessorPil(**given, patch_size=cell)
    return Qwen2VLImageProcessorPil(
        **given, patch_size=settings["patch_size"], merge_size=settings["merge_size"], temporal_patch_size=2
    )


def rows_of(family: str, model: Any, made: Any) -> torch.Tensor:
    """transformers' rows of one picture."""
    if family.startswith("qwen"):
        found = model.model.visual(made["pixel_values"], grid_thw=made["image_grid_thw"])
        return torch.cat((found.pooler_output, *(getattr(found, "deepstack_features", None) or ())), dim=1)
    sizes = {"image_sizes": made["image_sizes"]} if family == "mistral3" else {}
    pooled = model.model.get_image_features(made["pixel_values"], return_dict=True, **sizes).pooler_output
    rows: torch.Tensor = pooled[0]
    return rows.view(-1, rows.shape[-1])


def image_tokens(vision: VisionSpec, picture: Picture) -> list[int]:
    if vision.kind != "pixtral":
        return [vision.token_id] * vision.rows(picture.size)
    lines, columns = vision.grid(picture.size)
    return [*([*[vision.token_id] * columns, LINE_END] * lines)[:-1], END]


def said(scene: Scene, picture: Picture, tokens: list[int], cut: int) -> tuple[list[int], torch.Tensor]:
    """Our answer to a prompt that is cut at a position; log-probabilities of all tokens behind the first."""
    vision, known = scene.vision, len(tokens)
    length = known - len(BEFORE) - len(AFTER)
    table = np.array((len(BEFORE), length, 0, picture.width, picture.height), "<i4").tobytes()
    start = msgspec.structs.replace(Prompt(tokens).start(vision), images=table)
    found = [scene.launch(starts=(start,), chunks=column(0, 0, cut, 0))]
    found.append(scene.launch(chunks=column(0, cut, known - cut, 1)))
    found += [scene.launch(decode_on=column(0) if step == 0 else b"") for step in range(COUNT - 1)]
    scene.launch(decode_off=column(0))
    return [token for result in found for token in tokens_of(result)], scores(found)


def told(
    family: str, model: Any, made: Any, token_id: int, tokens: list[int], answer: list[int]
) -> tuple[list[int], torch.Tensor]:
    """The same of transformers, behind each token of an answer."""
    ids = torch.tensor([tokens + answer])
    seen = (ids == token_id).long()
    more = {"token_type_ids": seen} if family == "gemma3" else {"mm_token_type_ids": seen.int()}
    inputs = dict(made.items()) | (more if family != "mistral3" else {})
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), **inputs).logits[0, :-1]
    scored = torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None]).flatten()
    return [int(token) for token in logits[len(tokens) - 1 :].argmax(-1)], scored


@pytest.mark.filterwarnings("ignore:Palette images with Transparency")
@pytest.mark.parametrize("share", [4, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_files_become_the_tokens_of_transformers(family: str, share: int, tmp_path: Path) -> None:
    """All files, or one of so many, others for each family."""
    config, settings = FAMILIES[family]
    model, scene = write(tmp_path, config, settings), stored(tmp_path)
    assert scene.encoder is not None
    vision, processor = scene.vision, oracle(family, settings, scene.vision.cell)
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
        scene.encoder.begin(
            EncodeImage(
                number=1, first_row=0, rows=rows, width=picture.width, height=picture.height, pixels=picture.pixels
            )
        )
        while not scene.encoder.launch().last:
            pass
        assert not scene.encoder.trouble()
        expected = rows_of(family, model, made)
        torch.testing.assert_close(scene.encoder.cache[:rows], expected, atol=1e-4, rtol=1e-4, msg=name)
        tokens = [*BEFORE, *image_tokens(vision, picture), *AFTER]
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
