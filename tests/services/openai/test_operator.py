"""The operator's routes: what they ask of the schedulers, and what they answer."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from safetensors.numpy import save_file

from penstock.protocol.control import (
    AbortAll,
    AskState,
    Controlled,
    FlushCache,
    Pause,
    PauseMode,
    Resume,
    SleepEngine,
    UpdateWeights,
    WakeEngine,
)
from penstock.protocol.message import Message
from penstock.services.openai.operator import next_version
from penstock.services.openai.routes import operator_application
from tests.services.client.fake_engine import FakeLink, app_state, client

Script = Callable[[FakeLink, Message], None]


def answering(**fields: Any) -> Script:
    """Schedulers that have done what they were asked."""

    def script(port: FakeLink, message: Message) -> None:
        asyncio.get_running_loop().call_soon(port.arrive, Controlled(message.id, **fields))  # type: ignore[attr-defined]

    return script


async def asked(
    port: FakeLink, path: str, method: str = "POST", directory: Path | None = None, **request: Any
) -> tuple[int, Any, list[Message]]:
    """Status and body of the answer, and what the schedulers were asked, without ids."""
    app = app_state(port, admin_address="unix:/none", weights_dir="" if directory is None else str(directory))
    async with client(app, served=operator_application) as http:
        answer = await http.request(method, path, **request)
    body = answer.json() if "json" in answer.headers["content-type"] else answer.text
    return answer.status_code, body, [msgspec.structs.replace(message, id=0) for message in port.sent]  # type: ignore[type-var]


PAUSED: list[tuple[str, Any, list[Message]]] = [
    ("/pause", None, [Pause(0, PauseMode.ABORT), FlushCache(0)]),
    ("/pause?mode=wait", None, [Pause(0, PauseMode.WAIT), FlushCache(0)]),
    ("/pause?mode=wait&clear_cache=false", None, [Pause(0, PauseMode.WAIT)]),
    ("/pause?mode=keep", None, [Pause(0, PauseMode.KEEP)]),
    ("/pause?wait_for_inflight_requests=true&clear_cache=0", None, [Pause(0, PauseMode.WAIT)]),
    ("/pause_generation", None, [Pause(0, PauseMode.ABORT)]),
    ("/pause_generation", {}, [Pause(0, PauseMode.ABORT)]),
    ("/pause_generation", {"mode": "in_place"}, [Pause(0, PauseMode.KEEP)]),
    ("/pause_generation", {"mode": "retract"}, [Pause(0, PauseMode.KEEP)]),
    ("/resume", None, [Resume(0)]),
    ("/continue_generation", {"torch_empty_cache": True}, [Resume(0)]),
    ("/flush_cache", None, [FlushCache(0)]),
    ("/reset_prefix_cache", None, [FlushCache(0)]),
    ("/abort_request", {"rid": "", "abort_all": True}, [AbortAll(0)]),
    ("/abort_request", {"rid": "a"}, [AbortAll(0, "a")]),
    ("/sleep", None, [SleepEngine(0)]),
    ("/sleep?level=2", None, [SleepEngine(0, discard=True)]),
    ("/wake_up?tags=weights", None, [WakeEngine(0)]),
]


@pytest.mark.parametrize(("path", "body", "messages"), PAUSED)
async def test_what_is_asked(path: str, body: Any, messages: list[Message]) -> None:
    status, _, sent = await asked(FakeLink(answering()), path, **({} if body is None else {"json": body}))
    assert (status, sent) == (200, messages)


async def test_sleep_that_would_disturb_requests_is_refused() -> None:
    status, body, _ = await asked(FakeLink(answering(error="3 requests have not ended")), "/sleep")
    assert (status, body["error"]["message"]) == (409, "3 requests have not ended")
    status, body, sent = await asked(FakeLink(answering()), "/sleep?level=0")
    assert (status, body["error"]["param"], sent) == (400, "level", [])


async def test_what_is_told() -> None:
    assert (await asked(FakeLink(answering(asleep=True)), "/is_sleeping", "GET"))[1] == {"is_sleeping": True}
    assert (await asked(FakeLink(answering()), "/is_sleeping", "GET"))[1] == {"is_sleeping": False}
    loads = await asked(FakeLink(answering(requests=3)), "/v1/loads?include=core", "GET")
    assert loads[1] == {"loads": [{"num_total_reqs": 3}]}, "what slime's client adds up"
    state = answering(paused="keep", version="4")
    assert (await asked(FakeLink(state), "/is_paused", "GET"))[1] == {"is_paused": True}
    assert (await asked(FakeLink(answering()), "/is_paused", "GET"))[1] == {"is_paused": False}
    assert (await asked(FakeLink(state), "/get_weight_version", "GET"))[1] == {"weight_version": "4"}
    assert (await asked(FakeLink(state), "/model_info", "GET"))[1] == {"model_path": "demo", "weight_version": "4"}
    assert (await asked(FakeLink(state), "/flush_cache", "GET"))[1] == "Cache flushed.\n"


@pytest.mark.parametrize(("together", "experts"), [(False, 1), (True, 2)])
async def test_a_trainer_learns_how_many_executors_there_are(together: bool, experts: int) -> None:
    app = app_state(FakeLink(answering()), admin_address="unix:/none")
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 3, "data_parallel_size": 4}
    model = msgspec.structs.replace(app.config.model, **sizes, expert_parallel=together)
    app = dataclasses.replace(app, config=msgspec.structs.replace(app.config, model=model))
    async with client(app, served=operator_application) as http:
        found = (await http.get("/server_info")).json()
        assert (await http.get("/get_world_size")).json() == {"world_size": 24}
        assert (await http.get("/get_world_size?include_dp=false")).json() == {"world_size": 6}
        assert (await http.get("/get_world_size?include_dp=some")).status_code == 400
    assert found == {
        "model_path": "demo", "tp_size": 2, "pp_size": 3, "dp_size": 4, "ep_size": experts, "num_gpus": 24,
        "enable_memory_saver": False,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/pause?mode=stop", None, "mode"),
        ("/pause?clear_cache=perhaps", None, "clear_cache"),
        ("/pause_generation", {"mode": "keep"}, "mode"),
        ("/abort_request", {"rid": "a", "abort_all": True}, "rid"),
        ("/abort_request", None, "rid"),
    ],
)
async def test_what_is_refused(path: str, body: Any, param: str) -> None:
    status, told, sent = await asked(FakeLink(answering()), path, **({} if body is None else {"json": body}))
    assert (status, told["error"]["param"], sent) == (400, param, [])


async def test_what_schedulers_have_not_done_is_said() -> None:
    status, told, _ = await asked(FakeLink(answering(error="it is not ready")), "/pause")
    assert (status, told["error"]["message"], told["error"]["code"]) == (503, "it is not ready", "not_done")


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A directory with a folder that looks like a model."""
    folder = tmp_path / "weights" / "new"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    save_file({}, folder / "model.safetensors")
    return folder.parent


async def test_an_update_is_looked_at_by_all_before_it_begins(weights: Path) -> None:
    port = FakeLink(answering(requests=3, version="8"))
    body = {"model_path": "new", "load_format": "auto", "flush_cache": True, "keep_pause": True, "is_async": False}
    status, told, sent = await asked(port, "/update_weights_from_disk", directory=weights, json=body)
    path = str(weights / "new")
    assert status == 200
    assert told == {
        "success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 3,
        "weight_version": "8",
    }  # fmt: skip
    look, change = UpdateWeights(0, path, "9", check_only=True), UpdateWeights(0, path, "9")
    assert sent == [AskState(0), look, Pause(0, PauseMode.KEEP), change]


async def test_an_update_has_the_version_that_is_given(weights: Path) -> None:
    body = {"model_path": str(weights / "new"), "weight_version": "step-3", "abort_all_requests": True}
    _, _, sent = await asked(FakeLink(answering()), "/update_weights_from_disk", directory=weights, json=body)
    assert sent[1:] == [UpdateWeights(0, str(weights / "new"), "step-3", abort=True)]


async def test_a_folder_that_schedulers_refuse_is_not_read(weights: Path) -> None:
    error = f"{weights}/new/config.json: it describes another model"
    status, told, sent = await asked(
        FakeLink(answering(error=error)), "/update_weights_from_disk", directory=weights,
        json={"model_path": "new", "weight_version": "1"},
    )  # fmt: skip
    assert (status, told["success"]) == (400, False)
    assert told["message"] == "config.json: it describes another model", "paths are the operator's own"
    assert len(sent) == 1


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"model_path": "../weights2"}, 400, "model_path"),
        ({"model_path": "."}, 400, "model_path"),
        ({"model_path": "/"}, 400, "model_path"),
        ({"model_path": "linked"}, 400, "model_path"),
        ({"model_path": "empty"}, 400, "model_path"),
        ({"model_path": "none"}, 404, "model_path"),
        ({"load_format": "dummy"}, 400, "load_format"),
        ({"flush_cache": False}, 400, "flush_cache"),
        ({"weight_version": "a,b"}, 400, "weight_version"),
        ({"weight_version": ""}, 400, "weight_version"),
    ],
)
async def test_an_update_that_cannot_be_meant(weights: Path, fields: Any, status: int, param: str) -> None:
    outside = weights.parent / "weights2"
    outside.mkdir()
    (weights / "empty").mkdir()
    (weights / "linked").mkdir()
    for name in ("config.json", "model.safetensors"):
        (outside / name).write_bytes((weights / "new" / name).read_bytes())
        (weights / "linked" / name).symlink_to(outside / name)
    found, told, sent = await asked(
        FakeLink(answering()), "/update_weights_from_disk", directory=weights,
        content=json.dumps({"model_path": "new", **fields}), headers={"content-type": "application/json"},
    )  # fmt: skip
    assert (found, told["error"]["param"], sent) == (status, param, [])


async def test_without_a_directory_there_are_no_updates() -> None:
    assert (await asked(FakeLink(answering()), "/update_weights_from_disk", json={"model_path": "new"}))[0] == 404


@pytest.mark.parametrize(("current", "following"), [("0", "1"), ("9", "10"), ("3,5", "6")])
def test_versions_are_counted(current: str, following: str) -> None:
    assert next_version(current) == following
