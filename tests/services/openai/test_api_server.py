"""The process: it says where it listens and when it is ready, drains on SIGTERM, ends with a reason when it must."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest

from penstock.protocol.messages import Abort, Finish, SubmitText
from penstock.protocol.outputs import TextBatch
from penstock.services.http.connection import ConnectionLimits
from penstock.services.supervisor.process import ExitCode
from tests.services.client.fake_engine import LIMIT, Row, answering, batch, silent, words
from tests.services.http.process import Api, Tokenizer, api, start

HELLO = [{"role": "user", "content": "Hello"}]
CHAT = "/v1/chat/completions"


@pytest.fixture
async def tokenizer(tmp_path: Path) -> AsyncIterator[Tokenizer]:
    made = Tokenizer(silent, tmp_path)
    yield made
    made.close()


async def begun(process: Api, tokenizer: Tokenizer, http: httpx.AsyncClient) -> tuple[int, asyncio.Task[str]]:
    """A stream that has said "Hi": its internal id and its text to come."""
    before = len(tokenizer.of(SubmitText))
    said = asyncio.Event()

    async def read() -> str:
        text = ""
        async with http.stream("POST", process.url + CHAT, json={"messages": HELLO, "stream": True}) as answer:
            async for piece in answer.aiter_text():
                text += piece
                if "Hi" in text:
                    said.set()
        return text

    reading = asyncio.ensure_future(read())
    await tokenizer.until(lambda: len(tokenizer.of(SubmitText)) > before)
    request = tokenizer.of(SubmitText)[-1]
    assert isinstance(request, SubmitText)
    tokenizer.arrive(batch([(request.id, Row(text="Hi", extra={"prompt_tokens": 3}))]))
    await asyncio.wait_for(said.wait(), LIMIT)
    return request.id, reading


async def test_the_openai_clients(tmp_path: Path, tokenizer: Tokenizer) -> None:
    tokenizer.script = answering(words("Hi", " there"))
    async with api(tmp_path) as process:

        def ask_in_a_thread() -> tuple[str, str, str]:
            with openai.OpenAI(base_url=process.url + "/v1", api_key="none", max_retries=0, timeout=LIMIT) as client:
                whole = client.chat.completions.create(model="model", messages=HELLO)
                stream = client.chat.completions.create(model="model", messages=HELLO, stream=True)
                text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
                with client.chat.completions.stream(model="model", messages=HELLO, n=2) as events:
                    final = events.get_final_completion()
                assert [choice.message.content for choice in final.choices] == ["Hi there"] * 2
                with pytest.raises(openai.BadRequestError) as caught:
                    client.chat.completions.create(model="model", messages=HELLO, temperature=3)
                assert caught.value.param == "temperature"
                with pytest.raises(openai.NotFoundError):
                    client.models.retrieve("nobody")
                return whole.choices[0].message.content or "", text, client.models.list().data[0].id

        assert await asyncio.to_thread(ask_in_a_thread) == ("Hi there", "Hi there", "model")
        async with openai.AsyncOpenAI(base_url=process.url + "/v1", api_key="none", max_retries=0) as client:
            answers = await asyncio.gather(
                *(client.completions.create(model="model", prompt=f"{k}", n=2) for k in range(32))
            )
            assert all([choice.text for choice in answer.choices] == ["Hi there"] * 2 for answer in answers)
            events = await client.completions.create(model="model", prompt=["a", "b"], stream=True)
            texts = ["", ""]
            async for chunk in events:
                texts[chunk.choices[0].index] += chunk.choices[0].text
            assert texts == ["Hi there"] * 2
        process.signal()
        assert await process.ended() == ExitCode.ORDERLY
        log = process.log.read_text()
    assert log.count(" request ") == 39
    assert "Hello" not in log
    assert "log message" not in log  # nobody else's lines


async def test_a_client_that_leaves_over_a_real_socket(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async with api(tmp_path) as process, httpx.AsyncClient(timeout=LIMIT) as http:
        number, reading = await begun(process, tokenizer, http)
        reading.cancel()
        await tokenizer.until(lambda: Abort(number) in tokenizer.sent)
        health = (await http.get(process.url + "/health")).json()
        assert health["capacity"]["unfinished_requests"] == 0


async def test_sigterm_lets_running_requests_finish(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async with api(tmp_path) as process, httpx.AsyncClient(timeout=LIMIT) as http:
        number, reading = await begun(process, tokenizer, http)
        process.signal()
        await refused(process.url)
        assert process.process.returncode is None
        tokenizer.arrive(batch([(number, Row(text=" there", finish=Finish.STOP))]))
        text = await asyncio.wait_for(reading, LIMIT)
        assert " there" in text
        assert text.endswith("data: [DONE]\n\n")
        assert await process.ended() == ExitCode.ORDERLY


async def test_what_outlasts_the_drain_limit_ends_with_a_reason(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async with api(tmp_path, "--drain-timeout", "0") as process, httpx.AsyncClient(timeout=LIMIT) as http:
        number, reading = await begun(process, tokenizer, http)
        process.signal()
        text = await asyncio.wait_for(reading, LIMIT)
        error, end = text.strip().split("\n\n")[-2:]
        assert json.loads(error[6:])["error"]["code"] == "draining"
        assert end == "data: [DONE]"
        await tokenizer.until(lambda: Abort(number) in tokenizer.sent)
        assert await process.ended() == ExitCode.ORDERLY


async def in_background(process: Api, tokenizer: Tokenizer, http: httpx.AsyncClient) -> tuple[int, str]:
    """A response in the background that has begun: its request's number and its id."""
    begun = await http.post(process.url + "/v1/responses", json={"input": "hi", "background": True})
    assert begun.status_code == 200, begun.text
    await tokenizer.until(lambda: bool(tokenizer.of(SubmitText)))
    asked = tokenizer.of(SubmitText)[-1]
    assert isinstance(asked, SubmitText)
    tokenizer.arrive(batch([(asked.id, Row(text="Hi", extra={"prompt_tokens": 3}))]))
    return asked.id, begun.json()["id"]


def kept(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(msgspec.msgpack.decode((folder / name).read_bytes())[1])
    return found


async def test_sigterm_lets_responses_in_the_background_finish(tmp_path: Path, tokenizer: Tokenizer) -> None:
    own = tmp_path / "responses"
    async with api(tmp_path, "--response-dir", str(own)) as process, httpx.AsyncClient(timeout=LIMIT) as http:
        number, name = await in_background(process, tokenizer, http)
        process.signal()
        await refused(process.url)
        await process.logged("draining_background unfinished=1")
        assert kept(own, name)["status"] == "in_progress"
        tokenizer.arrive(batch([(number, Row(text=" there", finish=Finish.STOP))]))
        assert await process.ended() == ExitCode.ORDERLY
    told = kept(own, name)
    assert told["status"] == "completed"
    assert told["output"][0]["content"][0]["text"] == "Hi there"
    async with api(tmp_path, "--response-dir", str(own)) as process, httpx.AsyncClient(timeout=LIMIT) as http:
        assert (await http.get(f"{process.url}/v1/responses/{name}")).json() == told


async def test_a_response_in_the_background_fails_at_the_drain_limit(tmp_path: Path, tokenizer: Tokenizer) -> None:
    own = tmp_path / "responses"
    arguments = ("--response-dir", str(own), "--drain-timeout", "0")
    async with api(tmp_path, *arguments) as process, httpx.AsyncClient(timeout=LIMIT) as http:
        number, name = await in_background(process, tokenizer, http)
        process.signal()
        assert await process.ended() == ExitCode.ORDERLY
        await tokenizer.until(lambda: Abort(number) in tokenizer.sent)
    told = kept(own, name)
    assert (told["status"], told["error"]["code"]) == ("failed", "server_error")
    assert "shutting down" in told["error"]["message"]


async def test_a_second_signal_ends_it_at_once(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async with api(tmp_path, "--drain-timeout", "3600") as process, httpx.AsyncClient(timeout=LIMIT) as http:
        _, reading = await begun(process, tokenizer, http)
        process.signal()
        await refused(process.url)
        assert process.process.returncode is None
        process.signal()
        text = await asyncio.wait_for(reading, LIMIT)
        assert '"code":"draining"' in text
        assert text.endswith("data: [DONE]\n\n")
        assert await process.ended() == ExitCode.FAILED
        assert "ending_at_once" in process.log.read_text()


def leftovers(run_dir: Path) -> list[str]:
    return [path.name for path in run_dir.glob("*.starts")]


LAUNCHER = 'export PENSTOCK_PARENT=$$; "$@" & echo $! > "$0"; wait'  # a shell in its place


async def test_one_whose_launcher_is_killed_ends_at_once_and_cleans_up(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """The processes behind it have been killed with the launcher; its streams have nothing to wait for."""
    file = tmp_path / "pid"
    parent = ("sh", "-c", LAUNCHER, str(file))
    async with (
        api(tmp_path, "--drain-timeout", "3600", parent=parent) as process,
        httpx.AsyncClient(timeout=LIMIT) as http,
    ):
        _, reading = await begun(process, tokenizer, http)
        over = asyncio.Event()
        pidfd = os.pidfd_open(int(file.read_text()))
        asyncio.get_running_loop().add_reader(pidfd, over.set)
        try:
            process.process.kill()
            assert '"code":"draining"' in await asyncio.wait_for(reading, LIMIT)
            await asyncio.wait_for(over.wait(), LIMIT)
        finally:
            asyncio.get_running_loop().remove_reader(pidfd)
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)
        assert leftovers(tmp_path) == []


async def test_one_whose_launcher_is_killed_during_its_start_cleans_up(tmp_path: Path, tokenizer: Tokenizer) -> None:
    file, log = tmp_path / "pid", tmp_path / "api-0.log"
    launcher = await start(tmp_path, log, notify="", parent=("sh", "-c", LAUNCHER, str(file)))
    async with asyncio.timeout(LIMIT):
        while not (leftovers(tmp_path) and file.exists() and file.read_text().strip()):
            assert launcher.returncode is None, log.read_text()
            await asyncio.sleep(0.002)
        over = asyncio.Event()
        pidfd = os.pidfd_open(int(file.read_text()))
        asyncio.get_running_loop().add_reader(pidfd, over.set)
        launcher.kill()
        await launcher.wait()
        await over.wait()
    asyncio.get_running_loop().remove_reader(pidfd)
    os.close(pidfd)
    assert leftovers(tmp_path) == []


async def refused(url: str) -> None:
    """Wait until nobody listens at `url`."""
    host, port = url.removeprefix("http://").split(":")
    async with asyncio.timeout(LIMIT):
        while True:
            try:
                _, writer = await asyncio.open_connection(host, int(port))
                writer.close()
            except ConnectionRefusedError:
                return
            except ConnectionResetError:
                pass  # it was taken, and not yet accepted, when the listener closed
            await asyncio.sleep(0.01)


async def test_sigterm_before_the_engine_is_there(tmp_path: Path) -> None:
    async with api(tmp_path, ready=False) as process, httpx.AsyncClient(timeout=LIMIT) as http:
        assert (await http.get(process.url + "/health/live")).status_code == 200
        assert (await http.get(process.url + "/health/ready")).status_code == 503
        process.signal()
        assert await process.ended() == ExitCode.ORDERLY


async def test_a_message_that_makes_no_sense_ends_the_process(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async with api(tmp_path) as process:
        tokenizer.arrive(TextBatch(ids=b"", choices=b"", text=("a",), tokens=b"", token_ids=b"", finish=b""))
        assert await process.ended() == ExitCode.FAILED
        assert "api_failed" in process.log.read_text()


async def test_two_processes_share_a_port(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        arguments = ("--api-processes", "2", "--port", str(held.getsockname()[1]))
        async with api(tmp_path, *arguments) as first, api(tmp_path, *arguments, index=1) as second:
            assert first.url == second.url
            async with httpx.AsyncClient(timeout=LIMIT, headers={"connection": "close"}) as http:
                seen: set[str] = set()
                while len(seen) < 2:
                    metrics = (await http.get(first.url + "/metrics")).text
                    seen.add(metrics.split('penstock_unfinished_requests{api="')[1][0])


async def test_a_head_without_end_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async with api(tmp_path) as process:
        host, port = process.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /version HTTP/1.1\r\nHost: a\r\nX-Fill: " + b"x" * ConnectionLimits().head_bytes)
        answer = (await asyncio.wait_for(reader.read(), LIMIT)).decode()
        writer.close()
        assert answer.startswith("HTTP/1.1 431 ")
        assert json.loads(answer.split("\r\n\r\n")[1])["error"]["code"] == "head_too_large"
        async with httpx.AsyncClient(timeout=LIMIT) as http:
            assert (await http.get(process.url + "/version", headers={"x-fill": "x" * 8000})).status_code == 200


async def test_a_taken_port_ends_the_process(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        process = await start(tmp_path, tmp_path / "log", "--port", str(taken.getsockname()[1]))
        assert await asyncio.wait_for(process.wait(), LIMIT) == ExitCode.ADDRESS


async def test_a_refused_handshake_ends_the_process(tmp_path: Path) -> None:
    stranger = Tokenizer(silent, tmp_path, shared=1)
    log = tmp_path / "log"
    process = await start(tmp_path, log)
    assert await asyncio.wait_for(process.wait(), LIMIT) == ExitCode.LINK
    assert "model options" in log.read_text()
    stranger.close()


def test_starting_imports_no_torch_and_no_transformers() -> None:
    code = "import sys, penstock.services.openai.api_server\n"
    code += "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"
