"""`penstock top`: what it makes of two looks, and a running server."""

from __future__ import annotations

import io
import json
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
from penstock.services.commands.top import Process, Snapshot, percentiles, seconds, show, view
from tests.e2e.server import Server
from tests.services.commands.run import penstock

HEALTH = {
    "model": "m", "status": "ok", "ready": True, "version": "0.1.0",
    "parts": {"tokenizer": {"connected": 1, "configured": 2}, "scheduler": True, "executor": False},
}  # fmt: skip
GAUGES = {"running": 3.0, "waiting": 2.0, "blocks": 100.0, "blocks_free": 10.0, "blocks_idle": 30.0, "epoch": 7.0}
TOTALS = {"step": 50.0, "prompt_tokens": 100.0, "output_tokens": 200.0, "finished": 4.0, "preemptions": 1.0}
GAP = "penstock_inter_token_latency_seconds_bucket"


def looked(time: float, factor: float = 1.0, **more: float) -> Snapshot:
    samples = {(f"penstock_engine_{name}", ()): value for name, value in GAUGES.items()}
    samples |= {(f"penstock_engine_{name}_total", ()): value * factor for name, value in TOTALS.items()}
    for bound, count in more.items():
        for api in ("0", "1"):
            samples[GAP, (("api", api), ("le", bound.removeprefix("le").replace("_", ".")))] = count / 2
    return Snapshot(time, HEALTH, samples)


def test_rates_are_of_the_time_between() -> None:
    found = view(looked(10.0), looked(12.0, 3.0), ())
    assert (found.output_rate, found.prompt_rate, found.step_rate, found.request_rate) == (200, 100, 50, 4)
    assert found.step_ms == 20.0
    assert (found.running, found.waiting, found.epoch, found.preemptions) == (3, 2, 7, 3)
    assert found.kv_used == pytest.approx(0.6)
    assert found.kv_cached == pytest.approx(0.3)
    assert found.parts == {"tokenizer 1 of 2": False, "scheduler": True, "executor": False}


PROCESSES = {
    "penstock_process_cpu_seconds_total": 10.0, "penstock_process_resident_memory_bytes": float(3 << 20),
    "penstock_link_queued_messages": 4.0, "penstock_process_starts_total": 2.0,
}  # fmt: skip


def test_a_server_that_sleeps_says_so() -> None:
    look = looked(10.0)
    look.samples["penstock_engine_sleeping", ()] = 0.0
    assert view(look, look, ()).status == "ok"
    look.samples["penstock_engine_sleeping", ()] = 1.0
    found = view(look, look, ())
    assert (found.status, found.ready) == ("sleeping", True)


def with_processes(look: Snapshot, seconds: float = 0.0) -> Snapshot:
    """Two processes that tell of themselves, after so many more seconds of processor time."""
    samples = dict(look.samples)
    for role, pid in (("api", "7"), ("executor", "8")):
        of = (("index", "0"), ("role", role))
        for name, value in PROCESSES.items():
            samples[name, of] = value + seconds * name.endswith("cpu_seconds_total")
        samples["penstock_process_info", (("incarnation", "1"), *of[:1], ("pid", pid), *of[1:])] = 1.0
        for bound, count in (("0.001", 90.0), ("0.1", 100.0), ("+Inf", 100.0)):
            samples["penstock_loop_lag_seconds_bucket", (*of[:1], ("le", bound), *of[1:])] = count
    for part, total, count in (("plan", 0.02, 10.0), ("device", 0.5 + seconds, 20.0 + seconds)):
        labels = (("index", "0"), ("part", part), ("role", "scheduler"))
        samples["penstock_step_part_seconds_sum", labels] = total
        samples["penstock_step_part_seconds_count", labels] = count
    mine = ("scheduler", "slot", 3.0), ("scheduler", "grammar", 1.0)
    theirs = ("tokenizer", "grammar", 2.0), ("tokenizer", "text", 0.0)
    for role, reason, number in (*mine, *theirs):
        samples["penstock_waiting_requests", (("index", "0"), ("reason", reason), ("role", role))] = number
    return Snapshot(look.time, look.health, samples)


def test_processes_steps_and_reasons() -> None:
    seen = (Process("api", "0", 7, 1), Process("tokenizer", "0", 9, 5 << 20))
    found = view(with_processes(looked(10.0)), with_processes(looked(12.0), 1.0), seen)
    assert found.reasons == {"grammar": 3, "slot": 3}
    assert found.parts_ms == {"plan": pytest.approx(2.0), "device": pytest.approx(1000.0)}
    api, executor, tokenizer = found.processes
    assert (api.pid, api.cores, api.queued, api.starts, api.resident_bytes) == (7, 0.5, 4, 2, 3 << 20)
    assert (executor.role, executor.told) == ("executor", True)
    assert api.lag_ms == pytest.approx(90.1)
    assert (tokenizer.told, tokenizer.resident_bytes) == (False, 5 << 20)
    out = io.StringIO()
    show(found, out, as_json=False)
    text = out.getvalue()
    assert all(word in text for word in ("grammar", "plan", "2.00", "api-0", "0.50", "90.1 ms", "silent"))


def test_what_was_started_again_has_no_rate() -> None:
    assert view(looked(10.0, 5.0), looked(11.0), ()).output_rate == 0.0
    assert view(looked(10.0), looked(10.0), ()).output_rate == 0.0


def test_a_server_that_knows_no_engine_is_shown() -> None:
    bare = Snapshot(1.0, {"status": "the engine's heartbeat is missing", "ready": False}, {})
    found = view(bare, bare, ())
    assert (found.ready, found.kv_used, found.first_token_ms) == (False, 0.0, {})
    out = io.StringIO()
    assert show(found, out, as_json=False) == 1
    assert "heartbeat is missing" in out.getvalue()


def test_percentiles_are_of_what_is_new() -> None:
    before = looked(1.0, le0_01=100, le0_02=100, leinf=100).buckets(GAP.removesuffix("_bucket"))
    after = looked(2.0, le0_01=100, le0_02=200, leinf=200).buckets(GAP.removesuffix("_bucket"))
    assert percentiles(before, after)["p50"] == pytest.approx(15.0)
    assert percentiles(before, before)["p50"] == pytest.approx(5.0)  # nothing new: of all
    assert percentiles({}, {}) == {}
    assert percentiles({}, {0.01: 0.0, float("inf"): 5.0}) == {"p50": 10.0, "p99": 10.0}  # no bound above is known


def test_replicas_are_one_server() -> None:
    """Totals are sums, what each has is a mean."""
    before, after = looked(10.0), looked(12.0, 3.0)
    labelled = []
    for look in (before, after):
        samples = {(name, (("replica", replica),)): value for (name, _), value in look.samples.items()
                   for replica in ("0", "1")}  # fmt: skip
        samples |= {("penstock_engine_device_idle_ratio", (("replica", str(n)),)): 0.5 * n for n in (0, 1)}
        labelled.append(Snapshot(look.time, look.health, samples))
    found = view(labelled[0], labelled[1], ())
    assert (found.output_rate, found.step_rate, found.running) == (400, 100, 6)
    assert (found.step_ms, found.epoch, found.idle) == (20.0, 7, 0.25)


@pytest.mark.parametrize("text", ["0", "-1", "nan", "soon", "1e9"])
def test_an_interval_that_cannot_be(text: str) -> None:
    with pytest.raises(ConfigError, match="--interval"):
        seconds(text)


def test_once(server: Server) -> None:
    ran = penstock("top", "--url", server.url, "--once", "--interval", "0.1", "--run-dir", str(server.run_dir))
    assert ran.returncode == 0, ran.stderr
    assert "penstock-demo" in ran.stdout
    assert "● executor" in ran.stdout
    assert all(word in ran.stdout for word in ("api-0", "tokenizer-0", "scheduler-0", "executor-0", "loop lag"))
    as_json = penstock("top", "--url", server.url, "--once", "--json", "--interval", "0.1")
    body = json.loads(as_json.stdout)
    assert (body["ready"], body["running"], body["waiting"]) == (True, 0, 0)


def test_what_is_refused(server: Server) -> None:
    locked = penstock("top", "--url", server.url, "--once", key="wrong")
    assert locked.returncode == 1
    assert locked.stderr.startswith("penstock: ")
    assert penstock("top", "--url", "http://127.0.0.1:1", "--once").returncode == 5
    assert penstock("top", "--url", server.url, "--json").returncode == 2


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
        assert top.watch(client, top.snapshot(client), 1.0, "") == 0
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
    seen = (Process("api", "0", 4194303, 1), Process("tokenizer", "10", 9, 5 << 30))
    found = view(with_processes(looked(10.0)), with_processes(looked(12.0), 1.0), seen)
    number = re.compile(r"\d[\d.,]*")
    wide, narrow = (io.StringIO(), io.StringIO())
    for out, columns in ((wide, 1000), (narrow, width)):
        Console(file=out, width=columns).print(top.drawn(found, columns))
    assert sorted(number.findall(narrow.getvalue())) == sorted(number.findall(wide.getvalue()))
    assert max(len(line.rstrip()) for line in narrow.getvalue().splitlines()) <= width
