"""What LoRA adapters cost on one GPU: `python -m benchmarks.adapters`, the rows of docs/features/lora.md.

Adapters with random weights on all seven matrices of each layer are written beside a shape's folder. Each load runs on
a server without LoRA (`off`), then on one with it: rows of the base model alone (`base`), of one adapter (`one`), of as
many adapters as have places (`each`). `--swap N` starts a third server, of 64 slots: 256 requests are open at any time
and draw from N adapters with Zipf's frequencies (`swap`), after the same load drawn from as many as have places there
(`held`). With fewer open requests most of those places serve one row, whatever the scheduler does. The result file is
written after each load. `--smoke` tries it on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file

from benchmarks import report
from benchmarks.h200 import SERVE, SMOKE, attempt, device, prepared
from benchmarks.load.workload import closed
from benchmarks.rows import WORKLOADS
from benchmarks.server import Server, serving
from benchmarks.shapes import SHAPES, Shape, make_folder
from penstock.services.bench.serve import HEADING, line
from penstock.services.bench.workload import FREE, Variant, Workload

RESULTS = report.ROOT / "benchmarks" / "results" / "h200" / "adapters.json"
LOADS = {"ttft_128": ("base", "one"), "bs8": ("base", "one", "each"), "bs64": ("base", "each")}
FILES = 4  # different weight files; further adapters are links to them
WARM_LIMIT = 120.0  # seconds
SLOTS, OPEN = 64, 256  # of the load that swaps
SWAP = closed("swap", (512, 128), 1024, OPEN)


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One load on one server. `price`: percent more time per token than the same load without LoRA. `share`:
    percent of the throughput of as many adapters as have places."""

    load: str
    rows: str
    tokens_per_second: float
    tpot_ms: float | None
    ttft_ms: float | None
    price: float | None = None
    share: float | None = None
    errors: str = ""


def write_adapters(shape: Shape, place: Path, rank: int, count: int) -> list[tuple[str, Path]]:
    """`count` PEFT folders of this rank below `place`: name and path of each."""
    config = shape.config.get("text_config", shape.config)
    layers = "layers" if config is shape.config else "language_model.layers"  # of a model that sees
    hidden, wide, head = (int(config[name]) for name in ("hidden_size", "intermediate_size", "head_dim"))
    queries, keys = (int(config[name]) * head for name in ("num_attention_heads", "num_key_value_heads"))
    sizes = {"self_attn.q_proj": (hidden, queries), "self_attn.k_proj": (hidden, keys),
             "self_attn.v_proj": (hidden, keys), "self_attn.o_proj": (queries, hidden),
             "mlp.gate_proj": (hidden, wide), "mlp.up_proj": (hidden, wide),
             "mlp.down_proj": (wide, hidden)}  # fmt: skip
    files = []
    for number in range(min(count, FILES)):
        chance = torch.Generator().manual_seed(number)
        tensors = {}
        for layer in range(int(config["num_hidden_layers"])):
            for name, (inside, outside) in sizes.items():
                prefix = f"base_model.model.model.{layers}.{layer}.{name}"
                for letter, size in (("A", (rank, inside)), ("B", (outside, rank))):
                    values = torch.randn(size, generator=chance) * 0.01
                    tensors[f"{prefix}.lora_{letter}.weight"] = values.to(torch.bfloat16)
        files.append(place / f"weights-{number}.safetensors")
        save_file(tensors, files[-1], metadata={"format": "pt"})
    found = []
    for number in range(count):
        path = place / f"a{number}"
        path.mkdir()
        os.link(files[number % len(files)], path / "adapter_model.safetensors")
        targets = sorted({name.rpartition(".")[2] for name in sizes})
        told = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": targets, "bias": "none"}
        (path / "adapter_config.json").write_text(json.dumps(told))
        found.append((path.name, path))
    return found


def named(names: Sequence[str]) -> tuple[Variant, ...]:
    return tuple(Variant(name, {"model": name}) for name in names)


def skewed(count: int, requests: int, seed: int = 0) -> tuple[Variant, ...]:
    """A variant for each request; adapter k is drawn in proportion to 1 / (k + 1)."""
    chance = random.Random(seed)
    weights = [1 / (number + 1) for number in range(count)]
    drawn = chance.choices(range(count), weights, k=requests)
    return tuple(Variant(f"request-{place}", {"model": f"a{number}"}) for place, number in enumerate(drawn))


class Run:
    """The figures of one go, printed and written as they come."""

    def __init__(self, options: argparse.Namespace, shape: Shape, environment: dict[str, Any]) -> None:
        self.options, self.shape, self.environment = options, shape, environment
        self.figures: list[Figure] = []

    def load(self, server: Server, workload: Workload, rows: str, variants: Sequence[Variant]) -> None:
        name = workload.name
        workload = msgspec.structs.replace(prepared(workload, self.shape, smoke=self.options.smoke),
                                           name=f"{name} {rows}", variants=tuple(variants))  # fmt: skip
        result, error = attempt(server, workload, self.options.clients, self.options.row_limit)
        summary = result.summary if result else None
        tpot = summary.tpot_ms.p50 if summary and summary.tpot_ms else None
        ttft = summary.ttft_ms.p50 if summary and summary.ttft_ms else None
        rate = summary.output_tokens_per_second if summary else 0.0
        known = {one.rows: one for one in self.figures if one.load == name}
        free, held = known.get("off"), known.get("held")
        price = round(100 * (tpot / free.tpot_ms - 1), 2) if tpot and free and free.tpot_ms else None
        share = round(100 * rate / held.tokens_per_second, 1) if held and held.tokens_per_second else None
        self.figures.append(Figure(load=name, rows=rows, tokens_per_second=rate, tpot_ms=tpot, ttft_ms=ttft,
                                   price=price, share=share, errors=error))  # fmt: skip
        self.write()
        told = (
            f"{rows}: {price} %" if price is not None else f"{rows}: {share} % of held" if share is not None else rows
        )
        print(line(result) if result else name, f"   {told}", error, flush=True)
        if error:
            print(server.tail(), flush=True)

    def write(self) -> None:
        options = self.options
        told = {
            "environment": self.environment, "model": self.shape.name, "rank": options.rank, "places": options.places,
            "swap": options.swap, "swap_places": options.swap_places, "server_arguments": options.server_args,
            "figures": self.figures,
        }  # fmt: skip
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_bytes(msgspec.json.format(msgspec.json.encode(told), indent=1) + b"\n")

    def all(self, folder: Path, adapters: Sequence[tuple[str, Path]]) -> None:
        """Every load. Raises TimeoutError when a server does not start."""
        options = self.options
        common = [str(folder), *(SMOKE if options.smoke else SERVE), *shlex.split(options.server_args)]
        print(HEADING, flush=True)
        with serving(common) as server:
            self.environment["chip"] = device(server)
            for name in LOADS:
                self.load(server, WORKLOADS[name], "off", (FREE,))
        names = [name for name, _ in adapters]
        with serving([*common, *self.lora(adapters, options.places)]) as server:
            variants = {"base": (FREE,), "one": named(names[:1]), "each": named(names[: options.places])}
            for name, wanted in LOADS.items():
                for rows in wanted:
                    self.load(server, WORKLOADS[name], rows, variants[rows])
        if options.swap:
            slots = [] if options.smoke else ["--max-num-seqs", str(SLOTS)]
            with serving([*common, *self.lora(adapters, options.swap_places), *slots]) as server:
                self.warm(server, names)
                for rows, count in (("held", options.swap_places), ("swap", options.swap)):
                    self.load(server, SWAP, rows, skewed(count, SWAP.requests))

    def warm(self, server: Server, names: Sequence[str]) -> None:
        """Have the host's memory hold every adapter: the load is about places."""
        began, workload = time.monotonic(), closed("warm", (16, 1), len(names), OPEN)
        workload = prepared(workload, self.shape, smoke=self.options.smoke)
        workload = msgspec.structs.replace(workload, requests=len(names), warmup=0, variants=named(names))
        _, error = attempt(server, workload, self.options.clients, WARM_LIMIT)
        print(f"{len(names)} adapters read in {time.monotonic() - began:.1f} s", error, flush=True)

    def lora(self, adapters: Sequence[tuple[str, Path]], places: int) -> list[str]:
        """Arguments of a server with adapters, all of which the host's memory holds."""
        return ["--enable-lora", "--max-lora-rank", str(self.options.rank), "--max-loras", str(places),
                "--max-cpu-loras", str(max(len(adapters), places)),
                "--lora-modules", *(f"{name}={path}" for name, path in adapters)]  # fmt: skip


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="python -m benchmarks.adapters", description=__doc__.partition("\n")[0],
                                    formatter_class=argparse.ArgumentDefaultsHelpFormatter)  # fmt: skip
    found.add_argument("--shape", default="8b", help="of a dense model: " + ", ".join(SHAPES))
    found.add_argument("--rank", type=int, default=16)
    found.add_argument("--places", type=int, default=8, help="--max-loras of the server of the prices")
    found.add_argument("--swap", type=int, default=0, help="adapters of the load that swaps; 0: none")
    found.add_argument("--swap-places", type=int, default=16, help="--max-loras of the server that swaps")
    found.add_argument("--server-args", default="", help="further arguments of penstock serve, in one word")
    found.add_argument("--clients", type=int, default=4, help="client processes")
    found.add_argument("--row-limit", type=float, default=90.0, help="seconds that a load may take")
    found.add_argument("--output", type=Path, default=RESULTS, help="JSON file of the figures")
    found.add_argument("--commit", default="", help="of this tree, where git cannot tell: in a copy")
    found.add_argument("--smoke", action="store_true", help="the embedded model's shape on a CPU, tiny loads")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    shape = SHAPES["smoke" if options.smoke else options.shape]
    run = Run(options, shape, report.header("adapters", arguments, options.commit))
    with tempfile.TemporaryDirectory(prefix="penstock-adapters-") as folder:
        place = Path(folder)
        model = make_folder(shape, place)
        count = max(options.swap, options.swap_places if options.swap else 0, options.places)
        run.all(model, write_adapters(shape, place, options.rank, count))
    return int(any(one.errors for one in run.figures))


if __name__ == "__main__":
    sys.exit(main())
