"""What LoRA adapters cost on one GPU: `python -m benchmarks.adapters`, the rows of docs/features/lora.md.

Adapters with random weights on all seven matrices of each layer are written beside a shape's folder. Each load runs on
a server without LoRA (`off`), then on one with it: rows of the base model alone (`base`), of one adapter (`one`), of as
many adapters as have places (`each`). `--swap N` adds a load whose requests draw from N adapters with Zipf's
frequencies (`swap`), beside the same load drawn from as many as have places (`held`). `--smoke` tries it on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file

from benchmarks import report
from benchmarks.h200 import SERVE, SMOKE, attempt, device, prepared
from benchmarks.rows import WORKLOADS
from benchmarks.server import Server, serving
from benchmarks.shapes import SHAPES, Shape, make_folder
from penstock.services.bench.serve import HEADING, line
from penstock.services.bench.workload import FREE, Variant, Workload

RESULTS = report.ROOT / "benchmarks" / "results" / "h200" / "adapters.json"
LOADS = ("ttft_128", "bs8", "bs64")
FILES = 4  # different weight files; further adapters are links to them
SWAP = "bs64"
SWAP_REQUESTS = 384


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One load on one server. `price`: percent more time per token than the same load without LoRA."""

    load: str
    rows: str
    tokens_per_second: float
    tpot_ms: float | None
    ttft_ms: float | None
    price: float | None = None
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
    """The figures of one go, printed as they come."""

    def __init__(self, options: argparse.Namespace, shape: Shape) -> None:
        self.options, self.shape = options, shape
        self.figures: list[Figure] = []

    def load(self, server: Server, name: str, rows: str, variants: Sequence[Variant], requests: int = 0) -> None:
        workload: Workload = prepared(WORKLOADS[name], self.shape, smoke=self.options.smoke)
        workload = msgspec.structs.replace(workload, name=f"{name} {rows}", variants=tuple(variants),
                                           requests=requests or workload.requests)  # fmt: skip
        result, error = attempt(server, workload, self.options.clients, self.options.row_limit)
        summary = result.summary if result else None
        tpot = summary.tpot_ms.p50 if summary and summary.tpot_ms else None
        ttft = summary.ttft_ms.p50 if summary and summary.ttft_ms else None
        free = next((one.tpot_ms for one in self.figures if (one.load, one.rows) == (name, "off")), None)
        price = round(100 * (tpot / free - 1), 2) if tpot and free and rows != "off" else None
        rate = summary.output_tokens_per_second if summary else 0.0
        self.figures.append(Figure(load=name, rows=rows, tokens_per_second=rate, tpot_ms=tpot, ttft_ms=ttft,
                                   price=price, errors=error))  # fmt: skip
        print(line(result) if result else name, f"   {rows}: {price} %" if price is not None else f"   {rows}", error)

    def all(self, folder: Path, adapters: Sequence[tuple[str, Path]]) -> str:
        """Every load; the device's name. Raises TimeoutError when a server does not start."""
        options = self.options
        common = [str(folder), *(SMOKE if options.smoke else SERVE), *shlex.split(options.server_args)]
        print(HEADING, flush=True)
        with serving(common) as server:
            for name in LOADS:
                self.load(server, name, "off", (FREE,))
        lora = ["--enable-lora", "--max-lora-rank", str(options.rank), "--max-loras", str(options.places),
                "--max-cpu-loras", str(max(len(adapters), 4 * options.places)),
                "--lora-modules", *(f"{name}={path}" for name, path in adapters)]  # fmt: skip
        names = [name for name, _ in adapters[: options.places]]
        with serving([*common, *lora]) as server:
            chip = device(server)
            for name in LOADS:
                self.load(server, name, "base", (FREE,))
                self.load(server, name, "one", named(names[:1]))
                self.load(server, name, "each", named(names))
            if options.swap:
                for rows, count in (("held", options.places), ("swap", options.swap)):
                    requests = 4 if options.smoke else SWAP_REQUESTS
                    self.load(server, SWAP, rows, skewed(count, requests), requests)
            if any(one.errors for one in self.figures):
                print(server.tail(), flush=True)
        return chip


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="python -m benchmarks.adapters", description=__doc__.partition("\n")[0],
                                    formatter_class=argparse.ArgumentDefaultsHelpFormatter)  # fmt: skip
    found.add_argument("--shape", default="8b", help="of a dense model: " + ", ".join(SHAPES))
    found.add_argument("--rank", type=int, default=16)
    found.add_argument("--places", type=int, default=8, help="--max-loras of the server")
    found.add_argument("--swap", type=int, default=0, help="adapters of the load that swaps; 0: none")
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
    run = Run(options, shape)
    with tempfile.TemporaryDirectory(prefix="penstock-adapters-") as folder:
        place = Path(folder)
        model = make_folder(shape, place)
        chip = run.all(model, write_adapters(shape, place, options.rank, max(options.swap, options.places)))
    told: dict[str, Any] = {
        "environment": report.header("h200", arguments, options.commit) | {"chip": chip},
        "model": shape.name, "rank": options.rank, "places": options.places, "swap": options.swap,
        "server_arguments": options.server_args, "figures": run.figures,
    }  # fmt: skip
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_bytes(msgspec.json.format(msgspec.json.encode(told), indent=1) + b"\n")
    return int(any(one.errors for one in run.figures))


if __name__ == "__main__":
    sys.exit(main())
