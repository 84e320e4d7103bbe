"""Grammars are compiled once, in processes with limits, and nobody waits for another's. Real workers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvloop

from penstock.engine_core.embedded import demo_folder
from penstock.protocol.config import TokenizerConfig
from penstock.protocol.errors import EngineFailure, InvalidRequest, Overloaded
from penstock.protocol.messages import Grammar
from penstock.services.tokenizer import grammar_compiler, outcome_cache, worker_pool
from penstock.services.tokenizer.grammar_compiler import GrammarCompiler, content_key
from penstock.services.tokenizer.worker_pool import NICE, last_line

BOMB = Grammar(
    kind="grammar", source="root ::= " + " ".join([f'"x{number}"' for number in range(90_000)]), param="guided_grammar"
)


@asynccontextmanager
async def compiling(folder: Path | None = None, **options: float) -> AsyncIterator[GrammarCompiler]:
    compiler = GrammarCompiler(folder or demo_folder(), TokenizerConfig(**{"grammar_workers": 1, **options}))
    try:
        yield compiler
    finally:
        workers, starting = list(compiler._pool.workers), list(compiler._pool._starting)
        compiler.close()
        await asyncio.gather(*starting, return_exceptions=True)
        for worker in workers:
            await worker.end()


def regex(source: str) -> Grammar:
    return Grammar(kind="regex", source=source, param="guided_regex")


async def test_one_flight_for_a_grammar_and_a_memory_of_it() -> None:
    async with compiling() as compiler:
        found = await asyncio.gather(*(compiler.compile(regex("[a-z]+")) for _ in range(5)))
        assert len({id(each) for each in found}) == 1
        assert await compiler.compile(regex("[a-z]+")) is found[0]
        statistics = compiler.statistics()
        assert (statistics.compiled, statistics.hits) == (1, 5)
        assert statistics.workers in (1, 2), "the one that is at work, and the next"
        assert statistics.seconds.total > 0


async def test_workers_leave_the_cores_to_streams() -> None:
    async with compiling() as compiler:
        await compiler.compile(regex("[a-z]+"))
        own = os.getpriority(os.PRIO_PROCESS, 0)
        for worker in compiler._pool.workers:
            assert os.getpriority(os.PRIO_PROCESS, worker._process.pid) == min(19, own + NICE)


async def test_a_refusal_names_the_field_of_each_request() -> None:
    async with compiling() as compiler:
        for param in ("guided_regex", "regex"):
            with pytest.raises(InvalidRequest, match=f"^{param}: .*unclosed") as caught:
                await compiler.compile(Grammar(kind="regex", source="(a", param=param))
            assert (caught.value.param, caught.value.code) == (param, "invalid_grammar")
        assert compiler.statistics().refused == 1


async def test_what_takes_too_long_is_refused_for_good_and_the_worker_replaced() -> None:
    async with compiling(grammar_compile_timeout=1.0) as compiler:  # by the clock five times that, for the last one
        for _ in range(2):
            with pytest.raises(InvalidRequest, match="--grammar-compile-timeout") as caught:
                await compiler.compile(BOMB)
            assert caught.value.code == "grammar_too_complex"
        assert compiler.statistics().replaced == 1
        assert (await compiler.compile(regex("a"))).source


async def test_nobody_waits_for_anothers_grammar() -> None:
    async with compiling(grammar_workers=2, grammar_compile_timeout=60.0) as compiler:
        await asyncio.gather(compiler.compile(regex("x")), compiler.compile(regex("y")))  # both workers are up
        bomb = asyncio.create_task(compiler.compile(BOMB))
        for number in range(20):
            await compiler.compile(regex(f"a{{{number + 1}}}"))
        assert not bomb.done()
        bomb.cancel()
        await asyncio.wait([bomb])


async def test_what_takes_too_much_memory_is_refused() -> None:
    big = json.dumps([f"value{number:06}" for number in range(80_000)])
    async with compiling(grammar_compile_memory=24 << 20, grammar_compile_timeout=20.0) as compiler:
        with pytest.raises(InvalidRequest, match="--grammar-compile-memory"):
            await compiler.compile(Grammar(kind="choice", source=big, param="guided_choice"))
        assert (await compiler.compile(regex("a"))).source


async def test_a_worker_that_is_killed_costs_time_only() -> None:
    async with compiling() as compiler:
        await compiler.compile(regex("a"))
        (worker,) = compiler._pool.idle
        os.kill(worker._process.pid, signal.SIGKILL)
        assert (await compiler.compile(regex("b"))).source
        assert compiler.statistics().replaced == 1


def test_a_worker_is_begun_past_the_loop_that_streams_run_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """uvloop, as in a server: its own way to begin a process copies the memory map of this one, streams waiting."""
    monkeypatch.setattr(asyncio, "create_subprocess_exec", None)
    long = Grammar(kind="choice", unread=json.dumps([f"value{number}" for number in range(20_000)]).encode(), param="x")

    async def replaced() -> None:
        before = pipes()
        async with compiling(grammar_compile_timeout=60.0) as compiler:
            first = await compiler.compile(long)
            await until(lambda: not compiler._pool._starting)  # the spare one may take as long as the compilation
            os.kill(compiler._pool.idle[-1].pid, signal.SIGKILL)  # which is asked next
            assert (await compiler.compile(regex("b"))).source
            assert compiler.statistics().replaced == 1
            assert await compiler.compile(long) is first
        await until(lambda: pipes() == before)

    uvloop.run(replaced())


async def test_a_worker_that_does_not_come_up_is_our_failure(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with compiling(tmp_path) as compiler:
        compiler.start()
        await compiler.warm()  # a server without structured output is a server
        with pytest.raises(EngineFailure, match=r"does not start .*log says why"):
            await compiler.compile(regex("a"))
        assert compiler.statistics().remembered == 0
    said = [record for record in caplog.records if record.message == "worker_failed"]
    assert said
    assert "tokenizer.json" in str(said[0].__dict__), "the log says why"


async def refuse_to_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    def begin(*_: object) -> object:
        raise OSError("no more processes")

    monkeypatch.setattr(worker_pool, "begin", begin)


async def test_a_worker_that_the_system_refuses_is_our_failure_and_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with compiling() as compiler:
        with monkeypatch.context() as patched:
            await refuse_to_begin(patched)
            with pytest.raises(EngineFailure, match="does not start"):
                await compiler.compile(regex("a"))
        said = [record for record in caplog.records if record.message == "worker_failed"]
        assert "no more processes" in str(said[0].__dict__), "the log says why"
        assert (await compiler.compile(regex("a"))).source


async def test_one_worker_is_warm_before_anybody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    async with compiling(grammar_workers=2) as compiler:
        compiler.start()
        assert compiler.statistics().workers == 0
        await compiler.warm()
        assert compiler.statistics().workers == 1
        await refuse_to_begin(monkeypatch)
        found = await asyncio.gather(*(compiler.compile(regex(f"a{{{number}}}")) for number in range(1, 6)))
        assert len(found) == 5, "a burst does not wait for workers that have yet to start"
        own = os.getpriority(os.PRIO_PROCESS, 0)
        (worker,) = compiler._pool.workers
        assert os.getpriority(os.PRIO_PROCESS, worker._process.pid) == min(19, own + NICE)


async def test_after_a_worker_was_ended_the_next_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    async with compiling(grammar_compile_timeout=1.0) as compiler:
        compiler.start()
        await compiler.warm()
        bomb = asyncio.create_task(compiler.compile(BOMB))
        await until(lambda: compiler._pool.waiting == 0 and not compiler._pool.idle)  # it is at work
        await until(lambda: bool(compiler._pool.idle))  # the spare is there, without anybody's asking
        await refuse_to_begin(monkeypatch)
        with pytest.raises(InvalidRequest):
            await bomb
        assert (await compiler.compile(regex("a"))).source


@pytest.mark.parametrize(("gigabytes", "told"), [(4.0, "compiled"), (0.06, "does not start")])
def test_a_hard_limit_on_address_space(gigabytes: float, told: str) -> None:
    """Under `ulimit -v` limits are lowered only; where nothing can start, that is told at once."""
    limit = int(gigabytes * 2**30)
    script = f"""if True:
        import asyncio, resource
        from tests.services.tokenizer.test_grammar_compiler import compiling, regex
        from penstock.services.tokenizer import worker_pool
        from penstock.protocol.errors import EngineFailure
        begin = worker_pool.subprocess.Popen
        def limited(*words, **more):
            return begin(["bash", "-c", "ulimit -v {limit >> 10}; exec \\"$@\\"", "x", *words[0]], **more)
        worker_pool.subprocess.Popen = limited
        async def main():
            async with compiling() as compiler:
                try:
                    found = [await compiler.compile(regex(text)) for text in ("a", "b")]
                    print("compiled", len(found))
                except EngineFailure as error:
                    print(error)
        asyncio.run(main())
    """
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert told in done.stdout


def test_the_last_line_of_a_complaint() -> None:
    assert last_line(b"Traceback\n  File\nMemoryError: too much\n\n") == "MemoryError: too much"
    assert last_line(b"") == ""
    assert len(last_line(b"x" * 9999)) == 400


async def test_what_is_too_long_never_reaches_a_worker() -> None:
    async with compiling(grammar_max_bytes=100) as compiler:
        with pytest.raises(InvalidRequest, match="--grammar-max-bytes"):
            await compiler.compile(regex("a" * 101))
        assert compiler.statistics().workers == 0


async def test_memory_is_bounded_in_number_and_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    async with compiling(grammar_cache_entries=3) as compiler:
        for letter in "abcdef":
            await compiler.compile(regex(letter))
        assert compiler.statistics().remembered == 3
        assert 3 * grammar_compiler.ENTRY < compiler.statistics().bytes < 6 * grammar_compiler.ENTRY
        monkeypatch.setattr(compiler._cache, "_most", (1, 3))
        await compiler.compile(regex("g"))
        assert compiler.statistics().remembered == 0
        assert compiler.statistics().bytes == 0


async def test_a_queue_that_is_full_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    async with compiling() as compiler:
        found = await compiler.compile(regex("a"))
        monkeypatch.setattr(outcome_cache, "MOST_WAITING", 0)
        with pytest.raises(Overloaded):
            await compiler.compile(regex("b"))
        assert await compiler.compile(regex("a")) is found


async def test_closing_ends_the_workers() -> None:
    async with compiling() as compiler:
        await compiler.compile(regex("a"))
        (worker,) = compiler._pool.idle
        process = worker._process
        waiting = asyncio.create_task(compiler.compile(BOMB))
        await until(lambda: worker not in compiler._pool.idle)
        compiler.close()
        await asyncio.wait([waiting])
        assert process.wait(60) == -signal.SIGKILL


def pipes() -> int:
    """That this process has open."""
    return sum([os.path.realpath(f"/proc/self/fd/{name}").split("/")[-1].startswith("pipe:")
                for name in os.listdir("/proc/self/fd")])  # fmt: skip


async def until(done: Callable[[], bool]) -> None:
    limit = time.monotonic() + 60
    while not done():
        assert time.monotonic() < limit
        await asyncio.sleep(0)


def test_what_means_the_same_has_one_key() -> None:
    one = Grammar(kind="regex", source="a", param="x")
    assert content_key(one) == content_key(Grammar(kind="regex", source="a", param="y"))
    others = [
        Grammar(kind="choice", source="a"), Grammar(kind="regex", source="b"),
        Grammar(kind="regex", source="a", lenient=True), Grammar(kind="regex", source="a", whitespace="none"),
    ]  # fmt: skip
    assert len({content_key(grammar) for grammar in (one, *others)}) == 5


def test_what_nobody_has_read_has_a_key_of_its_own() -> None:
    """It is made of the bytes as they are, whether or not they are JSON."""
    texts = (b"", b'"a"', b'"b"', b"[\xff", b'"a" ')
    grammars = [Grammar(kind="regex", unread=text, param=param) for text in texts for param in ("x", "y")]
    assert len({content_key(grammar) for grammar in grammars}) == len(texts)


async def test_a_long_source_is_hashed_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[str] = []

    def noted(grammar: Grammar) -> bytes:
        hashed.append(threading.current_thread().name)
        return content_key(grammar)

    monkeypatch.setattr(grammar_compiler, "content_key", noted)
    async with compiling() as compiler:
        for size in (grammar_compiler.LONG, grammar_compiler.LONG + 1):
            with pytest.raises(InvalidRequest):
                await compiler.compile(Grammar(kind="regex", unread=b"[" * size, param="x"))
    assert hashed[0] == threading.main_thread().name
    assert hashed[1] != threading.main_thread().name
