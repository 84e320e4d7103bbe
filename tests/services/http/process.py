"""A real api process for tests, with a tokenizer that the test plays over a real socket."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import zmq

from penstock.protocol.engine_config import ModelConfig
from penstock.protocol.links import TEXT, Role, shared_hash
from penstock.protocol.message import Message
from penstock.services.links.async_link import AsyncLink
from penstock.services.links.handshake import Identity
from penstock.services.links.link import Arrival, Joined, Left, Link, Peer
from penstock.services.supervisor.sd_notify import NoticeSocket
from tests.services.client.fake_engine import LIMIT, status

MODEL_FILE: Mapping[str, object] = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 1000, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "float32",
}  # fmt: skip


class Tokenizer:
    """The binder's end of the text link, played by `script`, which is called with each message of an api."""

    def __init__(self, script: Callable[[Tokenizer, Message], None], run_dir: Path, shared: int | None = None) -> None:
        self.script = script
        self.api: Peer | None = None
        self.sent: list[Message] = []
        self.news = asyncio.Event()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        shared = shared_hash(model(run_dir)) if shared is None else shared
        port = Link.bind(self._context, TEXT, Identity(Role.TOKENIZER, 0, 1, shared), run_dir)
        self._watch = AsyncLink(port)
        self._watch.start(self._arrived)
        self._beat()

    def arrive(self, *messages: Message) -> None:
        """Send to the api, as `FakeLink.arrive` does."""
        assert self.api is not None
        for message in messages:
            sent = self._watch.send(self.api, message)
            assert sent

    async def until(self, done: Callable[[], bool]) -> None:
        """Wait for messages until `done`."""
        while not done():
            self.news.clear()
            await asyncio.wait_for(self.news.wait(), LIMIT)

    def of(self, kind: type[Message]) -> list[Message]:
        return [message for message in self.sent if isinstance(message, kind)]

    def close(self) -> None:
        self._timer.cancel()
        self._watch.close()
        self._context.term()

    def _beat(self) -> None:
        """The engine's heartbeat, passed on."""
        if self.api is not None:
            self._watch.send(self.api, status())
        self._timer = asyncio.get_running_loop().call_later(0.3, self._beat)

    def _arrived(self, arrivals: list[Arrival]) -> None:
        for arrival in arrivals:
            match arrival.message:
                case Joined():
                    self.api = arrival.peer
                    self.arrive(status())
                case Left():
                    self.api = None
                case message:
                    self.sent.append(message)
                    self.script(self, message)
        self.news.set()

    @property
    def peer(self) -> Peer | None:
        return self.api


class Api:
    """A running `penstock api`."""

    def __init__(self, process: asyncio.subprocess.Process, url: str, log: Path) -> None:
        self.process = process
        self.url = url
        self.log = log

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    async def logged(self, words: str) -> None:
        """Wait until these words stand in the log of a process that runs on."""
        async with asyncio.timeout(LIMIT):
            while words not in self.log.read_text():
                assert self.process.returncode is None, self.log.read_text()
                await asyncio.sleep(0.01)

    async def ended(self) -> int:
        return await asyncio.wait_for(self.process.wait(), LIMIT)


def model(run_dir: Path) -> ModelConfig:
    """The options that both ends share: a folder with what an api reads of a model."""
    folder = run_dir / "model"
    if not folder.exists():
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(MODEL_FILE))
    return ModelConfig(model=str(folder))


@asynccontextmanager
async def api(
    run_dir: Path, *arguments: str, index: int = 0, ready: bool = True, parent: Sequence[str] = ()
) -> AsyncIterator[Api]:
    """`penstock api --port 0`, listening and with `ready` also ready; for arguments given twice the last one holds.
    With `parent` it is what that command makes of it."""
    notices = NoticeSocket(run_dir / f"notify-{index}.sock")
    log = run_dir / f"api-{index}.log"
    process = await start(run_dir, log, "--index", str(index), *arguments, notify=str(notices.path), parent=parent)
    try:
        url = await asyncio.wait_for(listening_url(notices, process, log, ready=ready), 2 * LIMIT)
        yield Api(process, url, log)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        notices.close()


async def start(
    run_dir: Path, log: Path, *arguments: str, notify: str = "", parent: Sequence[str] = ()
) -> asyncio.subprocess.Process:
    """The process itself, writing to `log`."""
    command = [*parent, sys.executable, "-m", "penstock", "api", "--port", "0", "--run-dir", str(run_dir)]
    command += ["--model", model(run_dir).model, *arguments]
    environment = {**os.environ, "NOTIFY_SOCKET": notify}
    with log.open("wb") as out:
        return await asyncio.create_subprocess_exec(*command, stdout=out, stderr=out, env=environment)


async def listening_url(notices: NoticeSocket, process: asyncio.subprocess.Process, log: Path, *, ready: bool) -> str:
    """Wait for an address, and with `ready` for READY=1; the address."""
    loop = asyncio.get_running_loop()
    heard = asyncio.Event()
    ending = asyncio.ensure_future(process.wait())
    ending.add_done_callback(lambda _: heard.set())
    loop.add_reader(notices.fileno(), heard.set)
    url = ""
    try:
        while True:
            await heard.wait()
            heard.clear()
            assert process.returncode is None, f"the api ended with {process.returncode}; see {log}"
            for notice in notices.receive():
                url = notice.fields.get("X_PENSTOCK_URL", url)
                if url and (notice.ready or not ready):
                    return url
    finally:
        loop.remove_reader(notices.fileno())
        ending.cancel()
