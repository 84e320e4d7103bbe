"""What KV blocks in the host's memory are worth: `python -m benchmarks.kv_tier`, 8B with dummy weights over HTTP.

- Time to first token of one prompt: computed, found on the device, and fetched from the host's memory. Between the
  last two other prompts fill the device's cache.
- Time per token of streams alone, beside prompts that hit on the device, and beside as many that are fetched.
- Conversations that need ten times the device's cache, turn by turn: the share of repeated tokens that hit.

With `--disk FOLDER` it measures the tier on disk instead: prompts are computed and written there, and a second server
on the same folder finds them.

- Time to first token of one prompt: computed, and read from disk.
- Time per token of streams alone, beside prompts that hit on the device, and beside prompts that are read from disk, as
  the second server's memory for blocks has no room for them.

`--smoke` does the same with the embedded model on a CPU, to try the script.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shlex
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from benchmarks import report
from benchmarks.h200 import device
from benchmarks.load.loads import Loads, median_ttft, price
from benchmarks.server import Server, serving
from benchmarks.several_models import operate
from benchmarks.shapes import SHAPES, SMOKE, Shape, make_folder
from penstock.engine_core.models.memory_estimate import ITEM_BYTES, block_bytes
from penstock.engine_core.models.spec import read_spec
from penstock.services.bench.serve import Summary
from penstock.services.bench.workload import FIRST_ID, Request
from penstock.services.executor.device import available_memory

RESULTS = report.ROOT / "benchmarks" / "results" / "h200"
BLOCK = 16  # tokens
REQUEST_LIMIT = 90.0  # seconds
HOST = 1.3  # times what conversations need: other prompts are there before them
HOST_SHARE = 0.6  # of the machine's available memory that is taken at most
STREAM_PROMPT = 32  # tokens
COPIES = 12  # prompts that are fetched in turn beside streams: more than the device has room for
DISK_OFFERED = 2.0  # prompts a second beside streams that are read from disk
DISK_HOST = 4  # prompts that the second server's host memory has room for
TURN_TOKENS = 128  # that each turn of a conversation adds
ANSWER = 16  # tokens of a conversation's answer


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """Of the loads."""

    prompt: int = 8192  # tokens
    prompts: int = 3  # that are asked one at a time
    cache: int = 32_768  # tokens that the device has room for
    streams: int = 32
    stream_tokens: int = 512
    offered: float = 4.0  # prompts a second beside streams
    times: int = 10  # as much as the device's cache is what conversations need
    turns: int = 3
    open: int = 8  # requests of conversations at once


SMALL = Sizes(prompt=240, prompts=2, cache=1600, streams=3, stream_tokens=200, offered=4.0, turns=2, open=2)


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Times in milliseconds."""

    model: str
    device_cache_tokens: int
    host_cache_tokens: int
    prompt_tokens: int
    cold_ttft_ms: float
    device_hit_ttft_ms: float
    host_hit_ttft_ms: float
    host_hit_share: float  # of a computed prompt's time; the goal is 0.2
    host_hit_tokens: int  # of one prompt
    fetch_bytes_per_second: float
    tpot_ms: float  # of streams alone
    tpot_beside_device_hits_ms: float
    tpot_beside_fetches_ms: float
    fetches_beside: int
    computed_beside: int  # tokens of these prompts that were not fetched
    price: float  # percent by which fetches slow streams down; the goal is 3
    price_of_device_hits: float
    conversation_tokens: int
    hit_rate: float  # of tokens that an earlier turn had
    turn_ttft_ms: tuple[float, ...]  # by turn
    lost_blocks: int  # evicted before they were copied
    errors: dict[str, int]


class DiskFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Of blocks on disk. Times in milliseconds."""

    model: str
    prompt_tokens: int
    cold_ttft_ms: float
    disk_hit_ttft_ms: float
    disk_hit_share: float  # of a computed prompt's time
    disk_hit_tokens: int  # of one prompt
    read_bytes_per_second: float
    write_bytes_per_second: float
    tpot_ms: float  # of streams alone
    tpot_beside_device_hits_ms: float
    tpot_beside_reads_ms: float
    reads_beside: int
    price: float  # percent by which reads slow streams down
    price_of_device_hits: float
    unwritten_blocks: int
    failed_blocks: int
    errors: dict[str, int]


class Prompts:
    """Random prompts, none of which begins like another."""

    def __init__(self, vocabulary: int) -> None:
        self._chance, self._vocabulary = random.Random(1), int(0.75 * vocabulary)

    def new(self, tokens: int) -> list[int]:
        return [self._chance.randrange(FIRST_ID, self._vocabulary) for _ in range(tokens)]


def asked(prompt: Sequence[int], tokens: int, index: int = 0, due: float = 0.0) -> Request:
    body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0, "stream": True,
            "stream_options": {"include_usage": True}}  # fmt: skip
    return Request(index, 0, due, -1, tokens, msgspec.json.encode(body))


class Measurement:
    """The loads of one server."""

    def __init__(self, server: Server, sizes: Sizes, prompts: Prompts) -> None:
        self.loads = Loads(server, "completions", REQUEST_LIMIT)
        self._server, self._sizes, self._prompts = server, sizes, prompts

    def metric(self, name: str, label: str = "") -> float:
        """A metric's value, or the sum of all whose labels have this in them."""
        with urllib.request.urlopen(f"{self._server.url}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        found = [line.rpartition(" ") for line in lines if line.startswith(f"penstock_{name}")]
        return sum([float(value) for sample, _, value in found if label in sample])

    async def settle(self) -> None:
        """Until the metrics are of now: they are taken once a second."""
        await asyncio.sleep(2.5)

    async def one_by_one(self, prompts: Sequence[Sequence[int]]) -> Summary:
        return await self.loads.run([asked(prompt, 1, at) for at, prompt in enumerate(prompts)], 1)

    async def fill(self) -> None:
        """Have the device's cache hold other prompts than those before."""
        count = self._sizes.cache // self._sizes.prompt + 1
        await self.loads.run([asked(self._prompts.new(self._sizes.prompt), 1, at) for at in range(count)], 1)

    async def streams(self, beside: Sequence[Sequence[int]]) -> float:
        """Milliseconds per token of streams, while these prompts come in turn."""
        sizes = self._sizes
        requests = [asked(self._prompts.new(STREAM_PROMPT), sizes.stream_tokens, at) for at in range(sizes.streams)]
        count = int(sizes.offered * 20) if beside else 0  # longer than the streams
        due = [asked(beside[at % len(beside)], 1, at, 0.2 + at / sizes.offered) for at in range(count)]
        summary = await self.loads.streams(requests, due)
        return summary.tpot_ms.mean if summary.tpot_ms else 0.0

    def computed(self) -> float:
        """Tokens of prompts that were computed, since the start."""
        return self.metric("engine_prompt_tokens_total") - self.metric("engine_cached_tokens_total")

    async def written(self) -> None:
        """Until nothing more is written to disk."""
        before = -1.0
        while (stored := self.metric("engine_disk_stored_blocks_total")) > before:
            before = stored
            await self.settle()

    def rate(self, direction: str) -> float:
        """Bytes per second of the disk."""
        label = f'direction="{direction}"'
        seconds = self.metric("executor_disk_seconds_total", label)
        return round(self.metric("executor_disk_copied_bytes_total", label) / max(seconds, 1e-9))

    async def conversations(self) -> tuple[int, float, list[float]]:
        """Tokens that all of them come to, the share of repeated ones that hit, and first tokens by turn."""
        sizes = self._sizes
        told = [self._prompts.new(sizes.prompt) for _ in range(sizes.times * sizes.cache // sizes.prompt + 1)]
        repeated = cached = 0
        first: list[float] = []
        for turn in range(sizes.turns):
            if turn:
                repeated += sum(map(len, told))
                told = [[*prompt, *self._prompts.new(min(TURN_TOKENS, sizes.prompt // 16))] for prompt in told]
            summary = await self.loads.run([asked(prompt, ANSWER, at) for at, prompt in enumerate(told)], sizes.open)
            cached += summary.cached_tokens if turn else 0
            first.append(median_ttft(summary))
        return sum(map(len, told)), cached / max(1, repeated), first


async def measure(server: Server, shape: Shape, sizes: Sizes, host_tokens: int, place: Path) -> Figures:
    """place: the folder of the operator's socket."""
    prompts = Prompts(shape.vocab)
    found = Measurement(server, sizes, prompts)
    await found.loads.run([asked(prompts.new(sizes.prompt), 4, at) for at in range(2)], 1)  # warm-up
    single = [prompts.new(sizes.prompt) for _ in range(sizes.prompts)]
    cold, device_hit = await found.one_by_one(single), await found.one_by_one(single)
    await found.fill()
    host_hit = await found.one_by_one(single)
    print(f"first token: {median_ttft(cold):.1f} ms computed, {median_ttft(device_hit):.1f} on the device, "
          f"{median_ttft(host_hit):.1f} fetched", flush=True)  # fmt: skip
    tokens, rate, first = await found.conversations()
    print(f"conversations: {rate:.1%} of repeated tokens hit", flush=True)
    await found.settle()
    lost = int(found.metric("engine_host_lost_blocks_total"))
    operate(place, "/flush_cache")  # a full host memory would keep what was fetched before, not what comes now
    alone = await found.streams(())
    copied = [prompts.new(sizes.prompt) for _ in range(COPIES)]
    await found.one_by_one(copied[-1:])
    beside_hits = await found.streams(copied[-1:])
    await found.one_by_one(copied)
    await found.settle()
    before, computed = found.metric("engine_host_fetches_total"), found.computed() + sizes.streams * STREAM_PROMPT
    beside = await found.streams(copied)
    await found.settle()
    fetches, computed = int(found.metric("engine_host_fetches_total") - before), int(found.computed() - computed)
    print(f"a token: {alone:.2f} ms alone, {beside_hits:.2f} beside device hits, {beside:.2f} beside {fetches} fetches",
          flush=True)  # fmt: skip
    seconds = found.metric("executor_copy_seconds_total", 'direction="in"')
    fetched = found.metric("executor_copied_bytes_total", 'direction="in"')
    return Figures(
        model=shape.name, device_cache_tokens=sizes.cache, host_cache_tokens=host_tokens, prompt_tokens=sizes.prompt,
        cold_ttft_ms=median_ttft(cold), device_hit_ttft_ms=median_ttft(device_hit),
        host_hit_ttft_ms=median_ttft(host_hit),
        host_hit_share=round(median_ttft(host_hit) / max(median_ttft(cold), 1e-9), 4),
        host_hit_tokens=host_hit.cached_tokens // max(1, host_hit.completed),
        fetch_bytes_per_second=round(fetched / max(seconds, 1e-9)),
        tpot_ms=alone, tpot_beside_device_hits_ms=beside_hits, tpot_beside_fetches_ms=beside, fetches_beside=fetches,
        computed_beside=computed, price=price(beside, alone), price_of_device_hits=price(beside_hits, alone),
        conversation_tokens=tokens,
        hit_rate=round(rate, 4), turn_ttft_ms=tuple(round(value, 3) for value in first),
        lost_blocks=lost, errors=found.loads.errors,
    )  # fmt: skip


async def fill_disk(
    server: Server, sizes: Sizes, prompts: Prompts, asked_for: list[list[int]]
) -> tuple[float, float, int]:
    """Have prompts computed and written to disk: milliseconds to a first token, bytes per second, and blocks that were
    not written."""
    found = Measurement(server, sizes, prompts)
    await found.loads.run([asked(prompts.new(sizes.prompt), 4, at) for at in range(2)], 1)  # warm-up
    cold = await found.one_by_one(asked_for)
    await found.fill()
    await found.written()
    return median_ttft(cold), found.rate("out"), int(found.metric("engine_disk_lost_blocks_total"))


async def measure_disk(
    server: Server, shape: Shape, sizes: Sizes, prompts: Prompts, asked_for: list[list[int]],
    before: tuple[float, float, int],
) -> DiskFigures:  # fmt: skip
    """On a server that has the prompts on disk alone."""
    found = Measurement(server, sizes, prompts)
    await found.loads.run([asked(prompts.new(sizes.prompt // 2), 4, at) for at in range(2)], 1)  # warm-up
    single, others = asked_for[: sizes.prompts], asked_for[sizes.prompts :]
    hit = await found.one_by_one(single)
    await found.settle()
    rate = found.rate("in")
    alone = await found.streams(())
    beside_hits = await found.streams(single[-1:])
    loads = found.metric("engine_disk_loads_total")
    beside = await found.streams(others)
    await found.settle()
    cold, share = before[0], median_ttft(hit) / max(before[0], 1e-9)
    return DiskFigures(
        model=shape.name, prompt_tokens=sizes.prompt, cold_ttft_ms=cold, disk_hit_ttft_ms=median_ttft(hit),
        disk_hit_share=round(share, 4), disk_hit_tokens=hit.cached_tokens // max(1, hit.completed),
        read_bytes_per_second=rate, write_bytes_per_second=before[1], tpot_ms=alone,
        tpot_beside_device_hits_ms=beside_hits, tpot_beside_reads_ms=beside,
        reads_beside=int(found.metric("engine_disk_loads_total") - loads), price=price(beside, alone),
        price_of_device_hits=price(beside_hits, alone), unwritten_blocks=before[2],
        failed_blocks=int(found.metric("engine_disk_failed_blocks_total")), errors=found.loads.errors,
    )  # fmt: skip


def disk_lines(found: DiskFigures) -> Iterator[str]:
    yield (
        f"first token of {found.prompt_tokens} tokens: {found.cold_ttft_ms:.1f} ms computed, "
        f"{found.disk_hit_ttft_ms:.1f} from disk ({found.disk_hit_share:.0%}; {found.disk_hit_tokens} tokens at "
        f"{found.read_bytes_per_second / 1e9:.1f} GB/s; written at {found.write_bytes_per_second / 1e9:.1f} GB/s)"
    )
    yield (
        f"a token of streams: {found.tpot_ms:.2f} ms; beside device hits {found.price_of_device_hits:+.1f} %, beside "
        f"{found.reads_beside} reads {found.price:+.1f} %; {found.unwritten_blocks} blocks were not written, "
        f"{found.failed_blocks} failed"
    )


def lines(found: Figures) -> Iterator[str]:
    yield (
        f"first token of {found.prompt_tokens} tokens: {found.cold_ttft_ms:.1f} ms computed, "
        f"{found.device_hit_ttft_ms:.1f} on the device, {found.host_hit_ttft_ms:.1f} fetched "
        f"({found.host_hit_share:.0%}; {found.host_hit_tokens} tokens at {found.fetch_bytes_per_second / 1e9:.1f} GB/s)"
    )
    yield (
        f"a token of streams: {found.tpot_ms:.2f} ms; beside device hits {found.price_of_device_hits:+.1f} %, beside "
        f"{found.fetches_beside} fetches {found.price:+.1f} %, {found.computed_beside} of whose tokens were computed"
    )
    yield (
        f"conversations of {found.conversation_tokens} tokens, {found.device_cache_tokens} on the device: "
        f"{found.hit_rate:.1%} of repeated tokens hit; first tokens by turn "
        + " ".join(f"{value:.0f}" for value in found.turn_ttft_ms)
        + f" ms; {found.lost_blocks} blocks were evicted before they were copied"
    )


def scaled(sizes: Sizes, token_bytes: int) -> Sizes:
    """With a cache whose ten times fit the machine's memory."""
    fits = int(available_memory() * HOST_SHARE / (sizes.times * HOST) / token_bytes)
    return msgspec.structs.replace(sizes, cache=min(sizes.cache, fits // BLOCK * BLOCK))


def arguments_of(shape: Shape, folder: Path, sizes: Sizes, *, smoke: bool) -> tuple[list[str], Sizes, int]:
    """Of the server, with the sizes that this machine has room for, and the tokens of the host's memory."""
    spec = read_spec(folder)
    each = block_bytes(spec, BLOCK, 4 if smoke else ITEM_BYTES[spec.dtype])
    sizes = scaled(sizes, each // BLOCK)
    host = int(HOST * sizes.times * sizes.cache) // BLOCK
    longest = sizes.prompt + sizes.turns * TURN_TOKENS + ANSWER
    words = [str(folder), "--load-format", "dummy", "--max-model-len", str(longest), "--block-size", str(BLOCK),
             "--kv-cache-memory", str((sizes.cache // BLOCK + 1) * each),
             "--kv-host-memory", str(host * each)]  # fmt: skip
    if smoke:
        words += ["--device", "cpu", "--dtype", "float32", "--max-num-seqs", "8"]
    return words, sizes, host * BLOCK


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="python -m benchmarks.kv_tier", description=__doc__.partition("\n")[0],
                                    formatter_class=argparse.ArgumentDefaultsHelpFormatter)  # fmt: skip
    found.add_argument("--shape", default="8b", choices=sorted(SHAPES))
    found.add_argument("--smoke", action="store_true", help="the embedded model on a CPU, in small")
    found.add_argument("--server-args", default="", help="further arguments of penstock serve, in one word")
    found.add_argument("--disk", type=Path, help="an empty folder: measure the tier on disk there")
    found.add_argument("--output", type=Path, help="JSON file of the figures; default: below benchmarks/results/h200")
    found.add_argument("--commit", default="", help="of this tree, where git cannot tell: in a copy")
    return found


def run_disk(
    words: list[str], sizes: Sizes, shape: Shape, options: argparse.Namespace, arguments: Sequence[str] | None
) -> int:
    """Two servers, one after the other, on one folder."""
    prompts = Prompts(shape.vocab)
    asked_for = [prompts.new(sizes.prompt) for _ in range(sizes.prompts + COPIES)]
    at = words.index("--kv-host-memory") + 1
    each = int(words[words.index("--kv-cache-memory") + 1]) // (sizes.cache // BLOCK + 1)
    blocks = (len(asked_for) * sizes.prompt + 2 * sizes.cache) // BLOCK
    words += ["--kv-disk", str(options.disk), "--kv-disk-size", str(2 * blocks * (each + 8192))]
    words[at] = str(blocks * each)
    print(shlex.join(words), flush=True)
    with serving(words) as server:
        chip = device(server)
        before = asyncio.run(fill_disk(server, sizes, prompts, asked_for))
    words[at] = str(DISK_HOST * sizes.prompt // BLOCK * each)
    with serving(words) as server:
        print(f"ready after {server.seconds:.0f} s, with {blocks} blocks at most on disk", flush=True)
        figures = asyncio.run(measure_disk(server, shape, sizes, prompts, asked_for, before))
        if figures.errors:
            print(server.tail(), flush=True)
    results = {"chip": chip, "server_arguments": shlex.join(words[1:]), "sizes": sizes, "figures": figures}
    report.write(options.output or RESULTS / "kv_disk.json", "kv_tier", results, arguments, options.commit)
    print("\n".join(disk_lines(figures)), flush=True)
    return int(bool(figures.errors))


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    shape = SMOKE if options.smoke else SHAPES[options.shape]
    with tempfile.TemporaryDirectory(prefix="penstock-tier-") as place:
        folder = make_folder(shape, Path(place))
        words, sizes, host = arguments_of(shape, folder, SMALL if options.smoke else Sizes(), smoke=options.smoke)
        words += shlex.split(options.server_args)
        if options.disk is not None:
            sizes = msgspec.structs.replace(sizes, offered=DISK_OFFERED)
            return run_disk(words, sizes, shape, options, arguments)
        words += ["--admin-address", f"unix:{place}/admin"]
        print(shlex.join(words), flush=True)
        with serving(words) as server:
            print(f"ready after {server.seconds:.0f} s", flush=True)
            chip = device(server)
            figures = asyncio.run(measure(server, shape, sizes, host, Path(place)))
            if figures.errors:
                print(server.tail(), flush=True)
    results = {"chip": chip, "server_arguments": shlex.join(words[1:]), "sizes": sizes, "figures": figures}
    report.write(options.output or RESULTS / "kv_tier.json", "kv_tier", results, arguments, options.commit)
    print("\n".join(lines(figures)), flush=True)
    return int(bool(figures.errors))


if __name__ == "__main__":
    sys.exit(main())
