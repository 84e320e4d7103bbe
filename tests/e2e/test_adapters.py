"""LoRA adapters in a real server: two api processes, one place on the device, an executor that is killed."""

from __future__ import annotations

import json
import os
import select
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import save_file

from penstock.engine_core.folder import resolve
from tests.e2e.server import FAULTY, LIMIT, Server, serving

KEY = {"authorization": "Bearer operator"}
TOKENS = 32
LONG = 3000  # of a stream that a test ends
PROMPTS = ("The people who live in this house are", "A list of colours: red, green,")


def write_adapter(folder: Path, seed: int, rank: int = 4) -> Path:
    """A random adapter for the embedded model, strong enough that it says something else."""
    config = json.loads((resolve("", "") / "config.json").read_text())
    hidden, width = config["hidden_size"], config["num_attention_heads"] * config["head_dim"]
    random, tensors = np.random.default_rng(seed), {}
    for layer in range(config["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        for half, shape in (("A", (rank, hidden)), ("B", (width, rank))):
            tensors[f"{name}.lora_{half}.weight"] = random.normal(0, 0.1, shape).astype(np.float32)
    folder.mkdir(parents=True)
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("a", "b", "c")):
        write_adapter(folder / "loras" / name, seed)
    write_adapter(folder / "loras" / "large", 9, rank=64)
    write_adapter(folder / "loras" / "cut", 9)
    weights = folder / "loras" / "cut" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    (folder / "keys").write_text("operator\n")
    with serving(
        folder, "--enable-lora", "--lora-modules", f"first={folder}/loras/a", "--lora-dir", str(folder / "loras"),
        "--admin-address", f"unix:{folder}/admin", "--operator-key-file", str(folder / "keys"), "--max-loras", "1",
        "--max-cpu-loras", "2", "--device", "cpu", "--dtype", "float32", "--api-processes", "2", "--max-num-seqs", "8",
        "--metrics-alias", "vllm", entry=FAULTY,
    ) as found:  # fmt: skip
        yield found


def post(server: Server, path: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=LIMIT) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        return {"status": error.code, **json.load(error)}


def operate(server: Server, path: str, body: dict[str, Any], headers: Mapping[str, str] = KEY) -> Any:
    """The same at --admin-address."""
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(server.log.parent / "admin")), timeout=LIMIT) as http:
        answer = http.post(f"http://admin{path}", json=body, headers=headers)
    return answer.json() if answer.is_success else {"status": answer.status_code, **answer.json()}


def asked(model: str, number: int = 0) -> dict[str, Any]:
    return {"model": model, "prompt": PROMPTS[number], "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}


def said(server: Server, model: str, number: int = 0) -> str:
    answer = post(server, "/v1/completions", asked(model, number))
    assert "choices" in answer, answer
    assert answer["model"] == model
    return str(answer["choices"][0]["text"])


def stream(server: Server, model: str, tokens: int = 120) -> Iterator[str]:
    """Pieces of a text as they come."""
    body = {**asked(model), "stream": True, "max_tokens": tokens}
    request = urllib.request.Request(
        server.url + "/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=LIMIT) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])["choices"][0]["text"]


def test_base_and_adapters_at_once_are_as_each_alone(server: Server) -> None:
    names = ["penstock-demo", "first", "b", "c"]
    alone = {name: [said(server, name, number) for number in range(2)] for name in names}
    assert len({tuple(texts) for texts in alone.values()}) == len(names), "each says something else"
    with ThreadPoolExecutor(8) as pool:
        together = [(name, number, pool.submit(said, server, name, number)) for number in range(2) for name in names]
        assert {(name, number): text.result() for name, number, text in together} == {
            (name, number): alone[name][number] for name in names for number in range(2)
        }
    listed = {model["id"]: model.get("parent") for model in server.get("/v1/models")["data"]}
    assert listed == {"penstock-demo": None, "first": "penstock-demo", "b": "penstock-demo", "c": "penstock-demo"}


def test_banner_and_health_tell_of_adapters(server: Server) -> None:
    """The executor tells the memory of its places, and the scheduler what lies in them."""
    said(server, "first")
    known = f"1 of --lora-modules and the folders of {server.log.parent}/loras"
    server.logged(f"LoRA         {known}; 1 in places of rank 16 (0.00 GiB), 2 in the host's memory")
    health = server.until("/health", lambda found: found["engine"]["adapters_held"])
    assert health["adapters"] == len(server.get("/v1/models")["data"]) - 1
    assert (health["engine"]["adapter_places"], health["engine"]["adapters_placed"]) == (1, 1)


def test_an_endpoint_picker_sees_which_adapters_are_in_use(server: Server) -> None:
    """A request runs, and one waits for the only place, while the operator's pause keeps both where they are."""
    running, deadline = stream(server, "b", LONG), time.monotonic() + LIMIT
    with server.slow():
        next(running)
        operate(server, "/pause?mode=keep", {})
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(said, server, "c")
        labels = 'max_lora="1",model_name="penstock-demo",running_lora_adapters="b",waiting_lora_adapters="c"'
        told = f'vllm:lora_requests_info{{engine="0",{labels}}} '
        while told not in (text := httpx.get(server.url + "/metrics").text):
            assert time.monotonic() < deadline, text
            select.select([], [], [], 0.05)
        operate(server, "/resume", {})
        running.close()
        assert waiting.result()


def test_an_unload_lets_streams_finish_and_a_load_means_what_is_there_then(server: Server) -> None:
    loaded = operate(server, "/v1/load_lora_adapter", {"lora_name": "new", "lora_path": "b"})
    assert loaded["id"] == "new"
    running = stream(server, "new")
    pieces = [next(running)]
    assert operate(server, "/v1/unload_lora_adapter", {"lora_name": "new"})["deleted"]
    for _ in range(4):  # whichever process answers
        assert post(server, "/v1/completions", asked("new"))["status"] == 404
    pieces += running
    assert "".join(pieces).startswith(said(server, "b"))


def test_what_is_not_the_operators_and_what_is_broken(server: Server) -> None:
    assert post(server, "/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "b"})["status"] == 404
    assert operate(server, "/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "b"}, {})["status"] == 401
    assert operate(server, "/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "../keys"})["status"] == 400
    large = post(server, "/v1/completions", asked("large"))
    assert large["status"] == 400
    assert large["error"]["message"].startswith("the adapter 'large' cannot be served: adapter_config.json: r is 64")
    cut = operate(server, "/v1/load_lora_adapter", {"lora_name": "cut"})
    assert (cut["status"], cut["error"]["code"]) == (400, "adapter_failed")
    assert post(server, "/v1/completions", asked("nobody"))["status"] == 404


def test_a_killed_executor_costs_an_adapters_stream_no_token(server: Server) -> None:
    undisturbed = "".join(stream(server, "first"))
    running = stream(server, "first")
    pieces = [next(running)]
    os.kill(server.children()["executor"], signal.SIGKILL)
    pieces += running
    assert "".join(pieces) == undisturbed
