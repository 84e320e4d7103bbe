"""What drafts are worth at an acceptance that is set: `python -m benchmarks.speculation_h200`.

The 8B shape drafts with one random layer of the same width, k = 4; `synthetic_acceptance` keeps each draft with a given
chance whatever the model says, so that time per token can be told against acceptance (the text is nonsense either way).
A server without drafts comes first, then one for each rate; each is given the same loads of 1, 8 and 64 open requests.
On the drafting servers every load runs twice, the second time with `speculative: false`, which switches drafts off for
its requests. One JSON file per server goes to benchmarks/results/h200/speculation/, written as soon as it is done.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client.samples import Sample

from benchmarks.h200 import RESULTS as H200_RESULTS
from benchmarks.h200 import VOCAB_MARGIN, device
from benchmarks.report import header
from benchmarks.samples import scrape, total
from benchmarks.server import Server, serving
from benchmarks.shapes import EIGHT, SMOKE, Shape, make_folder
from penstock.services.bench.client import target
from penstock.services.bench.serve import measure
from penstock.services.bench.workload import Variant, Workload

RESULTS = H200_RESULTS / "speculation"
RATES = (0.0, 0.5, 0.8, 1.0)
BATCHES = (1, 8, 64)
DRAFTS = 4  # of a row
ROUNDS: Mapping[int, int] = {1: 8, 8: 2, 64: 1}  # requests of a load by batch, in batches: chance decides less
OUTPUT = 256  # tokens of an answer: enough to begin with no idea of the rate and still measure what follows
WARMUP_OUTPUT = 128  # in which the server learns the rate, and its price
WRONG = ("--allow-wrong-output", "--load-format", "dummy")
SERVE = (*WRONG, "--max-model-len", "4096", "--gpu-memory-utilization", "0.90")
SMOKE_SERVE = (*WRONG, "--device", "cpu", "--max-model-len", "512", "--cpu-threads", "1")
HEARTBEAT = 0.1  # seconds
COUNTERS = ("drafts", "draft_tokens", "accepted_tokens")
OFF = Variant("off", {"speculative": False})
GOAL_SPEEDUP = 2.2  # at rate 0.8, one request open
GOAL_PRICE = 1.03  # of the time per token without drafts, at rate 0


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """One load."""

    batch: int
    tpot_ms: float  # median over requests
    output_tokens_per_second: float
    switched_off_tpot_ms: float | None = None  # of the same load whose requests switch drafts off
    drafts: int = 0  # tokens that were verified
    accepted: int = 0
    requests: int = 0


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One server."""

    rate: float | None  # None: a server without drafts
    model: str
    drafts: int
    figures: tuple[Figures, ...]
    start_seconds: float
    environment: dict[str, Any] = {}

    @property
    def name(self) -> str:
        return "off" if self.rate is None else f"rate_{self.rate:.1f}"


def load(batch: int, shape: Shape, *, smoke: bool) -> Workload:
    """The same for every server."""
    output = 8 if smoke else OUTPUT
    return Workload(
        name=f"speculation_{batch}", requests=batch * ROUNDS.get(batch, 1), concurrency=batch, input=(128, 128),
        output=(output, output), warmup=batch, warmup_output=output if smoke else WARMUP_OUTPUT,
        vocab=int(shape.vocab * VOCAB_MARGIN),
    )  # fmt: skip


def counters(samples: Sequence[Sample]) -> dict[str, int]:
    """What a server has drafted."""
    return {name: int(total(samples, f"engine_{name}_total")) for name in COUNTERS}


def settled(url: str) -> dict[str, int]:
    """The counters after the next heartbeats, which bring them."""
    time.sleep(3 * HEARTBEAT)
    return counters(scrape(url))


def run(server: Server, workload: Workload, *, drafting: bool) -> Figures:
    """One load, and on a drafting server the same with drafts switched off."""
    before = settled(server.url)
    summary = asyncio.run(measure(target(server.url), workload)).summary
    after = settled(server.url)
    off = None
    if drafting:
        bare = msgspec.structs.replace(workload, name=workload.name + "_off", variants=(OFF,))
        off = asyncio.run(measure(target(server.url), bare)).summary
    for one in (summary, off):
        if one is not None and (one.failed or one.tpot_ms is None):
            raise ValueError(f"{workload.name}: {one.errors} {one.error_examples}")
    assert summary.tpot_ms is not None
    return Figures(
        batch=workload.concurrency, tpot_ms=summary.tpot_ms.p50, requests=summary.completed,
        output_tokens_per_second=summary.output_tokens_per_second,
        switched_off_tpot_ms=off.tpot_ms.p50 if off is not None and off.tpot_ms is not None else None,
        drafts=after["draft_tokens"] - before["draft_tokens"],
        accepted=after["accepted_tokens"] - before["accepted_tokens"],
    )  # fmt: skip


def speculative(draft: Path, rate: float) -> str:
    """The server's option."""
    return json.dumps({"method": "draft_model", "model": str(draft), "num_speculative_tokens": DRAFTS,
                       "synthetic_acceptance": rate})  # fmt: skip


def table(reports: Sequence[Report]) -> str:
    """Time per token by server and batch, against the server without drafts."""
    plain = {one.batch: one.tpot_ms for report in reports if report.rate is None for one in report.figures}
    rows = [f"{'rate':>5} {'batch':>5} {'ms/token':>9} {'speed-up':>9} {'off, same server':>17} {'accepted':>9}"]
    for report in reports:
        for one in report.figures:
            rate = "off" if report.rate is None else f"{report.rate:.1f}"
            gain = f"{plain[one.batch] / one.tpot_ms:8.2f}x" if one.batch in plain else f"{'-':>9}"
            bare = f"{one.switched_off_tpot_ms:17.3f}" if one.switched_off_tpot_ms is not None else f"{'-':>17}"
            share = f"{one.accepted / one.drafts:9.3f}" if one.drafts else f"{'-':>9}"
            rows.append(f"{rate:>5} {one.batch:5} {one.tpot_ms:9.3f} {gain} {bare} {share}")
    return "\n".join(rows)


def missed(reports: Sequence[Report]) -> list[str]:
    """Goals that are not reached, in words."""
    times = {(report.rate, one.batch): one.tpot_ms for report in reports for one in report.figures}
    found = []
    for batch in {batch for _, batch in times}:
        off, worst, good = (times.get((rate, batch)) for rate in (None, 0.0, 0.8))
        if off and worst and worst > GOAL_PRICE * off:
            found.append(f"batch {batch}: rate 0.0 costs {100 * (worst / off - 1):.1f} %, at most 3 % are allowed")
        if batch == 1 and off and good and off < GOAL_SPEEDUP * good:
            found.append(f"batch 1: rate 0.8 is {off / good:.2f} times as fast, {GOAL_SPEEDUP} are asked for")
    return sorted(found)


def read(folder: Path) -> list[Report]:
    """Reports that are there: off first, then by rate."""
    found = [msgspec.json.decode(path.read_bytes(), type=Report) for path in folder.glob("*.json")]
    return sorted(found, key=lambda report: -1.0 if report.rate is None else report.rate)


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="python -m benchmarks.speculation_h200",
                                    description=(__doc__ or "").partition("\n")[0])  # fmt: skip
    found.add_argument("--rates", default="off," + ",".join(map(str, RATES)), help="with commas; off: no drafts")
    found.add_argument("--batches", default=",".join(map(str, BATCHES)), help="open requests, with commas")
    found.add_argument("--output", type=Path, default=RESULTS, help="folder of the reports")
    found.add_argument("--commit", default="", help="of this tree, where git cannot tell: in a copy")
    found.add_argument("--table", action="store_true", help="print the table of the reports that are there, and end")
    found.add_argument("--smoke", action="store_true", help="the embedded model's shape on a CPU, tiny loads")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if not options.table:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the server is ended, too
        measure_all(options, arguments)
    reports = read(options.output)
    print(table(reports))
    for complaint in missed(reports):
        print(complaint)
    return int(bool(missed(reports)))


def measure_all(options: argparse.Namespace, words: Sequence[str] | None) -> None:
    """A server for each rate, one after the other, with what the first one compiled."""
    shape = SMOKE if options.smoke else EIGHT
    batches = [int(word) for word in options.batches.split(",")]
    environment = header("speculation_h200", words, options.commit)
    options.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="penstock-drafts-") as place:
        folder = make_folder(shape, Path(place))
        one_layer = msgspec.structs.replace(
            shape, name=f"{shape.name}-draft", config={**shape.config, "num_hidden_layers": 1}
        )
        draft = make_folder(one_layer, Path(place))
        caches = {name: os.environ.get(name, place) for name in ("TRITON_CACHE_DIR", "XDG_CACHE_HOME")}
        for word in options.rates.split(","):
            rate = None if word == "off" else float(word)
            extra = ["--status-interval", str(HEARTBEAT)]
            extra += [] if rate is None else ["--speculative-config", speculative(draft, rate)]
            with serving([str(folder), *(SMOKE_SERVE if options.smoke else SERVE), *extra], caches) as server:
                chip = device(server)
                figures = tuple(
                    run(server, load(batch, shape, smoke=options.smoke), drafting=rate is not None) for batch in batches
                )
                print(server.tail(), file=sys.stderr, flush=True)
            report = Report(
                rate=rate, model=shape.name, drafts=0 if rate is None else DRAFTS, figures=figures,
                start_seconds=round(server.seconds, 2), environment={**environment, "chip": chip},
            )  # fmt: skip
            (options.output / f"{report.name}.json").write_bytes(
                msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n"
            )
            print(table([report]), flush=True)


if __name__ == "__main__":
    sys.exit(main())
