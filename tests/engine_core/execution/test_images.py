"""Steps over tokens of images: the same numbers however they are cut, and those of transformers."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from peft import LoraConfig, get_peft_model
from transformers import Gemma3Config, Gemma3ImageProcessorPil

from penstock.engine_core.distributed.group import Group
from penstock.engine_core.execution.draft_model import Draft
from penstock.engine_core.images.processor_spec import Size
from penstock.engine_core.loading import load
from penstock.engine_core.loading.adapters import read_adapter
from penstock.engine_core.models import registry
from penstock.engine_core.models.layers import pack
from penstock.engine_core.models.spec import read_spec
from penstock.protocol.steps import OWN_DRAFT
from tests.engine_core.execution.harness import column, tokens_of
from tests.engine_core.execution.image_scene import (
    CPU,
    IMAGE,
    LENGTH,
    VISION,
    Prompt,
    Scene,
    asked,
    made,
    scores,
    seeing_spec,
)
from tests.engine_core.models.specs import small_spec
from tests.engine_core.models.vision.test_qwen import CASES, PROCESSOR, patches_of
from tests.engine_core.models.vision.test_siglip import PROCESSOR as GEMMA_PROCESSOR
from tests.engine_core.models.vision.test_siglip import SIDE, TOKENS
from tests.engine_core.models.vision.test_siglip import VISION as GEMMA_VISION
from tests.engine_core.models.vision.vision_folders import TEXT, write
from tests.ranks import Ranks
from tests.ranks import Size as Members

WIDE, TALL = Size(16, 40), Size(32, 16)  # 2 x 5 and 4 x 2 rows
SIZES: tuple[Members, ...] = (2, (1, 2))  # ranks; ranks and stages
ADAPTED = r".*language_model.*\.(q_proj|o_proj|up_proj|down_proj)"
PARTS = (4, WIDE, 3, TALL, 5)  # of 30 tokens: images at 4..13 and 17..24


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("case", ["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_tokens_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    reference = write(tmp_path, CASES[case], PROCESSOR)
    scene = stored(tmp_path)
    prompt = scene.prompt(*PARTS)
    scene.run(prompt, (7, 20), decodes=6)
    assert prompt.output == generated(reference, prompt, 7)


def generated(model: Any, prompt: Prompt, count: int) -> list[int]:
    """What transformers' model of Qwen's says."""
    pictures = [patches_of(pixels(size, seed)) for seed, (_, size) in enumerate(prompt.images)]
    with torch.inference_mode():
        ids = torch.tensor([prompt.token_ids])
        found = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            mm_token_type_ids=(ids == IMAGE).int(),
            pixel_values=torch.cat([picture["pixel_values"] for picture in pictures]),
            image_grid_thw=torch.cat([picture["image_grid_thw"] for picture in pictures]),
            max_new_tokens=count, do_sample=False,
        )  # fmt: skip
    return [int(token) for token in found[0, len(prompt.token_ids) :]]


def test_tokens_that_see_their_image_are_those_of_transformers(tmp_path: Path) -> None:
    """Of Gemma 3, whose windows are shorter than an image. No chunk ends within one."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    text = {**TEXT, "num_hidden_layers": 3, "sliding_window": 6, "layer_types": kinds}
    config = Gemma3Config(text_config=text, vision_config=GEMMA_VISION, mm_tokens_per_image=16, **TOKENS)
    reference, square = write(tmp_path, config, GEMMA_PROCESSOR), Size(SIDE, SIDE)
    scene = stored(tmp_path)
    prompt = scene.prompt(4, square, 1, square, 9)
    scene.run(prompt, (2, 20, 40), decodes=6)
    processor = Gemma3ImageProcessorPil(**{key: GEMMA_PROCESSOR[key] for key in ("image_mean", "image_std", "size")})
    pictures = [pixels(square, seed).numpy() for seed in range(2)]
    ids = torch.tensor([prompt.token_ids])
    with torch.inference_mode():
        found = reference.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), token_type_ids=(ids == scene.vision.token_id).long(),
            pixel_values=processor(pictures, return_tensors="pt", input_data_format="channels_last")["pixel_values"],
            max_new_tokens=7, min_new_tokens=7, do_sample=False, eos_token_id=None,
        )  # fmt: skip
    assert prompt.output == found[0, len(prompt.token_ids) :].tolist()


@pytest.mark.parametrize("case", ["qwen3_vl", "qwen3_5"])
def test_rows_with_an_adapter_of_the_text_half(case: str, tmp_path: Path) -> None:
    """Beside one without, over the same images, in the same steps; peft says what is expected."""
    base, folder = tmp_path / "base", tmp_path / "adapter"
    reference = write(base, CASES[case], PROCESSOR)
    scene = stored(base, adapters=True)
    assert scene.runner.adapters is not None
    plain, own = scene.prompt(*PARTS), scene.prompt(*PARTS, slot=1, adapter=1)
    expected = [generated(reference, plain, 4)]
    with warnings.catch_warnings():  # peft asks transformers for what is deprecated
        warnings.simplefilter("ignore")
        config = LoraConfig(target_modules=ADAPTED, r=4, lora_alpha=8, init_lora_weights=False)
        adapted = get_peft_model(reference, config).eval()
        adapted.save_pretrained(folder)
    expected.append(generated(adapted, own, 4))
    scene.adapt(read_adapter(folder, scene.runner.adapters.places))
    starts = tuple(prompt.start(scene.vision) for prompt in (plain, own))
    found = [scene.launch(starts=starts, chunks=column(0, 0, 7, 0, 1, 0, 12, 0))]
    found.append(scene.launch(chunks=column(0, 7, 23, 1, 1, 12, 18, 1)))
    found += [scene.launch(decode_on=column(0, 1) if step == 0 else b"") for step in range(3)]
    tokens = [tokens_of(result) for result in found[1:]]
    assert [list(row) for row in zip(*tokens, strict=True)] == expected
    assert expected[0] != expected[1]


def test_the_first_stage_alone_reads_the_encoder(tmp_path: Path) -> None:
    """From the files that hold all of it."""
    write(tmp_path, CASES["qwen3_vl_moe"], PROCESSOR)
    read = []
    for stage in range(2):
        group = Group(stage=stage, stages=2)
        with torch.inference_mode():
            model = registry.build(read_spec(tmp_path), torch.float32, CPU, LENGTH, group=group)
            tower = registry.build_tower(model)
            load(model, tmp_path, tower=tower)
        read.append(tower is not None)
    assert read == [True, False]


def stored(folder: Path, *, adapters: bool = False) -> Scene:
    """With the weights of a folder."""
    with torch.inference_mode():
        model = registry.build(read_spec(folder), torch.float32, CPU, LENGTH)
        tower = registry.build_tower(model)
        load(model, folder, tower=tower)
        pack(model.destinations())
    return Scene(model, tower, adapters=adapters)


def pixels(size: Size, seed: int) -> torch.Tensor:
    found = np.frombuffer(asked(size, seed, 0, 0).pixels, np.uint8).reshape(*size, 3)
    return torch.from_numpy(found.copy())


@pytest.fixture(scope="module")
def scene() -> Scene:
    return made(seeing_spec())


@pytest.fixture(scope="module")
def whole(scene: Scene) -> tuple[torch.Tensor, list[int]]:
    prompt = scene.prompt(*PARTS)
    return scores(scene.run(prompt, decodes=5)), prompt.output


@pytest.mark.parametrize("cuts", [(4,), (5, 6, 13, 14, 18), (9, 21), (17, 25), tuple(range(1, 30))])
def test_a_prompt_may_be_cut_anywhere(scene: Scene, whole: tuple[torch.Tensor, list[int]], cuts: Sequence[int]) -> None:
    prompt = scene.prompt(*PARTS, slot=1)
    close(scores(scene.run(prompt, cuts, decodes=5)), whole[0])
    assert prompt.output == whole[1]


@pytest.mark.parametrize(("computed", "read"), [(9, (True, True)), (14, (False, True)), (20, (False, True)),
                                                (25, (False, False)), (29, (False, False))])  # fmt: skip
def test_a_prompt_may_begin_behind_what_is_cached(
    scene: Scene, whole: tuple[torch.Tensor, list[int]], computed: int, read: tuple[bool, bool]
) -> None:
    """The same blocks have its first positions. An image that no step reads has no rows."""
    before = scene.prompt(*PARTS)
    scene.run(before)
    if not read[0]:  # its rows are another's by now
        scene.encode(WIDE, 99, 0)
    prompt = scene.prompt(*PARTS)
    scene.run(prompt, (27,), computed=computed, read=read, decodes=5)
    assert prompt.output == whole[1]


@pytest.mark.parametrize("after", [1, 3])
def test_a_preempted_request_goes_on(scene: Scene, whole: tuple[torch.Tensor, list[int]], after: int) -> None:
    """Its output is part of the next prompt, behind the images."""
    prompt = scene.prompt(*PARTS)
    prompt.output = whole[1][:after]
    scene.run(prompt, (12, 29), decodes=5 - after)
    assert prompt.output == whole[1]


def test_text_does_not_see_the_images_of_the_slot_before(scene: Scene) -> None:
    text = scene.prompt(12)
    scene.run(text, decodes=4)
    scene.run(scene.prompt(*PARTS), decodes=2)
    again = scene.prompt(12)
    scene.run(again, decodes=4)
    scene.run(scene.prompt(*PARTS), decodes=2)
    scene.runner.reset()
    anew = scene.prompt(12)
    scene.run(anew, decodes=4)
    assert text.output == again.output == anew.output


def test_rows_of_one_step_have_their_own_positions(scene: Scene, whole: tuple[torch.Tensor, list[int]]) -> None:
    """A chunk of an image beside a row that decodes behind images, and one of text."""
    alone = scene.prompt(8, slot=1)
    scene.run(alone, decodes=3)
    first, text, late = scene.prompt(*PARTS), scene.prompt(8, slot=1), scene.prompt(*PARTS, slot=2)
    scene.run(first)
    scene.run(text)
    on, starts = column(0, 1), (late.start(VISION),)
    for begin, end in ((0, 9), (9, 30)):
        chunks = column(2, begin, end - begin, int(end == 30))
        found = tokens_of(scene.launch(decode_on=on, starts=starts, chunks=chunks))
        first.output.append(found[0])
        text.output.append(found[1])
        late.output += found[2:]
        on, starts = b"", ()
    assert first.output == whole[1][:3]
    assert text.output == alone.output[:3]
    assert late.output == whole[1][:1]
    scene.launch(decode_off=column(0, 1))


def test_embeddings_of_images_are_rows_of_the_cache() -> None:
    """With rows that are embeddings of text, the model says what it says of that text."""
    scene = made(seeing_spec(replace(VISION, levels=(), mrope=False)))
    assert scene.encoder is not None
    prompt = scene.prompt(*PARTS)
    words = torch.arange(30, 48)
    assert scene.model.embedding is not None
    scene.encoder.cache[:18] = scene.model.embedding.forward(words)
    places = [at for at, token in enumerate(prompt.token_ids) if token == IMAGE]
    text = scene.prompt(30, slot=1)
    text.token_ids = prompt.token_ids[:]
    for place, word in zip(places, words.tolist(), strict=True):
        text.token_ids[place] = word
    scene.run(prompt, (6, 7), decodes=3)
    scene.run(text, decodes=3)
    assert prompt.output == text.output


def test_levels_are_added_behind_the_first_layers(scene: Scene) -> None:
    """To tokens of images alone. What the tower gives for other levels changes nothing before their layer."""
    assert scene.encoder is not None
    prompt, cache = scene.prompt(*PARTS), scene.encoder.cache
    model, kept = scene.model, cache.clone()

    def streams() -> list[torch.Tensor]:
        """The residual stream in front of layers 1 and 2."""
        found: list[torch.Tensor] = []
        forward = model.forward_aux
        model.forward = lambda *inputs: (found.extend(forward(*inputs, (1, 2))[1]), forward(*inputs, ()))[1][0]  # type: ignore[method-assign]
        scene.run(scene.prompt(*PARTS))
        del model.forward
        return found

    before = streams()
    original = scene.encode
    scene.encode = lambda *_: None  # type: ignore[method-assign]
    cache[:, 32:64] += 1.0
    after = streams()
    cache.copy_(kept)
    scene.encode = original  # type: ignore[method-assign]
    images = torch.tensor(prompt.token_ids) == IMAGE
    close(after[0] - before[0], images[:, None].float().expand(-1, 32))
    assert not torch.equal(after[1], before[1])


def test_tokens_of_an_image_see_its_later_ones() -> None:
    """Where the model has it so; text sees nothing behind it."""
    scene = made(seeing_spec(replace(VISION, levels=(), mrope=False, mutual=True)))
    assert scene.encoder is not None
    before = scores(scene.run(scene.prompt(*PARTS), (4, 15)))
    prompt = scene.prompt(*PARTS)
    scene.encoder.cache[9] += 1.0  # the last of the first image, at 13
    after = scores(scene.run(prompt, (4, 15)))
    close(after[:4], before[:4])  # of tokens 1 to 4, by those before
    assert ((after - before).abs()[4:] > 1e-4).all()


def test_drafts_of_a_draft_model_change_nothing(scene: Scene, whole: tuple[torch.Tensor, list[int]]) -> None:
    """It reads placeholders as text, at plain positions."""
    spec = small_spec(layers=1, vocab_size=scene.runner.sizes.vocabulary, max_position=LENGTH, longest=LENGTH)
    with torch.inference_mode():
        drafter = registry.build(spec, torch.float32, CPU, LENGTH)
        load(drafter, Path(), "dummy", 4)
    assert scene.encoder is not None
    drafting = Scene(scene.model, scene.encoder.tower, Draft(drafter, spec, 2))
    prompt = drafting.prompt(*PARTS)
    found = tokens_of(drafting.launch(
        starts=(prompt.start(VISION),), chunks=column(0, 0, 30, 1), drafting=column(0, 0, 30, 2, 0)
    ))  # fmt: skip
    while len(found) < 6:
        on = column(0) if len(found) == 1 else b""
        result = drafting.launch(
            decode_on=on, drafts=column(0, 2), draft_ids=column(OWN_DRAFT, OWN_DRAFT), drafting=column(0, -3, 3, 2, 0)
        )
        found += [token for token in tokens_of(result) if token >= 0]
    assert found[:6] == whole[1]


def said(group: Group) -> tuple[list[float], list[int], bool]:
    """The prompt's scores and its output on a member of a group, and whether that has the encoder."""
    scene = made(seeing_spec(), group)
    prompt = scene.prompt(*PARTS)
    found = scene.run(prompt, (7, 20), decodes=5)
    scene.runner.reset()
    return scores(found).tolist() if prompt.output else [], prompt.output, scene.encoder is not None


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    found = Ranks(SIZES, tmp_path_factory.mktemp("members"))
    yield found
    found.close()


@pytest.mark.parametrize("size", SIZES)
def test_ranks_and_stages(members: Ranks, whole: tuple[torch.Tensor, list[int]], size: Members) -> None:
    """Each rank of the first stage has the whole encoder; every stage has the rotary positions."""
    first, last = members.run(size, said)
    answering = first if size == 2 else last
    close(torch.tensor(answering[0]), whole[0])
    assert answering[1] == whole[1]
    assert (first[2], last[2]) == (True, size == 2)
