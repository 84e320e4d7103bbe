"""`AsyncLLM` on the test's own loop: streams, cancellation, and an end in order."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import runpy
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

import penstock
from penstock import AsyncLLM, LinkError, RequestOutput, RequestOutputKind, SamplingParams
from penstock.protocol.errors import InvalidRequest
from tests.e2e.chaos.faulty import slow
from tests.services.llm.processes import LIMIT, engine_process, gone
from tests.services.llm.test_examples import ASYNC, EXAMPLES

PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
LOOP = "module"

pytestmark = pytest.mark.asyncio(loop_scope=LOOP)


@pytest_asyncio.fixture(scope="module", loop_scope=LOOP)
async def engine(faults: Path) -> AsyncIterator[AsyncLLM]:
    async with AsyncLLM(max_num_seqs=8, tokenizer_processes=1) as llm:
        yield llm


async def collected(outputs: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in outputs]


async def test_a_stream_grows_to_the_whole(engine: AsyncLLM, faults: Path) -> None:
    """Who is late gets several tokens at once, so the first steps are slow."""
    long = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
    stream = engine.generate("Once upon a time", long)
    with slow(faults):
        outputs = [await anext(stream) for _ in range(3)]
    outputs += await collected(stream)
    texts = [output.outputs[0].text for output in outputs]
    assert all(after.startswith(before) for before, after in itertools.pairwise(texts))
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert len(outputs[-1].outputs[0].token_ids) == 400
    assert outputs[-1].metrics.first_token_time is not None


async def test_every_kind_of_output_says_the_same(engine: AsyncLLM) -> None:
    found = {}
    for kind in RequestOutputKind:
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, output_kind=kind)
        found[kind] = await collected(engine.generate("Once upon a time", params))
    whole = found[RequestOutputKind.CUMULATIVE][-1].outputs[0]
    deltas = [output.outputs[0] for output in found[RequestOutputKind.DELTA]]
    (final,) = found[RequestOutputKind.FINAL_ONLY]
    assert "".join(delta.text for delta in deltas) == whole.text == final.outputs[0].text
    assert [token for delta in deltas for token in delta.token_ids] == whole.token_ids == final.outputs[0].token_ids


async def test_many_at_once(engine: AsyncLLM) -> None:
    async def one(number: int) -> int:
        outputs = await collected(engine.generate([10 + number, 11], PARAMS, str(number)))
        assert outputs[-1].request_id == str(number)
        assert outputs[-1].prompt_token_ids == [10 + number, 11]
        return len(outputs[-1].outputs[0].token_ids)

    assert await asyncio.gather(*(one(number) for number in range(30))) == [12] * 30


async def test_each_has_a_name_of_its_own_also_where_some_wait(
    engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine._engine, "_room", asyncio.Semaphore(2))
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    found = await asyncio.gather(*(collected(engine.generate([10, 11], params)) for _ in range(6)))
    assert len({outputs[-1].request_id for outputs in found}) == 6


async def test_a_chat(engine: AsyncLLM) -> None:
    messages = [{"role": "user", "content": "What is 128 + 457?"}]
    outputs = await collected(engine.chat(messages, SamplingParams(temperature=0.0, max_tokens=30)))
    assert outputs[-1].outputs[0].text == "128 + 457 = 585."


async def until(done: Callable[[], object]) -> None:
    """Wait for what the engine's own messages bring about."""
    async with asyncio.timeout(LIMIT):
        while not done():  # noqa: ASYNC110 (nothing tells of it)
            await asyncio.sleep(0.01)


def idle(engine: AsyncLLM) -> bool:
    """Whether the engine runs nothing."""
    engine_client = engine._engine.engine_client
    return (
        not engine_client.statistics().unfinished
        and engine_client.status is not None
        and not engine_client.status.running
    )


async def test_leaving_the_loop_aborts(engine: AsyncLLM) -> None:
    long = SamplingParams(max_tokens=3500, ignore_eos=True)
    outputs = engine.generate("Once", long)
    async for _ in outputs:
        break
    await outputs.aclose()  # type: ignore[attr-defined]
    await until(lambda: idle(engine))


async def test_cancellation_aborts(engine: AsyncLLM) -> None:
    long = SamplingParams(max_tokens=3500, ignore_eos=True)
    task = asyncio.ensure_future(collected(engine.generate("Once", long)))
    await until(lambda: not idle(engine))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: idle(engine))


@pytest.mark.parametrize(
    ("prompt", "params"),
    [({"text": "x"}, PARAMS), ("x", SamplingParams(max_tokens=10_000)), ("word " * 6000, PARAMS)],
)
async def test_a_wrong_request_raises(engine: AsyncLLM, prompt: Any, params: SamplingParams) -> None:
    with pytest.raises(InvalidRequest):
        await collected(engine.generate(prompt, params))


async def test_a_vector(engine: AsyncLLM) -> None:
    found = await engine.embed("a cat", dimensions=64)
    assert len(found.outputs.embedding) == 64
    with pytest.raises(InvalidRequest, match="dimensions"):
        await engine.embed("a cat", dimensions=1000)


async def test_the_example(
    engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As it stands, but for the engine, which is not its own."""
    monkeypatch.setattr(penstock, "AsyncLLM", lambda: contextlib.nullcontext(engine))
    await runpy.run_path(str(EXAMPLES / ASYNC))["main"]()
    assert capsys.readouterr().out == "What is 128 + 457? 128 + 457 = 585.\nWhat is 12 * 12? 12 * 12 = 144.\n"


async def test_tokens_and_text(engine: AsyncLLM) -> None:
    ids = await engine.tokenize("one two")
    assert await engine.detokenize(ids) == "one two"
    assert await engine.detokenize([]) == ""


async def test_an_executor_that_dies_costs_time_and_the_engine_that_dies_an_error(
    faults: Path,
) -> None:
    """What is asked of a dead engine gets the same error. Steps are slow where a request must not end before."""
    llm = AsyncLLM(max_num_seqs=2, tokenizer_processes=1, log_level="error")
    try:
        params = SamplingParams(max_tokens=100, ignore_eos=True, temperature=0.0)
        undisturbed = await collected(llm.generate("Once", params))
        run_dir = str(llm._engine.launcher.directory)
        with slow(faults):
            outputs = llm.generate("Once", params)
            first = await anext(outputs)
            os.kill(engine_process(run_dir, "executor"), signal.SIGKILL)
        assert len(first.outputs[0].token_ids) < 100
        again = await collected(outputs)
        assert again[-1].outputs[0].token_ids == undisturbed[-1].outputs[0].token_ids
        with slow(faults):
            outputs = llm.generate("Once", params)
            await anext(outputs)
            os.kill(llm._engine.launcher.pid, signal.SIGKILL)
            with pytest.raises(LinkError, match="did not say why"):
                await collected(outputs)
        with pytest.raises(LinkError):
            await collected(llm.generate("x", PARAMS))
    finally:
        await llm.close()
        await llm.close()
    gone(run_dir)
