"""What each process exports, and what it passes on."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from penstock.engine_core.execution.block_copies import CopyStatistics
from penstock.engine_core.execution.storage_copies import StorageStatistics
from penstock.engine_core.histogram import Histogram
from penstock.engine_core.images.processor_spec import ProcessorSpec
from penstock.engine_core.parsers.dialect import Dialect
from penstock.engine_core.scheduling.admission import REASONS
from penstock.engine_core.text.prompts import PromptLimits
from penstock.protocol.config import TokenizerConfig
from penstock.protocol.links import STEPS, Role, Welcome
from penstock.protocol.message import Message
from penstock.protocol.snapshots import MetricsSnapshots
from penstock.protocol.steps import ExecutorReady
from penstock.services.executor.steps import StepsStatistics
from penstock.services.links.handshake import Identity
from penstock.services.links.link import Joined, Left, Peer, SocketStatistics
from penstock.services.metrics import exporter as module
from penstock.services.metrics.definitions import BY_ROLE, LAG, METRICS, PART, PROCESS
from penstock.services.metrics.exporter import (
    INTERVAL,
    Collector,
    Exporter,
    collect_executor,
    collect_link,
    collect_tokenizer,
    keep_exporting,
    resident_bytes,
    scheduler_collector,
)
from penstock.services.metrics.snapshot import DECODER, RemoteSnapshots, Snapshot, SnapshotFile, read_snapshots
from penstock.services.scheduler.step_times import DEVICE, OWN
from penstock.services.supervisor import process
from penstock.services.tokenizer.grammar_compiler import GrammarCompiler
from penstock.services.tokenizer.image_decoder import ImageDecoder
from penstock.services.tokenizer.template_worker import TemplateSettings
from penstock.services.tokenizer.templates import Templates
from penstock.services.tracing.tracer import Tracer
from tests.engine_core.text.streams import make_frontend
from tests.services.metrics.snapshots import every, message
from tests.services.scheduler.test_server_loop import Bench
from tests.services.tokenizer.test_server_loop import Neighbour, new_loop

SELDOM = {"engine_accepted_tokens_by_position", "engine_lora_requests"}  # exported once there is something to tell
READY = ExecutorReady(
    epoch=1, blocks=8, block_size=16, step_tokens=64, device="cpu", dtype="float32", weight_bytes=1000,
    cache_bytes=2000, load_seconds=0.5,
)  # fmt: skip


TRAFFIC = SocketStatistics(1, 2, 3, 4, 5, 6, 7)


class FakeSteps:
    def statistics(self) -> StepsStatistics:
        launch = Histogram(PART)
        launch.observe(0.0002)
        return StepsStatistics(
            plans=5, results=4, dropped=1, stray_masks=2, waiting=3, launch=launch.statistics(),
            copies=CopyStatistics(
                bytes_out=7, bytes_in=3, seconds_out=0.5, seconds_in=0.1,
                storage=StorageStatistics(bytes_out=2, bytes_in=1),
            ),
        )  # fmt: skip


class FakePort:
    """An end of a link with these peers."""

    def __init__(self, *peers: Peer, statistics: SocketStatistics = TRAFFIC) -> None:
        self.peers = peers
        self.sent: list[tuple[Peer, Message]] = []
        self._statistics = statistics

    def send_each(self, peers: Iterable[Peer], message: Message) -> bool:
        self.sent += [(peer, message) for peer in peers]
        return True

    def statistics(self) -> SocketStatistics:
        return self._statistics


def new_peer() -> Peer:
    return Peer(b"", Welcome(version=1, role="scheduler", index=0, incarnation=1, pid=0), STEPS.window, 0.0)


def new_exporter(role: Role, run_dir: Path, collector: Collector = lambda into: None, **words: Any) -> Exporter:
    return Exporter(Identity(role, 2, 0xABC, 7), run_dir, Histogram(LAG), collector, Tracer(), **words)


def names(found: Snapshot) -> set[str]:
    """The metrics in a snapshot, each with as many labels as its definition has."""
    for name, series in (*found.values.items(), *found.histograms.items()):
        assert all(len(labels) == len(METRICS[name].labels) for labels in series), name
    return {*found.values, *found.histograms}


def received(port: FakePort) -> list[tuple[str, int]]:
    """Role and index of what was sent last."""
    sent = port.sent[-1][1]
    assert isinstance(sent, MetricsSnapshots)
    return [(each.role, each.index) for each in DECODER.decode(sent.snapshots)]


def test_every_process_has_the_metrics_of_a_process(tmp_path: Path) -> None:
    process.count_start(process.starts_file(tmp_path, "tokenizer", 2))
    exporter = new_exporter(Role.TOKENIZER, tmp_path)
    exporter.lag.observe(0.0007)
    found = exporter.snapshot(1e9)
    assert (found.role, found.index, found.incarnation, found.pid, found.time) == (
        "tokenizer", 2, 0xABC, os.getpid(), 1e9,
    )  # fmt: skip
    assert found.values["process_info"] == {(str(os.getpid()), "00000abc"): 1}
    assert found.values["process_starts"][()] == 1
    assert found.values["process_cpu_seconds"][()] > 0
    assert found.values["process_resident_memory_bytes"][()] > 1 << 20
    assert sum(found.histograms["loop_lag_seconds"][()].counts) == 1
    assert names(found) == {metric.name for metric in PROCESS}


def test_ports_of_one_link_are_summed() -> None:
    ports = [
        FakePort(statistics=SocketStatistics(*numbers))
        for numbers in ((1, 2, 3, 4, 5, 6, 7), (1, 20, 30, 40, 50, 60, 70))
    ]
    found = Snapshot("tokenizer", 0, 1, 1, 0.0)
    collect_link(found, "tokens", ports, 9)
    assert found.values["link_peers"] == {("tokens",): 2}
    assert found.values["link_messages"] == {("tokens", "in"): 22, ("tokens", "out"): 33}
    assert found.values["link_bytes"] == {("tokens", "in"): 44, ("tokens", "out"): 55}
    assert found.values["link_refused_messages"] == {("tokens",): 66}
    assert found.values["link_unacknowledged_messages"] == {("tokens",): 77}
    assert found.values["link_queued_messages"] == {("tokens",): 9}


def test_memory_is_that_of_the_kernel(tmp_path: Path) -> None:
    statm = tmp_path / "statm"
    statm.write_text("1000 25 3 4 0 6 0\n")
    assert resident_bytes(statm) == 25 * os.sysconf("SC_PAGESIZE")


def test_with_no_descriptor_left_memory_stays_what_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = new_exporter(Role.TOKENIZER, tmp_path)

    def exhausted() -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(module, "resident_bytes", exhausted)
    assert exporter.snapshot(1e9).values["process_resident_memory_bytes"][()] > 1 << 20


def test_it_exports_once_in_an_interval(tmp_path: Path) -> None:
    exporter = new_exporter(Role.EXECUTOR, tmp_path)
    times = []
    for seconds in (10.0, 10.1, 10.0 + INTERVAL, 10.1 + INTERVAL):
        exporter.tick(seconds, seconds)
        times.append(read_snapshots(tmp_path, seconds)[0].time)
    assert times == [10.0, 10.0, 10.0 + INTERVAL, 10.0 + INTERVAL]
    exporter.close()
    assert list(tmp_path.iterdir()) == []


async def test_an_asyncio_process_observes_its_lag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sleeper finds the clock wound on by what held the loop up."""
    exporter, loop, clock = new_exporter(Role.API, tmp_path), asyncio.get_running_loop(), [100.0]
    lag = exporter.lag
    monkeypatch.setattr(loop, "time", lambda: clock[0])

    async def sleep(seconds: float) -> None:
        if sum(lag.statistics().counts) == 2:
            raise asyncio.CancelledError
        clock[0] += seconds + (0.3 if sum(lag.statistics().counts) else 0.0)

    monkeypatch.setattr(module.asyncio, "sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        await keep_exporting(exporter)
    assert lag.statistics().total == pytest.approx(0.3)
    assert lag.statistics().counts[LAG.index(0.5)] == 1
    assert len(read_snapshots(tmp_path, 0.0)) == 1
    exporter.close()


def test_an_executor_sends_its_own_to_another_host(tmp_path: Path) -> None:
    neighbour = SnapshotFile(tmp_path, Role.EXECUTOR, 9)
    neighbour.write([every(Role.EXECUTOR, 9)])
    port = FakePort(new_peer())
    exporter = new_exporter(Role.EXECUTOR, tmp_path, other_host=port)
    exporter.export(1e9)
    assert received(port) == [("executor", 2)]
    port.peers[0].credit = 0
    exporter.export(1e9)
    port.peers = ()
    exporter.export(1e9)
    assert len(port.sent) == 1
    exporter.close()
    neighbour.close()


def test_a_scheduler_passes_on_what_it_received_and_finds_but_api_processes(tmp_path: Path) -> None:
    port, remote, executor = FakePort(new_peer()), RemoteSnapshots(), new_peer()
    files = [SnapshotFile(tmp_path, role, 0) for role in (Role.API, Role.EXECUTOR)]
    for role, file in zip((Role.API, Role.EXECUTOR), files, strict=True):
        file.write([every(role, time=1e9)])
    remote.receive(executor, message(every(Role.EXECUTOR, 7)))
    exporter = new_exporter(Role.SCHEDULER, tmp_path, remote=remote, other_host=port)
    exporter.export(1e9)
    assert received(port) == [("scheduler", 2), ("executor", 7), ("executor", 0)]
    assert {(each.role, each.index) for each in read_snapshots(tmp_path, 1e9)} == {
        ("api", 0), ("executor", 0), ("executor", 7), ("scheduler", 2),
    }  # fmt: skip
    remote.remove(executor)
    exporter.export(1e9)
    assert received(port) == [("scheduler", 2), ("executor", 0)]
    for file in (*files, exporter):
        file.close()


def test_without_another_host_an_api_process_finds_all_in_the_directory(tmp_path: Path) -> None:
    scheduler, api = new_exporter(Role.SCHEDULER, tmp_path), new_exporter(Role.API, tmp_path)
    scheduler.export(5.0)
    api.export(5.0)
    found = api.snapshots(6.0)
    assert [(each.role, each.index, each.time) for each in found] == [("api", 2, 6.0), ("scheduler", 2, 5.0)]
    for each in (scheduler, api):
        each.close()


def test_everything_of_an_executor_is_exported(tmp_path: Path) -> None:
    steps: Any = FakeSteps()
    found = new_exporter(Role.EXECUTOR, tmp_path, partial(collect_executor, steps, FakePort(), READY)).snapshot(0.0)
    assert names(found) == {metric.name for metric in BY_ROLE[Role.EXECUTOR]}
    assert found.values["executor_dropped_results"][()] == 1
    assert found.values["executor_copied_bytes"] == {("out",): 7, ("in",): 3}
    assert found.values["link_queued_messages"]["steps",] == 3
    assert sum(found.histograms["step_part_seconds"]["launch",].counts) == 1


async def test_everything_of_a_tokenizer_is_exported(tmp_path: Path) -> None:
    scheduler = Neighbour()
    with ThreadPoolExecutor(1) as threads:
        loop = new_loop(make_frontend(apis=()), threads)
        loop.from_scheduler(0, [scheduler.arrival(Joined())])
        loop.from_scheduler(0, [scheduler.arrival(message(every(Role.SCHEDULER), every(Role.EXECUTOR)))])
        assert [each.role for each in loop.remote.all()] == ["scheduler", "executor"]
        options = TokenizerConfig()
        templates = Templates(
            TemplateSettings("", "", PromptLimits(9, 9, ()), {}, Dialect(), None, 2.0, 1 << 30), options
        )
        compiler = GrammarCompiler(tmp_path, options)
        decoder = ImageDecoder(ProcessorSpec(mean=(0, 0, 0), std=(1, 1, 1)), 1, options)
        collector = partial(collect_tokenizer, loop, compiler, templates, decoder, FakePort(), [FakePort()])
        found = new_exporter(Role.TOKENIZER, tmp_path, collector).snapshot(0.0)
        assert names(found) == {metric.name for metric in BY_ROLE[Role.TOKENIZER]}
        assert set(found.values["waiting_requests"]) == {("text",), ("grammar",), ("engine",)}
        loop.from_scheduler(0, [scheduler.arrival(Left("gone"))])
        assert loop.remote.all() == []
        loop.close()


@pytest.fixture
def bench() -> Bench:
    return Bench()


def exported(bench: Bench, run_dir: Path, seconds: float = 1.0) -> Snapshot:
    collector = scheduler_collector(bench.loop, bench.tokens, bench.steps, lambda: bench.now)
    bench.now += seconds
    return new_exporter(Role.SCHEDULER, run_dir, collector).snapshot(5.0)


def test_everything_of_an_engine_is_exported(bench: Bench, tmp_path: Path) -> None:
    bench.ready()
    bench.submit(1, max_tokens=2)
    for _ in range(6):
        bench.iterate()
        for plan in bench.executor.collect():
            bench.executor.answer(plan, busy=0.25)
    found = exported(bench, tmp_path)
    assert {metric.name for metric in BY_ROLE[Role.SCHEDULER]} - names(found) <= SELDOM
    values = found.values
    assert values["engine_ready"][()] == 1
    assert values["engine_prompt_tokens"][()] == 20
    assert values["engine_output_tokens"][()] == 2
    assert {labels[0]: value for labels, value in values["engine_ended"].items()} == {
        "stop": 0, "length": 1, "abort": 0, "error": 0, "grammar": 0, "unavailable": 0,
    }, "all of them from the beginning, so that the first one is a rise"  # fmt: skip
    assert values["waiting_requests"] == {(reason,): 0 for reason in ("grammar", *REASONS)}
    assert values["engine_device_busy_seconds"][()] == pytest.approx(0.5, abs=0.3)
    assert 0.0 <= values["engine_device_idle_ratio"][()] <= 1.0
    parts = found.histograms["step_part_seconds"]
    assert set(parts) == {(part,) for part in (*OWN, *DEVICE, "mask")}
    assert sum(parts["plan",].counts) >= 2
    assert sum(parts["wait",].counts) == sum(parts["apply",].counts) - 1
    assert sum(found.histograms["engine_queue_seconds"][()].counts) == 1
    assert found.histograms["engine_request_prompt_tokens"][()].total == 20
    assert found.histograms["engine_request_output_tokens"][()].total == 2


def test_before_there_is_an_engine_it_says_that_it_is_not_ready(bench: Bench, tmp_path: Path) -> None:
    bench.iterate()
    values = exported(bench, tmp_path).values
    assert values["engine_ready"][()] == 0
    assert values["engine_kv_used_ratio"][()] == 0.0
    assert "engine_scheduled_tokens" not in values


def test_an_executor_of_another_host_is_known_until_it_leaves(bench: Bench) -> None:
    bench.ready()
    bench.steps.arrives(bench.executor.peer, message(every(Role.EXECUTOR, executor_plans=7)))
    bench.iterate()
    assert [each.values["executor_plans"] for each in bench.loop.remote.all()] == [{(): 7}]
    bench.steps.leave(bench.executor.peer)
    bench.iterate()
    assert bench.loop.remote.all() == []


def test_waiting_requests_are_told_by_what_for(tmp_path: Path) -> None:
    bench = Bench(size=1)
    bench.ready()
    for number in range(3):
        bench.submit(number + 1)
    bench.iterate()
    found = exported(bench, tmp_path).values["waiting_requests"]
    assert (found["slot",], found["grammar",]) == (2, 0)


def test_a_late_tick_is_lag(bench: Bench) -> None:
    bench.iterate()
    bench.iterate(seconds=5.0)
    assert bench.loop.lag.statistics().total == pytest.approx(4.8, abs=0.01)
