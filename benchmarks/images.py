"""What images cost a server: `python -m benchmarks.images --shapes qwen3-vl-2b,qwen3.5-9b-vision`, dummy weights.

For each shape and size of image, over HTTP with data: URLs of JPEG files that are all different: images a second with
16 requests open, time to the first token of one request with one image, the same again once the image is known, and
what streams without images pay while images come, and while prompts of as many tokens of text come instead: the
difference is the price of encoding, which alone could be lower. The share of the limit counts the tower's products
alone, at the measured rate of large ones.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from PIL import Image

from benchmarks import limits, report
from benchmarks.adapters import write_adapters
from benchmarks.h200 import SERVE, device
from benchmarks.load.loads import Loads, median_ttft, price
from benchmarks.server import Server, serving
from benchmarks.shapes import SHAPES, Shape, make_folder
from benchmarks.vision_shapes import tower_flops
from penstock.engine_core.images.processor_spec import Size
from penstock.engine_core.models.spec import read_spec
from penstock.engine_core.models.vision_spec import VisionSpec
from penstock.services.bench.workload import Request

RESULTS = report.ROOT / "benchmarks" / "results" / "h200" / "images.json"
OPEN = 16  # requests with images at once
STREAMS = 32  # without images, whose tokens are timed
STREAM_TOKENS = 512
LONGEST = 6.0  # seconds of what comes beside streams; what is left when they end is not waited for
COARSE = 16  # pixels of what is enlarged to an image: files of photographs' sizes, not of noise
ROW_LIMIT = 60.0  # seconds
ADAPTER, RANK = "adapter", 16


class Beside(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds per token of streams, alone and while something comes, and what that costs them in percent."""

    offered: float  # images, or prompts of text, a second
    tpot_ms: float
    with_images_ms: float
    with_text_ms: float | None  # beside as many prompts of as many tokens of text; older files lack it

    @property
    def price(self) -> float:
        return price(self.with_images_ms, self.tpot_ms)

    @property
    def text_price(self) -> float | None:
        return None if self.with_text_ms is None else price(self.with_text_ms, self.tpot_ms)

    @property
    def encoder_price(self) -> float | None:
        """What images cost beyond their tokens."""
        return None if self.text_price is None else self.price - self.text_price


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """One shape and size. Times in milliseconds."""

    model: str
    pixels: int  # of a side
    tokens: int  # of the prompt, its text included
    file_bytes: int
    images_per_second: float
    share_of_limit: float | None
    ttft_ms: float
    known_ttft_ms: float  # of the same image and text
    text_ttft_ms: float  # of a prompt of as many tokens of text
    adapter_ttft_ms: float | None = None  # of one image whose text half has a LoRA adapter; None: the server had none
    beside: tuple[Beside, ...] = ()  # by rate
    errors: dict[str, int]


def figures_of(results: dict[str, Any]) -> list[Figures]:
    """The figures of a result file. Older ones have one rate, in fields of their own."""
    found = []
    for one in results["figures"]:
        if "beside" not in one:
            kept = {"offered": one["offered"], "tpot_ms": one["tpot_ms"], "with_images_ms": one["tpot_with_images_ms"],
                    "with_text_ms": one.get("tpot_with_text_ms")}  # fmt: skip
            one = {**one, "beside": [kept]}
        found.append(msgspec.convert(one, Figures))
    return found


def picture(side: int, seed: int) -> bytes:
    """A JPEG file of random clouds, another for each seed."""
    chance = np.random.default_rng(seed)
    coarse = chance.integers(0, 256, (COARSE, COARSE, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(coarse).resize((side, side), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
    return file.getvalue()


def asked(content: Any, tokens: int, index: int = 0, due: float = 0.0, **more: Any) -> Request:
    body = {**more, "messages": [{"role": "user", "content": content}], "max_tokens": tokens, "ignore_eos": True,
            "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}  # fmt: skip
    return Request(index, 0, due, -1, tokens, msgspec.json.encode(body))


def with_image(file: bytes, tokens: int, index: int = 0, due: float = 0.0, **more: Any) -> Request:
    url = "data:image/jpeg;base64," + base64.b64encode(file).decode()
    parts = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": url}}]
    return asked(parts, tokens, index, due, **more)


class Measurement:
    """The loads of one server and size."""

    def __init__(self, server: Server, side: int, seeds: Iterator[int]) -> None:
        self.loads = Loads(server, "chat", ROW_LIMIT)
        self._side, self._seeds = side, seeds

    def files(self, count: int) -> list[bytes]:
        return [picture(self._side, next(self._seeds)) for _ in range(count)]

    async def first_tokens(self, count: int) -> tuple[float, float, int]:
        """Medians of times to the first token of new images and of known ones, one at a time; tokens of a prompt."""
        requests = [with_image(file, 1, index) for index, file in enumerate(self.files(count))]
        fresh, known = await self.loads.run(requests, 1), await self.loads.run(requests, 1)
        return median_ttft(fresh), median_ttft(known), fresh.prompt_tokens // max(1, fresh.completed)

    async def adapted(self, count: int) -> float:
        """The same of new images, for the adapter."""
        files = self.files(2 * count)
        requests = [with_image(file, 1, index, model=ADAPTER) for index, file in enumerate(files)]
        await self.loads.run(requests[:count], 1)  # which brings the adapter to its place
        return median_ttft(await self.loads.run(requests[count:], 1))

    async def text(self, count: int, tokens: int) -> float:
        """The same of text: random words, about so many tokens."""
        return median_ttft(
            await self.loads.run([asked(text, 1, at) for at, text in enumerate(self.texts(count, tokens))], 1)
        )

    def texts(self, count: int, tokens: int) -> list[str]:
        return [f"{next(self._seeds)} " + "water " * max(1, tokens - 12) for _ in range(count)]

    async def rate(self, count: int) -> float:
        """Images a second with OPEN requests."""
        requests = [with_image(file, 1, index) for index, file in enumerate(self.files(count))]
        return (await self.loads.run(requests, OPEN)).requests_per_second

    async def streams(self, beside: Sequence[Request] = ()) -> float:
        """Milliseconds per token of streams of text, while the requests `beside` come."""
        words = [asked(f"Stream {next(self._seeds)}: go on.", STREAM_TOKENS, at) for at in range(STREAMS)]
        summary = await self.loads.streams(words, beside)
        return summary.tpot_ms.p50 if summary.tpot_ms else 0.0

    async def beside(self, offered: float, tokens: int) -> Beside:
        """What streams pay for so many images of `tokens` tokens a second."""
        count = int(offered * LONGEST) + 1
        due = [0.3 + at / offered for at in range(count)]
        coming = [with_image(file, 1, at, due[at]) for at, file in enumerate(self.files(count))]
        texts = [asked(words, 1, at, due[at]) for at, words in enumerate(self.texts(count, tokens))]
        alone, images, text = await self.streams(), await self.streams(coming), await self.streams(texts)
        return Beside(offered=offered, tpot_ms=alone, with_images_ms=images, with_text_ms=text)


async def measure(
    server: Server, shape: Shape, vision: VisionSpec, side: int, seeds: Iterator[int], rates: Sequence[float],
    *, adapter: bool,
) -> Figures:  # fmt: skip
    """Every figure of one size. rates: images a second beside streams."""
    found = Measurement(server, side, seeds)
    await found.loads.run([with_image(file, 8, at) for at, file in enumerate(found.files(4))], 4)  # warm-up
    fresh, known, tokens = await found.first_tokens(8)
    text = await found.text(8, tokens)
    adapted = await found.adapted(8) if adapter else None
    rate = await found.rate(96 if side < 800 else 48)
    beside = [await found.beside(offered, tokens) for offered in rates]
    chip = limits.chip(device(server))
    most = None if chip is None else chip.flops_per_second / tower_flops(vision, Size(side, side))
    return Figures(
        model=shape.name, pixels=side, tokens=tokens, file_bytes=len(picture(side, 0)),
        images_per_second=round(rate, 2), share_of_limit=None if most is None else round(rate / most, 4),
        ttft_ms=fresh, known_ttft_ms=known, text_ttft_ms=text, adapter_ttft_ms=adapted, beside=tuple(beside),
        errors=found.loads.errors,
    )  # fmt: skip


def table(figures: Sequence[Figures]) -> str:
    """A row for each size and rate; what does not depend on the rate stands in the first."""
    head = ["Model", "image", "images/s", "limit", "first token, ms", "known", "as text", "images beside",
            "a token, ms", "price", "of as much text", "of encoding"]  # fmt: skip
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for one in figures:
        share = "" if one.share_of_limit is None else f"{one.share_of_limit:.0%}"
        first = [
            SHAPES[one.model].title, f"{one.pixels} x {one.pixels}, {one.tokens} tokens",
            f"{one.images_per_second:.0f}", share, f"{one.ttft_ms:.1f}", f"{one.known_ttft_ms:.1f}",
            f"{one.text_ttft_ms:.1f}",
        ]  # fmt: skip
        for load in one.beside:
            cells = [f"{load.offered:g}/s", f"{load.tpot_ms:.2f} → {load.with_images_ms:.2f}"]
            cells += [percent(load.price), percent(load.text_price), percent(load.encoder_price)]
            lines.append("| " + " | ".join([*first, *cells]) + " |")
            first = [""] * len(first)
    return "\n".join(lines)


def percent(value: float | None) -> str:
    return "" if value is None else f"{value:+.1f} %"


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="python -m benchmarks.images", description=__doc__.partition("\n")[0],
                                    formatter_class=argparse.ArgumentDefaultsHelpFormatter)  # fmt: skip
    found.add_argument("--shapes", default="qwen3-vl-2b,qwen3.5-9b-vision", help="with commas")
    found.add_argument("--sides", default="448,1024", help="pixels of an image's side, with commas")
    found.add_argument("--offered", default="1,4", help="images a second beside streams of text, with commas; or empty")
    found.add_argument(
        "--lora",
        action="store_true",
        help="serve a LoRA adapter of the text half, and measure first tokens with it; no hybrids",
    )
    found.add_argument("--server-args", default="", help="further arguments of penstock serve, in one word")
    found.add_argument("--output", type=Path, default=RESULTS, help="JSON file of the figures")
    found.add_argument("--commit", default="", help="of this tree, where git cannot tell: in a copy")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    figures: list[Figures] = []
    rates = [float(rate) for rate in options.offered.split(",") if rate]
    seeds = iter(range(1, 1 << 30))
    chip = ""
    for name in options.shapes.split(","):
        shape = SHAPES[name]
        with tempfile.TemporaryDirectory(prefix="penstock-images-") as place:
            folder = make_folder(shape, Path(place))
            vision = read_spec(folder).vision
            assert vision is not None, "a shape that sees"
            words = [str(folder), *SERVE, *shlex.split(options.server_args)]
            if options.lora:
                ((_, adapter),) = write_adapters(shape, Path(place), RANK, 1)
                words += ["--enable-lora", "--max-lora-rank", str(RANK), "--lora-modules", f"{ADAPTER}={adapter}"]
            with serving(words) as server:
                chip = device(server)
                for side in map(int, options.sides.split(",")):
                    measuring = measure(server, shape, vision, side, seeds, rates, adapter=options.lora)
                    figures.append(asyncio.run(measuring))
                    print(table(figures[-1:]), flush=True)
                    results = {"chip": chip, "server_arguments": options.server_args, "figures": figures}
                    report.write(options.output, "images", results, arguments, options.commit)
                if any(one.errors for one in figures):
                    print(server.tail(), flush=True)
    print("\n" + table(figures), flush=True)
    return int(any(one.errors for one in figures))


if __name__ == "__main__":
    sys.exit(main())
