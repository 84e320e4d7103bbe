"""What transformers' own `generate` does with the same load: `python -m benchmarks.generate_baseline MODEL`.

One process, no server: the prompts of a workload in batches of its concurrency, padded on the left to the longest,
greedy, `min_new_tokens` = `max_new_tokens` so that nothing stops early. A batch ends with its longest request, which
is how plain batching works; tokens beyond a request's own length do not count as output.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from penstock.services.bench.serve import length
from penstock.services.bench.workload import Workload, requests

Batch = list[tuple[list[int], int]]  # token ids and how many to generate


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """One workload through `generate`."""

    workload: Workload
    seconds: float
    output_tokens: int
    output_tokens_per_second: float
    seconds_per_step: float  # of the batch, prefill included
    dtype: str
    threads: int
    transformers: str
    torch: str


def batches(workload: Workload, *, warmup: bool = False) -> Iterator[Batch]:
    """The workload's prompts and lengths, `concurrency` at a time."""
    batch: Batch = []
    for request in requests(workload, warmup=warmup):
        body = msgspec.json.decode(request.body)
        batch.append((body["prompt"], body["max_tokens"]))
        if len(batch) == workload.concurrency:
            yield batch
            batch = []
    if batch:
        yield batch


def padded(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and attention mask, both [batch, longest], padding on the left."""
    longest = max(len(ids) for ids, _ in batch)
    ids = torch.zeros(len(batch), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, (prompt, _) in enumerate(batch):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    return ids, mask


def steps(model: torch.nn.Module, batch: Batch) -> int:
    """Generate for one batch; how many steps it took."""
    ids, mask = padded(batch)
    count = max(tokens for _, tokens in batch)
    device = next(model.parameters()).device
    with torch.inference_mode():
        out = model.generate(  # type: ignore[operator]
            ids.to(device), attention_mask=mask.to(device), max_new_tokens=count, min_new_tokens=count,
            do_sample=False, pad_token_id=0,
        )  # fmt: skip
    assert out.shape == (len(batch), ids.shape[1] + count)
    return count


def measure(model: torch.nn.Module, workload: Workload) -> Figures:
    """Warm up with one batch, then time the whole workload."""
    for batch in batches(msgspec.structs.replace(workload, warmup=min(workload.concurrency, 4)), warmup=True):
        steps(model, [(prompt, min(tokens, 8)) for prompt, tokens in batch])
    start, count, output = time.perf_counter(), 0, 0
    for batch in batches(workload):
        count += steps(model, batch)
        output += sum(tokens for _, tokens in batch)
    if next(model.parameters()).is_cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    return Figures(
        workload=workload, seconds=round(seconds, 4), output_tokens=output,
        output_tokens_per_second=round(output / seconds, 2), seconds_per_step=round(seconds / count, 6),
        dtype=str(next(model.parameters()).dtype).removeprefix("torch."), threads=torch.get_num_threads(),
        transformers=transformers.__version__, torch=str(torch.__version__),
    )  # fmt: skip


def load(path: str, dtype: str = "float32", device: str = "cpu") -> torch.nn.Module:
    """The model as transformers loads it; with weights of its own making where the folder has none."""
    transformers.utils.logging.set_verbosity_error()
    kind = getattr(torch, dtype)
    if any(Path(path).glob("*.safetensors")):
        model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(path, dtype=kind)
    else:
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=kind)
    return model.to(device).eval()


def compare(path: str, workloads: Iterable[Workload], dtype: str = "float32", device: str = "cpu") -> list[Figures]:
    model = load(path, dtype, device)
    return [measure(model, workload) for workload in workloads]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.generate_baseline",
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)  # fmt: skip
    parser.add_argument("model", help="folder in Hugging Face layout")
    parser.add_argument("--concurrency", default="1,16,64", help="batch sizes, with commas")
    parser.add_argument("--requests", type=int, default=0, help="requests per batch size; 0: one batch")
    parser.add_argument("--input", type=length, default="128", metavar="N|LOW:HIGH", help="prompt tokens")
    parser.add_argument("--output-tokens", type=length, default="128", metavar="N|LOW:HIGH", help="new tokens")
    parser.add_argument("--vocab", type=int, default=1000, help="random token ids are below")
    parser.add_argument("--workloads", help="JSON list of workloads, instead of the options above; - is standard input")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=0, help="torch threads; 0: one per core")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads or os.cpu_count() or 1)
    if options.workloads:
        text = sys.stdin.read() if options.workloads == "-" else options.workloads
        workloads = msgspec.json.decode(text, type=list[Workload])
    else:
        workloads = [
            Workload(name=f"c{c}", concurrency=c, requests=options.requests or c, input=options.input,
                     output=options.output_tokens, vocab=options.vocab)
            for c in map(int, options.concurrency.split(","))
        ]  # fmt: skip
    found = compare(options.model, workloads, options.dtype, options.device)
    if options.json:
        print(json.dumps(msgspec.to_builtins(found)))
    else:
        for figures in found:
            print(f"{figures.workload.name:12} {figures.output_tokens_per_second:10,.1f} tok/s"
                  f" {1000 * figures.seconds_per_step:8.2f} ms a step")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
