"""Adapters come into host memory beside the steps, and go; what the scheduler is told."""

from __future__ import annotations

import json
import logging
import os
import select
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from penstock.engine_core.models.adapter_folder import adapter_version
from penstock.protocol.config import Config
from penstock.protocol.engine_config import ExecutorConfig, ModelConfig
from penstock.protocol.steps import AdapterLoaded, DropAdapter, LoadAdapter, StepPlan
from penstock.services.executor import adapter_loading
from penstock.services.executor.adapter_loading import AdapterLoader
from penstock.services.executor.crash_report import Reports
from penstock.services.executor.startup import Engine, start
from penstock.services.executor.steps import Steps
from penstock.services.executor.watchdog import Watchdog
from penstock.services.links.link import Joined, Left
from tests.services.executor.folder import write_folder
from tests.services.executor.test_steps import FakePort, first, peer, results, run, then

DEADLINE = 60.0  # seconds, which only a failure takes


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    options = ModelConfig(
        model=str(write_folder(tmp_path_factory.mktemp("models") / "tiny")), load_format="dummy", dtype="float32",
        max_num_seqs=4, max_num_batched_tokens=64, enable_lora=True, max_loras=2, max_lora_rank=4,
    )  # fmt: skip
    return start(Config(model=options, executor=ExecutorConfig(device="cpu", cpu_threads=1)), 0)


@pytest.fixture
def port() -> FakePort:
    return FakePort()


@pytest.fixture
def steps(port: FakePort, engine: Engine, tmp_path: Path) -> Steps:
    sink: Any = port
    made = Steps(sink, engine.runner, engine.ready, Watchdog(), Reports(tmp_path, "e", engine.ready, prompts=False))
    run(made, peer(), Joined())
    port.sent.clear()
    return made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 400, "target_modules": ["o_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    prefix, halves = "base_model.model.model.layers", {"A": (4, 16), "B": (16, 4)}
    save_file(
        {
            f"{prefix}.{layer}.self_attn.o_proj.lora_{half}.weight": torch.randn(shape)
            for layer in range(2)
            for half, shape in halves.items()
        },
        tmp_path / "adapter_model.safetensors",
    )
    return tmp_path


def loader_of(steps: Steps) -> AdapterLoader:
    assert steps.adapters is not None
    return steps.adapters


def wait(steps: Steps) -> None:
    """Until something has been read, as the process's loop does."""
    readable, _, _ = select.select([loader_of(steps)], [], [], DEADLINE)
    assert readable
    steps.iterate()


def spare(steps: Steps) -> int:
    """Memory that adapters have left."""
    slots = loader_of(steps)._slots
    return len(slots.memory._free)


def answers(port: FakePort) -> list[AdapterLoaded]:
    return [message for _, message in port.sent if isinstance(message, AdapterLoaded)]


def pairs(*numbers: int) -> bytes:
    return np.array(numbers, "<i4").tobytes()


def adapted(step: int, place: int, *copied: int) -> StepPlan:
    """`first`, with the adapter in a place."""
    plan = first(step)
    starts = tuple(replace(begin, adapter=place) for begin in plan.starts)
    return replace(plan, starts=starts, adapters=pairs(*copied))


def test_an_adapter_is_loaded_copied_and_dropped(steps: Steps, port: FakePort, engine: Engine, folder: Path) -> None:
    """A drop waits for the plans that came before it."""
    assert engine.ready.adapter_places == 2
    run(steps, peer(), first(1), then(2))
    plain = b"".join(result.token_ids for result in results(port))
    run(steps, peer(), LoadAdapter(number=7, path=str(folder)))
    wait(steps)
    assert answers(port) == [AdapterLoaded(number=7)]
    slots = engine.runner.adapters
    assert slots is not None
    assert list(slots.loaded) == [7]
    before = spare(steps)
    run(steps, peer(), then(3, on=None), adapted(4, 2, 7, 2), then(5), DropAdapter(number=7))
    assert slots.loaded == {}
    assert spare(steps) == before + 1
    found = b"".join(result.token_ids for result in results(port)[-2:])
    assert found != plain
    assert slots.places.memory[1].any()
    assert not slots.places.memory[0].any()


def test_a_folder_that_is_refused(steps: Steps, port: FakePort, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The scheduler is told why, without a path; the log has it."""
    (folder / "adapter_model.safetensors").unlink()
    with caplog.at_level(logging.WARNING):
        run(steps, peer(), LoadAdapter(number=1, path=f"{folder}/"))
        wait(steps)
    assert answers(port) == [AdapterLoaded(number=1, error="adapter_model.safetensors: no such file")]
    (fields,) = [vars(record)["fields"] for record in caplog.records]
    told = {"number": 1, "path": f"{folder}/", "reason": "adapter_model.safetensors: no such file"}
    assert fields == told
    assert spare(steps)


def test_a_folder_that_has_changed_is_another_adapter(steps: Steps, port: FakePort, folder: Path) -> None:
    version, weights = adapter_version(folder), folder / "adapter_model.safetensors"
    os.utime(weights, ns=(0, 1))  # a copy of it is the same
    run(steps, peer(), LoadAdapter(number=1, path=str(folder), version=version))
    wait(steps)
    save_file({name: -tensor for name, tensor in load_file(weights).items()}, weights)
    run(steps, peer(), LoadAdapter(number=2, path=str(folder), version=version))
    wait(steps)
    error = "its folder has changed since it was named: load it anew"
    assert answers(port) == [AdapterLoaded(number=1), AdapterLoaded(number=2, error=error)]


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RuntimeError("CUDA error: out of memory"), "this executor cannot hold it: RuntimeError"),
        (ValueError("cannot reshape"), "this executor cannot read it: ValueError"),
    ],
)
def test_whatever_happens_the_next_one_is_read(
    error: Exception,
    told: str,
    steps: Steps,
    port: FakePort,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(adapter_loading, "read_adapter", fail)
        run(steps, peer(), LoadAdapter(number=1, path=str(folder)))
        wait(steps)
    assert "adapter_failed" in caplog.text
    run(steps, peer(), LoadAdapter(number=2, path=str(folder)))
    wait(steps)
    assert answers(port) == [AdapterLoaded(number=1, error=told), AdapterLoaded(number=2)]


def test_a_folder_that_is_gone_is_told_without_its_path(steps: Steps, port: FakePort, tmp_path: Path) -> None:
    run(steps, peer(), LoadAdapter(number=1, path=str(tmp_path / "gone")))
    wait(steps)
    assert answers(port) == [AdapterLoaded(number=1, error="no such folder")]


def test_answers_wait_for_credit(steps: Steps, port: FakePort, folder: Path) -> None:
    port.full = True
    run(steps, peer(), LoadAdapter(number=1, path=str(folder)))
    wait(steps)
    assert (answers(port), steps.busy) == ([], True)
    port.full = False
    steps.iterate()
    assert (answers(port), steps.busy) == ([AdapterLoaded(number=1)], False)


@pytest.mark.parametrize("how", ["its scheduler leaves", "it is dropped"])
def test_what_nobody_wants_any_more_is_not_kept(
    how: str, steps: Steps, port: FakePort, engine: Engine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither what has been read, nor what is being read; numbers of the next scheduler are others."""
    slots, began, gate = engine.runner.adapters, threading.Event(), threading.Event()
    assert slots is not None
    slots.memory._free.clear()
    run(steps, peer(), LoadAdapter(number=1, path=str(folder)))
    wait(steps)

    def attempt(*asked: Any) -> Any:
        began.set()
        assert gate.wait(DEADLINE)
        return plain(*asked)

    plain = adapter_loading.attempt
    monkeypatch.setattr(adapter_loading, "attempt", attempt)
    run(steps, peer(), LoadAdapter(number=2, path=str(folder)))
    assert began.wait(DEADLINE)
    if how == "it is dropped":
        run(steps, peer(), DropAdapter(number=1), DropAdapter(number=2))
    else:
        run(steps, peer(), Left("gone"))
        run(steps, peer(2), Joined())
    steps.iterate()
    assert slots.loaded == {}
    gate.set()
    wait(steps)
    assert spare(steps) == 1, "the second was read into what the first had"
    run(steps, peer(2), LoadAdapter(number=3, path=str(folder)))
    while 3 not in slots.loaded:
        wait(steps)
    assert list(slots.loaded) == [3]
    assert spare(steps) == 0
    assert [answer.number for answer in answers(port)] == [1, 3]
