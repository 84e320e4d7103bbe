"""The rows of the GPU figures as data: which load, which figure, what vLLM reached, what the goal is; their records.

vLLM's figures are those of release 0.24.0 on one H200 with the same shapes and load, from an earlier run on another
machine of the same kind; two such machines differed by at most 2 % (7 % in the time to the first token).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.load.workload import ROWS
from benchmarks.shapes import SHAPES
from penstock.services.bench.serve import Result, Summary
from penstock.services.bench.workload import Workload

WORKLOADS: Mapping[str, Workload] = {workload.name: workload for workload in ROWS}
WARMUP_OUTPUT = 64  # tokens: enough for every form of step to have run
VLLM = "vLLM 0.24.0, 2026-11-21"  # head of the column; docs/performance.md has its options
TOKENS = "output_tokens_per_second"
UNITS: Mapping[str, str] = {"tpot_ms": "ms per token", "ttft_ms": "ms to first token", TOKENS: "tok/s",
                            "start_seconds": "s to ready"}  # fmt: skip


class Target(msgspec.Struct, frozen=True):
    """What to reach: the goal, and vLLM's figure or range of figures. A price is in percent."""

    goal: float
    vllm: tuple[float, ...] = ()


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of one load. `against` names the row whose time per token its own is compared with: its price."""

    name: str
    figure: str
    workload: str = ""  # name of the load, which several rows may share; empty for the row's own
    variant: str = ""  # whose requests count; empty for all
    against: str = ""
    targets: Mapping[str, Target] = {}  # by shape

    @property
    def load(self) -> str:
        return self.workload or self.name


# Goals of quantized shapes, and what vLLM reached with `--quantization fp8` on the bf16 folder on 2026-11-22.
QUANTIZED: Mapping[str, Mapping[str, Target]] = {
    "8b-fp8": {
        "lat_bs1": Target(2.4, (3.44,)), "ttft_1024": Target(16, (22.4,)), "ttft_8192": Target(128, (156,)),
        "bs8": Target(2.55, (3.63,)), "bs64": Target(11800, (9146,)), "decode_c256": Target(29000, (15732,)),
    },
    "8b-w4a16": {
        "lat_bs1": Target(1.65), "ttft_1024": Target(28), "ttft_8192": Target(225), "bs8": Target(1.8),
        "bs64": Target(9500), "decode_c256": Target(21000),
    },
    "30b-a3b-fp8": {
        "lat_bs1": Target(1.8), "ttft_1024": Target(15), "ttft_8192": Target(95), "bs8": Target(4.6),
        "bs64": Target(5800), "decode_c256": Target(19000),
    },
}  # fmt: skip


def row(name: str, figure: str, eight: Target | None, small: Target | None = None, **more: Any) -> Row:
    found = {"8b": eight, "0.6b": small, **{shape: goals.get(name) for shape, goals in QUANTIZED.items()}}
    return Row(name=name, figure=figure, targets={key: one for key, one in found.items() if one is not None}, **more)


SERVING: tuple[Row, ...] = (
    row("lat_bs1", "tpot_ms", Target(4.10, (4.89,)), Target(0.90, (1.61,)), workload="ttft_128"),
    row("ttft_128", "ttft_ms", Target(8, (11.5,)), Target(4.5, (9.1,))),
    row("ttft_1024", "ttft_ms", Target(25, (29.4,)), Target(8, (14.6,))),
    row("ttft_8192", "ttft_ms", Target(215, (220,)), Target(40, (41,))),
    row("ttft_32000", "ttft_ms", Target(1000, (952, 1177)), Target(260, (263, 285))),
    row("bs8", "tpot_ms", Target(4.45, (5.09,)), Target(1.05, (1.78,))),
    row("bs64", TOKENS, Target(8000, (6815,)), Target(34000, (18928,))),
    row("thr_c256", TOKENS, Target(7300, (6159,)), Target(30000, (19338,))),
    row("decode_c256", TOKENS, Target(22500, (18638,)), Target(55000, (30198,))),
    row("mixed_256", TOKENS, Target(11900, (9914,)), Target(36000, (24026,))),
    row("prefix4k", TOKENS, Target(5000, (4140,)), Target(13000, (7547,))),
)
OFFLINE: tuple[Row, ...] = (row("offline_256", TOKENS, None, Target(36000, (23525,))),)
STARTS: tuple[Row, ...] = (
    row("start_cold", "start_seconds", Target(15, (75.6,)), Target(12, (71.9,))),
    row("start_warm", "start_seconds", Target(10), Target(8, (39.2,))),
)
FEATURES: tuple[Row, ...] = (
    row("free_c64", TOKENS, Target(10800, (9389,))),
    row("sample_c64", "tpot_ms", Target(2, (3,)), against="free_c64"),
    row("half_seeded_c64", "tpot_ms", Target(2, (340,)), against="free_c64"),
    row("logprobs_c64", "tpot_ms", Target(3, (5,)), against="free_c64"),
    row("penalties_c64", "tpot_ms", Target(2, (1,)), against="free_c64"),
    row("json_c64", "tpot_ms", Target(3, (25,)), against="free_c64"),
    row("half_json_c64", "tpot_ms", Target(1, (15,)), against="free_c64", variant="free"),
    row("free_c256", TOKENS, Target(22500, (19053,))),
    row("json_c256", "tpot_ms", Target(5, (44,)), against="free_c256"),
    row("json_c1", "tpot_ms", Target(0, (0,)), against="lat_bs1"),
)
ALL: tuple[Row, ...] = (*SERVING, *OFFLINE, *STARTS, *FEATURES)


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One row's file: the figure, what it is to be held against, and what it was measured with."""

    row: str
    model: str
    figure: str
    unit: str
    value: float | None  # None where the row failed
    goal: float | None = None  # of the value, or of the price in percent
    met: bool | None = None
    vllm: tuple[float, ...] = ()
    price: float | None = None  # percent more time per token than the row `against`
    against: str = ""
    limit: float | None = None  # the chip's, see benchmarks/limits.py
    share_of_limit: float | None = None
    output_tokens_per_second: float | None = None
    concurrency: int = 0
    cache: str = ""
    workload: Workload | None = None
    client: Summary | None = None
    variants: dict[str, Summary] = {}
    client_cpu_seconds: float = 0.0
    cpu_seconds: dict[str, float] = {}  # of each role's processes together, while the load ran, warm-up included
    host_microseconds_per_token: dict[str, float] = {}  # the same by output token
    error: str = ""
    environment: dict[str, Any] = {}


def figure(row: Row, result: Result) -> float | None:
    """The row's value in a result; None when nothing of it was measured."""
    summary = result.variants.get(row.variant, result.summary)
    if row.figure == TOKENS:
        return summary.output_tokens_per_second or None
    times = summary.tpot_ms if row.figure == "tpot_ms" else summary.ttft_ms
    return times.p50 if times is not None else None


def lower_is_better(row: Row) -> bool:
    return row.figure != TOKENS


def price(time: float | None, free: float | None) -> float | None:
    """How much longer a token takes than a free one, in percent."""
    return round(100 * (time / free - 1), 2) if time and free else None


def met(row: Row, target: Target, value: float | None, cost: float | None) -> bool | None:
    """Whether the goal was reached; None where there is nothing to judge."""
    found = cost if row.against else value
    if found is None:
        return None
    return found <= target.goal if lower_is_better(row) else found >= target.goal


def cached_share(record: Record) -> float:
    """Share of the prompt tokens that came from the prefix cache though the load shares no prefix: such a figure says
    nothing about its goal."""
    if record.client is None or record.workload is None or record.workload.prefix or not record.client.prompt_tokens:
        return 0.0
    return record.client.cached_tokens / record.client.prompt_tokens


def share(row: Row, value: float | None, limit: float | None) -> float | None:
    """Share of the limit that was reached, 1 being all of it."""
    if not value or not limit:
        return None
    return round(limit / value if lower_is_better(row) else value / limit, 3)


def write(folder: Path, record: Record) -> None:
    """One JSON file per row, below the folder of its model."""
    path = folder / record.model / f"{record.row}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")


def read(folder: Path) -> dict[tuple[str, str], Record]:
    """Every record below a folder, by model and row; other results may stand beside them."""
    paths = [path for shape in SHAPES for path in sorted(folder.glob(f"{shape}/*.json"))]
    found = [msgspec.json.decode(path.read_bytes(), type=Record) for path in paths]
    return {(record.model, record.row): record for record in found}


def number(value: float | None) -> str:
    """Enough digits to compare by."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def table(records: Mapping[tuple[str, str], Record], models: Sequence[tuple[str, str]]) -> str:
    """docs/performance.md's tables: of serving with every model side by side, then of what a request asks for."""
    shown = [(key, title) for key, title in models if any(model == key for model, _ in records)]
    heads = [f"{title} | goal | {VLLM} | limit" for _, title in shown]
    lines = ["| Row | figure | " + " | ".join(heads) + " |", "|---|---|" + "---|---|---|---|" * len(shown)]
    for row in (*SERVING, *OFFLINE, *STARTS):
        cells = [serving_cells(row, key, records.get((key, row.name))) for key, _ in shown]
        if any((key, row.name) in records for key, _ in shown):
            lines.append(f"| {row.name} | {UNITS[row.figure]} | " + " | ".join(cells) + " |")
    for key, title in shown:
        found = [(row, records[key, row.name]) for row in FEATURES if (key, row.name) in records]
        if found:
            heads = [title, "tok/s", "ms per token", "price", "goal", f"{VLLM}, FlashInfer", "scheduler, µs per token"]
            lines += ["", "| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
            lines += [f"| {row.name} | {feature_cells(row, record)} |" for row, record in found]
    return "\n".join(lines)


def serving_cells(row: Row, model: str, record: Record | None) -> str:
    target = row.targets.get(model)
    sign = "≤" if lower_is_better(row) else "≥"
    goal = f"{sign} {number(target.goal)}" if target else ""
    vllm = " to ".join(number(value) for value in target.vllm) if target else ""
    if record is None:
        return f" | {goal} | {vllm} | "
    value = number(record.value) if record.value is not None else "failed"
    value = f"**{value}**" if record.met else value
    if cached := cached_share(record):
        value += f" ({cached:.0%} cached)"
    reached = f"{record.share_of_limit:.0%}" if record.share_of_limit is not None else ""
    return f"{value} | {goal} | {vllm} | {reached}"


def feature_cells(row: Row, record: Record) -> str:
    tpot = figure_tpot(row, record)
    goal, vllm = record.goal, record.vllm[0] if record.vllm else None
    if row.against:
        cost = f"{record.price:+.1f} %" if record.price is not None else "failed"
        cost = f"**{cost}**" if record.met else cost
        words = [cost, f"≤ {goal:+g} %" if goal is not None else "", f"{vllm:+g} %" if vllm is not None else ""]
    else:
        words = ["", f"≥ {number(goal)}" if goal is not None else "", number(vllm)]
    rate = number(record.output_tokens_per_second)
    rate = f"**{rate}**" if record.met and not row.against else rate
    if cached := cached_share(record):
        rate += f" ({cached:.0%} cached)"
    host = number(record.host_microseconds_per_token.get("scheduler"))
    return " | ".join((rate, number(tpot), *words, host))


def figure_tpot(row: Row, record: Record) -> float | None:
    summary = record.variants.get(row.variant, record.client)
    return summary.tpot_ms.p50 if summary is not None and summary.tpot_ms is not None else None
