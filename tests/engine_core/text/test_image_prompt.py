"""Images in prompts are the tokens that the processors of transformers write, and nothing else is."""

from __future__ import annotations

import importlib
import io
import json
import sys
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import PreTrainedTokenizerFast
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.pixtral import image_processing_pil_pixtral
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from penstock.engine_core.images.picture import Picture
from penstock.engine_core.images.processor_spec import Size
from penstock.engine_core.parsers.dialect import Dialect
from penstock.engine_core.text import image_prompt
from penstock.engine_core.text.controls import read_controls
from penstock.engine_core.text.image_prompt import ImagePrompter, PixelBudget
from penstock.engine_core.text.prompts import Prepared, Prompter, PromptLimits
from penstock.engine_core.text.template import ChatTemplate, Conversation
from penstock.protocol.columns import unpack
from penstock.protocol.errors import InvalidRequest, ModelError, Overloaded
from penstock.protocol.images import ImageFile
from penstock.protocol.messages import Pooling, Sampling, SubmitText, Tokenize
from tests.engine_core.images.pictures import noise, read_picture, write
from tests.engine_core.text.sighted import FAMILIES, Sighted

IMAGE = {"type": "image"}
SIZES = ((100, 60), (31, 33), (120, 120))  # width and height of files
CHAT = [
    {"role": "user", "content": [{"type": "text", "text": "this:"}, IMAGE, {"type": "text", "text": "and\n"}, IMAGE]},
    {"role": "assistant", "content": "a cat"},
    {"role": "user", "content": [IMAGE, {"type": "text", "text": "what is that?"}]},
]


def said(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [IMAGE, {"type": "text", "text": text}]}]


def prompter(name: str, *, controlled: bool = True, template: str = "", limits: Any = None) -> Prompter:
    family = FAMILIES[name]
    vocabulary = family.vocabulary()
    source = template or family.template
    controls = read_controls(vocabulary, source, Dialect()) if controlled else None
    eos = vocabulary.token_id(family.eos)
    assert eos is not None
    found = limits or PromptLimits(vocabulary.size, 2048, (eos,), recurrent=True, vision=family.vision())
    return Prompter(vocabulary, ChatTemplate({"default": source}, vocabulary.names), found, None, controls)


def pictures(name: str, sizes: Sequence[tuple[int, int]] = SIZES) -> tuple[Picture, ...]:
    processor = FAMILIES[name].processor
    return tuple(read_picture(write(noise(*size), "PNG"), "auto", processor, 1 << 24) for size in sizes)


def submit(messages: Any, count: int, **fields: Any) -> SubmitText:
    files = tuple(ImageFile(data=b"", param=f"image {number}") for number in range(count))
    return SubmitText(id=1, messages=json.dumps(messages).encode(), images=files, sampling=Sampling(), **fields)


def prepared(name: str, messages: Any = CHAT, sizes: Sequence[tuple[int, int]] = SIZES, **fields: Any) -> Prepared:
    chosen = {key: fields.pop(key) for key in ("controlled", "template", "limits") if key in fields}
    request = submit(messages, len(sizes), add_special_tokens=False, **fields)
    return prompter(name, **chosen).prepare(request, 0.0, None, pictures(name, sizes))


def oracle(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The processor of transformers around our tokenizer. Those that want torchvision are put together without it."""
    family = FAMILIES[name]
    tokens = {"bos_token": family.special[0], "eos_token": family.eos}
    if name == "gemma":
        extra = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=family.tokenizer(), extra_special_tokens=extra, **tokens)
        module, image = "gemma3", Gemma3ImageProcessorPil(size={"height": 56, "width": 56})
    else:
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=family.tokenizer(), **tokens)
        module = "qwen3_vl" if name == "qwen" else "pixtral"
        size = {"shortest_edge": 2048, "longest_edge": 20_000} if name == "qwen" else {"longest_edge": 140}
        kind = Qwen2VLImageProcessorPil if name == "qwen" else PixtralImageProcessorPil
        image = kind(size=size, patch_size=16 if name == "qwen" else 28)
    monkeypatch.setitem(
        sys.modules, "transformers.models.pixtral.image_processing_pixtral", image_processing_pil_pixtral
    )
    found = importlib.import_module(f"transformers.models.{module}.processing_{module}")
    chosen = {"qwen3_vl": "Qwen3VLProcessor", "gemma3": "Gemma3Processor", "pixtral": "PixtralProcessor"}[module]
    kind = getattr(found, chosen)
    monkeypatch.setattr(kind, "check_argument_for_proper_class", lambda *_: None)
    monkeypatch.setattr(kind, "get_attributes", lambda *_: ["image_processor", "tokenizer"])
    if name == "gemma":
        return kind(image_processor=image, tokenizer=tokenizer, image_seq_length=4)
    if name == "mistral":
        return kind(image_processor=image, tokenizer=tokenizer, patch_size=14, spatial_merge_size=2)
    made = kind.__new__(kind)
    made.image_processor, made.tokenizer, made.chat_template = image, tokenizer, None
    made.image_token, made.video_token = "<|image_pad|>", "<|video_pad|>"
    made.image_token_id, made.video_token_id = map(tokenizer.convert_tokens_to_ids, ("<|image_pad|>", "<|video_pad|>"))
    return made


@pytest.mark.parametrize("controlled", [True, False])
@pytest.mark.parametrize("name", FAMILIES)
def test_ids_are_those_of_transformers(name: str, controlled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    family = FAMILIES[name]
    found = prepared(name, controlled=controlled)
    text = ChatTemplate({"default": family.template}, family.vocabulary().names).render(
        Conversation(messages=CHAT), datetime.fromtimestamp(0)
    )
    images = [Image.open(io.BytesIO(write(noise(*size), "PNG"))) for size in SIZES]
    expected = oracle(name, monkeypatch)(images=images, text=[text], add_special_tokens=False, return_tensors=None)
    assert list(found.token_ids) == list(expected["input_ids"][0])


@pytest.mark.parametrize("name", FAMILIES)
def test_images_cover_their_placeholders(name: str) -> None:
    found, vision = prepared(name), FAMILIES[name].vision()
    ids = list(found.token_ids)
    covered = set[int]()
    assert [image.digest for image in found.request.images] == [picture.digest for picture in pictures(name)]
    for image, picture in zip(found.request.images, pictures(name), strict=True):
        span = range(image.position, image.position + image.length)
        assert ids[span[0]] == vision.token_id
        assert sum(ids[place] == vision.token_id for place in span) == image.rows == vision.rows(picture.size)
        assert (image.width, image.height, image.pixels) == (picture.width, picture.height, picture.pixels)
        assert not covered & set(span)
        covered |= set(span)
    assert all(ids[place] != vision.token_id for place in range(len(ids)) if place not in covered)
    assert unpack("i", found.request.token_ids) == ids
    assert all(ids[turn - 1] in found.request.sampling.eos_token_ids for turn in found.request.turns)
    assert found.request.turns


@pytest.mark.parametrize("name", FAMILIES)
def test_contents_spell_no_placeholder(name: str) -> None:
    """Escaped, it is text; without --split-special-tokens it is counted, and refused."""
    placeholder = FAMILIES[name].placeholder
    for spelled in {placeholder, *FAMILIES[name].special}:
        found = prepared(name, said(f"a{spelled}b"), SIZES[:1])
        assert len(found.request.images) == 1
        ids = list(found.token_ids)
        assert ids.count(FAMILIES[name].vision().token_id) == found.request.images[0].rows
    message = f"messages must not spell {placeholder}, which stands for an image"
    for trusted in ([{"role": "system", "content": placeholder}], [{"role": "user", "content": f"x {placeholder}"}]):
        if name != "mistral" or trusted[0]["role"] == "user":  # its template has no system message
            with pytest.raises(InvalidRequest) as caught:
                prepared(name, trusted, (), controlled=False)
            assert caught.value.message == message
    with pytest.raises(InvalidRequest, match="must not spell"):
        prepared(name, said(placeholder), SIZES[:1], controlled=False)
    if name == "gemma":
        with pytest.raises(InvalidRequest, match="must not spell"):
            prepared(name, said("<start_of_image>"), SIZES[:1], controlled=False)


@pytest.mark.parametrize("controlled", [True, False])
def test_a_template_that_knows_no_images_is_refused(controlled: bool) -> None:
    """It prints parts as a list, or cannot put them together with a text."""
    silent = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    with pytest.raises(InvalidRequest) as caught:
        prepared("qwen", template=silent, controlled=controlled)
    assert caught.value.message == "the chat template shows the model 0 of 3 images"
    with pytest.raises(InvalidRequest, match="The chat template refused the messages"):
        prepared("qwen", template="{{ '<|im_start|>' + messages[0].content }}", controlled=controlled)


def test_images_have_their_place() -> None:
    def refused(request: SubmitText, count: int = 1) -> InvalidRequest:
        with pytest.raises(InvalidRequest) as caught:
            prompter("qwen").prepare(request, 0.0, None, pictures("qwen", SIZES[:count]))
        return caught.value

    cut = refused(submit(said("x"), 1, truncate=5))
    assert cut.message == "a prompt with images is not truncated: leave out truncate_prompt_tokens"
    assert (cut.param, cut.code) == ("truncate_prompt_tokens", "unsupported")
    bare = msgspec.structs.replace(submit(said("x"), 1), messages=None, prompt="x")
    assert refused(bare).message == "images are parts of messages; a prompt has none"
    vector = submit(said("x"), 1, pooling=Pooling(kind="mean"))
    assert refused(vector).message == "this server makes vectors of texts, not of images"
    assert "hold 1 parts of type 'image', and 2 images came" in refused(submit(said("x"), 2), 2).message
    assert "hold 2 parts of type 'image', and 1 images came" in refused(submit(CHAT[:1], 1)).message
    blind = PromptLimits(999, 2048, (1,))
    with pytest.raises(InvalidRequest) as caught:
        prepared("qwen", said("x"), SIZES[:1], limits=blind)
    assert (caught.value.message, caught.value.param) == ("this model does not see images", "image 0")


def test_too_many_tokens_of_images_are_counted() -> None:
    limits = PromptLimits(999, 30, (1,), vision=FAMILIES["qwen"].vision())
    with pytest.raises(InvalidRequest, match="maximum context length is 30 tokens"):
        prepared("qwen", limits=limits)


def test_pixels_of_a_prompt_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    size = sum(len(picture.pixels) for picture in pictures("qwen"))
    monkeypatch.setattr(image_prompt, "MOST_BYTES", size)
    assert len(prepared("qwen").request.images) == 3
    monkeypatch.setattr(image_prompt, "MOST_BYTES", size - 1)
    with pytest.raises(InvalidRequest, match="these take more"):
        prepared("qwen")


def test_pixels_of_all_unfinished_requests_are_bounded() -> None:
    """The request that brings too many is refused, and what it held is forgotten; one that is alone has any number."""
    living, budget = {1, 2, 3}, PixelBudget(100)
    budget.add(1, 60, living.__contains__)
    budget.add(2, 40, living.__contains__)
    budget.add(3, 0, living.__contains__)
    with pytest.raises(Overloaded, match=r"more than 100 bytes as pixels \(--media-max-bytes\)"):
        budget.add(2, 1, living.__contains__)
    assert budget.total == 60
    living.remove(1)
    budget.add(2, 100, living.__contains__)
    assert budget.total == 100, "the first has ended"
    living.remove(3)
    budget.add(2, 900, living.__contains__)
    assert budget.total == 1000
    with pytest.raises(Overloaded):
        budget.add(4, 1, living.__contains__)


def test_tokenizing_a_chat_shows_its_images() -> None:
    whole = prepared("mistral")
    request = Tokenize(
        id=2, messages=json.dumps(CHAT).encode(), images=(ImageFile(data=b""),) * 3, add_special_tokens=False,
        with_strings=True,
    )  # fmt: skip
    found = prompter("mistral").tokenize(request, 0.0, pictures("mistral"))
    assert found.token_ids == whole.request.token_ids
    assert found.token_strings is not None
    assert found.token_strings.count("[IMG_END]") == 3
    assert prepared("mistral", echo=True).echo == "this:and\na catwhat is that?"
    assert prepared("mistral", echo=True, skip_special_tokens=False).echo.count("[IMG_END]") == 3


def test_a_vocabulary_without_the_tokens_is_refused() -> None:
    family = FAMILIES["mistral"]
    with pytest.raises(ModelError, match="has no token 9999"):
        ImagePrompter(msgspec.structs.replace(family.vision(), token_id=9999), family.vocabulary())
    other = FAMILIES["qwen"].vocabulary()
    lacking = msgspec.structs.replace(family, special=("<s>", "</s>", "[IMG]"))
    assert other.token_id("[IMG]") is None
    with pytest.raises(ModelError, match=r"has no token \[IMG_(BREAK|END)\]"):
        ImagePrompter(family.vision(), Lacking(lacking))


class Lacking:
    """A vocabulary that knows the placeholder alone."""

    def __init__(self, family: Sighted) -> None:
        self._family = family

    def token(self, token_id: int) -> str:
        return self._family.placeholder

    def token_id(self, token: str) -> int | None:
        return 1 if token == self._family.placeholder else None


@settings(max_examples=60)
@given(
    st.sampled_from(sorted(FAMILIES)),
    st.lists(st.one_of(st.tuples(st.integers(1, 6), st.integers(1, 6)), st.integers(0, 90)), max_size=30),
)
def test_expansion_covers_exactly_the_placeholders(name: str, parts: list[tuple[int, int] | int]) -> None:
    """Whatever stands between images, what is not theirs stays as it was."""
    family, vision = FAMILIES[name], FAMILIES[name].vision()
    found: list[Picture] = []
    ids: list[int] = []
    for part in parts:
        if isinstance(part, int):
            ids.append(part)
            continue
        size = Size(part[0] * vision.cell, part[1] * vision.cell)
        found.append(Picture(*size, bytes([len(found)]) * 16, b""))
        ids.append(vision.token_id)
    expanded, images = ImagePrompter(vision, family.vocabulary()).expanded(ids, found)
    back = list(expanded)
    for image in reversed(images):
        assert back[image.position : image.position + image.length].count(vision.token_id) == image.rows
        back[image.position : image.position + image.length] = [vision.token_id]
    assert back == ids
    assert [image.digest for image in images] == [picture.digest for picture in found]
    wrong = found[:-1] if found else [Picture(1, 1, b"", b"")]
    with pytest.raises(InvalidRequest):
        ImagePrompter(vision, family.vocabulary()).expanded(ids, wrong)
