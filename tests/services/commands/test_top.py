"""`penstock top`: what it makes of two looks, and a running server."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import subprocess
import sys
import termios
import time

import pytest
from rich.console import Console

from penstock.protocol.errors import ConfigError
from penstock.services.commands import top
from penstock.services.commands.top import Snapshot, drawn, overview, parts_of, percentiles, processes, seconds
from tests.e2e.server import Server
from tests.services.commands.run import penstock

HEALTH = {
    "model": "m", "status": "ok", "ready": True, "version": "0.1.0",
    "parts": {"tokenizer": {"connected": 1, "configured": 2}, "scheduler": True, "executor": False},
}  # fmt: skip
GAUGES = {"running": 3.0, "waiting": 2.0, "blocks": 100.0, "blocks_free": 10.0, "blocks_idle": 30.0, "epoch": 7.0}
TOTALS = {"step": 50.0, "prompt_tokens": 100.0, "output_tokens": 200.0, "finished": 4.0, "preemptions": 1.0}
GAP = "penstock_inter_token_latency_seconds"


def looked(time: float, factor: float = 1.0, **more: float) -> Snapshot:
    samples: dict[str, list[tuple[dict[str, str], float]]] = {}
    samples |= {f"penstock_engine_{name}": [({}, value)] for name, value in GAUGES.items()}
    samples |= {f"penstock_engine_{name}_total": [({}, value * factor)] for name, value in TOTALS.items()}
    samples[f"{GAP}_bucket"] = [
        ({"api": api, "le": bound.removeprefix("le").replace("_", ".")}, count / 2)
        for bound, count in more.items()
        for api in ("0", "1")
    ]
    return Snapshot(time, HEALTH, samples)


def text_of(before: Snapshot, after: Snapshot, columns: int = 1000) -> str:
    out = io.StringIO()
    Console(file=out, width=columns).print(drawn(before, after, columns))
    return out.getvalue()


def cells(before: Snapshot, after: Snapshot) -> dict[str, tuple[str, ...]]:
    return {row[0]: row[1:] for row in overview(before, after)}


def test_rates_are_of_the_time_between() -> None:
    found = cells(looked(10.0), looked(12.0, 3.0))
    assert found["requests"] == ("3 running", "2 waiting", "4.0 finished/s", "3 preempted")
    assert found["tokens"] == ("200 out/s", "100 in/s")
    assert found["KV cache"] == ("60% used", "30% cached")
    assert found["steps"] == ("50/s", "20.00 ms", "device 100% busy", "epoch 7")
    assert "● scheduler" in (text := text_of(looked(10.0), looked(12.0, 3.0)))
    assert "○ tokenizer 1 of 2" in text
    assert "○ executor" in text


PROCESSES = {
    "penstock_process_cpu_seconds_total": 10.0, "penstock_process_resident_memory_bytes": float(3 << 20),
    "penstock_link_queued_messages": 4.0, "penstock_process_starts_total": 2.0,
}  # fmt: skip


def test_a_server_that_sleeps_says_so() -> None:
    look = looked(10.0)
    samples = dict(look.samples) | {"penstock_engine_sleeping": [({}, 0.0)]}
    assert " ok" in text_of(look, look._replace(samples=samples)).splitlines()[0]
    samples["penstock_engine_sleeping"] = [({}, 1.0)]
    assert "sleeping" in text_of(look, look._replace(samples=samples)).splitlines()[0]


def test_of_several_models_each_has_its_state() -> None:
    models = [{"model": "a", "state": "loaded"}, {"model": "b", "state": "asleep"}]
    look = looked(10.0)._replace(health=HEALTH | {"models": models})
    assert "a loaded, b asleep" in text_of(look, look)


def with_processes(look: Snapshot, seconds: float = 0.0) -> Snapshot:
    """Two processes that tell of themselves, after so many more seconds of processor time."""
    samples = {name: list(found) for name, found in look.samples.items()}

    def add(name: str, value: float, **labels: str) -> None:
        samples.setdefault(f"penstock_{name}", []).append((labels, value))

    for role, pid in (("api", "4194303"), ("executor", "8")):
        of = {"index": "0", "role": role}
        for name, value in PROCESSES.items():
            add(name.removeprefix("penstock_"), value + seconds * name.endswith("cpu_seconds_total"), **of)
        add("process_info", 1.0, incarnation="1", pid=pid, **of)
        for bound, count in (("0.001", 90.0), ("0.1", 100.0), ("+Inf", 100.0)):
            add("loop_lag_seconds_bucket", count, le=bound, **of)
    for part, total, count in (("plan", 0.02, 10.0), ("device", 0.5 + seconds, 20.0 + seconds)):
        add("step_part_seconds_sum", total, index="0", part=part, role="scheduler")
        add("step_part_seconds_count", count, index="0", part=part, role="scheduler")
    mine = ("scheduler", "slot", 3.0), ("scheduler", "grammar", 1.0)
    theirs = ("tokenizer", "grammar", 2.0), ("tokenizer", "text", 0.0)
    for role, reason, number in (*mine, *theirs):
        add("waiting_requests", number, index="0", reason=reason, role=role)
    return look._replace(samples=samples)


def test_processes_steps_and_reasons() -> None:
    before, after = with_processes(looked(10.0)), with_processes(looked(12.0), 1.0)
    assert parts_of(before, after) == {"plan": "2.00", "device": "1000.00"}
    assert processes(before, after) == [
        ("api-0", "4194303", "3 MiB", "0.50", "90.1 ms", "4", "2"),
        ("executor-0", "8", "3 MiB", "0.50", "90.1 ms", "4", "2"),
    ]
    waiting = text_of(before, after).split("waiting for")[1].split("step, ms")[0].split()
    assert waiting == ["grammar", "slot", "3", "3"]


def test_what_was_started_again_has_no_rate() -> None:
    assert cells(looked(10.0, 5.0), looked(11.0))["tokens"][0] == "0 out/s"
    assert cells(looked(10.0), looked(10.0))["tokens"][0] == "0 out/s"


def test_a_server_that_knows_no_engine_is_shown() -> None:
    bare = Snapshot(1.0, {"status": "the engine's heartbeat is missing", "ready": False}, {})
    found = cells(bare, bare)
    assert (found["KV cache"], found["first token"]) == (("0% used", "0% cached"), ())
    assert "heartbeat is missing" in text_of(bare, bare)


def test_percentiles_are_of_what_is_new() -> None:
    before, after = looked(1.0, le0_01=100, le0_02=100, leinf=100), looked(2.0, le0_01=100, le0_02=200, leinf=200)
    assert dict(percentiles(before, after, GAP))[50] == pytest.approx(0.015)
    assert dict(percentiles(before, before, GAP))[50] == pytest.approx(0.005)  # nothing new: of all
    assert percentiles(looked(1.0), looked(1.0), GAP) == []
    unbounded = looked(1.0, le0_01=0.0, leinf=5.0)
    assert percentiles(looked(1.0), unbounded, GAP) == [(50, 0.01), (99, 0.01)]  # no bound above is known


def test_replicas_are_one_server() -> None:
    """Totals are sums, what each has is a mean."""
    looks = []
    for look in (looked(10.0), looked(12.0, 3.0)):
        samples = {name: [({"replica": replica}, value) for _, value in found for replica in ("0", "1")]
                   for name, found in look.samples.items()}  # fmt: skip
        samples["penstock_engine_device_idle_ratio"] = [({"replica": str(n)}, 0.5 * n) for n in (0, 1)]
        looks.append(look._replace(samples=samples))
    found = cells(*looks)
    assert (found["tokens"][0], found["requests"][0]) == ("400 out/s", "6 running")
    assert found["steps"] == ("100/s", "20.00 ms", "device 75% busy", "epoch 7")


@pytest.mark.parametrize("text", ["0", "-1", "nan", "soon", "1e9"])
def test_an_interval_that_cannot_be(text: str) -> None:
    with pytest.raises(ConfigError, match="--interval"):
        seconds(text)


def test_once(server: Server) -> None:
    client = top.Client(server.url, "open")
    while top.snapshot(client).samples["penstock_engine_running"][0][1] > 0:  # of a test before; told once a second
        select.select([], [], [], 0.05)
    ran = penstock("top", "--url", server.url, "--once", "--interval", "0.1")
    assert ran.returncode == 0, ran.stderr
    assert "penstock-demo" in ran.stdout
    assert "● executor" in ran.stdout
    assert all(word in ran.stdout for word in ("api-0", "tokenizer-0", "scheduler-0", "executor-0", "loop lag"))
    assert "0 running" in ran.stdout


def test_what_is_refused(server: Server) -> None:
    locked = penstock("top", "--url", server.url, "--once", key="wrong")
    assert locked.returncode == 1
    assert locked.stderr.startswith("penstock: ")
    assert penstock("top", "--url", "http://127.0.0.1:1", "--once").returncode == 5


def test_it_is_shown_again_and_again(server: Server) -> None:
    """Until Ctrl-C; a pipe gets every view."""
    views = 0

    def interrupted(*_: object) -> bool:
        nonlocal views
        views += 1
        if views == 3:
            raise KeyboardInterrupt
        return False

    patch = pytest.MonkeyPatch()
    client = top.Client(server.url, "open")
    with patch.context() as patched:
        patched.setattr(top, "pressed", interrupted)
        assert top.watch(client, top.snapshot(client), 1.0) == 0
    assert views == 3


def test_the_key_q_ends_it(server: Server) -> None:
    """On a terminal, which is then as it was; the server is named by its port."""
    master, slave = pty.openpty()
    before = termios.tcgetattr(slave)
    port = server.url.rpartition(":")[2]
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock", "top", "--port", port, "--interval", "0.1"],
        stdin=slave, stdout=slave, stderr=slave, env={**os.environ, "PENSTOCK_API_KEY": "open", "TERM": "xterm"},
    )  # fmt: skip
    shown = b""
    while b"executor-0" not in shown:
        shown += os.read(master, 65536)
    os.write(master, b"xq")
    ended = os.pidfd_open(process.pid)
    while master in select.select([master, ended], [], [], 60)[0]:
        os.read(master, 65536)  # what it still shows must not block it
    assert process.wait(60) == 0
    assert termios.tcgetattr(slave) == before
    os.close(ended)
    os.close(master)
    os.close(slave)


def test_other_keys_and_the_end_of_the_terminal_do_not_hurry_it() -> None:
    read, write = os.pipe()
    os.write(write, b"x")
    os.close(write)
    keys = [read]
    began = time.monotonic()
    assert not top.pressed(keys, b"q", 0.05)
    assert time.monotonic() - began >= 0.05
    assert keys == []
    os.close(read)


@pytest.mark.parametrize(
    ("url", "port", "found"),
    [("", "", "http://127.0.0.1:8000"), ("", "9", "http://127.0.0.1:9"), ("http://a:1", "", "http://a:1")],
)
def test_the_server_is_named_by_url_or_port(url: str, port: str, found: str) -> None:
    assert top.url_of(url, port) == found


@pytest.mark.parametrize(("url", "port"), [("", "x"), ("", "0"), ("", "65536"), ("http://a", "1")])
def test_a_wrong_port_is_refused(url: str, port: str) -> None:
    with pytest.raises(ConfigError, match="--port"):
        top.url_of(url, port)


@pytest.mark.parametrize("width", [20, 30, 40, 60, 80, 120])
def test_no_number_is_cut_at_any_width(width: int) -> None:
    looks = with_processes(looked(10.0)), with_processes(looked(12.0), 1.0)
    number = re.compile(r"\d[\d.,]*")
    wide, narrow = text_of(*looks), text_of(*looks, width)
    assert sorted(number.findall(narrow)) == sorted(number.findall(wide))
    assert max(len(line.rstrip()) for line in narrow.splitlines()) <= width
