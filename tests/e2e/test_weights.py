"""The operator's pauses and updates of weights in a real server, beside one that began with the new weights."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file

from penstock.engine_core.embedded import demo_folder
from tests.e2e.server import FAULTY, LIMIT, Server, serving

PROMPT = "The people who live in this house are"
TOKENS = 40
MIDDLE = 100  # of a stream that somebody dies in
LONG = 3000  # of a stream that goes on behind what a test does to it
WEIGHTS = "model.safetensors"


def write_folder(folder: Path) -> Path:
    """The embedded model with what its norms weigh turned around: it says something else."""
    shutil.copytree(demo_folder(), folder, ignore=shutil.ignore_patterns("SHA256SUMS", "self_test.json"))
    tensors = load_file(folder / WEIGHTS)
    turned = {name: tensor.flip(0).contiguous() if "norm" in name else tensor for name, tensor in tensors.items()}
    save_file(turned, folder / WEIGHTS, {"format": "pt"})
    return folder


def options(folder: Path) -> tuple[str, ...]:
    return (
        "--admin-address", f"unix:{folder}/admin", "--weights-dir", str(folder / "weights"), "--device", "cpu",
        "--dtype", "float32", "--max-num-seqs", "8",
    )  # fmt: skip


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """With the new weights from its start."""
    folder = tmp_path_factory.mktemp("fresh")
    with serving(folder, "--device", "cpu", "--dtype", "float32", model=str(write_folder(folder / "new"))) as found:
        yield found


@contextmanager
def updatable(folder: Path) -> Iterator[Server]:
    write_folder(folder / "weights" / "new")
    with serving(folder, *options(folder), entry=FAULTY) as found:
        yield found


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with updatable(tmp_path) as found:
        yield found


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """For tests after which it has the weights that it had."""
    with updatable(tmp_path_factory.mktemp("unchanged")) as found:
        yield found


def operate(server: Server, path: str, body: Any = None, method: str = "POST") -> Any:
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(server.log.parent / "admin")), timeout=LIMIT) as http:
        answer = http.request(method, f"http://admin{path}", json=body)
    return answer.json() if "json" in answer.headers["content-type"] else answer.text


def asked(server: Server, prompt: Any, tokens: int) -> urllib.request.Request:
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True,
            "return_token_ids": True}  # fmt: skip
    return urllib.request.Request(
        server.url + "/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )


def stream(
    server: Server, prompt: Any, tokens: int = TOKENS, reasons: list[str] | None = None, remarks: Any = None
) -> Iterator[list[int]]:
    """Ids as they come; why it ended goes to `reasons`, and what is told of versions to `remarks`."""
    with urllib.request.urlopen(asked(server, prompt, tokens), timeout=LIMIT) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                choice = event["choices"][0]
                if remarks is not None:
                    remarks.update(event.get("penstock", {}))
                if reasons is not None and choice["finish_reason"]:
                    reasons.append(choice["finish_reason"])
                yield choice.get("token_ids") or []


def ids(server: Server, prompt: Any, tokens: int = TOKENS) -> list[int]:
    return [token for part in stream(server, prompt, tokens) for token in part]


def rest(server: Server, running: Iterator[list[int]]) -> list[int]:
    """What a long stream says until it has said TOKENS more from now on, and is aborted."""
    asked = time.time()
    now = server.until("/health", lambda found: found["engine"]["time"] > asked)["engine"]["output_tokens"]
    server.until("/health", lambda found: found["engine"]["output_tokens"] >= now + TOKENS)
    operate(server, "/pause?mode=abort")
    found = [token for part in running for token in part]
    operate(server, "/resume")
    return found


def tokens_of(server: Server) -> list[int]:
    request = urllib.request.Request(
        server.url + "/tokenize", json.dumps({"prompt": PROMPT}).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=LIMIT) as answer:
        return list(json.load(answer)["tokens"])


def version(server: Server) -> str:
    return str(operate(server, "/get_weight_version", method="GET")["weight_version"])


def update(server: Server, path: str = "new", **more: Any) -> Any:
    return operate(server, "/update_weights_from_disk", {"model_path": path, **more})


def test_a_stream_goes_on_with_the_new_weights_and_no_token_is_of_both(server: Server, fresh: Server) -> None:
    old, new, prompt = ids(server, PROMPT, 4 * TOKENS), ids(fresh, PROMPT), tokens_of(server)
    assert old[:20] != new[:20]
    told: dict[str, Any] = {}
    with server.slow():
        running = stream(server, PROMPT, LONG, remarks=told)
        found = [*next(running), *next(running), *next(running)]
        assert update(server) == {
            "success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 1,
            "weight_version": "1",
        }  # fmt: skip
    found += rest(server, running)
    first, second = told["weight_versions"]
    assert first == {"index": 0, "start": 0, "weight_version": "0"}
    assert (second["weight_version"], told["weight_version"]) == ("1", "1")
    before = second["start"]
    assert 0 < before <= len(found) - TOKENS
    assert found[: min(before, len(old))] == old[:before]
    assert found[before:] == ids(fresh, prompt + found[:before], len(found) - before)
    assert ids(server, PROMPT) == new, "what the old weights have cached is of no use"
    assert (
        version(server)
        == server.until("/health", lambda found: found["replicas"][0]["weight_version"] == "1")["engine"][
            "weight_version"
        ]
    )


def test_an_executor_that_begins_anew_reads_what_it_should_have(server: Server, fresh: Server) -> None:
    new = ids(fresh, PROMPT, MIDDLE)
    assert update(server, weight_version="step-7")["weight_version"] == "step-7"
    running = stream(server, PROMPT, MIDDLE)
    found = next(running)
    os.kill(server.children()["executor"], signal.SIGKILL)
    assert found + [token for part in running for token in part] == new
    assert version(server) == "step-7"
    assert "weight_version: it must be given" in update(server)["error"]["message"]


def test_folders_that_are_not_the_model_change_nothing(unchanged: Server) -> None:
    old, weights = ids(unchanged, PROMPT, 20), unchanged.log.parent / "weights"
    shutil.copytree(weights / "new", weights / "cut")
    (weights / "cut" / WEIGHTS).write_bytes((weights / "new" / WEIGHTS).read_bytes()[:-8])
    shutil.copytree(weights / "new", weights / "other")
    config = json.loads((weights / "new" / "config.json").read_text())
    (weights / "other" / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    (weights / "out").mkdir()
    for name in ("config.json", WEIGHTS):
        (weights / "out" / name).symlink_to(demo_folder() / name)
    told = {path: update(unchanged, path) for path in ("cut", "other", "out", "..", "", "nothing", "/etc")}
    assert told["cut"]["success"] is told["other"]["success"] is False
    assert told["cut"]["message"].startswith(f"{WEIGHTS}: truncated or damaged")
    assert told["other"]["message"] == "config.json: it describes another model than the one that is served"
    for path in ("out", "..", "", "/etc"):
        assert told[path]["error"]["message"] == "the folder and its files must be below --weights-dir"
    assert told["nothing"]["error"]["code"] == "not_found"
    assert (ids(unchanged, PROMPT, 20), version(unchanged)) == (old, "0")


def test_pauses(unchanged: Server) -> None:
    old = ids(unchanged, PROMPT)
    with unchanged.slow():
        running = stream(unchanged, PROMPT, LONG)
        found = next(running)
        assert operate(unchanged, "/pause?mode=keep") == {"status": "paused"}
    assert operate(unchanged, "/is_paused", method="GET") == {"is_paused": True}
    health = unchanged.until("/health", lambda found: found["paused"] and found["engine"]["running"] == 1)
    assert (health["paused"], health["ready"]) == ("keep", True)
    assert operate(unchanged, "/resume") == {"status": "resumed"}
    assert (found + rest(unchanged, running))[:TOKENS] == old
    said: list[str] = []
    with unchanged.slow():
        running = stream(unchanged, PROMPT, LONG, reasons=said)
        next(running)
        assert operate(unchanged, "/pause_generation", {"mode": "abort"})["status"] == "ok"
    assert sum(map(len, running)) < LONG - 1
    assert said[-1] == "abort"
    with ThreadPoolExecutor(1) as pool:
        newcomer = pool.submit(ids, unchanged, PROMPT)
        unchanged.until("/health", lambda found: found["engine"]["waiting"] == 1)
        operate(unchanged, "/continue_generation", {})
        assert operate(unchanged, "/is_paused", method="GET") == {"is_paused": False}
        assert newcomer.result() == old
    assert operate(unchanged, "/flush_cache") == "Cache flushed.\n"
    running = stream(unchanged, PROMPT)
    found = next(running)
    assert operate(unchanged, "/pause?mode=wait") == {"status": "paused"}
    assert found + [token for part in running for token in part] == old, "it ran to its end"
    assert operate(unchanged, "/pause?mode=no")["error"]["param"] == "mode"
    operate(unchanged, "/resume")


def generate(server: Server, body: dict[str, Any], operator: bool = False) -> Any:
    """POST /generate as slime asks for it."""
    if operator:
        return operate(server, "/generate", body)
    with httpx.Client(timeout=LIMIT) as http:
        return http.post(server.url + "/generate", json=body).json()


def test_rollouts_are_deterministic_and_end_by_their_ids(unchanged: Server) -> None:
    prompt = tokens_of(unchanged)
    sampled = {"temperature": 0.7, "max_new_tokens": 12, "ignore_eos": True, "sampling_seed": 3}
    body = {"input_ids": prompt, "sampling_params": sampled, "return_logprob": True}
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: generate(unchanged, body), range(4)))
    logprobs = [each["meta_info"]["output_token_logprobs"] for each in found]
    assert [[one[1] for one in each] for each in logprobs] == [found[0]["output_ids"]] * 4
    for each in logprobs[1:]:
        assert [one[0] for one in each] == pytest.approx([one[0] for one in logprobs[0]], abs=1e-4)
    raw = generate(unchanged, {**body, "logprobs_mode": "raw_logprobs"}, operator=True)
    assert raw["output_ids"] == found[0]["output_ids"]
    assert [one[0] for one in raw["meta_info"]["output_token_logprobs"]] != [one[0] for one in logprobs[0]]
    whole = {"input_ids": prompt + raw["output_ids"], "sampling_params": {"max_new_tokens": 0},
             "return_logprob": True, "logprob_start_len": len(prompt)}  # fmt: skip
    scored = generate(unchanged, whole)["meta_info"]["input_token_logprobs"]
    assert [one[0] for one in scored] == pytest.approx(
        [one[0] for one in raw["meta_info"]["output_token_logprobs"]], abs=1e-3
    ), "a model's own distribution is the same, sampled from or scored"
    long = {"input_ids": prompt, "sampling_params": {"max_new_tokens": LONG, "ignore_eos": True}, "rid": "mine"}
    with unchanged.slow(), ThreadPoolExecutor(1) as pool:
        running = pool.submit(generate, unchanged, long)
        while operate(unchanged, "/v1/loads", method="GET") != {"loads": [{"num_total_reqs": 1}]}:
            assert not running.done(), running.result()
        assert operate(unchanged, "/abort_request", {"rid": "other"}) == ""
        assert operate(unchanged, "/v1/loads", method="GET") == {"loads": [{"num_total_reqs": 1}]}
        operate(unchanged, "/abort_request", {"rid": "mine"})
        assert running.result()["meta_info"]["finish_reason"]["type"] == "abort"


@pytest.mark.parametrize(
    "option",
    [
        "--tensor-parallel-size",
        pytest.param("--pipeline-parallel-size", marks=pytest.mark.long),
        pytest.param("--data-parallel-size", marks=pytest.mark.long),
    ],
)
def test_every_rank_stage_and_replica_reads_its_share(option: str, tmp_path: Path, fresh: Server) -> None:
    write_folder(tmp_path / "weights" / "new")
    with serving(tmp_path, *options(tmp_path), option, "2") as server:
        old = ids(server, PROMPT)
        assert update(server)["success"]
        new = [ids(server, PROMPT) for _ in range(2)]
        assert version(server) == "1"
    assert new == [ids(fresh, PROMPT)] * 2
    assert old != new[0]
