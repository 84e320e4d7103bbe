"""The scheduler as a process of its own, between an executor and a tokenizer that the test plays over real sockets."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import zmq

from penstock.protocol.control import EngineStatus
from penstock.protocol.engine_config import ModelConfig
from penstock.protocol.links import STEPS, TOKENS, LinkSpec, Role, new_incarnation, shared_hash
from penstock.protocol.messages import Finish, Sampling, SubmitTokens
from penstock.protocol.outputs import TokenBatch
from penstock.protocol.steps import ExecutorReady, StepPlan, StepResult
from penstock.services.links.handshake import Identity
from penstock.services.links.link import Joined, Left, Link
from penstock.services.supervisor.sd_notify import NoticeSocket

ROOT = Path(__file__).resolve().parents[3]
LIMIT = 120.0  # seconds; a loaded machine needs some of them
LAST_WORDS = 20.0  # seconds that they may be on their way
CONFIG = {"architectures": ["LlamaForCausalLM"], "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
CONFIG |= {"num_attention_heads": 1, "vocab_size": 32, "max_position_embeddings": 64, "torch_dtype": "float32"}


class Scene:
    """The process under test and the two ends that the test plays."""

    def __init__(self, folder: Path) -> None:
        self.model = folder / "model"
        self.model.mkdir()
        (self.model / "config.json").write_text(json.dumps(CONFIG))
        self.run_dir = folder / "run"
        self.run_dir.mkdir(mode=0o700)
        self.notices = NoticeSocket(folder / "notify")
        self.told: dict[str, str] = {}
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.tokens = self.connect(TOKENS, Role.TOKENIZER)
        self.steps = self.connect(STEPS, Role.EXECUTOR)
        self.got: list[object] = []
        self.decoding: set[int] = set()
        self.held = False  # plans are kept unanswered
        self.process = self.start()

    def start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "penstock", "scheduler", f"--run-dir={self.run_dir}", f"--model={self.model}"]
        environ = {**os.environ, "NOTIFY_SOCKET": str(self.notices.path)}
        return subprocess.Popen(command, cwd=ROOT, env=environ, stderr=subprocess.PIPE, text=True)

    def connect(self, link: LinkSpec, role: Role) -> Link:
        me = Identity(role, 0, new_incarnation(), shared_hash(ModelConfig(model=str(self.model))))
        return Link.connect(self.context, link, me, self.run_dir)

    def iterate(self) -> None:
        """Answer plans as an executor would, keep what a tokenizer gets."""
        for port in (self.tokens, self.steps):
            port.tick(time.monotonic())
        for arrival in self.steps.receive():
            match arrival.message:
                case StepPlan() as plan if not self.held:
                    self.steps.send(arrival.peer, self.result(plan))
                case Joined():
                    self.steps.send(arrival.peer, ExecutorReady(
                        epoch=arrival.peer.epoch, blocks=8, block_size=16, step_tokens=512, device="cpu",
                        dtype="float32", weight_bytes=1, cache_bytes=1, load_seconds=0.1))  # fmt: skip
                case _:
                    self.got.append(arrival.message)
        self.got += [arrival.message for arrival in self.tokens.receive()]
        for notice in self.notices.receive():
            self.told |= notice.fields

    def result(self, plan: StepPlan) -> StepResult:
        self.decoding |= set(np.frombuffer(plan.decode_on, np.int32).tolist())
        self.decoding -= set(np.frombuffer(plan.decode_off, np.int32).tolist())
        rows = len(self.decoding) + int(np.frombuffer(plan.chunks, np.int32).reshape(-1, 4)[:, 3].sum())
        return StepResult(step=plan.step, epoch=plan.epoch, token_ids=np.full(rows, 5, np.int32).tobytes())

    def until(self, done: Callable[[], object]) -> None:
        """Keep both ends moving until `done`. The last words of a process may be read after its end."""
        deadline = time.monotonic() + LIMIT
        while not done():
            if self.process.poll() is not None:
                deadline = min(deadline, time.monotonic() + LAST_WORDS)
            assert time.monotonic() < deadline, (self.told, self.got)
            poller = zmq.Poller()
            for port in (self.tokens, self.steps):
                poller.register(port.socket, zmq.POLLIN)
            poller.poll(20)
            self.iterate()

    def submit(self, number: int, max_tokens: int = 4) -> None:
        self.until(lambda: self.tokens.peers)  # the scheduler may be ready before the tokenizer's link is
        (peer,) = self.tokens.peers
        ids = np.arange(10, dtype=np.int32).tobytes()
        assert self.tokens.send(peer, SubmitTokens(id=number, token_ids=ids, sampling=Sampling(max_tokens=max_tokens)))

    def of(self, kind: type) -> list:
        return [message for message in self.got if isinstance(message, kind)]

    def ends(self) -> list[int]:
        return [finish for batch in self.of(TokenBatch) for finish in batch.finish if finish]

    def wait(self) -> tuple[int, str]:
        _, errors = self.process.communicate(timeout=LIMIT)
        return self.process.returncode, errors

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()
        self.tokens.close()
        self.steps.close()
        self.context.term()
        self.notices.close()


@pytest.fixture
def scene(tmp_path) -> Iterator[Scene]:
    opened = Scene(tmp_path)
    yield opened
    opened.close()


def test_it_serves_tells_and_ends_in_order(scene):
    scene.until(lambda: scene.told.get("READY") == "1")
    scene.until(lambda: any(status.ready for status in scene.of(EngineStatus)))
    told = scene.of(EngineStatus)[-1]
    assert (told.blocks, told.block_size, told.max_model_len, told.device) == (8, 16, 64, "cpu")
    scene.submit(1)
    scene.until(scene.ends)
    assert scene.ends() == [Finish.LENGTH]
    scene.process.terminate()
    scene.until(lambda: scene.of(Left))
    code, errors = scene.wait()
    assert code == 0
    assert " scheduler-0 ended unfinished=0" in errors


def test_what_runs_is_finished_after_a_signal(scene):
    scene.until(lambda: scene.told.get("READY") == "1" and scene.tokens.peers)
    scene.held = True
    scene.submit(1, max_tokens=30)
    scene.until(lambda: any(status.running for status in scene.of(EngineStatus)))
    scene.process.terminate()
    scene.until(lambda: scene.told.get("STOPPING") == "1")
    scene.process.terminate()  # at once, whatever is unfinished
    code, _ = scene.wait()
    assert code == -signal.SIGTERM
    assert scene.ends() == []


def test_a_restarted_scheduler_finds_its_peers_again(scene):
    scene.until(lambda: scene.told.get("READY") == "1")
    scene.submit(1)
    scene.until(scene.ends)
    (before,) = scene.steps.peers
    scene.process.kill()
    scene.process.wait()
    scene.until(lambda: len(scene.of(Left)) == 2)  # on either link: what it said last, that it was ready, came before
    assert scene.process.stderr is not None
    scene.process.stderr.close()
    scene.told.clear()
    scene.got.clear()
    scene.decoding.clear()
    scene.process = scene.start()
    scene.until(lambda: scene.told.get("READY") == "1" and any(status.ready for status in scene.of(EngineStatus)))
    (after,) = scene.steps.peers
    assert after.incarnation != before.incarnation
    scene.submit(2)
    scene.until(scene.ends)
    assert scene.ends() == [Finish.LENGTH]


def test_an_idle_scheduler_costs_next_to_nothing(scene):
    """Its turns while nothing happens are those of ticks and heartbeats: no busy loop."""
    scene.until(lambda: scene.told.get("READY") == "1")
    deadline, rates = time.monotonic() + LIMIT, [1e9]
    while rates[-1] >= 60:  # what a start leaves to be done may take its time
        assert time.monotonic() < deadline, rates
        before, began = switches(scene.process.pid), time.monotonic()
        select.select([], [], [], 1.0)
        rates.append((switches(scene.process.pid) - before) / (time.monotonic() - began))


def switches(pid: int) -> int:
    """How often the main thread went to sleep so far."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "voluntary_ctxt_switches":
            return int(value)
    raise AssertionError("proc(5) has changed")
