from __future__ import annotations

import http.server
import json
import os
import shutil
import subprocess
import threading

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol.config import ApiConfig, Config, wrong_output
from penstock.protocol.control import EngineStatus
from penstock.protocol.engine_config import ModelConfig
from penstock.services.supervisor import banner
from penstock.services.supervisor.banner import Serving, curl
from tests.engine_core.models.specs import online_spec, small_spec


class Told:
    """A child, as far as the banner looks at it."""

    def __init__(self, fields: dict[str, str]) -> None:
        self.fields = fields


ENGINE = EngineStatus(
    time=0.0, epoch=0, ready=True, device="cpu", dtype="float32", blocks=1000, block_size=16, max_model_len=100,
    max_num_seqs=256,
)  # fmt: skip
FACTS = Serving(
    url="http://127.0.0.1:8000",
    model="penstock-demo",
    engine=ENGINE,
    max_num_seqs=256,
    seconds=3.21,
    chat=True,
    locked=False,
)


def of_engine(**facts) -> Serving:
    return msgspec.structs.replace(FACTS, engine=msgspec.structs.replace(ENGINE, **facts))


def ready(engine: EngineStatus = ENGINE, **fields: str) -> Told:
    """An api process that has told what it must."""
    lines = *banner.engine_facts(engine), "X_PENSTOCK_URL=http://x:1"
    return Told(dict(line.split("=", 1) for line in lines) | fields)


def test_it_says_where_what_and_how_much():
    text = "\n".join(banner.banner(FACTS))
    assert "Penstock listens on http://127.0.0.1:8000" in text
    assert "penstock-demo" in text
    assert "cpu, float32" in text
    assert "1,000 blocks of 16 tokens: at most 16,000 tokens" in text
    assert "142 requests of full length (100 tokens), 256 of any length" in text
    assert "3.2 s" in text
    assert curl(FACTS) in text


def test_what_is_known_of_the_weights_is_told():
    assert "weights" not in "\n".join(banner.banner(FACTS))
    text = "\n".join(banner.banner(msgspec.structs.replace(FACTS, weights="SHA-256 of 4 of 4 files")))
    assert "  weights      SHA-256 of 4 of 4 files" in text


@pytest.mark.parametrize(
    ("limit", "hosts", "text"),
    [
        ("4", "", "4 in a prompt at most, as data: URLs"),
        ("4", "example.org,*.b.org", "4 in a prompt at most, as data: URLs or by https from example.org, *.b.org"),
        ('{"image": 0}', "example.org", "refused: --limit-mm-per-prompt is 0, and the vision encoder is not loaded"),
    ],
)
def test_images_are_told_of(limit, hosts, text):
    config = Config(model=ModelConfig(limit_mm_per_prompt=limit), api=ApiConfig(allowed_media_domains=hosts))
    facts = msgspec.structs.replace(FACTS, inputs=(("images", banner.images(config)),))
    assert f"  images       {text}" in banner.banner(facts)
    assert not any("images" in line for line in banner.banner(FACTS))


def test_wrong_output_is_told():
    assert "WRONG" not in "\n".join(banner.banner(FACTS))
    text = "\n".join(banner.banner(msgspec.structs.replace(FACTS, wrong_output=("random weights", "drafts"))))
    assert "  WRONG OUTPUT random weights; drafts" in text
    dummy = Config(model=ModelConfig(load_format="dummy"))
    facts = banner.serving(dummy, [ready()], "model", 1.0, small_spec(), chat=False)
    assert facts.wrong_output == wrong_output(dummy)


@pytest.mark.parametrize(
    ("modules", "directory", "memory", "text"),
    [
        ("a=x,b=y", "", "0.32 GiB", "2 of --lora-modules; 4 in places of rank 9 (0.32 GiB), 16 in the host's "),
        ("a=x", "/l", "", "1 of --lora-modules and the folders of /l; 4 in places of rank 9, 16 in the host's "),
        ("", "", "", "none can be asked for, without --lora-modules and --lora-dir; 4 in places of rank 9, 16 "),
    ],
)
def test_adapters_are_told_of(modules, directory, memory, text):
    assert "LoRA" not in "\n".join(banner.banner(FACTS))
    model = ModelConfig(enable_lora=True, max_loras=4, max_lora_rank=9)
    config = Config(model=model, api=ApiConfig(lora_modules=modules, lora_dir=directory))
    told = banner.executor_facts("", 332 << 20 if memory else 0)
    child = ready(**dict(line.split("=", 1) for line in told))
    facts = banner.serving(config, [child], "model", 1.0, small_spec(), chat=False)
    assert f"  LoRA         {text}" in "\n".join(banner.banner(facts))


def test_the_type_of_the_cache_is_told_where_it_is_another():
    assert "at most 1,024 tokens\n" in "\n".join(banner.banner(of_engine(blocks=64)))
    facts = of_engine(blocks=64, kv_cache_dtype="fp8_e4m3")
    assert "at most 1,024 tokens, in fp8_e4m3\n" in "\n".join(banner.banner(facts))


def test_quantized_weights_are_told_with_what_they_save():
    assert "quantized" not in "\n".join(banner.banner(FACTS))
    spec = online_spec(small_spec(hidden=1 << 10, intermediate=1 << 12, layers=4), "fp8")
    facts = banner.serving(Config(), [ready()], "model", 1.0, spec, chat=False)
    assert "  quantized    fp8 (FP8), 0.05 GiB in place of 0.09 in bfloat16" in banner.banner(facts)


def test_replicas_are_told_of_where_there_are_several():
    assert "replicas" not in "\n".join(banner.banner(FACTS))
    text = "\n".join(banner.banner(msgspec.structs.replace(FACTS, replicas=4)))
    assert "replicas     4, each with as large a cache" in text


def test_what_an_api_tells_of_the_engine_is_what_the_banner_shows():
    """Wherever the engine runs."""
    engine = msgspec.structs.replace(ENGINE, device="2 x cpu", windows=(0, 128), kv_cache_dtype="fp8_e4m3")
    facts = banner.serving(Config(), [ready(engine)], "model", 1.0, small_spec(), chat=False)
    assert (facts.engine, facts.url) == (engine, "http://x:1")


def test_a_host_with_a_part_says_which_and_where_the_rest_is():
    lines = banner.part("executor:1", {"elsewhere": "api,scheduler", "schedulers": "tcp://10.0.0.1:7000"}, 2.04)
    text = "\n".join(lines)
    assert "Penstock serves a part here" in text
    assert "here         executor:1" in text
    assert "schedulers   tcp://10.0.0.1:7000" in text
    assert "started in   2.0 s" in text


@given(blocks=st.integers(1, 1 << 20), size=st.integers(1, 256), length=st.integers(2, 1 << 20))
def test_so_many_of_full_length_fit(blocks, size, length):
    facts = of_engine(blocks=blocks, block_size=size, max_model_len=length)
    facts = msgspec.structs.replace(facts, max_num_seqs=4096)
    fit = facts.concurrency
    each = -(-length // size)
    assert fit * each <= blocks
    assert fit == 4096 or (fit + 1) * each > blocks


class Echo(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen = (self.path, self.headers["Content-Type"], self.headers["Authorization"], body)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *words) -> None:
        return


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not there")
@pytest.mark.parametrize("locked", [False, True])
@pytest.mark.parametrize("chat", [False, True])
def test_the_curl_line_works_when_it_is_pasted(chat, locked):
    with http.server.HTTPServer(("127.0.0.1", 0), Echo) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        facts = msgspec.structs.replace(FACTS, url=f"http://127.0.0.1:{server.server_port}", chat=chat, locked=locked)
        command = curl(facts)
        assert "\n" not in command
        environ = {**os.environ, banner.KEY_VARIABLE: "the key", "NO_PROXY": "*"}
        subprocess.run(["bash", "-c", command + " -s -f -S"], env=environ, timeout=30, check=True)
        path, kind, key, body = server.seen
    assert path == ("/v1/chat/completions" if chat else "/v1/completions")
    assert kind == "application/json"
    assert key == ("Bearer the key" if locked else None)
    assert ("messages" in body) == chat


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"host": "127.0.0.1"}, False),
        ({"host": "localhost"}, False),
        ({"host": "0.0.0.0"}, True),
        ({"host": "::"}, True),
        ({"host": "0.0.0.0", "api_key": "k"}, False),
        ({"host": "0.0.0.0", "api_key_file": "keys"}, False),
        ({"host": "0.0.0.0", "uds": "file"}, False),
    ],
)
def test_a_server_that_others_reach_without_a_key_says_so(options, expected):
    assert banner.exposed(ApiConfig(**options)) is expected
    lines = banner.banner(msgspec.structs.replace(FACTS, exposed=expected))
    assert any("NO KEY" in line and "--api-key" in line for line in lines) is expected


def test_a_model_without_a_template_says_that_it_refuses_chats():
    assert not any("--chat-template" in line for line in banner.banner(FACTS))
    lines = banner.banner(msgspec.structs.replace(FACTS, chat=False))
    assert any(line.strip().startswith("chats") and "--chat-template" in line for line in lines)


def test_a_model_without_an_output_embedding_says_that_it_makes_vectors_alone():
    facts = msgspec.structs.replace(FACTS, headless=True)
    assert "/v1/embeddings" in curl(facts)
    assert any(line.strip().startswith("texts") and "lm_head.weight" in line for line in banner.banner(facts))


def test_the_key_is_not_in_the_banner():
    text = "\n".join(banner.banner(msgspec.structs.replace(FACTS, locked=True)))
    assert "$PENSTOCK_API_KEY" in text


def test_without_a_terminal_lines_pass_as_they_are(capsys):
    progress = banner.Progress()
    progress.open()
    assert not progress.shown
    progress.update([])
    progress.write("a [bold]line[/bold] of another")
    progress.close()
    assert capsys.readouterr().err == "a [bold]line[/bold] of another\n"


def test_an_encoder_has_no_cache_and_every_slot():
    facts = msgspec.structs.replace(of_engine(blocks=0), headless=True, max_num_seqs=7)
    assert facts.concurrency == 7
    lines = banner.banner(facts)
    assert any("none: an encoder" in line for line in lines)
    assert not any("blocks" in line for line in lines)


def test_replicas_that_compute_prompts_are_told_of():
    text = "\n".join(banner.banner(msgspec.structs.replace(FACTS, replicas=4, prefill_replicas=1)))
    assert "as many requests; 1 compute prompts for the others" in text
