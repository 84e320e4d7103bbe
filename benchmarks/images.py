"""What images cost a server: `python -m benchmarks.images --shapes qwen3-vl-2b,qwen3.5-9b-vision`, dummy weights.

For each shape and size of image, over HTTP with data: URLs of JPEG files that are all different: images a second with
16 requests open, time to the first token of one request with one image, the same again once the image is known, and
what streams without images pay while images come, and while prompts of as many tokens of text come instead. The share
of the limit counts the tower's products alone, at the measured rate of large ones.
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
from benchmarks.h200 import SERVE, device
from benchmarks.load.loads import Loads, median_ttft, price
from benchmarks.server import Server, serving
from benchmarks.shapes import SHAPES, Shape, make_folder
from penstock.engine_core.images.processor_spec import Size
from penstock.engine_core.models.spec import read_spec
from penstock.engine_core.models.vision_cost import tower_flops
from penstock.engine_core.models.vision_spec import VisionSpec
from penstock.services.bench.workload import Request

RESULTS = report.ROOT / "benchmarks" / "results" / "h200" / "images.json"
OPEN = 16  # requests with images at once
STREAMS = 32  # without images, whose tokens are timed
STREAM_TOKENS = 512
LONGEST = 6.0  # seconds of what comes beside streams; what is left when they end is not waited for
COARSE = 16  # pixels of what is enlarged to an image: files of photographs' sizes, not of noise
ROW_LIMIT = 60.0  # seconds


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
    tpot_ms: float  # of streams alone
    tpot_with_images_ms: float
    tpot_with_text_ms: float | None = None  # beside as many prompts of as many tokens of text; older files lack it
    offered: float  # images, or prompts, a second meanwhile
    price: float  # percent, of images
    text_price: float | None = None  # of text
    errors: dict[str, int]


def picture(side: int, seed: int) -> bytes:
    """A JPEG file of random clouds, another for each seed."""
    chance = np.random.default_rng(seed)
    coarse = chance.integers(0, 256, (COARSE, COARSE, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(coarse).resize((side, side), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
    return file.getvalue()


def asked(content: Any, tokens: int, index: int = 0, due: float = 0.0) -> Request:
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": tokens, "ignore_eos": True,
            "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}  # fmt: skip
    return Request(index, 0, due, -1, tokens, msgspec.json.encode(body))


def with_image(file: bytes, tokens: int, index: int = 0, due: float = 0.0) -> Request:
    url = "data:image/jpeg;base64," + base64.b64encode(file).decode()
    parts = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": url}}]
    return asked(parts, tokens, index, due)


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


async def measure(
    server: Server, shape: Shape, vision: VisionSpec, side: int, seeds: Iterator[int], offered: float
) -> Figures:
    """Every figure of one size. `offered`: images a second beside streams."""
    found = Measurement(server, side, seeds)
    await found.loads.run([with_image(file, 8, at) for at, file in enumerate(found.files(4))], 4)  # warm-up
    fresh, known, tokens = await found.first_tokens(8)
    text = await found.text(8, tokens)
    rate = await found.rate(96 if side < 800 else 48)
    count = int(offered * LONGEST) + 1
    coming = [with_image(file, 1, at, 0.3 + at / offered) for at, file in enumerate(found.files(count))]
    texts = [asked(words, 1, at, 0.3 + at / offered) for at, words in enumerate(found.texts(count, tokens))]
    alone, beside, beside_text = await found.streams(), await found.streams(coming), await found.streams(texts)
    chip = limits.chip(device(server))
    most = None if chip is None else chip.flops_per_second / tower_flops(vision, Size(side, side))
    return Figures(
        model=shape.name, pixels=side, tokens=tokens, file_bytes=len(picture(side, 0)),
        images_per_second=round(rate, 2), share_of_limit=None if most is None else round(rate / most, 4),
        ttft_ms=fresh, known_ttft_ms=known, text_ttft_ms=text, tpot_ms=alone, tpot_with_images_ms=beside,
        tpot_with_text_ms=beside_text, offered=offered, price=price(beside, alone),
        text_price=price(beside_text, alone), errors=found.loads.errors,
    )  # fmt: skip


def table(figures: Sequence[Figures]) -> str:
    head = [
        "Model",
        "image",
        "images/s",
        "limit",
        "first token, ms",
        "known",
        "as text",
        "a token beside, ms",
        "price",
        "of text",
    ]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for one in figures:
        share = "" if one.share_of_limit is None else f"{one.share_of_limit:.0%}"
        text_price = "" if one.text_price is None else f"{one.text_price:+.1f} %"
        lines.append(
            f"| {SHAPES[one.model].title} | {one.pixels} x {one.pixels}, {one.tokens} tokens "
            f"| {one.images_per_second:.0f} | {share} "
            f"| {one.ttft_ms:.1f} | {one.known_ttft_ms:.1f} | {one.text_ttft_ms:.1f} "
            f"| {one.tpot_ms:.2f} → {one.tpot_with_images_ms:.2f} at {one.offered:.0f}/s "
            f"| {one.price:+.1f} % | {text_price} |"
        )
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="python -m benchmarks.images", description=__doc__.partition("\n")[0],
                                    formatter_class=argparse.ArgumentDefaultsHelpFormatter)  # fmt: skip
    found.add_argument("--shapes", default="qwen3-vl-2b,qwen3.5-9b-vision", help="with commas")
    found.add_argument("--sides", default="448,1024", help="pixels of an image's side, with commas")
    found.add_argument("--offered", type=float, default=4.0, help="images a second beside streams of text")
    found.add_argument("--server-args", default="", help="further arguments of penstock serve, in one word")
    found.add_argument("--output", type=Path, default=RESULTS, help="JSON file of the figures")
    found.add_argument("--commit", default="", help="of this tree, where git cannot tell: in a copy")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    figures: list[Figures] = []
    seeds = iter(range(1, 1 << 30))
    chip = ""
    for name in options.shapes.split(","):
        shape = SHAPES[name]
        with tempfile.TemporaryDirectory(prefix="penstock-images-") as place:
            folder = make_folder(shape, Path(place))
            vision = read_spec(folder).vision
            assert vision is not None, "a shape that sees"
            words = [str(folder), *SERVE, *shlex.split(options.server_args)]
            with serving(words) as server:
                chip = device(server)
                for side in map(int, options.sides.split(",")):
                    figures.append(asyncio.run(measure(server, shape, vision, side, seeds, options.offered)))
                    print(table(figures[-1:]), flush=True)
                    results = {"chip": chip, "server_arguments": options.server_args, "figures": figures}
                    report.write(options.output, "images", results, arguments, options.commit)
                if any(one.errors for one in figures):
                    print(server.tail(), flush=True)
    print("\n" + table(figures), flush=True)
    return int(any(one.errors for one in figures))


if __name__ == "__main__":
    sys.exit(main())
