"""Trainers that give a real server weights: by broadcast, by shared memory, in parts; and trainers that die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
from safetensors.torch import load_file

from penstock.engine_core.loading.digests import checksum
from tests.e2e.server import Server, serving
from tests.e2e.test_weights import (
    LONG,
    MIDDLE,
    PROMPT,
    TOKENS,
    WEIGHTS,
    fresh,  # noqa: F401 (a fixture)
    ids,
    operate,
    options,
    rest,
    stream,
    tokens_of,
    updatable,
    version,
    write_folder,
)
from tests.services.links.network import free_port

TRAINER = Path(__file__).with_name("trainer.py")


class Trainer:
    """The process, and what its clients ask of a server meanwhile."""

    def __init__(self, server: Server, file: Path, size: int = 2) -> None:
        self.server, self.tensors, self.size, self.port = server, sorted(load_file(file).items()), size, free_port()
        command = [sys.executable, str(TRAINER), str(self.port), str(size), "group", str(file)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pool = ThreadPoolExecutor(1)

    def join(self) -> Any:
        group = {"master_address": "127.0.0.1", "master_port": self.port, "rank_offset": 1, "world_size": self.size,
                 "group_name": "group", "backend": "gloo"}  # fmt: skip
        told = operate(self.server, "/init_weights_update_group", group)
        assert self.line() == "joined"
        return told

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def send(self, start: int, count: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{start} {count}\n")
        self.process.stdin.flush()

    def listing(self, start: int = 0, count: int = 1 << 20, dtypes: str = "dtypes") -> dict[str, Any]:
        chosen = self.tensors[start : start + count]
        return {"names": [name for name, _ in chosen], dtypes: [str(each.dtype) for _, each in chosen],
                "shapes": [list(each.shape) for _, each in chosen]}  # fmt: skip

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.pool.shutdown()


@contextmanager
def training(server: Server, size: int = 2) -> Iterator[Trainer]:
    trainer = Trainer(server, server.log.parent / "weights" / "new" / WEIGHTS, size)
    try:
        yield trainer
    finally:
        trainer.end()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with updatable(tmp_path) as found:
        yield found


def test_a_broadcast_under_an_open_stream(server: Server, fresh: Server) -> None:  # noqa: F811
    """As slime does it: buckets with one version. What is refused is refused before anything is sent."""
    prompt, told = tokens_of(server), {}
    with training(server) as trainer:
        assert trainer.join() == {"success": True, "message": "Succeeded to initialize custom process group."}
        half = len(trainer.tensors) // 2
        asked = {"group_name": "group", "flush_cache": False, "weight_version": "7"}
        wrong = {**asked, **trainer.listing(0, 1), "shapes": [[3]]}
        with server.slow():
            running = stream(server, PROMPT, LONG, remarks=told)
            found = [*next(running), *next(running)]
            assert "has shape [3]" in operate(server, "/update_weights_from_distributed", wrong)["message"]
            assert version(server) == "0"
            operate(server, "/pause?mode=keep")
        for start, count in ((0, half), (half, len(trainer.tensors))):
            trainer.send(start, count)
            answer = operate(server, "/update_weights_from_distributed", {**asked, **trainer.listing(start, count)})
            assert answer["success"], answer
            assert trainer.line() == "sent"
        operate(server, "/resume")
        found += rest(server, running)
        first, second = told["weight_versions"]
        assert (first["weight_version"], second["weight_version"]) == ("0", "7")
        before = second["start"]
        assert 0 < before <= len(found) - TOKENS
        assert found[before:] == ids(fresh, prompt + found[:before], len(found) - before)
        sums = operate(server, "/weights_checker", {"action": "checksum"})["payload"]
        assert sums["weight_version"] == "7"
        for name, tensor in trainer.tensors:
            held = tensor.to(getattr(torch, sums["dtypes"][name])) + sums["offsets"].get(name, 0.0)
            assert sums["checksums"][name] == f"{checksum(held):016x}", name
        assert operate(server, "/destroy_weights_update_group", {"group_name": "group"})["success"]
        gone = operate(server, "/update_weights_from_distributed", {**asked, **trainer.listing(0, 1)})
        assert "there is no group 'group'" in gone["message"]


def test_a_trainer_killed_in_a_broadcast_costs_its_weights_and_no_stream(server: Server) -> None:
    old = ids(server, PROMPT, MIDDLE)
    with training(server) as trainer:
        trainer.join()
        running = stream(server, PROMPT, MIDDLE)
        found = next(running)
        trainer.send(0, 3)
        asked = {"group_name": "group", **trainer.listing()}
        answer = trainer.pool.submit(operate, server, "/update_weights_from_distributed", asked)
        assert trainer.line() == "sent"
        os.kill(trainer.process.pid, signal.SIGKILL)
        told = answer.result()
        assert not told["success"]
        assert told["message"].endswith("the weights are those of version 0 again")
    assert found + [token for part in running for token in part] == old
    assert version(server) == "0"


def shared_file(tensors: dict[str, torch.Tensor]) -> tuple[str, list[dict[str, Any]]]:
    """A file below /dev/shm with these tensors, and how a request lists them."""
    name, listed, content = f"penstock-test-{uuid4().hex}", [], b""
    for each, tensor in tensors.items():
        listed.append({"name": each, "dtype": str(tensor.dtype), "shape": list(tensor.shape), "offset": len(content),
                       "handles": {"cpu": name}})  # fmt: skip
        raw = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        content += raw + bytes(-len(raw) % 8)
    (Path("/dev/shm") / name).write_bytes(content)
    return name, listed


@pytest.mark.long
def test_memory_in_parts_and_a_killed_executor(server: Server, fresh: Server) -> None:  # noqa: F811
    """By vLLM's paths. Weights that are in no folder are lost with an executor: the server goes on with the last
    folder's, and says so."""
    old, new = ids(server, PROMPT), ids(fresh, PROMPT)
    name, listed = shared_file(load_file(server.log.parent / "weights" / "new" / WEIGHTS))
    try:
        assert operate(server, "/get_world_size", method="GET") == {"world_size": 1}
        assert "no update has begun" in operate(server, "/finish_weight_update")["error"]["message"]
        operate(server, "/start_weight_update", {"is_checkpoint_format": True})
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(ids, server, PROMPT)
            server.until("/health", lambda found: found["engine"]["waiting"] == 1)
            for at in range(0, len(listed), 8):
                part = {"update_info": {"tensors": listed[at : at + 8]}}
                assert operate(server, "/update_weights", part) == {"message": "Weights updated"}
            assert not waiting.done()
            operate(server, "/finish_weight_update", {"weight_version": "step-2"})
            assert waiting.result() == new
        assert version(server) == "step-2"
        told: dict[str, Any] = {}
        running = stream(server, PROMPT, MIDDLE, remarks=told)
        found = next(running)
        os.kill(server.children()["executor"], signal.SIGKILL)
        found += [token for part in running for token in part]
        assert [span["weight_version"] for span in told["weight_versions"]] == ["step-2", "0"]
        assert version(server) == "0"
        assert ids(server, PROMPT) == old
    finally:
        (Path("/dev/shm") / name).unlink()


def test_a_scheduler_killed_within_an_update(server: Server) -> None:
    old = ids(server, PROMPT)
    name, listed = shared_file(load_file(server.log.parent / "weights" / "new" / WEIGHTS))
    try:
        operate(server, "/start_weight_update")
        operate(server, "/update_weights", {"update_info": {"tensors": listed[:5]}})
        os.kill(server.children()["scheduler"], signal.SIGKILL)
        assert ids(server, PROMPT) == old, "the last folder is read again"
        assert version(server) == "0"
    finally:
        (Path("/dev/shm") / name).unlink()


@pytest.mark.long
def test_every_rank_takes_its_slices_of_a_broadcast(tmp_path: Path, fresh: Server) -> None:  # noqa: F811
    write_folder(tmp_path / "weights" / "new")
    with serving(tmp_path, *options(tmp_path), "--tensor-parallel-size", "2") as server, training(server, 3) as trainer:
        assert trainer.join()["success"]
        trainer.send(0, len(trainer.tensors))
        answer = operate(server, "/update_weights_from_distributed", {"group_name": "group", **trainer.listing()})
        assert answer["success"], answer
        assert ids(server, PROMPT) == ids(fresh, PROMPT)
        sums = operate(server, "/weights_checker")["payload"]
        for name, tensor in trainer.tensors:
            held = tensor.to(getattr(torch, sums["dtypes"][name])) + sums["offsets"].get(name, 0.0)
            assert sums["checksums"][name] == f"{checksum(held):016x}", name
