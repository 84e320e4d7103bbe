"""Pictures through real processes: clients of OpenAI and Anthropic, what transformers generates for the same prompt,
hits of the prefix cache, an executor that is killed, and files that are no pictures."""

from __future__ import annotations

import base64
import contextlib
import copy
import io
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import numpy as np
import openai
import pytest
import torch
from peft import LoraConfig, get_peft_model
from PIL import Image, ImageOps

from benchmarks.vision_shapes import IMAGE_TOKENS
from tests.e2e.browser import browser, fresh, installed
from tests.e2e.server import LIMIT, Server, descendants, serving
from tests.e2e.test_processes import cpu_seconds
from tests.e2e.vision_models import SeeingModel, picture, png, write_qwen3_vl
from tests.engine_core.images.test_decode import BAD

COUNT = 12  # tokens of an answer
FIRST, SECOND = picture(300, 200), picture(256, 256, 2)
OPTIONS = ("--dtype", "float32", "--max-model-len", "1024", "--max-num-batched-tokens", "64", "--max-num-seqs", "8")


class Seeing:
    """A server, and the model that it must agree with."""

    def __init__(self, server: Server, model: SeeingModel) -> None:
        self.server, self.model = server, model
        self.openai = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=LIMIT, max_retries=0)

    def ask(self, *content: Any, **more: Any) -> Any:
        """The answer to one turn, with the token ids of its prompt and text."""
        body = {"messages": [{"role": "user", "content": list(content)}], "temperature": 0, "max_tokens": COUNT,
                "ignore_eos": True, "return_token_ids": True, **more}  # fmt: skip
        answer = httpx.post(f"{self.server.url}/v1/chat/completions", json=body, timeout=LIMIT)
        assert answer.status_code == 200, answer.text
        return answer.json()


def data_url(file: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(file).decode()}"


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def image(file: bytes, kind: str = "image/png") -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(file, kind)}}


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seeing]:
    place = tmp_path_factory.mktemp("images")
    model = write_qwen3_vl(place / "model")
    named = ("--served-model-name", "eyes", "--allowed-media-domains", "localhost")
    with serving(place, *OPTIONS, *named, model=str(model.folder)) as server:
        yield Seeing(server, model)


def test_answers_are_those_of_transformers(seeing: Seeing) -> None:
    """Two pictures, whose 134 tokens go through steps of 64; then the same from the prefix cache."""
    content = (text("Look:"), image(png(FIRST)), text("and"), image(png(SECOND)), text("What differs?"))
    for attempt in range(2):
        answer = seeing.ask(*content)
        prompt, found = answer["prompt_token_ids"], answer["choices"][0]["token_ids"]
        assert prompt.count(IMAGE_TOKENS["image_token_id"]) == 70 + 64
        assert found == seeing.model.greedy(prompt, [FIRST, SECOND], COUNT)
        usage = answer["usage"]
        assert usage["prompt_tokens"] == len(prompt)
        assert (usage["prompt_tokens_details"]["cached_tokens"] > 134) is bool(attempt)
    other = seeing.ask(text("Look:"), image(png(SECOND)), text("and"), image(png(FIRST)), text("What differs?"))
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] < 64, "pictures are told apart"
    expected = seeing.model.greedy(other["prompt_token_ids"], [SECOND, FIRST], COUNT)
    assert other["choices"][0]["token_ids"] == expected


def test_a_grammar_holds_behind_a_picture(seeing: Seeing) -> None:
    """Computed, and found in the prefix cache."""
    for _ in range(2):
        answer = seeing.ask(
            image(png(FIRST)), text("One word:"), structured_outputs={"regex": "(yes|no){3}"}, ignore_eos=False
        )
        assert re.fullmatch("(yes|no){3}", answer["choices"][0]["message"]["content"])


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_say_the_same(tmp_path: Path) -> None:
    """Ranks that each have the whole encoder and half of the text model."""
    model = write_qwen3_vl(tmp_path / "model")
    ranks = ("--tensor-parallel-size", "2", "--served-model-name", "eyes")
    with serving(tmp_path, *OPTIONS, *ranks, model=str(model.folder)) as server:
        answer = Seeing(server, model).ask(text("Look:"), image(png(FIRST)), text("and"), image(png(SECOND)))
    prompt, found = answer["prompt_token_ids"], answer["choices"][0]["token_ids"]
    assert found == model.greedy(prompt, [FIRST, SECOND], COUNT)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # peft asks transformers for what is deprecated
def test_two_ranks_and_an_adapter_of_the_text_half(tmp_path: Path) -> None:
    """In one server, over several images and turns; peft says what the adapter's answer is."""
    model = write_qwen3_vl(tmp_path / "model")
    ranks = ("--tensor-parallel-size", "2", "--device", "cpu", "--served-model-name", "eyes")
    settings = LoraConfig(
        target_modules=r".*language_model.*\.(q_proj|o_proj|up_proj|down_proj)", r=4, lora_alpha=8,
        init_lora_weights=False,
    )  # fmt: skip
    adapted = SeeingModel(model.folder, get_peft_model(copy.deepcopy(model.model), settings).eval())
    adapted.model.save_pretrained(tmp_path / "adapter")
    adapters = ("--enable-lora", "--lora-modules", f"own={tmp_path / 'adapter'}")
    messages = [
        {"role": "user", "content": [text("Look:"), image(png(FIRST)), text("What is it?")]},
        {"role": "assistant", "content": "A page."},
        {"role": "user", "content": [text("And"), image(png(SECOND)), text("this?")]},
    ]
    with serving(tmp_path, *OPTIONS, *ranks, *adapters, model=str(model.folder)) as server:
        seeing = Seeing(server, model)
        for attempt in range(2):
            for name, expected in (("eyes", model), ("own", adapted)):
                answer = seeing.ask(messages=messages, model=name)
                prompt, found = answer["prompt_token_ids"], answer["choices"][0]["token_ids"]
                assert found == expected.greedy(prompt, [FIRST, SECOND], COUNT), name
                cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
                assert (cached > 134) is bool(attempt), "an adapter has prefixes of its own"


@pytest.mark.parametrize("role", ["executor", "scheduler", "tokenizer"])
def test_a_process_that_is_killed_loses_no_picture(seeing: Seeing, role: str) -> None:
    """The stream goes on with the tokens that an undisturbed one has."""
    content: Any = [image(png(picture(320, 320, 5))), text("Describe it.")]
    messages: Any = [{"role": "user", "content": content}]
    body: Any = {"model": "eyes", "messages": messages, "temperature": 0, "max_tokens": 200,
                 "extra_body": {"ignore_eos": True, "cache_salt": "other"}}  # fmt: skip
    whole = seeing.openai.chat.completions.create(**body).choices[0].message.content
    pieces = list[str]()
    body["extra_body"]["cache_salt"] = f"killed {role}"
    for chunk in seeing.openai.chat.completions.create(**body, stream=True):
        said = (chunk.choices and chunk.choices[0].delta.content) or ""
        if said and not any(pieces):
            os.kill(seeing.server.children()[role], signal.SIGKILL)
        pieces.append(said)
    assert "".join(pieces) == whole
    seeing.server.healthy()


def test_clients_of_both_makers(seeing: Seeing) -> None:
    file = png(FIRST)
    parts: Any = [{"type": "input_image", "image_url": data_url(file), "detail": "auto"},
                  {"type": "input_text", "text": "What is it?"}]  # fmt: skip
    response = seeing.openai.responses.create(
        model="eyes", input=[{"role": "user", "content": parts}], temperature=0, max_output_tokens=COUNT
    )
    assert response.usage is not None
    assert response.usage.input_tokens > 70
    claude = anthropic.Anthropic(base_url=seeing.server.url, api_key="none", timeout=LIMIT, max_retries=0)
    source: Any = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(file).decode()}
    messages: Any = [{"role": "user", "content": [{"type": "image", "source": source}, text("What is it?")]}]
    counted = claude.messages.count_tokens(model="eyes", messages=messages).input_tokens
    with claude.messages.stream(model="eyes", max_tokens=COUNT, messages=messages) as stream:
        message = stream.get_final_message()
    cached = message.usage.cache_read_input_tokens or 0
    assert message.usage.input_tokens + cached == counted == response.usage.input_tokens
    asked = {"model": "eyes", "messages": [{"role": "user", "content": [image(file), text("What is it?")]}]}
    tokens = httpx.post(f"{seeing.server.url}/tokenize", json=asked, timeout=LIMIT).json()
    assert tokens["count"] == counted
    (model,) = [each for each in seeing.openai.models.list() if each.id == "eyes"]
    assert model.model_dump()["input_modalities"] == ["text", "image"]


def test_a_photograph_through_every_client(seeing: Seeing, tmp_path: Path) -> None:
    """A JPEG file of a camera held sideways, with the same question: OpenAI's client, Anthropic's and the page get what
    transformers says to the picture as it was meant."""
    file, upright = photograph()
    question, encoded = "What is on this picture?", base64.b64encode(file).decode()
    answer = seeing.ask(image(file, "image/jpeg"), text(question))
    prompt, found = answer["prompt_token_ids"], answer["choices"][0]["token_ids"]
    assert prompt.count(IMAGE_TOKENS["image_token_id"]) == 12 * 16
    assert found == seeing.model.greedy(prompt, [upright], COUNT)
    expected = answer["choices"][0]["message"]["content"]
    messages: Any = [{"role": "user", "content": [image(file, "image/jpeg"), text(question)]}]
    chat = seeing.openai.chat.completions.create(
        model="eyes", messages=messages, temperature=0, max_tokens=COUNT, extra_body={"ignore_eos": True}
    )
    assert chat.choices[0].message.content == expected
    claude = anthropic.Anthropic(base_url=seeing.server.url, api_key="none", timeout=LIMIT, max_retries=0)
    source: Any = {"type": "base64", "media_type": "image/jpeg", "data": encoded}
    parts: Any = [{"type": "image", "source": source}, text(question)]
    message = claude.messages.create(
        model="eyes", max_tokens=COUNT, messages=[{"role": "user", "content": parts}],
        extra_body={"ignore_eos": True, "temperature": 0},
    )  # fmt: skip
    assert [block.text for block in message.content if block.type == "text"] == [expected]
    if not installed():  # `make browser` installs Chromium
        return
    with browser(tmp_path) as chromium, fresh(chromium) as page:
        page.size(1280, 800)
        page.open(f"{seeing.server.url}/")
        page.until("document.getElementById('state').className === 'ready'")
        for name, value in (("temperature", "0"), ("max_tokens", str(COUNT))):
            page.evaluate(
                f"(() => {{ const box = document.getElementById('{name}'); box.value = '{value}'; "
                "box.dispatchEvent(new Event('input')); })()"
            )
        page.evaluate(f"""(() => {{
            const bytes = Uint8Array.from(atob('{encoded}'), (one) => one.charCodeAt(0));
            const given = new DataTransfer(), box = document.getElementById('files');
            given.items.add(new File([bytes], 'holiday.jpg', {{type: 'image/jpeg'}}));
            box.files = given.files;
            box.dispatchEvent(new Event('change'));
        }})()""")
        page.until("document.querySelector('#attached img')?.naturalWidth === 384")
        page.evaluate("document.getElementById('prompt').focus()")
        page.type(question)
        page.press("Enter", text="\r")
        page.until("document.querySelector('article.assistant:last-of-type .timing')")
        shown = page.evaluate("document.querySelector('article.assistant:last-of-type .text').textContent")
        if folder := os.environ.get("PENSTOCK_PICTURES"):
            page.screenshot(Path(folder) / "photograph.png")
        assert page.faults == []
        assert shown.split() == expected.split()


def photograph() -> tuple[bytes, Image.Image]:
    """A file of 512 by 384 pixels that are to be turned by a quarter: sky, sun, hills and grain; and it upright."""
    lines, columns = np.mgrid[:384, :512]
    chance = np.random.default_rng(12)
    sky = np.stack([90 + lines / 4, 140 + lines / 5, 235 - lines / 6], axis=-1)
    sky[(lines - 90) ** 2 + (columns - 380) ** 2 < 40**2] = (255, 240, 170)
    hills = lines > 260 + 40 * np.sin(columns / 60) + 15 * np.sin(columns / 17)
    sky[hills] = np.stack([40 + lines / 12, 110 - lines / 9, 50 + columns / 30], axis=-1)[hills]
    pixels = np.clip(sky + chance.normal(0, 6, sky.shape), 0, 255).astype(np.uint8)
    exif, file = Image.Exif(), io.BytesIO()
    exif[0x0112] = 6  # orientation: the top of the picture is at the right
    Image.fromarray(pixels).save(file, "JPEG", quality=92, exif=exif)
    return file.getvalue(), ImageOps.exif_transpose(Image.open(file)).convert("RGB")


ELSEWHERE = {  # localhost is one of the hosts that this server may ask
    "https://localhost/a.png": "localhost does not have public addresses alone",
    "https://127.0.0.1/a.png": "is no https URL with the name of a host",
    "https://example.org/a.png": "images are not fetched from example.org (--allowed-media-domains)",
    "http://localhost/a.png": "must be a data: URL or begin with https://",
}
REFUSED = (
    "text", "animated GIF", "TIFF", "MP4", "SVG", "HTML", "WebP of several frames", "PNG of several frames",
    "truncated PNG", "truncated JPEG", "truncated WebP", "PNG bomb", "JPEG bomb", "WebP bomb", "lossless WebP bomb",
    "lossy WebP bomb", "text that inflates",
)  # fmt: skip


def bodies(url: str) -> Iterator[tuple[str, dict[str, Any], str]]:
    """A request of each API for an image, and the field that its refusals name."""
    kind, _, data = url.removeprefix("data:").partition(";base64,")
    source = {"type": "base64", "media_type": kind, "data": data} if data else {"type": "url", "url": url}
    parts: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
        ("chat/completions", "messages", text("a"), {"type": "image_url", "image_url": {"url": url}}),
        ("responses", "input", {"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": url}),
        ("messages", "messages", text("a"), {"type": "image", "source": source}),
    ]
    for path, field, *content in parts:
        turn = {"role": "user", "content": content}
        yield path, {"model": "eyes", field: [turn], **({"max_tokens": 1} if path == "messages" else {})}, field


def refused(seeing: Seeing, url: str, told: str) -> None:
    """By each API with a 400, and within two seconds of CPU time of the api, the tokenizer and its workers, where one
    takes a hundredth of that."""
    processes = [seeing.server.children()[role] for role in ("api", "tokenizer")]
    for path, body, field in bodies(url):
        began = sum(map(spent, processes))
        answer = httpx.post(f"{seeing.server.url}/v1/{path}", json=body, timeout=LIMIT)
        assert sum(map(spent, processes)) - began < 2, path
        assert answer.status_code == 400, (path, answer.text)
        message = answer.json()["error"]["message"]
        assert told in message
        assert message.startswith(f"{field}[0].content[1]")


def test_what_is_no_picture_is_refused_at_once_and_nobody_waits_for_it(seeing: Seeing) -> None:
    """A stream goes on meanwhile, and the memory of the api and the tokenizer stays what it was."""
    processes = [seeing.server.children()[role] for role in ("api", "tokenizer")]
    messages: Any = [{"role": "user", "content": "Count."}]
    stream = seeing.openai.chat.completions.create(
        model="eyes", messages=messages, max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    )
    chunks = iter(stream)
    next(chunks)
    before = [resident(process) for process in processes]
    for name in REFUSED:
        file, told, _ = BAD[name]
        refused(seeing, data_url(file, "application/octet-stream"), told.partition(";")[0])
        next(chunks)
    mislabelled = "its media type is 'image/webp', but it is a PNG (image/png)"
    refused(seeing, data_url(png(FIRST), "image/webp"), mislabelled)
    for url, told in ELSEWHERE.items():
        refused(seeing, url, told)
    assert all(resident(process) - size < 32 << 20 for process, size in zip(processes, before, strict=True))
    assert sum(1 for _ in chunks) > 10


def spent(pid: int) -> float:
    """Seconds of CPU of a process, its children and theirs, those that have ended as well."""
    found = 0.0
    for each in reversed((pid, *descendants(pid))):
        with contextlib.suppress(OSError):  # it has ended: then its parent has its time
            found += cpu_seconds(each, ended=True)
    return found


def resident(pid: int) -> int:
    """Bytes. Source: proc(5), statm."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
