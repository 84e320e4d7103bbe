"""Classes of past advisories against servers of this kind, each with what holds here. Where another test goes
deeper, the docstring names it."""

from __future__ import annotations

import ast
import errno
import hmac
import math
import os
import subprocess
import sys
import tempfile
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine_core.kv.prefix_index import IDENTITY_BYTES, extend, root
from penstock.engine_core.models.weight_files import find_files
from penstock.protocol.config import ApiConfig, Config, LinksConfig, fields
from penstock.protocol.engine_config import ExecutorConfig
from penstock.protocol.errors import ConfigError, ModelError
from penstock.protocol.links import LINKS, TEXT, LinkSpec, address, decoder
from penstock.protocol.messages import SubmitText
from penstock.protocol.request_ids import request_id
from penstock.protocol.validation import check
from penstock.services.executor.rendezvous import LOOPBACK, choose
from penstock.services.http import security as keys
from penstock.services.http.routing import Access
from penstock.services.http.static_files import FILES
from penstock.services.links.handshake import Identity
from penstock.services.links.link import Link
from penstock.services.openai.routes import ROUTES, operator_routes
from penstock.services.supervisor.run_directory import prepared
from tests.rules.source import ROOT, product
from tests.services.client.fake_engine import FakeLink, answering, app_state, client, silent, words

RUNS_CODE = frozenset(
    ("pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "jsonpickle", "yaml")
)
FETCHES = frozenset(
    ("urllib.request", "http.client", "httpx", "httpx2", "httpcore", "httpcore2", "requests", "aiohttp", "ftplib",
     "urllib3")
)  # fmt: skip
PICKLES = frozenset(  # torch.distributed's ways to send any object between ranks
    ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list",
     "recv_object_list")
)  # fmt: skip
PIPES = ("multiprocessing.connection", "multiprocessing.managers", "torch.multiprocessing", "xmlrpc", "socketserver")
EVERY = (*ROUTES, *operator_routes(ApiConfig(lora_dir="x", weights_dir="x")))
KINDS = tuple(dict.fromkeys(route.body for route in EVERY if route.body is not None))
SERVING = ("services.http", "services.tokenizer", "services.scheduler", "services.executor", "engine_core", "protocol")
NOBODY = 65534
CANARY = "a-secret-that-nobody-prints"


def imports(*folders: str) -> Iterator[tuple[str, str]]:
    """(where, what) for every import of the product below `folders`; everywhere without any."""
    for source in product():
        if not folders or source.module.startswith(folders):
            for name, node in source.imports:
                yield source.at(node), name


def calls(*names: str) -> list[str]:
    """Where the product calls one of `names`."""
    return [
        source.at(node)
        for source in product()
        for node in source.nodes
        if isinstance(node, ast.Call) and ast.unparse(node.func) in names
    ]


# A: nothing that is received runs code (CVE-2025-32444, -30165, -47277, CVE-2026-3059)


def test_nothing_is_deserialised_by_what_runs_code() -> None:
    """Beyond this, tests/services/links/test_link.py puts nonsense on the sockets themselves."""
    assert [(place, name) for place, name in imports() if name.partition(".")[0] in RUNS_CODE] == []
    assert calls("torch.load", "eval", "exec", "numpy.load", "np.load", "recv_pyobj", "send_pyobj") == []
    pickling = [
        source.at(node)
        for source in product()
        for node in source.nodes
        if isinstance(node, ast.Attribute) and node.attr in PICKLES
    ]
    assert pickling == []
    assert [place for place, name in imports() if name.startswith(PIPES)] == []


@pytest.mark.parametrize("link", LINKS, ids=lambda link: link.name)
@pytest.mark.parametrize("at_binder", [False, True])
@given(data=st.one_of(st.binary(max_size=200), st.just(b"\x80\x04\x95cos\nsystem\n"), st.just(b"\x91" * 5000)))
def test_nonsense_on_a_link_is_refused_as_such(link: LinkSpec, at_binder: bool, data: bytes) -> None:
    with pytest.raises((msgspec.DecodeError, RecursionError, UnicodeDecodeError)):
        decoder(link, at_binder=at_binder).decode(data)


# B: nothing listens beyond this machine unless told to (CVE-2025-30202)


def test_nothing_listens_beyond_this_machine_by_default(tmp_path: Path) -> None:
    assert ApiConfig().host == "127.0.0.1"
    for link in LINKS:
        assert address(link, tmp_path, 0).startswith(f"ipc://{tmp_path}/")
    named = {source.module for source in product() if '"tcp://' in source.text or "'tcp://" in source.text}
    options = {"protocol.config", "protocol.engine_config"}
    assert named == {"protocol.links", *options, "services.executor.rendezvous"}, "which options name"
    assert Config().links == LinksConfig(scheduler_address="", tokenizer_address="", link_keys="")
    assert ExecutorConfig().rendezvous == "", "members of a group meet over a file of the run directory"
    environ: dict[str, str] = {}
    assert choose(LOOPBACK, environ) == "lo", "and talk over loopback"
    assert environ == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


def test_the_sockets_are_nobody_elses(tmp_path: Path) -> None:
    """Who else may read a run directory is refused one in tests/services/supervisor/test_run_directory.py."""
    before = os.umask(0)
    try:
        assert prepared(tmp_path / "run").stat().st_mode & 0o777 == 0o700
    finally:
        os.umask(before)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
@pytest.mark.parametrize("closed", [True, False])
def test_another_user_does_not_reach_the_sockets(closed: bool) -> None:
    """It is the directory that keeps others out: opened by hand, it would not."""
    script = """
import os, socket, sys
number, path = int(sys.argv[1]), sys.argv[2]
socket.socket(socket.AF_UNIX)  # imported and made as root, whose files the interpreter may be
os.setgroups([])
os.setgid(number)
os.setuid(number)
one = socket.socket(socket.AF_UNIX)
one.settimeout(20)
sys.exit(one.connect_ex(path))
"""
    with tempfile.TemporaryDirectory(prefix="penstock-test-", dir="/tmp") as place:
        Path(place).chmod(0o755)
        run_dir = prepared(Path(place) / "run")
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        port = Link.bind(context, TEXT, Identity(TEXT.binder, 0, 1, 7), run_dir)
        try:
            path = run_dir / "text-0.sock"
            path.chmod(0o777)
            if not closed:
                run_dir.chmod(0o755)
            command = [sys.executable, "-c", script, str(NOBODY), str(path)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
            assert done.returncode == (errno.EACCES if closed else 0), done.stderr
        finally:
            port.close()
            context.term()


# C and D: every number is bounded and finite before anything is made of it (CVE-2026-34756, CVE-2025-48956, -48943)


def numbers(schema: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every place of a JSON Schema where a number may stand."""
    if isinstance(schema, dict):
        if schema.get("type") in ("integer", "number"):
            yield path, schema
        for name, part in schema.items():
            yield from numbers(part, f"{path}/{name}")
    elif isinstance(schema, list):
        for part in schema:
            yield from numbers(part, path)


@pytest.mark.parametrize("kind", KINDS)
def test_every_number_of_a_request_is_bounded(kind: type) -> None:
    _, parts = msgspec.json.schema_components([kind])
    for path, schema in numbers(parts):
        bounds = [
            schema.get(name, schema.get("exclusive" + name[:1].upper() + name[1:])) for name in ("minimum", "maximum")
        ]
        assert all(bound is not None and math.isfinite(bound) for bound in bounds), path


def test_every_number_of_an_option_is_bounded() -> None:
    for field in fields():
        if field.type in (int, float):
            assert field.option.low is not None, field.flag
            assert field.option.high is not None, field.flag
            section = msgspec.structs.replace(getattr(Config(), field.section), **{field.name: math.nan})
            config = msgspec.structs.replace(Config(), **{field.section: section})
            with pytest.raises(ConfigError):
                check(config)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999", "9" * 4000, "-" + "9" * 4000, "1e308"])
@pytest.mark.parametrize(
    "name", ["temperature", "top_p", "n", "seed", "max_tokens", "priority", "timeout", "min_p", "top_k"]
)
async def test_a_number_beyond_all_bounds_ends_at_the_door(name: str, value: str) -> None:
    port = FakeLink(silent)
    async with client(app_state(port)) as http:
        body = f'{{"prompt": "a", "{name}": {value}}}'.encode()
        answer = await http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert port.sent == []


# E: caches are bounded, compiles limited (CVE-2025-29770, -32381, CVE-2026-25048)


def test_no_cache_grows_without_end() -> None:
    """Bombs of schemas, regexes and templates are in tests/e2e/test_bombs.py."""
    unbounded = [
        source.at(node)
        for source in product()
        for node in source.nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for decorator in node.decorator_list
        if ast.unparse(decorator) in ("functools.cache", "cache", "functools.lru_cache(maxsize=None)")
        and (node.args.args or node.args.kwonlyargs)
        and source.module.startswith(("services.http", "services.tokenizer", "engine_core.grammar", "engine_core.text"))
    ]
    assert unbounded == []
    bounded = {field.name for field in fields() if field.option.high is not None}
    assert {
        "grammar_cache_entries",
        "grammar_compile_timeout",
        "grammar_compile_memory",
        "grammar_max_bytes",
    } <= bounded


# F: nothing of a request or a model folder is run or fetched (CVE-2026-5760, -22807, -24779, CVE-2025-6242)


def test_one_module_of_all_that_serves_can_fetch() -> None:
    """test_images.py beside this file holds it to where it may."""
    serving = (*SERVING, "services.openai", "services.client")
    found = {(place.partition(":")[0], name) for place, name in imports(*serving) if name in FETCHES}
    assert found == {("services/openai/media_fetcher.py", "httpcore2")}


def test_no_model_brings_code() -> None:
    for source in product():
        for node in source.nodes:
            if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
                assert isinstance(node.value, ast.Constant), source.at(node)
                assert node.value.value is False, source.at(node)


@pytest.mark.parametrize("url", ["http://169.254.169.254/latest/", "file:///etc/passwd", "data:image/png;base64,AAAA"])
async def test_what_a_message_points_to_is_not_looked_at(url: str) -> None:
    port = FakeLink(silent)
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what is it?"}]
    async with client(app_state(port)) as http:
        answer = await http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": parts}]})
    assert answer.status_code == 400
    assert port.sent == []


# G: internal names are the server's; cache keys are cryptographic and salted (CVE-2026-105755, CVE-2025-46570, -25183)


async def test_a_clients_name_for_a_request_names_nothing_inside() -> None:
    port = FakeLink(answering(words("ok")))
    async with client(app_state(port)) as http:
        for _ in range(2):  # the same one twice, and one that looks like ours
            body = {"prompt": "a", "request_id": str(request_id(0, 1, 1))}
            answer = await http.post("/v1/completions", json=body, headers={"x-request-id": "twice"})
            assert answer.status_code == 200
    sent = port.of(SubmitText)
    assert len({request.id for request in sent}) == 2
    assert "twice" not in str(sent)


def identities(salt: str, tokens: int = 64) -> list[bytes]:
    chain: list[bytes] = []
    extend(chain, root(salt), array("i", range(tokens)), tokens // 16, 16)
    return chain


@given(st.text(max_size=20), st.text(max_size=20))
def test_a_salt_keeps_equal_prompts_apart(one: str, other: str) -> None:
    """That a probe then measures nothing is in tests/engine_core/scheduling/test_admission.py and in tests/sim."""
    assert (identities(one) == identities(other)) == (one == other)
    if one != other:
        assert not set(identities(one)) & set(identities(other))
    assert all(len(identity) == IDENTITY_BYTES >= 16 for identity in identities(one))


OPEN_PATHS = {"/health/live", "/health/ready", "/health_generate", "/ping"}
OPEN_PATHS |= {"/", "/favicon.ico", "/favicon.svg", "/robots.txt"}
OPEN_PATHS |= {path for path in FILES if path.startswith("/static/")}  # of the page, which asks for the key itself

# H: every route but liveness needs the key, compared in constant time (CVE-2025-59425)


async def test_every_route_that_there_is_needs_the_key() -> None:
    parts = app_state(FakeLink(silent), api_key=CANARY)
    assert len(ROUTES) > 10
    assert {route.path for route in ROUTES if route.access is not Access.KEY} == OPEN_PATHS
    async with client(parts) as http:
        for route in ROUTES:
            for method in (route.method, "HEAD", "PUT"):
                path = route.path.replace("{name:path}", "x").replace("{id}", "x")
                answer = await http.request(method, path)
                assert (answer.status_code == 401) == (path not in OPEN_PATHS), (method, path)
                assert CANARY not in answer.text
        for path in ("/V1/models", "//v1/models", "/v1/models/", "/health/live/../../v1/models", "/health/live%2f.."):
            assert (await http.get(path)).status_code == 401


def test_keys_are_compared_in_constant_time() -> None:
    text = Path(str(keys.__file__)).read_text()
    assert "compare_digest" in text
    assert hmac.compare_digest(b"a", b"a")


# I: errors carry no internals, and no check is an assertion (CVE-2026-22778, CVE-2026-41523)


@pytest.mark.parametrize(
    "body", [b"{", b'{"prompt": 1}', b'{"prompt": "a", "n": "x"}', b'{"prompt": "\xff"}', b'{"model": "/etc"}']
)
async def test_an_error_tells_neither_paths_nor_traces(body: bytes) -> None:
    async with client(app_state(FakeLink(silent))) as http:
        answer = await http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert 400 <= answer.status_code < 500
    for internal in (str(ROOT), "Traceback", ".py", "site-packages", "object at"):
        assert internal not in answer.text


def test_users_mistakes_are_told_without_assertions_too() -> None:
    """The same checks in an interpreter that leaves assertions out."""
    script = """
import sys
assert False, "assertions are on"
from penstock.protocol.config import Config, ApiConfig
from penstock.protocol.validation import check
from penstock.protocol.errors import RequestError, PenstockError
from penstock.engine_core.scheduling.options import SchedulingOptions
from penstock.engine_core.scheduling.scheduler import Scheduler
from penstock.protocol.messages import Sampling, SubmitTokens
from tests.sim.idle import is_idle
scheduler = Scheduler(SchedulingOptions(blocks=8, block_size=4, max_model_len=16, max_num_seqs=2,
                                        max_num_batched_tokens=8, vocab_size=10))
bad = [dict(token_ids=b""), dict(token_ids=b"abc"), dict(token_ids=b"\\xff" * 4), dict(token_ids=bytes(4), n=0),
       dict(token_ids=bytes(4), id=-1), dict(token_ids=bytes(400)), dict(token_ids=bytes(4), prediction=b"a")]
for number, fields in enumerate(bad):
    scheduler.submit(SubmitTokens(**{"id": number, "sampling": Sampling(max_tokens=1), **fields}), 0, 0.0)
answers = scheduler.outputs(0)
if [answer.status for answer in answers] != [400] * len(bad) or not is_idle(scheduler):
    sys.exit(f"answered {answers}")
try:
    check(Config(api=ApiConfig(port=-1)))
except PenstockError:
    sys.exit(0)
sys.exit("a port of -1 passed")
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-O", "-c", script], env=environment, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr.decode()


def test_pickled_weights_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(ModelError, match="runs code"):
        find_files(tmp_path)
