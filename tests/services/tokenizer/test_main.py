"""The tokenizer as a process of its own, between an api and a scheduler that the test plays over real sockets."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest
import zmq

from penstock.engine_core.text.prompts import PromptLimits
from penstock.protocol.columns import pack, unpack
from penstock.protocol.config import Config, TokenizerConfig
from penstock.protocol.control import EngineStatus
from penstock.protocol.engine_config import ModelConfig, SchedulerConfig
from penstock.protocol.links import TEXT, TOKENS, Role, shared_hash
from penstock.protocol.message import Message
from penstock.protocol.messages import (
    Abort,
    Detokenize,
    Detokenized,
    Finish,
    Rejected,
    Sampling,
    StopHit,
    SubmitText,
    SubmitTokens,
    Tokenize,
    Tokenized,
)
from penstock.protocol.outputs import TextBatch, TokenBatch
from penstock.services.links.handshake import Identity
from penstock.services.links.link import Link
from penstock.services.supervisor.sd_notify import NoticeSocket
from penstock.services.tokenizer.main import image_decoder, placement_of, read_frontend, read_vocabulary
from tests.engine_core.text.sighted import FAMILIES
from tests.engine_core.tokenizer.vocabularies import tokenizer, write_folder

STATUS = EngineStatus(
    time=1.0, epoch=1, ready=True, step=1, step_age=0.0, running=0, waiting=0, blocks=8, blocks_free=8, blocks_idle=0,
    block_size=16, max_model_len=512, max_num_seqs=4, device="cpu", dtype="float32", prompt_tokens=0, cached_tokens=0,
    output_tokens=0, finished=0, aborted=0, failed=0, preemptions=0, drain_rate=0.0,
)  # fmt: skip
T = TypeVar("T")
DEADLINE = 60.0  # seconds in which everything expected has to arrive


class Stage:
    """The process under test and its two neighbours."""

    def __init__(self, root: Path) -> None:
        self.run_dir = root / "run"
        self.run_dir.mkdir(mode=0o700)
        self.notices = NoticeSocket(root / "notify.sock")
        folder = write_folder(root / "model")
        shared = shared_hash(ModelConfig(model=str(folder)))
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.scheduler = Link.bind(self.context, TOKENS, Identity(Role.SCHEDULER, 0, 1, shared), self.run_dir)
        self.api = Link.connect(self.context, TEXT, Identity(Role.API, 0, 2, shared), self.run_dir)
        command = [sys.executable, "-m", "penstock.services.cli", "tokenizer", "--run-dir", str(self.run_dir)]
        self.process = subprocess.Popen(
            [*command, "--model", str(folder)], env={**os.environ, "NOTIFY_SOCKET": str(self.notices.path)}
        )
        self.at_api: list[Message] = []
        self.at_scheduler: list[Message] = []

    def until(self, done: Callable[[], bool]) -> None:
        """Keep both neighbours moving until `done`."""
        end = time.monotonic() + DEADLINE
        while not done():
            assert time.monotonic() < end, f"nothing of the kind arrived: {self.at_api} {self.at_scheduler}"
            for port, found in ((self.api, self.at_api), (self.scheduler, self.at_scheduler)):
                port.tick(time.monotonic())
                found += [arrival.message for arrival in port.receive() if isinstance(arrival.message, Message)]
            self.api.socket.poll(2)

    def ask(self, message: Message) -> None:
        assert self.api.send(self.api.peers[0], message)

    def say(self, message: Message) -> None:
        assert self.scheduler.send(self.scheduler.peers[0], message)

    def take(self, found: list[Message], kind: type[T]) -> T:
        self.until(lambda: any(isinstance(message, kind) for message in found))
        message = next(message for message in found if isinstance(message, kind))
        found.remove(message)  # type: ignore[arg-type]
        return message

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.api.close()
        self.scheduler.close()
        self.notices.close()
        self.context.destroy(linger=0)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path)
    yield stage
    stage.close()


def tokens(request_id: int, token_ids: list[int], finish: Finish = Finish.NONE) -> TokenBatch:
    return TokenBatch(
        ids=pack("q", [request_id]),
        choices=pack("H", [0]),
        counts=pack("i", [len(token_ids)]),
        token_ids=pack("i", token_ids),
        finish=pack("B", [finish]),
    )


def test_a_request_there_and_back(stage: Stage) -> None:
    stage.until(lambda: bool(stage.api.peers and stage.scheduler.peers))
    stage.until(lambda: any(notice.ready for notice in stage.notices.receive()))
    library = tokenizer("byte_level")
    stage.say(STATUS)
    assert stage.take(stage.at_api, EngineStatus) == STATUS

    stage.ask(
        SubmitText(
            id=7, messages=b'[{"role":"user","content":"one"}]', sampling=Sampling(seed=3), stop=("four",), stream=True
        )
    )
    submitted = stage.take(stage.at_scheduler, SubmitTokens)
    prompt = unpack("i", submitted.token_ids)
    assert library.decode(prompt, skip_special_tokens=False) == (
        "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n"
    )
    assert submitted.sampling.max_tokens == 512 - len(prompt)
    names = [library.id_to_token(token_id) for token_id in submitted.sampling.eos_token_ids]
    assert names == ["<|im_end|>", "</s>"]
    answer = library.encode("two three four five").ids
    text = ""
    for token_id in answer:
        stage.say(tokens(7, [token_id]))
        batch = stage.take(stage.at_api, TextBatch)
        text += batch.text[0]
        if batch.finish != b"\x00":
            break
    assert text == "two three "
    assert batch.extras[0].stop_reason == "four"
    hit = stage.take(stage.at_scheduler, StopHit)
    assert (hit.id, hit.choice) == (7, 0)
    stage.say(tokens(7, [], Finish.STOP))

    stage.ask(Tokenize(id=8, prompt="one", with_strings=True))
    tokenized = stage.take(stage.at_api, Tokenized)
    assert library.decode(unpack("i", tokenized.token_ids)) == "one"
    stage.ask(Detokenize(9, tokenized.token_ids))
    assert stage.take(stage.at_api, Detokenized).text == "one"
    assert not [message for message in stage.at_api if isinstance(message, TextBatch)]


def test_long_prompts_neighbours_and_the_end(stage: Stage) -> None:
    """A long prompt goes through a thread, and the next scheduler gets what a lost one had."""
    stage.until(lambda: bool(stage.api.peers and stage.scheduler.peers))
    stage.ask(SubmitText(id=1, prompt="one two " * 20_000, sampling=Sampling()))
    rejected = stage.take(stage.at_api, Rejected)
    assert (rejected.id, rejected.status, rejected.code) == (1, 400, "context_length_exceeded")
    stage.ask(SubmitText(id=2, prompt="one two " * 520, sampling=Sampling()))  # not refused at sight
    rejected = stage.take(stage.at_api, Rejected)
    assert (rejected.id, rejected.status, rejected.code) == (2, 400, "context_length_exceeded")
    stage.say(STATUS)
    stage.ask(SubmitText(id=3, prompt="one", sampling=Sampling()))
    stage.take(stage.at_scheduler, SubmitTokens)
    stage.scheduler.close()
    stage.scheduler = Link.bind(
        stage.context,
        TOKENS,
        msgspec.structs.replace(stage.scheduler.me, incarnation=9),
        stage.run_dir,
    )
    stage.until(lambda: bool(stage.scheduler.peers))
    stage.say(STATUS)
    assert stage.take(stage.at_scheduler, SubmitTokens).id == 3
    stage.ask(Abort(3))
    stage.say(tokens(3, [], Finish.ABORT))
    stage.process.send_signal(signal.SIGTERM)
    assert stage.process.wait(DEADLINE) == 0


def test_options_of_templates_reach_the_frontend(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    given = {"split_special_tokens": False, "default_chat_template_kwargs": '{"enable_thinking": false}'}
    for tokenizer_options, split, thinks in (({}, True, None), (given, False, False)):
        config = Config(model=ModelConfig(model=str(folder)), tokenizer=TokenizerConfig(**tokenizer_options))
        _, found = read_frontend(config, folder, read_vocabulary(folder))
        assert (found.controls is not None, found.names.get("enable_thinking")) == (split, thinks)


def test_neither_torch_nor_transformers_is_imported(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    code = (
        "import sys, penstock.services.tokenizer.main as main\n"
        "from penstock.protocol.config import Config, ModelConfig\n"
        f"path = main.Path({str(folder)!r})\n"
        "main.read_frontend(Config(model=ModelConfig(model=str(path))), path, main.read_vocabulary(path))\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'numpy', 'PIL')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("policy", "caching", "replicas", "chains"),
    [
        ("prefix", True, 2, True),
        ("prefix", False, 2, False),
        ("prefix", True, 1, False),
        ("round_robin", True, 2, False),
    ],
)
def test_prefixes_count_where_they_are_cached(policy: str, caching: bool, replicas: int, chains: bool) -> None:
    config = Config(
        model=ModelConfig(data_parallel_size=replicas, block_size=32),
        tokenizer=TokenizerConfig(placement=policy),
        scheduler=SchedulerConfig(enable_prefix_caching=caching),
    )
    made = placement_of(config)
    assert (made.chains, len(made.replicas), made.block_size) == (chains, replicas, 32)


async def test_workers_are_for_models_that_see_images() -> None:
    seeing = PromptLimits(9, 9, (1,), vision=FAMILIES["qwen"].vision())
    assert image_decoder(Config(), PromptLimits(9, 9, (1,))) is None
    assert image_decoder(Config(model=ModelConfig(limit_mm_per_prompt="image=0")), seeing) is None
    assert image_decoder(Config(), seeing) is not None
