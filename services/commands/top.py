"""`penstock top`: the state of a running server, from its /health and /metrics, once or continuously."""

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
from typing import Any, NamedTuple, TextIO

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from penstock.protocol.errors import ConfigError, LinkError
from penstock.services.commands.client import DEFAULT_URL, Client, first_key, refusal
from penstock.services.supervisor.options import Effective
from penstock.services.supervisor.process import ExitCode

SHORTEST = 0.1  # seconds between snapshots
WIDTH = 100  # columns where the output is no terminal
NARROW = 76  # columns; with fewer the figures are not in a table
ENGINE = "penstock_engine_"
TIMES = (("first token", "penstock_time_to_first_token_seconds"),
         ("between tokens", "penstock_inter_token_latency_seconds"))  # fmt: skip
PARTS = ("plan", "encode", "launch", "mask", "wait", "device", "draft", "apply", "deliver")  # of a step, in their order
PERCENTILES = (50, 99)
PROCESS = ("role", "index", "model_name")  # the labels that tell processes apart
TITLES = ("process", "pid", "memory", "cores", "loop lag", "queued", "starts")
Rows = list[tuple[str, ...]]


class Snapshot(NamedTuple):
    """A server at one moment: /health, and the labels and values of every sample of /metrics by its name."""

    time: float  # monotonic seconds
    health: dict[str, Any]
    samples: Mapping[str, Sequence[tuple[Mapping[str, str], float]]]

    def values(self, name: str) -> list[float]:
        """A name's samples, whatever their labels."""
        return [value for _, value in self.samples.get(name, ())]

    def total(self, name: str) -> float:
        return sum(self.values(name))

    def by(self, name: str, *labels: str) -> dict[tuple[str, ...], float]:
        """Sums of a name's samples by the values of these labels."""
        found: dict[tuple[str, ...], float] = {}
        for known, value in self.samples.get(name, ()):
            key = tuple(known.get(label, "") for label in labels)
            found[key] = found.get(key, 0.0) + value
        return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="", help=f"server to show [default {DEFAULT_URL}]")
    parser.add_argument(
        "--port", default="", metavar="N", dest="local_port", help="its port, where it runs on this machine"
    )
    parser.add_argument("--interval", default="1", metavar="SECONDS", help="between updates [default 1]")
    parser.add_argument("--once", action="store_true", help="print the state over one interval, and exit")


def command(namespace: argparse.Namespace, effective: Effective) -> int:
    """Show the server until q or Ctrl-C, or once. 1 if it is not ready.

    Raises ConfigError, LinkError when it cannot be reached at first, RequestError when it refuses the key.
    """
    interval = seconds(namespace.interval)
    client = Client(url_of(namespace.url, namespace.local_port), first_key(effective))
    before = snapshot(client)
    if not namespace.once:
        return watch(client, before, interval)
    select.select([], [], [], interval)
    after = snapshot(client)
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    console.print(drawn(before, after, console.width))
    return ExitCode.ORDERLY if after.health.get("ready") else ExitCode.FAILED


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


def watch(client: Client, before: Snapshot, interval: float) -> int:
    """Show one view after another. The key q and Ctrl-C are the orderly ends."""
    console = Console()
    shown = drawn(before, before, console.width)
    with (
        contextlib.suppress(KeyboardInterrupt),
        keyboard(sys.stdin) as keys,
        Live(shown, console=console, screen=console.is_terminal, auto_refresh=False) as live,
    ):
        while not pressed(keys, b"q", interval):
            try:
                after = snapshot(client)
            except LinkError as error:
                live.update(Group(shown, Text(f"\n{error}", style="red")), refresh=True)
                continue
            shown = drawn(before, after, console.width)
            live.update(shown, refresh=True)
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


def snapshot(client: Client) -> Snapshot:
    """Raises LinkError, RequestError. A server that is not ready answers as well."""
    health = client.ask("/health")
    if health.status not in (200, 503):
        raise refusal(health)
    samples: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    for family in text_string_to_metric_families(client.text("/metrics")):
        for sample in family.samples:
            samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    return Snapshot(time.monotonic(), health.body, samples)


def drawn(before: Snapshot, after: Snapshot, width: int = WIDTH) -> Group:
    """Two snapshots as one view, for a terminal of so many columns."""
    health = after.health
    sleeping = after.total(f"{ENGINE}sleeping") == len(after.values(f"{ENGINE}step_total")) > 0
    status = "sleeping" if sleeping else str(health.get("status", ""))
    several = ", ".join(f"{each['model']} {each['state']}" for each in health.get("models") or ())
    head = Text.assemble(
        ("penstock ", "bold"), str(health.get("version", "")), "  ", (several or str(health.get("model", "")), "bold"),
        "  ", Text(status, style="green" if health.get("ready") else "red"),
    )  # fmt: skip
    lines: list[RenderableType] = [head, "", table(overview(before, after), width)]
    reasons = after.by("penstock_waiting_requests", "reason")
    waiting = {reason: f"{count:.0f}" for (reason,), count in sorted(reasons.items()) if count}
    for title, values in (("waiting for", waiting), ("step, ms", parts_of(before, after))):
        if values:
            lines.append(table([("", *values.values())], width, (title, *values)))
    lines += ["", health_of(health.get("parts") or {})]
    if rows := processes(before, after):
        lines += ["", table(rows, width, TITLES)]
    return Group(*lines)


def health_of(parts: Mapping[str, Any]) -> Text:
    """Which of the server's parts are there."""
    tokenizers = parts.get("tokenizer") or {}
    connected, configured = tokenizers.get("connected", 0), tokenizers.get("configured", 0)
    found = {f"tokenizer {connected} of {configured}": connected == configured}
    found |= {name: bool(parts.get(name)) for name in ("scheduler", "executor")}
    return Text("  ").join(
        Text(("● " if fine else "○ ") + name, style="green" if fine else "red") for name, fine in found.items()
    )


def overview(before: Snapshot, after: Snapshot) -> Rows:
    """The engine's figures. A total that went down is that of a restarted process, and has no rate."""
    passed = after.time - before.time

    def rate(name: str) -> float:
        more = after.total(ENGINE + name) - before.total(ENGINE + name)
        return more / passed if passed > 0 and more > 0 else 0.0

    def total(name: str) -> float:
        return after.total(ENGINE + name)

    blocks = total("blocks") or float("inf")
    filled = [
        f"{where} {total(held) / total(all_blocks):.0%} filled"
        for where, held, all_blocks in (("host memory", "host_blocks_held", "host_blocks"),
                                        ("disk", "disk_blocks_held", "disk_blocks"))
        if total(all_blocks)
    ]  # fmt: skip
    used = 1 - (total("blocks_idle") + total("blocks_free")) / blocks if total("blocks") else 0.0
    steps, idle = rate("step_total"), after.values(f"{ENGINE}device_idle_ratio")
    running = steps and total("running") and before.total(f"{ENGINE}running")
    each = 1000 * len(after.values(f"{ENGINE}step_total")) / steps if running else 0.0
    busy = 1 - sum(idle) / len(idle) if idle else 1.0
    return [
        ("requests", f"{total('running'):.0f} running", f"{total('waiting'):.0f} waiting",
         f"{rate('finished_total'):,.1f} finished/s", f"{total('preemptions_total'):.0f} preempted"),
        ("tokens", f"{rate('output_tokens_total'):,.0f} out/s", f"{rate('prompt_tokens_total'):,.0f} in/s"),
        ("KV cache", f"{used:.0%} used", f"{total('blocks_idle') / blocks:.0%} cached", *filled),
        ("steps", f"{steps:,.0f}/s", f"{each:.2f} ms" if each else "", f"device {busy:.0%} busy",
         f"epoch {max(after.values(f'{ENGINE}epoch'), default=0.0):.0f}"),
        *((title, *(f"p{percent} {1000 * value:,.1f} ms" for percent, value in percentiles(before, after, name)))
          for title, name in TIMES),
    ]  # fmt: skip


def parts_of(before: Snapshot, after: Snapshot) -> dict[str, str]:
    """Mean milliseconds of each part of the steps between two snapshots; without any, of all steps."""
    sums, counts = ("penstock_step_part_seconds_sum", "part"), ("penstock_step_part_seconds_count", "part")
    found = {}
    for part in PARTS:
        key = (part,)
        total, count = after.by(*sums).get(key, 0.0), after.by(*counts).get(key, 0.0)
        if (fresh := count - before.by(*counts).get(key, 0.0)) > 0:
            total, count = total - before.by(*sums).get(key, 0.0), fresh
        if count > 0 and total > 0:
            found[part] = f"{1000 * total / count:.2f}"
    return found


def processes(before: Snapshot, after: Snapshot) -> Rows:
    """A row for each process that reports at /metrics, wherever it runs."""
    passed = after.time - before.time
    cpu = "penstock_process_cpu_seconds_total"
    then = before.by(cpu, *PROCESS)
    memory = after.by("penstock_process_resident_memory_bytes", *PROCESS)
    queued = after.by("penstock_link_queued_messages", *PROCESS)
    starts = after.by("penstock_process_starts_total", *PROCESS)
    pids = {key[:3]: key[3] for key in after.by("penstock_process_info", *PROCESS, "pid")}
    rows: Rows = []
    for key, seconds in sorted(after.by(cpu, *PROCESS).items()):
        role, index, model = key
        lag = dict(percentiles(before, after, "penstock_loop_lag_seconds", key)).get(PERCENTILES[-1], 0.0)
        rows.append((
            f"{model}/{role}-{index}" if model else f"{role}-{index}",
            pids.get(key, ""),
            f"{memory.get(key, 0.0) / (1 << 20):,.0f} MiB",
            f"{max(0.0, seconds - then.get(key, seconds)) / passed if passed > 0 else 0.0:.2f}",
            f"{1000 * lag:,.1f} ms",
            f"{queued.get(key, 0.0):.0f}",
            f"{starts.get(key, 0.0):.0f}",
        ))  # fmt: skip
    return rows


def percentiles(
    before: Snapshot, after: Snapshot, name: str, process: tuple[str, ...] | None = None
) -> list[tuple[int, float]]:
    """Percentiles in seconds of a histogram's new observations, or of all if there are none, interpolated within a
    bucket as by Prometheus' histogram_quantile; empty without any. process: of one alone, by its labels."""
    labels = PROCESS if process is not None else ()
    older, newer = (
        {float(key[-1]): count for key, count in look.by(f"{name}_bucket", *labels, "le").items()
         if key[:-1] == (process or ())}
        for look in (before, after)
    )  # fmt: skip
    counts = [(bound, newer[bound] - older.get(bound, 0.0)) for bound in sorted(newer)]
    if not counts or counts[-1][1] <= 0:
        counts = sorted(newer.items())
    if not counts or counts[-1][1] <= 0:
        return []
    return [(percent, quantile(counts, percent / 100)) for percent in PERCENTILES]


def quantile(counts: Sequence[tuple[float, float]], share: float) -> float:
    wanted = share * counts[-1][1]
    low, below = 0.0, 0.0
    for bound, count in counts:
        if count >= wanted:
            if bound == float("inf"):
                return low
            return low + (bound - low) * ((wanted - below) / (count - below) if count > below else 1.0)
        low, below = bound, count
    return low


def table(rows: Rows, width: int, titles: Sequence[str] = ()) -> RenderableType:
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
