"""Several models behind one endpoint, as clients see them: in turns, mixed, beside one another, and whatever dies."""

from __future__ import annotations

import concurrent.futures
import json
import os
import select
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.chaos.leftovers import ended
from tests.e2e.server import LIMIT, Server, command_line, descendants, serving
from tests.e2e.test_weights import operate, write_folder
from tests.model_folder import linked

PROMPT = "The people who live in this house are"


def config(folder: Path, share: float, **more: Any) -> Path:
    """A file of two models of equal shares: one says something else than the other."""
    models = {"one": linked(folder / "one"), "other": write_folder(folder / "other")}
    file = folder / "penstock.toml"
    tables = [f'[models.{name}]\npath = "{path}"\n' for name, path in models.items()]
    options = [f"{name} = {json.dumps(value)}" for name, value in more.items()]
    file.write_text("\n".join([*options, f"gpu_memory_utilization = {share}", *tables]))
    return file


def arguments(folder: Path, share: float = 0.9, **more: Any) -> tuple[str, ...]:
    file = config(folder, share, **more)
    return ("--config", str(file), "--device", "cpu", "--dtype", "float32", "--admin-address", f"unix:{folder}/admin")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("turns")
    with serving(folder, *arguments(folder)) as made:
        yield made
        ended(made)


def asked(server: Server, model: str, tokens: int = 8) -> str:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0, timeout=LIMIT) as client:
        answer = client.completions.create(model=model, prompt=PROMPT, max_tokens=tokens, temperature=0)
    return answer.choices[0].text


def states(server: Server) -> dict[str, str]:
    return states_of(server.get("/v1/models"))


def become(server: Server, **wanted: str) -> None:
    """Wait for these states: heartbeats tell of them."""
    server.until("/v1/models", lambda listed: states_of(listed) == wanted)


def states_of(listed: dict[str, Any]) -> dict[str, str]:
    return {each["id"]: each["state"] for each in listed["data"]}


def pid_of(server: Server, role: str, model: str) -> int:
    """The process of a role that is for a model; its command line is empty while it changes its image."""
    while True:
        for pid in descendants(server.process.pid):
            words = command_line(pid)
            if role.encode() in words and f"--for-model={model}".encode() in words:
                return pid
        select.select([], [], [], 0.02)


def test_models_in_turns_and_mixed_answer_every_request(server: Server) -> None:
    become(server, one="loaded", other="asleep")
    said = {name: asked(server, name) for name in ("one", "other")}
    assert said["one"] != said["other"], "each has its own weights"
    become(server, one="asleep", other="loaded")
    with concurrent.futures.ThreadPoolExecutor(16) as clients:
        found = list(clients.map(lambda name: (name, asked(server, name)), ["one", "other"] * 12))
    assert all(text == said[name] for name, text in found)
    assert all(state in ("loaded", "asleep", "loading") for state in states(server).values())


def test_who_names_none_is_told_which_there_are_and_one_unknown_is_not_found(server: Server) -> None:
    with pytest.raises(openai.NotFoundError):
        asked(server, "third")
    answer = httpx.post(server.url + "/v1/completions", json={"prompt": PROMPT}, timeout=LIMIT)
    assert answer.status_code == 400
    assert "one, other" in answer.json()["error"]["message"]


def test_the_operator_has_one_loaded_and_put_to_sleep(server: Server) -> None:
    for name, other in (("one", "other"), ("other", "one")):
        assert operate(server, f"/wake_up?model={name}") == ""
        become(server, **{name: "loaded", other: "asleep"})
        assert operate(server, f"/is_sleeping?model={other}", method="GET") == {"is_sleeping": True}
    assert operate(server, "/sleep") == ""
    assert operate(server, "/is_sleeping", method="GET") == {"is_sleeping": True}
    become(server, one="asleep", other="asleep")


def struck(server: Server, role: str, model: str, words: str) -> None:
    """Kill a process of a model once these words have been logged of a switch, and find no request lost."""
    said = {name: asked(server, name) for name in ("other", "one")}
    before = server.log.read_text().count(words)
    found: dict[str, str] = {}
    clients = [threading.Thread(target=lambda name=name: found.update({name: asked(server, name)})) for name in said]
    for client in clients:
        client.start()
    server.logged(words, before + 1)
    os.kill(pid_of(server, role, model), signal.SIGKILL)
    for client in clients:
        client.join(LIMIT)
    assert found == said


@pytest.mark.parametrize(
    ("role", "model", "words"),
    [
        ("executor", "other", "other/scheduler-0 waking"),
        pytest.param("scheduler", "other", "other/scheduler-0 waking", marks=pytest.mark.long),
        pytest.param("tokenizer", "other", "other/scheduler-0 waking", marks=pytest.mark.long),
        pytest.param("executor", "one", "one/scheduler-0 sleeping", marks=pytest.mark.long),
        pytest.param("scheduler", "one", "one/scheduler-0 sleeping", marks=pytest.mark.long),
    ],
)
def test_whoever_is_killed_in_a_switch_costs_no_request(server: Server, role: str, model: str, words: str) -> None:
    struck(server, role, model, words)


@pytest.mark.long
def test_an_api_process_that_is_killed_in_a_switch_leaves_one_that_goes_on(server: Server) -> None:
    asked(server, "one")
    before = server.log.read_text().count("other/scheduler-0 waking")
    failed: list[Exception] = []

    def ask() -> None:
        try:
            asked(server, "other")
        except openai.APIError as error:  # its connection broke
            failed.append(error)

    client = threading.Thread(target=ask)
    client.start()
    server.logged("other/scheduler-0 waking", before + 1)
    os.kill(server.children()["api"], signal.SIGKILL)
    client.join(LIMIT)
    assert failed
    server.healthy()
    assert asked(server, "one")
    assert asked(server, "other")


def test_models_that_fit_together_stay_and_a_death_of_one_is_nothing_to_the_other(tmp_path: Path) -> None:
    with serving(tmp_path, *arguments(tmp_path, 0.4)) as server:
        become(server, one="loaded", other="loaded")
        said = asked(server, "one", 200)
        found: list[str] = []
        client = threading.Thread(target=lambda: found.append(asked(server, "one", 200)))
        client.start()
        for role in ("executor", "scheduler"):
            os.kill(pid_of(server, role, "other"), signal.SIGKILL)
        client.join(LIMIT)
        assert found == [said]
        assert asked(server, "other")
        assert "one/scheduler-0 sleeping" not in server.log.read_text()
        with openai.OpenAI(base_url=server.url + "/v1", api_key="x", timeout=LIMIT) as both:
            vector = both.embeddings.create(model="other", input=PROMPT).data[0].embedding
            assert vector != both.embeddings.create(model="one", input=PROMPT).data[0].embedding
        ended(server)


@pytest.mark.long
def test_a_full_queue_of_a_model_that_is_not_loaded_says_when_to_come_again(tmp_path: Path) -> None:
    with serving(tmp_path, *arguments(tmp_path, max_unloaded_requests=2)) as server:
        asked(server, "other")

        def status() -> int:
            body = {"model": "one", "prompt": PROMPT, "max_tokens": 4}
            answer = httpx.post(server.url + "/v1/completions", json=body, timeout=LIMIT)
            assert answer.status_code == 200 or int(answer.headers["retry-after"]) > 0
            return answer.status_code

        with concurrent.futures.ThreadPoolExecutor(8) as clients:
            found = list(clients.map(lambda _: status(), range(8)))
        assert set(found) == {200, 503}
        assert found.count(200) >= 2
        ended(server)
