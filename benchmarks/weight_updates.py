"""What updates of weights cost open streams: `python -m benchmarks.weight_updates --shape 8b`, on one GPU.

The folder holds real files of random numbers, which are in the operating system's page cache. While streams run, the
weights are read again from disk, and copied from this process's memory, by CUDA IPC handles on a GPU and through
/dev/shm on a CPU. The pause is the longest time between two events of a stream meanwhile. Then executors sleep, and a
request wakes them.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import itertools
import json
import shlex
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import msgspec
import torch
from safetensors.torch import load_file, save_file

from benchmarks import report
from benchmarks.h200 import device
from benchmarks.server import Server, serving
from benchmarks.shapes import SHAPES, make_folder
from penstock.engine_core.embedded import demo_folder
from penstock.engine_core.models.spec import read_spec
from penstock.engine_core.models.tensors import wanted_tensors
from penstock.engine_core.models.weight_files import INDEX
from penstock.weights import share

RESULTS = report.ROOT / "benchmarks" / "results" / "h200" / "weight_updates.json"
SHARD = 4 << 30  # bytes
BEGIN = 1.0  # seconds of streams before an update begins
LIMIT = 300.0  # seconds
SHM = Path("/dev/shm")


class Update(msgspec.Struct, frozen=True, kw_only=True):
    """One update under streams. Times in seconds."""

    way: str
    pause: float  # the longest between two events of any stream, from the update's beginning to its end
    typical: float  # the median of them otherwise
    call: float  # of the request that updates
    bytes: int  # of weights
    streams: int
    kept: int  # that came to their end with all tokens
    versions: list[str]  # that the streams tell


class Wake(msgspec.Struct, frozen=True):
    """Times in seconds."""

    sleep: float
    first_token: float  # of the request that wakes


def write_weights(folder: Path, kind: str) -> int:
    """Files of random numbers for the model of `folder`. Returns their bytes."""
    torch.manual_seed(0)
    dtype = getattr(torch, read_spec(folder).dtype)
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, wanted in wanted_tensors(read_spec(folder)).items():
        shape = wanted.shape
        made = torch.empty(shape, dtype=dtype, device=kind).normal_(0.0, 0.02) if len(shape) > 1 else None
        tensor = torch.ones(shape, dtype=dtype) if made is None else made.cpu()
        if size + tensor.nbytes > SHARD:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    weight_map = {}
    for at, shard in enumerate(shards):
        file = f"model-{at + 1:05}-of-{len(shards):05}.safetensors"
        save_file(shard, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return sum(tensor.nbytes for shard in shards for tensor in shard.values())


def tensors_of(folder: Path, kind: str) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors"))
            for name, tensor in load_file(file, device=kind).items()}  # fmt: skip


@contextmanager
def given(tensors: dict[str, torch.Tensor], kind: str) -> Iterator[list[dict[str, Any]]]:
    """How a request lists them."""
    if kind == "cuda":
        yield share(tensors.items())
        return
    file, listed, offset = SHM / f"penstock-bench-{uuid4().hex}", [], 0
    try:
        with file.open("wb") as out:
            for name, tensor in tensors.items():
                raw = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
                listed.append({"name": name, "dtype": str(tensor.dtype), "shape": list(tensor.shape), "offset": offset,
                               "handles": {"cpu": file.name}})  # fmt: skip
                offset += out.write(raw + bytes(-len(raw) % 8))
        yield listed
    finally:
        file.unlink()


async def stream(http: httpx.AsyncClient, index: int, tokens: int) -> tuple[list[float], dict[str, Any]]:
    """When its events came, and the last one with a finish reason."""
    body = {"prompt": f"Stream {index}: go on.", "max_tokens": tokens, "ignore_eos": True, "stream": True,
            "temperature": 0, "return_token_ids": True, "seed": index}  # fmt: skip
    times, last = [], {}
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                times.append(time.monotonic())
                if '"finish_reason":"' in line:
                    last = json.loads(line[6:])
    return times, last


async def under_streams(
    http: httpx.AsyncClient, way: str, options: argparse.Namespace, size: int, change: Callable[[], Awaitable[Any]]
) -> Update:
    running = [asyncio.create_task(stream(http, at, options.tokens)) for at in range(options.streams)]
    await asyncio.sleep(options.begin)
    began = time.monotonic()
    told = await change()
    ended = time.monotonic()
    assert told.get("success"), told
    found = await asyncio.gather(*running)
    gaps = [(one, other - one) for times, _ in found for one, other in itertools.pairwise(times)]
    meanwhile = [gap for start, gap in gaps if began < start + gap and start < ended]
    return Update(
        way=way, pause=round(max(meanwhile, default=0.0), 4),
        typical=round(statistics.median([gap for start, gap in gaps if start + gap <= began] or [0.0]), 5),
        call=round(ended - began, 4), bytes=size, streams=len(found),
        kept=sum(last.get("choices", [{}])[0].get("finish_reason") == "length" for _, last in found),
        versions=sorted({last.get("penstock", {}).get("weight_version", "") for _, last in found}),
    )  # fmt: skip


async def measure(server: Server, folder: Path, admin: Path, size: int, options: argparse.Namespace) -> dict[str, Any]:
    updates: list[Update] = []
    async with (
        httpx.AsyncClient(base_url=server.url, timeout=LIMIT, limits=httpx.Limits(max_connections=None)) as http,
        httpx.AsyncClient(
            base_url="http://admin", timeout=LIMIT, transport=httpx.AsyncHTTPTransport(uds=str(admin))
        ) as operator,
    ):

        async def ask(path: str, body: dict[str, Any]) -> Any:
            answer = await operator.post(path, json=body)
            return answer.json() if answer.content and "json" in answer.headers["content-type"] else {}

        await stream(http, 0, 8)
        for _ in range(options.repeat):
            body = {"model_path": folder.name}
            found = await under_streams(
                http, "disk", options, size, functools.partial(ask, "/update_weights_from_disk", body)
            )
            updates.append(found)
            print(found, flush=True)
        tensors = tensors_of(folder, options.device)
        with given(tensors, options.device) as listed:
            way = "ipc" if options.device == "cuda" else "shm"
            for _ in range(options.repeat):
                parts = {"tensors": listed}
                found = await under_streams(
                    http, way, options, size, functools.partial(ask, "/update_weights_from_tensor", parts)
                )
                updates.append(found)
                print(found, flush=True)
        tensors.clear()
        if options.device == "cuda":
            torch.cuda.empty_cache()
        began = time.monotonic()
        await ask("/sleep", {})
        slept = time.monotonic()
        times, _ = await stream(http, 0, 1)
        wake = Wake(round(slept - began, 3), round(times[0] - slept, 3))
        print(wake, flush=True)
    return {"updates": updates, "wake": wake}


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="python -m benchmarks.weight_updates", description=__doc__.partition("\n")[0],
                                    formatter_class=argparse.ArgumentDefaultsHelpFormatter)  # fmt: skip
    found.add_argument("--shape", default="8b")
    found.add_argument("--streams", type=int, default=32)
    found.add_argument("--tokens", type=int, default=1500, help="of each stream")
    found.add_argument("--repeat", type=int, default=3, help="updates of each way")
    found.add_argument("--server-args", default="--gpu-memory-utilization 0.5 --max-model-len 8192",
                       help="further arguments of penstock serve, in one word")  # fmt: skip
    found.add_argument("--smoke", action="store_true", help="the embedded model's size on a CPU")
    found.add_argument("--output", type=Path, default=RESULTS, help="JSON file of the figures")
    found.add_argument("--commit", default="", help="of this tree, where git cannot tell: in a copy")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    options.device, options.begin = ("cpu", 0.2) if options.smoke else ("cuda", BEGIN)
    if options.smoke:
        options.streams, options.tokens, options.repeat = 4, 150, 1
        options.server_args = "--device cpu --dtype float32 --max-num-seqs 8 --max-model-len 512"
    with tempfile.TemporaryDirectory(prefix="penstock-updates-") as place:
        weights = Path(place)
        folder, size = made(weights, options)
        words = [
            str(folder), "--admin-address", f"unix:{weights}/admin", "--weights-dir", place, "--allow-wrong-output",
            *shlex.split(options.server_args),
        ]  # fmt: skip
        with serving(words) as server:
            chip = device(server)
            results = asyncio.run(measure(server, folder, weights / "admin", size, options))
            results |= {"chip": chip, "shape": folder.name, "server_arguments": options.server_args}
            report.write(options.output, "weight_updates", results, arguments, options.commit)
    return int(any(update.kept < update.streams for update in results["updates"]))


def made(place: Path, options: argparse.Namespace) -> tuple[Path, int]:
    """The model's folder and the bytes of its weights."""
    if options.smoke:
        folder = place / "demo"
        shutil.copytree(demo_folder(), folder, ignore=shutil.ignore_patterns("SHA256SUMS", "self_test.json"))
        return folder, (folder / "model.safetensors").stat().st_size
    folder = make_folder(SHAPES[options.shape], place)
    return folder, write_weights(folder, options.device)


if __name__ == "__main__":
    sys.exit(main())
