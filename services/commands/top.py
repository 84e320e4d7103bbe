"""`penstock top`: the state of a running server, from its /health and /metrics, once or continuously.

Its processes are those that report at /metrics, wherever they run, and the same server's other processes on this
machine: those that are loading, or hang. A server's processes share a run directory, so one that reports leads to the
others. A pid alone does not identify a process, because every container and host has its own; role, index and start
time go with it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TextIO

import msgspec
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from penstock.protocol.errors import ConfigError, LinkError
from penstock.services.commands.client import DEFAULT_URL, Client, first_key, refusal
from penstock.services.commands.local import companions, local_processes
from penstock.services.supervisor.options import Effective
from penstock.services.supervisor.process import ExitCode

SHORTEST = 0.1  # seconds between snapshots
MEBIBYTE = 1 << 20
WIDTH = 100  # columns where the output is no terminal
NARROW = 76  # columns; with fewer the figures are not in a table
ENGINE = "penstock_engine_"
FIRST, GAP = "penstock_time_to_first_token_seconds", "penstock_inter_token_latency_seconds"
LAG, PART = "penstock_loop_lag_seconds", "penstock_step_part_seconds"
PARTS = ("plan", "encode", "launch", "mask", "wait", "device", "draft", "apply", "deliver")  # in their order
PERCENTILES = (50, 99)
Series = Mapping[tuple[str, tuple[tuple[str, str], ...]], float]


class Snapshot(msgspec.Struct, frozen=True):
    """A server at one moment: /health, and every sample of /metrics by its name and labels."""

    time: float  # monotonic seconds
    health: dict[str, Any]
    samples: Series

    def values(self, name: str) -> list[float]:
        """A name's samples, whatever their labels."""
        return [value for (sample, _), value in self.samples.items() if sample == name]

    def total(self, name: str) -> float:
        return sum(self.values(name))

    def by(self, name: str, *labels: str) -> dict[tuple[str, ...], float]:
        """Sums of a name's samples by the values of these labels."""
        found: dict[tuple[str, ...], float] = {}
        for (sample, pairs), value in self.samples.items():
            if sample == name:
                known = dict(pairs)
                key = tuple(known.get(label, "") for label in labels)
                found[key] = found.get(key, 0.0) + value
        return found

    def buckets(self, name: str, **wanted: str) -> dict[float, float]:
        """A histogram's cumulative counts by upper bound, summed over the series with these labels."""
        found: dict[float, float] = {}
        pairs = set(wanted.items())
        for (sample, labels), value in self.samples.items():
            if sample == f"{name}_bucket" and pairs <= set(labels):
                bound = float(dict(labels)["le"])
                found[bound] = found.get(bound, 0.0) + value
        return dict(sorted(found.items()))


class Process(msgspec.Struct, frozen=True):
    """A process of a server as it reports itself, or, with `told` false, as /proc has it."""

    role: str
    index: str
    pid: int
    resident_bytes: int
    told: bool = False
    cores: float = 0.0  # processors in use since the last snapshot
    lag_ms: float = 0.0  # 99th percentile of its event loop's delay
    queued: int = 0  # messages and rows waiting for a link
    starts: int = 1  # since its last orderly end


class ServerStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """The displayed figures. Rates are over the time between two snapshots, 0 in the first; times are milliseconds."""

    model: str
    status: str
    ready: bool
    version: str
    running: int
    waiting: int
    reasons: dict[str, int]  # waiting requests of all processes, by reason
    kv_used: float  # share of the blocks
    kv_cached: float  # share that is idle and holds a cached prefix
    kv_host: float | None  # share of the host memory for blocks that holds some; None: there is no such memory
    kv_disk: float | None  # the same of the disk
    prompt_rate: float  # tokens per second
    output_rate: float
    step_rate: float
    step_ms: float  # of a replica
    parts_ms: dict[str, float]  # mean, by part of a step
    idle: float  # share of the time without a step on a device
    request_rate: float
    preemptions: int
    epoch: int  # the latest
    first_token_ms: dict[str, float]
    inter_token_ms: dict[str, float]
    parts: dict[str, bool]
    processes: tuple[Process, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="", help=f"server to show [default {DEFAULT_URL}]")
    parser.add_argument(
        "--port", default="", metavar="N", dest="local_port", help="its port, where it runs on this machine"
    )
    parser.add_argument("--interval", default="1", metavar="SECONDS", help="between updates [default 1]")
    parser.add_argument("--once", action="store_true", help="print the state over one interval, and exit")
    parser.add_argument("--json", action="store_true", help="with --once: one JSON object")


def command(namespace: argparse.Namespace, effective: Effective) -> int:
    """Show the server until q or Ctrl-C, or once. 1 if it is not ready.

    Raises ConfigError, LinkError when it cannot be reached at first, RequestError when it refuses the key.
    """
    interval = seconds(namespace.interval)
    if namespace.json and not namespace.once:
        raise ConfigError("--json", None, "it goes with --once")
    key = first_key(effective)
    run_dir = os.path.abspath(effective.config.run.run_dir) if effective.config.run.run_dir else ""
    client = Client(url_of(namespace.url, namespace.local_port), key)
    before = snapshot(client)
    if namespace.once:
        select.select([], [], [], interval)
        after = snapshot(client)
        return show(view(before, after, silent_processes(after, run_dir)), sys.stdout, as_json=namespace.json)
    return watch(client, before, interval, run_dir)


def url_of(url: str, port: str) -> str:
    """The server's URL. Raises ConfigError for a wrong port, and for both options."""
    if not port:
        return url or DEFAULT_URL
    if url:
        raise ConfigError("--port", port, f"--url names a server too: {url}")
    if not (port.isdecimal() and 0 < int(port) < 1 << 16):
        raise ConfigError("--port", port, "it must be a whole number between 1 and 65535")
    return f"http://127.0.0.1:{port}"


def seconds(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not SHORTEST <= found <= 3600.0:
        raise ConfigError("--interval", text, f"it must be between {SHORTEST} and 3600 seconds")
    return found


def watch(client: Client, before: Snapshot, interval: float, run_dir: str) -> int:
    """Show one view after another. The key q and Ctrl-C are the orderly ends."""
    console = Console()
    shown = view(before, before, silent_processes(before, run_dir))
    first = drawn(shown, console.width)
    with (
        contextlib.suppress(KeyboardInterrupt),
        keyboard(sys.stdin) as keys,
        Live(first, console=console, screen=console.is_terminal, auto_refresh=False) as live,
    ):
        while not pressed(keys, b"q", interval):
            try:
                after = snapshot(client)
            except LinkError as error:
                live.update(Group(drawn(shown, console.width), Text(f"\n{error}", style="red")), refresh=True)
                continue
            shown = view(before, after, silent_processes(after, run_dir))
            live.update(drawn(shown, console.width), refresh=True)
            before = after
    return ExitCode.ORDERLY


@contextlib.contextmanager
def keyboard(terminal: TextIO) -> Iterator[list[int]]:
    """The terminal's descriptor, which gives keys as they are pressed, in a list; none where it is no terminal."""
    if not terminal.isatty():
        yield []
        return
    descriptor = terminal.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    try:
        yield [descriptor]
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def pressed(keys: list[int], key: bytes, seconds: float) -> bool:
    """Wait for so long; whether the key was pressed. `keys` loses a descriptor that has ended."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        for descriptor in select.select(keys, [], [], left)[0]:
            typed = os.read(descriptor, 64)
            if key in typed:
                return True
            if not typed:
                keys.remove(descriptor)
    return False


def show(found: ServerStatistics, out: TextIO, *, as_json: bool) -> int:
    if as_json:
        print(msgspec.json.encode(found).decode(), file=out)
    else:
        console = Console(file=out, width=None if out.isatty() else WIDTH)
        console.print(drawn(found, console.width))
    return ExitCode.ORDERLY if found.ready else ExitCode.FAILED


def snapshot(client: Client) -> Snapshot:
    """Raises LinkError, RequestError. A server that is not ready answers as well."""
    health = client.ask("/health")
    if health.status not in (200, 503):
        raise refusal(health)
    samples = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(client.text("/metrics"))
        for sample in family.samples
    }
    return Snapshot(time.monotonic(), health.body, samples)


def view(before: Snapshot, after: Snapshot, found: tuple[Process, ...]) -> ServerStatistics:
    """Two snapshots as one view. A total that went down is that of a restarted process, and has no rate."""
    passed = after.time - before.time

    def rate(name: str) -> float:
        more = after.total(name) - before.total(name)
        return more / passed if passed > 0 and more > 0 else 0.0

    blocks = after.total(f"{ENGINE}blocks")
    idle, free = after.total(f"{ENGINE}blocks_idle"), after.total(f"{ENGINE}blocks_free")
    steps = rate(f"{ENGINE}step_total")
    replicas = len(after.values(f"{ENGINE}step_total"))
    idle_shares = after.values(f"{ENGINE}device_idle_ratio")
    running, host = after.total(f"{ENGINE}running"), after.total(f"{ENGINE}host_blocks")
    disk = after.total(f"{ENGINE}disk_blocks")
    parts = after.health.get("parts") or {}
    tokenizer = parts.get("tokenizer") or {}
    return ServerStatistics(
        model=models_of(after.health),
        status="sleeping" if after.total(f"{ENGINE}sleeping") == replicas > 0 else str(after.health.get("status", "")),
        ready=bool(after.health.get("ready")),
        version=str(after.health.get("version", "")),
        running=int(running),
        waiting=int(after.total(f"{ENGINE}waiting")),
        reasons=reasons_of(after),
        kv_used=1 - (idle + free) / blocks if blocks else 0.0,
        kv_cached=idle / blocks if blocks else 0.0,
        kv_host=after.total(f"{ENGINE}host_blocks_held") / host if host else None,
        kv_disk=after.total(f"{ENGINE}disk_blocks_held") / disk if disk else None,
        prompt_rate=rate(f"{ENGINE}prompt_tokens_total"),
        output_rate=rate(f"{ENGINE}output_tokens_total"),
        step_rate=steps,
        step_ms=1000 * replicas / steps if steps and running and before.total(f"{ENGINE}running") else 0.0,
        parts_ms=parts_of(before, after),
        idle=sum(idle_shares) / len(idle_shares) if idle_shares else 0.0,
        request_rate=rate(f"{ENGINE}finished_total"),
        preemptions=int(after.total(f"{ENGINE}preemptions_total")),
        epoch=int(max(after.values(f"{ENGINE}epoch"), default=0.0)),
        first_token_ms=percentiles(before.buckets(FIRST), after.buckets(FIRST)),
        inter_token_ms=percentiles(before.buckets(GAP), after.buckets(GAP)),
        parts={
            f"tokenizer {tokenizer.get('connected', 0)} of {tokenizer.get('configured', 0)}":
                tokenizer.get("connected", 0) == tokenizer.get("configured", 0),
            "scheduler": bool(parts.get("scheduler")),
            "executor": bool(parts.get("executor")),
        },
        processes=merged(reported_processes(before, after), found),
    )  # fmt: skip


def models_of(health: Mapping[str, Any]) -> str:
    """The model's name, or those of several with their states."""
    several = health.get("models") or ()
    return ", ".join(f"{each['model']} {each['state']}" for each in several) or str(health.get("model", ""))


def reasons_of(after: Snapshot) -> dict[str, int]:
    """The number of waiting requests, by reason."""
    found = after.by("penstock_waiting_requests", "reason")
    return {reason: int(count) for (reason,), count in sorted(found.items()) if count}


def parts_of(before: Snapshot, after: Snapshot) -> dict[str, float]:
    """Mean milliseconds of each part of the steps between two snapshots; without any, of all steps."""
    sums, counts = after.by(f"{PART}_sum", "part"), after.by(f"{PART}_count", "part")
    old_sums, old_counts = before.by(f"{PART}_sum", "part"), before.by(f"{PART}_count", "part")
    found = {}
    for part in PARTS:
        total, count = sums.get((part,), 0.0), counts.get((part,), 0.0)
        fresh = count - old_counts.get((part,), 0.0)
        if fresh > 0:
            total, count = total - old_sums.get((part,), 0.0), fresh
        if count > 0 and total > 0:
            found[part] = 1000 * total / count
    return found


def reported_processes(before: Snapshot, after: Snapshot) -> tuple[Process, ...]:
    """The processes that report at /metrics."""
    passed = after.time - before.time
    cpu = "penstock_process_cpu_seconds_total"
    names = "role", "index", "model_name"
    then = before.by(cpu, *names)
    memory = after.by("penstock_process_resident_memory_bytes", *names)
    queued = after.by("penstock_link_queued_messages", *names)
    starts = after.by("penstock_process_starts_total", *names)
    pids = {key[:3]: int(key[3]) for key in after.by("penstock_process_info", *names, "pid")}
    found = []
    for key, seconds in after.by(cpu, *names).items():
        role, index, model = key
        used = max(0.0, seconds - then.get(key, seconds))
        of_model = {"model_name": model} if model else {}  # of several
        lags = [look.buckets(LAG, role=role, index=index, **of_model) for look in (before, after)]
        found.append(
            Process(
                f"{model}/{role}" if model else role, index, pids.get(key, 0), int(memory.get(key, 0)), True,
                cores=used / passed if passed > 0 else 0.0,
                lag_ms=percentiles(*lags).get("p99", 0.0),
                queued=int(queued.get(key, 0)),
                starts=int(starts.get(key, 0)),
            )
        )  # fmt: skip
    return tuple(found)


def merged(reported: tuple[Process, ...], local: tuple[Process, ...]) -> tuple[Process, ...]:
    """Every process once, as it reports itself if it does."""
    by_name = {(process.role, process.index, process.pid): process for process in (*local, *reported)}
    return tuple(by_name[name] for name in sorted(by_name))


def percentiles(before: Mapping[float, float], after: Mapping[float, float]) -> dict[str, float]:
    """Percentiles of the new observations in milliseconds, interpolated within a bucket as by Prometheus'
    histogram_quantile; empty without any."""
    counts = [(bound, after[bound] - before.get(bound, 0.0)) for bound in sorted(after)]
    if not counts or counts[-1][1] <= 0:
        counts = sorted(after.items())  # nothing new: over all observations
    if not counts or counts[-1][1] <= 0:
        return {}
    return {f"p{percent}": 1000 * quantile(counts, percent / 100) for percent in PERCENTILES}


def quantile(counts: list[tuple[float, float]], share: float) -> float:
    wanted = share * counts[-1][1]
    low, below = 0.0, 0.0
    for bound, count in counts:
        if count >= wanted:
            if bound == float("inf"):
                return low
            return low + (bound - low) * ((wanted - below) / (count - below) if count > below else 1.0)
        low, below = bound, count
    return low


def silent_processes(after: Snapshot, run_dir: str) -> tuple[Process, ...]:
    """The server's processes on this machine: those of `run_dir` if it is given, else those of the same run directory
    as a reported one. None for a server elsewhere."""
    names = "role", "index", "model_name"
    starts = after.by("penstock_process_start_time_seconds", *names)
    reported = {
        (f"{model}/{role}" if model else role, index, int(pid)): starts.get((role, index, model), 0.0)
        for role, index, model, pid in after.by("penstock_process_info", *names, "pid")
    }
    found = local_processes()
    here = [one for one in found if one.run_dir == run_dir] if run_dir else companions(found, reported)
    return tuple(Process(one.role, one.index, one.pid, one.resident_bytes) for one in here)


def drawn(found: ServerStatistics, width: int = WIDTH) -> Group:
    """The view for a terminal of so many columns."""
    state = Text(found.status, style="green" if found.ready else "red")
    head = Text.assemble(("penstock ", "bold"), found.version, "  ", (found.model, "bold"), "  ", state)
    rows = [
        ("requests", f"{found.running} running", f"{found.waiting} waiting", f"{found.request_rate:,.1f} finished/s",
         f"{found.preemptions} preempted"),
        ("tokens", f"{found.output_rate:,.0f} out/s", f"{found.prompt_rate:,.0f} in/s"),
        ("KV cache", f"{found.kv_used:.0%} used", f"{found.kv_cached:.0%} cached",
         *([] if found.kv_host is None else [f"host memory {found.kv_host:.0%} filled"]),
         *([] if found.kv_disk is None else [f"disk {found.kv_disk:.0%} filled"])),
        ("steps", f"{found.step_rate:,.0f}/s", f"{found.step_ms:.2f} ms" if found.step_ms else "",
         f"device {1 - found.idle:.0%} busy", f"epoch {found.epoch}"),
    ]  # fmt: skip
    for title, times in (("first token", found.first_token_ms), ("between tokens", found.inter_token_ms)):
        rows.append((title, *(f"{name} {value:,.1f} ms" for name, value in times.items())))
    parts = Text("  ").join(
        Text(("● " if fine else "○ ") + name, style="green" if fine else "red") for name, fine in found.parts.items()
    )
    lines: list[Any] = [head, "", table(rows, width)]
    for title, values in (
        ("waiting for", {reason: str(count) for reason, count in found.reasons.items()}),
        ("step, ms", {part: f"{value:.2f}" for part, value in found.parts_ms.items()}),
    ):
        if values:
            lines.append(table([("", *values.values())], width, (title, *values)))
    lines += ["", parts]
    if found.processes:
        titles = ("process", "pid", "memory", "cores", "loop lag", "queued", "starts")
        lines += ["", table([process_row(process) for process in found.processes], width, titles)]
    return Group(*lines)


def table(rows: Sequence[Sequence[str]], width: int, titles: Sequence[str] = ()) -> RenderableType:
    """Rows below their titles. On a narrow terminal each row is one line that goes on in the next, so that no figure
    is cut."""
    if width < NARROW:
        names = [f"{title} " if place else "" for place, title in enumerate(titles)] or [""] * len(max(rows, key=len))
        first = f"{titles[0]}  " if titles and not rows[0][0] else ""
        cells = [[name + cell for name, cell in zip(names, row, strict=False) if cell] for row in rows]
        return Group(*(Text(first + "  ".join(row)) for row in cells))
    if not titles:
        figures = Table.grid(padding=(0, 3))
    else:
        figures = Table(box=None, pad_edge=False, header_style="dim")
        for place, title in enumerate(titles):
            figures.add_column(title, justify="right" if place else "left")
    for row in rows:
        figures.add_row(*row)
    return figures


def process_row(process: Process) -> tuple[str, ...]:
    """A row of the table."""
    name, memory = f"{process.role}-{process.index}", f"{process.resident_bytes / MEBIBYTE:,.0f} MiB"
    if not process.told:
        return name, str(process.pid), memory, "", "", "", "silent"
    lag = f"{process.lag_ms:,.1f} ms"
    return name, str(process.pid), memory, f"{process.cores:.2f}", lag, str(process.queued), str(process.starts)
