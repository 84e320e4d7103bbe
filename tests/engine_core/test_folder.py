from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.engine_core.folder import (
    Generation,
    check_prefill_replicas,
    model_length,
    read_generation,
    resolve,
    served_names,
)
from penstock.engine_core.models.recurrence_spec import GatedDeltaSpec
from penstock.protocol.engine_config import ModelConfig
from penstock.protocol.errors import ConfigError, ModelError
from tests.engine_core.models.specs import small_spec

SPEC = small_spec(hidden=16, heads=2, kv_heads=1, intermediate=8, max_position=4096, longest=4096)


def write(folder: Path, config: dict[str, Any], generation: dict[str, Any] | None = None) -> Path:
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def test_a_folder_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve(str(tmp_path)) == tmp_path
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve("owner/name") == Path("owner/name")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/owner") == tmp_path / "owner"


def test_the_embedded_model_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless a folder has it too, which is then the one that is meant."""
    monkeypatch.chdir(tmp_path)
    assert resolve("penstock-demo") == resolve("")
    with pytest.raises(ConfigError, match="--revision"):
        resolve("penstock-demo", "main")
    (tmp_path / "penstock-demo").mkdir()
    assert resolve("penstock-demo") == Path("penstock-demo")


def test_a_folder_has_no_revisions(tmp_path: Path) -> None:
    for model in ("", str(tmp_path)):
        with pytest.raises(ConfigError, match="--revision: 'v2'"):
            resolve(model, "v2")


def test_what_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "weights.safetensors").touch()
    with pytest.raises(ModelError, match="a model is a folder"):
        resolve(str(tmp_path / "weights.safetensors"))
    for name in (str(tmp_path / "missing"), "missing", "a/b/c", "owner/na me"):
        with pytest.raises(ModelError, match="no such folder, and not a hub id"):
            resolve(name)


def hub(model: str, revision: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """`resolve` in a process of its own: huggingface_hub reads its environment once."""
    script = "import sys; from penstock.engine_core.folder import resolve; print(resolve(*sys.argv[1:]), end='')"
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return subprocess.run(
        [sys.executable, "-c", script, model, revision],
        capture_output=True,
        text=True,
        timeout=300,
        env={**inherited, **environment},
        check=False,
    )


def cached(home: Path, commit: str = "c" * 40) -> Path:
    """The layout of a hub cache after a download."""
    repository = home / "hub" / "models--owner--name"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    return write(repository / "snapshots" / commit, {})


def test_a_hub_id_from_the_cache_while_offline(tmp_path: Path) -> None:
    snapshot = cached(tmp_path)
    for revision in ("", "main", "c" * 40):
        found = hub("owner/name", revision, HF_HOME=str(tmp_path), HF_HUB_OFFLINE="1")
        assert found.stdout == str(snapshot), found.stderr


def test_a_hub_id_that_is_not_in_the_cache_while_offline(tmp_path: Path) -> None:
    cached(tmp_path)
    for model, revision in (("owner/other", ""), ("owner/name", "v2")):
        found = hub(model, revision, HF_HOME=str(tmp_path), HF_HUB_OFFLINE="1")
        assert "ModelError: " + model in found.stderr
        assert "not fetched from the hub" in found.stderr


COMMIT = "d" * 40
FILES = {
    "config.json": b"{}",
    "model.safetensors": b"weights",
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "merges.txt": b"a b",
    "modeling_remote.py": b"import os",
    "pytorch_model.bin": b"pickle",
    "consolidated.safetensors": b"the same weights",
    "original/params.json": b"{}",
    "README.md": b"#",
}


class Hub(BaseHTTPRequestHandler):
    """As much of a hub as one repository needs."""

    asked: list[str]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        if path.startswith(f"/owner/name/resolve/{COMMIT}/"):
            name = path.split(f"{COMMIT}/")[1]
            type(self).asked.append(name)
            self.answer(FILES[name])
        elif path == "/api/models/owner/name/revision/main":
            self.answer(json.dumps({"id": "owner/name", "sha": COMMIT, "siblings": []}).encode())
        elif path == f"/api/models/owner/name/tree/{COMMIT}":
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in FILES.items()
            ]
            self.answer(json.dumps(tree).encode())
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def answer(self, data: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Content-Type", "application/json")
        self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Tests read their own output."""


@pytest.fixture
def endpoint() -> Iterator[str]:
    Hub.asked = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_hub_id_is_fetched_without_code_and_pickles(tmp_path: Path, endpoint: str) -> None:
    found = hub("owner/name", HF_HOME=str(tmp_path), HF_ENDPOINT=endpoint, HF_HUB_DISABLE_XET="1")
    assert found.returncode == 0, found.stderr
    names = {path.name for path in Path(found.stdout).iterdir()}
    assert names == {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja", "merges.txt"}
    assert set(Hub.asked) == names
    assert "%|" in found.stderr  # a progress bar


def test_a_hub_id_that_the_hub_does_not_know(tmp_path: Path, endpoint: str) -> None:
    found = hub("owner/unknown", HF_HOME=str(tmp_path), HF_ENDPOINT=endpoint)
    assert "ModelError: owner/unknown: no such folder, and not fetched from the hub" in found.stderr


def test_generation_is_silent_by_default(tmp_path: Path) -> None:
    assert read_generation(write(tmp_path, {"eos_token_id": 2})) == Generation(eos_token_ids=(2,))
    assert read_generation(write(tmp_path, {}, {"do_sample": True})) == Generation()


def test_end_tokens_of_a_text_half_count_where_the_whole_names_none(tmp_path: Path) -> None:
    config = {"text_config": {"eos_token_id": [7, 8]}}
    assert read_generation(write(tmp_path, config)).eos_token_ids == (7, 8)
    assert read_generation(write(tmp_path, config | {"eos_token_id": None})).eos_token_ids == (7, 8)
    assert read_generation(write(tmp_path, config | {"eos_token_id": 2})).eos_token_ids == (2,)
    assert read_generation(write(tmp_path, config, {"eos_token_id": 9})).eos_token_ids == (9, 7, 8)


def test_generation_of_the_makers(tmp_path: Path) -> None:
    values = {
        "do_sample": True,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "max_new_tokens": 512,
        "eos_token_id": [7, 5],
        "transformers_version": "5.17.0",
    }
    found = read_generation(write(tmp_path, {"eos_token_id": 5}, values))
    assert found == Generation(
        eos_token_ids=(7, 5),
        temperature=0.6,
        top_k=20,
        top_p=0.95,
        min_p=0.05,
        repetition_penalty=1.1,
        max_new_tokens=512,
    )


def test_greedy_makers_set_no_sampling(tmp_path: Path) -> None:
    values = {"do_sample": False, "temperature": 0.6, "top_p": 0.9, "top_k": 50, "min_p": 0.1, "max_new_tokens": 9}
    assert read_generation(write(tmp_path, {}, values)) == Generation(max_new_tokens=9)


def test_all_of_top_k(tmp_path: Path) -> None:
    assert read_generation(write(tmp_path, {}, {"top_k": 0})).top_k == 0
    assert read_generation(write(tmp_path, {}, {"top_k": -1})).top_k == 0


@pytest.mark.parametrize(
    ("key", "value"),
    [("temperature", "hot"), ("temperature", -1), ("top_p", 1.5), ("top_k", 0.5), ("eos_token_id", "</s>"),
     ("max_new_tokens", 0)],
)  # fmt: skip
def test_wrong_generation_values_name_file_and_key(tmp_path: Path, key: str, value: object) -> None:
    with pytest.raises(ModelError, match=rf"generation_config\.json: {key} is"):
        read_generation(write(tmp_path, {}, {key: value}))


def test_a_wrong_end_token_of_the_model_names_file_and_key(tmp_path: Path) -> None:
    for config in ({"eos_token_id": "</s>"}, {"text_config": {"eos_token_id": "</s>"}}):
        with pytest.raises(ModelError, match=r"/config\.json: eos_token_id is '</s>'"):
            read_generation(write(tmp_path, config))


def test_a_folder_without_configuration(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json: no such file"):
        read_generation(tmp_path)


def test_model_length() -> None:
    assert model_length(SPEC, ModelConfig()) == 4096
    assert model_length(SPEC, ModelConfig(max_model_len=100)) == 100
    assert model_length(SPEC, ModelConfig(max_model_len=4096)) == 4096
    with pytest.raises(ConfigError, match=r"--max-model-len: 4097 .*4096") as caught:
        model_length(SPEC, ModelConfig(max_model_len=4097))
    assert (caught.value.option, caught.value.value) == ("--max-model-len", 4097)


def test_dynamic_scaling_may_be_asked_for_more() -> None:
    stretched = msgspec.structs.replace(SPEC, longest=8192)
    assert model_length(stretched, ModelConfig()) == 4096
    assert model_length(stretched, ModelConfig(max_model_len=8192)) == 8192
    with pytest.raises(ConfigError, match="8192"):
        model_length(stretched, ModelConfig(max_model_len=8193))


def test_served_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    assert served_names(folder, ModelConfig(model=str(folder))) == ("my-model",)
    assert served_names(tmp_path / "snapshots" / COMMIT, ModelConfig(model="owner/name")) == ("owner/name",)
    assert served_names(folder, ModelConfig()) == ("penstock-demo",)
    named = ModelConfig(model=str(folder), served_model_name=" first, second,first,")
    assert served_names(folder, named) == ("first", "second")
    monkeypatch.chdir(folder)
    assert served_names(Path("."), ModelConfig(model=".")) == ("my-model",)


def test_a_model_whose_prompts_nobody_computes_for_others_is_refused() -> None:
    config = ModelConfig(data_parallel_size=2, prefill_replicas=1)
    check_prefill_replicas(SPEC, config)
    layer = GatedDeltaSpec(key_heads=2, value_heads=4, key_dim=8, value_dim=12, width=4)
    blocks = (msgspec.structs.replace(SPEC.blocks[0], attention=None, recurrence=layer),)
    recurrent = SPEC.with_layers(blocks)
    check_prefill_replicas(recurrent, ModelConfig())
    for spec, said in ((recurrent, "recurrent layers"), (msgspec.structs.replace(SPEC, headless=True), "vectors")):
        with pytest.raises(ConfigError, match=f"--prefill-replicas: 1 is not allowed; .*{said}"):
            check_prefill_replicas(spec, config)
