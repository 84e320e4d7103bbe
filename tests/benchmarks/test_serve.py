"""The command: from options to a JSON file, through real client processes."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.load.fake import Behaviour, Fake
from benchmarks.load.workload import JSON, ROWS
from benchmarks.serve import main, parser, workloads
from penstock.services.bench.client import target
from penstock.services.bench.serve import ClientDied, length, measure, run
from penstock.services.bench.workload import FREE, Workload


class Running:
    """A fake server on a thread, for code that has an event loop of its own."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.fake = Fake(behaviour)
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))

    def __enter__(self) -> Fake:
        self._thread.start()
        assert self._ready.wait(120)
        return self.fake

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._loop.close()

    async def _serve(self) -> None:
        async with self.fake:
            self._ready.set()
            await self._stop.wait()


@pytest.fixture
def server() -> Iterator[Fake]:
    with Running(Behaviour(tick=0.001)) as fake:
        yield fake


def test_results_in_a_file(server: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "deep" / "results.json"
    options = ["--base-url", server.url, "--model", "m", "--requests", "10", "--concurrency", "4", "--input", "3:8",
               "--output-tokens", "5", "--processes", "2", "--warmup", "2", "--output", str(file),
               "--label", "chip=none", "--extra-body", '{"top_k": 3}']  # fmt: skip
    assert main(options) == 0
    record = json.loads(file.read_text())
    assert (record["model"], record["labels"], record["extra_body"]) == ("m", {"chip": "none"}, {"top_k": 3})
    (result,) = record["results"]
    assert result["summary"]["completed"] == 10
    assert result["summary"]["output_tokens"] == 50
    assert result["summary"]["tpot_ms"]["p50"] > 0
    assert result["workload"]["input"] == [3, 8]
    assert len(server.bodies) == 12
    assert all(body["top_k"] == 3 and body["model"] == "m" for body in server.bodies)
    assert "custom" in capsys.readouterr().out


def test_failures_are_told_and_change_the_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    with Running(Behaviour(status=503)) as fake:
        options = ["--base-url", fake.url, "--requests", "3", "--output-tokens", "4", "--warmup", "0"]
        assert main([*options, "--model", "m"]) == 1
    assert "3 × http 503" in capsys.readouterr().out


def test_nobody_there_is_said_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with Running(Behaviour()) as fake:
        url = fake.url
    assert main(["--base-url", url]) == 2
    assert url in capsys.readouterr().err


async def test_variants_have_figures_of_their_own() -> None:
    workload = Workload(requests=8, concurrency=8, output=(6, 6), warmup=0, variants=(JSON, FREE))
    async with Fake(Behaviour()) as fake:
        result = await measure(target(fake.url), workload, processes=3)
    assert {name: part.completed for name, part in result.variants.items()} == {"json": 4, "free": 4}
    assert result.summary.completed == 8
    assert result.client_cpu_seconds > 0


async def test_more_processes_than_slots_are_not_started() -> None:
    async with Fake(Behaviour()) as fake:
        outcome = await run(target(fake.url), Workload(requests=5, concurrency=1, output=(3, 3)), processes=4)
        assert fake.connections == 1
    assert [record.index for record in outcome.records] == list(range(5))
    assert [record.error for record in outcome.records] == [""] * 5


async def test_a_dead_client_process_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/true")
    with pytest.raises((ClientDied, ConnectionError)):
        await run(target("http://127.0.0.1:9"), Workload(requests=1, concurrency=1))


def test_options_become_a_workload() -> None:
    words = "--rate 3.5 --input 10:20 --prefix 64 --prefixes 4 --vocab 50"
    options = parser().parse_args(words.split())
    (workload,) = workloads(options)
    assert (workload.rate, workload.concurrency, workload.input, workload.output) == (3.5, 0, (10, 20), (128, 128))
    assert (workload.prefix, workload.prefixes, workload.vocab, workload.ignore_eos) == (64, 4, 50, True)


def test_rows_by_name() -> None:
    assert [row.name for row in workloads(parser().parse_args(["--rows", "bs64,prefix4k"]))] == ["bs64", "prefix4k"]
    assert len(workloads(parser().parse_args(["--rows", "all", "--vocab", "99"]))) == len(ROWS)
    with pytest.raises(ValueError, match="bs65"):
        workloads(parser().parse_args(["--rows", "bs65"]))


@pytest.mark.parametrize(("text", "ends"), [("7", (7, 7)), ("3:9", (3, 9))])
def test_lengths(text: str, ends: tuple[int, int]) -> None:
    assert length(text) == ends
