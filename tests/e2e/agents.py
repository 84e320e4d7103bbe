"""What it takes to try coding agents as people run them: their program, a tiny model with room for their prompts, and
a proxy that records what the program and the server say to each other and may rewrite a request on its way.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from safetensors.torch import save_file

from penstock.engine_core.embedded import demo_folder

CONTEXT = 65_536  # tokens; an agent's first prompt takes 20,000 to 50,000 of the embedded model's
WIDTH, HEAD = 64, 16  # of the one layer: its output is noise, which a grammar or `tool_choice` gives its form
INSTALL_LIMIT = 300.0  # seconds
CHUNK = 1 << 16
HOPS = ("connection", "content-length", "host", "transfer-encoding", "accept-encoding", "keep-alive")


def roomy_model(folder: Path) -> Path:
    """A model of one layer with random weights, `CONTEXT`, and the embedded model's tokenizer and chat template."""
    place = folder / "roomy"
    own = shutil.ignore_patterns("*.safetensors", "README.md", "SHA256SUMS", "self_test.json")
    shutil.copytree(demo_folder(), place, ignore=own)
    config = json.loads((place / "config.json").read_text())
    config |= {
        "max_position_embeddings": CONTEXT, "hidden_size": WIDTH, "intermediate_size": WIDTH, "head_dim": HEAD,
        "num_attention_heads": 1, "num_key_value_heads": 1, "num_hidden_layers": 1,
    }  # fmt: skip
    (place / "config.json").write_text(json.dumps(config))
    layer = "model.layers.0."
    shapes = {
        "model.embed_tokens.weight": (config["vocab_size"], WIDTH), "model.norm.weight": (WIDTH,),
        f"{layer}input_layernorm.weight": (WIDTH,), f"{layer}post_attention_layernorm.weight": (WIDTH,),
        f"{layer}self_attn.q_proj.weight": (HEAD, WIDTH), f"{layer}self_attn.k_proj.weight": (HEAD, WIDTH),
        f"{layer}self_attn.v_proj.weight": (HEAD, WIDTH), f"{layer}self_attn.o_proj.weight": (WIDTH, HEAD),
        f"{layer}self_attn.q_norm.weight": (HEAD,), f"{layer}self_attn.k_norm.weight": (HEAD,),
        f"{layer}mlp.gate_proj.weight": (WIDTH, WIDTH), f"{layer}mlp.up_proj.weight": (WIDTH, WIDTH),
        f"{layer}mlp.down_proj.weight": (WIDTH, WIDTH),
    }  # fmt: skip
    random = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=random) * 0.1 for name, shape in shapes.items()}
    save_file({name: weight.to(torch.bfloat16) for name, weight in weights.items()}, place / "model.safetensors")
    return place


def node_package(*packages: str) -> Path:
    """The folder in the user's cache that has these npm packages, installed there once. Skips the test where they
    cannot be had."""
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.skip("node and npm are not installed")
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    package = " ".join(packages)
    place = cache / "penstock" / "node" / re.sub(r"[^\w.]+", "-", package).strip("-")
    made = place / "made"  # an installation that was cut short leaves a folder as well
    if not made.exists():
        place.mkdir(parents=True, exist_ok=True)
        (place / "package.json").write_text('{"private": true, "type": "module"}')
        command = [npm, "install", "--no-audit", "--no-fund", *packages]
        try:
            done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=INSTALL_LIMIT)
        except subprocess.TimeoutExpired:
            pytest.skip(f"npm took too long to install {package}")
        if done.returncode:
            pytest.skip(f"npm cannot install {package}: {done.stderr[-300:]}")
        made.touch()
    return place


@dataclass
class Exchange:
    """A request as the program sent it, and its response as the server gave it."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    status: int = 0
    response_headers: Mapping[str, str] | None = None
    response: bytes = b""

    @property
    def asked(self) -> Any:
        return json.loads(self.body) if self.body else None


Rewrite = Callable[[str, dict[str, Any]], dict[str, Any]]  # path and JSON body → the body that the server gets


@dataclass
class Proxy:
    """`exchanges` in the order in which their requests came."""

    url: str
    exchanges: list[Exchange]


@contextmanager
def proxy(upstream: str, rewrite: Rewrite | None = None) -> Iterator[Proxy]:
    """A proxy on loopback in front of the server at `upstream`; streams pass as they come."""
    target = urlsplit(upstream)
    exchanges: list[Exchange] = []
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            seen = Exchange(self.command, self.path, dict(self.headers.items()), body)
            with lock:
                exchanges.append(seen)
                sent = json.dumps(rewrite(self.path, seen.asked)).encode() if rewrite and body else body
            assert target.hostname is not None
            server = http.client.HTTPConnection(target.hostname, target.port, timeout=600)
            kept = {name: value for name, value in self.headers.items() if name.lower() not in HOPS}
            try:
                server.request(self.command, self.path, sent or None, kept)
                self._answer(seen, server.getresponse())
            finally:
                server.close()

        do_POST = do_DELETE = do_HEAD = do_GET

        def _answer(self, seen: Exchange, response: http.client.HTTPResponse) -> None:
            seen.status, seen.response_headers = response.status, dict(response.getheaders())
            self.send_response(response.status)
            for name, value in response.getheaders():
                if name.lower() not in HOPS:
                    self.send_header(name, value)
            self.send_header("connection", "close")
            self.end_headers()
            while piece := response.read1(CHUNK):
                seen.response += piece
                self.wfile.write(piece)
                self.wfile.flush()
            self.close_connection = True

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: the exchanges are the record."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield Proxy(f"http://127.0.0.1:{listening.server_port}", exchanges)
        finally:
            listening.shutdown()
            thread.join()


def heading(version: str) -> list[str]:
    """What a transcript says of itself: the program, the commit, the date."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    today = datetime.now(UTC).date().isoformat()
    return [f"{version}, a tiny random model of {CONTEXT} tokens, commit {commit.stdout.strip()}, {today}", ""]
