"""Figures of processes: gathered, registered, forgotten with who told them."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path

import msgspec
import pytest

from penstock.engine_core.histogram import Histogram
from penstock.protocol.figures import Census, ProcessFigures
from penstock.protocol.links import TEXT, Role, Welcome
from penstock.services.links.link import Peer, PortStatistics, Self
from penstock.services.metrics import snapshot as census
from penstock.services.metrics.definitions import EVERY_PROCESS
from penstock.services.metrics.snapshot import LAG, Register, Sheet, Vitals, add_link, lagging, resident_bytes, telling
from penstock.services.supervisor import process

ME = Self(Role.TOKENIZER, 2, 0xABC, 7)


def peer(index: int = 0, incarnation: int = 1) -> Peer:
    welcome = Welcome(version=1, role="tokenizer", index=index, incarnation=incarnation, pid=0)
    return Peer(b"", welcome, TEXT.window, 0.0)


def figures(role: str = "executor", index: int = 0, incarnation: int = 1, time: float = 0.0) -> ProcessFigures:
    return ProcessFigures(role=role, index=index, incarnation=incarnation, pid=1, time=time)


def test_every_process_tells_its_vitals(tmp_path: Path) -> None:
    process.count_start(process.starts_file(tmp_path, "tokenizer", 2))
    lag = Histogram(LAG)
    lag.observe(0.0007)
    vitals = Vitals(ME, tmp_path, lag)
    sheet = vitals.sheet()
    add_link(sheet, "text", [PortStatistics(2, 10, 20, 300, 400, 5, 6)], 7)
    told = sheet.figures(ME, 1e9)
    assert (told.role, told.index, told.incarnation, told.pid, told.time) == ("tokenizer", 2, 0xABC, os.getpid(), 1e9)
    values = {(sample.name, *sample.labels): sample.value for sample in told.samples}
    assert values["process_info", str(os.getpid()), "00000abc"] == 1
    assert values[("process_starts",)] == 1
    assert values[("process_cpu_seconds",)] > 0
    assert values[("process_resident_memory_bytes",)] > 1 << 20
    assert values["link_messages", "text", "in"] == 10
    assert values["link_bytes", "text", "out"] == 400
    assert values["link_queued_messages", "text"] == 7
    assert values["link_unacknowledged_messages", "text"] == 6
    names = {each.name for each in (*told.samples, *told.spreads)}
    assert names == {metric.name for metric in EVERY_PROCESS} - {"waiting_requests"}


def test_ports_of_one_link_are_summed() -> None:
    sheet = Sheet()
    add_link(sheet, "tokens", [PortStatistics(1, 2, 3, 4, 5, 6, 7, 8), PortStatistics(1, 20, 30, 40, 50, 60, 70)], 0)
    values = {(sample.name, *sample.labels): sample.value for sample in sheet.figures(ME, 0.0).samples}
    assert values["link_peers", "tokens"] == 2
    assert values["link_messages", "tokens", "out"] == 33
    assert values["link_refused_messages", "tokens"] == 66
    assert values["link_refused_handshakes", "tokens"] == 8


def test_a_peer_that_is_gone_takes_its_figures_with_it() -> None:
    register, first, second = Register(), peer(0), peer(1)
    register.note(first, Census((figures("tokenizer", 0), figures("scheduler"))))
    register.note(second, Census((figures("tokenizer", 1), figures("scheduler", time=1.0))))
    both = register.processes((first, second))
    assert [(each.role, each.index, each.time) for each in both] == [
        ("scheduler", 0, 1.0), ("tokenizer", 0, 0.0), ("tokenizer", 1, 0.0),
    ]  # fmt: skip
    assert [each.role for each in register.processes((first,))] == ["scheduler", "tokenizer"]
    assert [each.index for each in register.processes((first, second))] == [0, 0]  # it must tell anew
    assert register.processes(()) == ()


def test_a_census_replaces_the_one_before() -> None:
    register, one = Register(), peer()
    register.note(one, Census((figures("executor", 0), figures("executor", 1))))
    register.note(one, Census((figures("executor", 1),)))
    assert [each.index for each in register.processes((one,))] == [1]


def test_of_two_lives_the_newer_counts() -> None:
    register, one, two = Register(), peer(0), peer(1)
    register.note(one, Census((figures(incarnation=8, time=2.0),)))
    register.note(two, Census((figures(incarnation=7, time=1.0),)))
    assert [each.incarnation for each in register.processes((one, two))] == [8]


def test_memory_is_that_of_the_kernel(tmp_path: Path) -> None:
    statm = tmp_path / "statm"
    statm.write_text("1000 25 3 4 0 6 0\n")
    assert resident_bytes(statm) == 25 * os.sysconf("SC_PAGESIZE")


def test_a_census_is_small() -> None:
    """A process's figures are about a packet's worth, once a second."""
    sheet = Sheet()
    for metric in EVERY_PROCESS:
        sheet.put(metric.name, 12345.678, *metric.labels)
    assert len(msgspec.msgpack.encode(Census((sheet.figures(ME, 0.0),)))) < 1500


async def test_a_loop_that_is_held_up_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sleeper finds the clock wound on by what held the loop up."""
    lag, loop = Histogram(LAG), asyncio.get_running_loop()
    clock = [100.0]
    monkeypatch.setattr(loop, "time", lambda: clock[0])

    async def sleep(seconds: float) -> None:
        if sum(lag.statistics().counts) == 2:
            raise asyncio.CancelledError
        clock[0] += seconds + (0.3 if sum(lag.statistics().counts) else 0.0)

    monkeypatch.setattr(census.asyncio, "sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        await lagging(lag)
    assert lag.statistics().total == pytest.approx(0.3)
    assert lag.statistics().counts[LAG.index(0.5)] == 1


async def test_a_census_is_told_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    told: list[int] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 4:
            raise asyncio.CancelledError

    monkeypatch.setattr(census.asyncio, "sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        await telling(lambda: told.append(1))
    assert (len(told), slept) == (3, [census.INTERVAL] * 4)


def test_with_no_descriptor_left_the_figures_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vitals = Vitals(ME, tmp_path, Histogram(LAG))

    def exhausted() -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(census, "resident_bytes", exhausted)
    told = {sample.name: sample.value for sample in vitals.sheet().figures(ME, 1e9).samples}
    assert told["process_resident_memory_bytes"] > 1 << 20
