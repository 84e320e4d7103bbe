"""What an executor tells of itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.engine_core.histogram import Histogram
from penstock.protocol.figures import Census
from penstock.protocol.links import STEPS, Role, Welcome
from penstock.protocol.messages import Message
from penstock.protocol.steps import ExecutorReady
from penstock.services.executor.steps import StepsStatistics
from penstock.services.links.link import Peer, PortStatistics, Self
from penstock.services.metrics.definitions import EXECUTOR, METRICS
from penstock.services.metrics.executor import Figures
from penstock.services.metrics.snapshot import INTERVAL, LAG, PART, Vitals

READY = ExecutorReady(
    epoch=1, blocks=8, block_size=16, step_tokens=64, device="cpu", dtype="float32", weight_bytes=1000,
    cache_bytes=2000, load_seconds=0.5,
)  # fmt: skip


class FakeSteps:
    def statistics(self) -> StepsStatistics:
        launch = Histogram(PART)
        launch.observe(0.0002)
        return StepsStatistics(
            plans=5, results=4, dropped=1, stray_masks=2, schedulers=1, waiting=3, launch=launch.statistics()
        )


class FakePort:
    def __init__(self) -> None:
        welcome = Welcome(version=1, role="scheduler", index=0, incarnation=1, pid=0)
        self.peers: tuple[Peer, ...] = (Peer(b"", welcome, STEPS.window, 0.0),)
        self.sent: list[Message] = []

    def send_each(self, peers: list[Peer], message: Message) -> bool:
        self.sent += [message] * len(peers)
        return True

    def statistics(self) -> PortStatistics:
        return PortStatistics(1, 2, 3, 4, 5, 6, 7)


def figures(port: Any, run_dir: Path) -> Figures:
    steps: Any = FakeSteps()
    return Figures(Vitals(Self(Role.EXECUTOR, 3, 1, 7), run_dir, Histogram(LAG)), steps, port, READY)


def test_everything_in_the_catalogue_is_told(tmp_path: Path) -> None:
    port = FakePort()
    figures(port, tmp_path).tick(10.0, 1e9)
    (census,) = port.sent
    assert isinstance(census, Census)
    (own,) = census.processes
    assert (own.role, own.index, own.time) == ("executor", 3, 1e9)
    known = {metric.name: metric for metric in METRICS}
    for each in (*own.samples, *own.spreads):
        assert len(each.labels) == len(known[each.name].labels), each.name
    values = {(sample.name, *sample.labels): sample.value for sample in own.samples}
    assert {metric.name for metric in EXECUTOR} <= {name for name, *_ in values}
    assert values[("executor_dropped_results",)] == 1
    assert values["link_queued_messages", "steps"] == 3
    launch = {(each.name, *each.labels): each.statistics for each in own.spreads}["step_part_seconds", "launch"]
    assert sum(launch.counts) == 1


def test_it_tells_now_and_then_and_to_nobody_where_nobody_is(tmp_path: Path) -> None:
    port = FakePort()
    told = figures(port, tmp_path)
    for second in (10.0, 10.1, 10.0 + INTERVAL, 10.1 + INTERVAL):
        told.tick(second, 0.0)
    assert len(port.sent) == 2
    port.peers[0].credit = 0
    told.tick(20.0, 0.0)
    port.peers = ()
    told.tick(30.0, 0.0)
    assert len(port.sent) == 2
