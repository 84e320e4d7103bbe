"""supervisord with the programs of `deploy/supervisord.conf`: start, kill, restart, reload, stop with drain."""

from __future__ import annotations

import configparser
import os
import signal
import tomllib
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from services import cli, options
from tests.deploy.supervised import CONF, LIMIT, ROLES, Supervised, supervised

pytest.importorskip("supervisor")
QUESTION = [{"role": "user", "content": "What is 128 + 457?"}]
SUM = "585"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Supervised]:
    with supervised(tmp_path_factory.mktemp("supervisord")) as found:
        found.serving()
        yield found


def client(server: Supervised) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=LIMIT)


def ask(server: Supervised) -> str:
    with client(server) as asking:
        model = asking.models.list().data[0].id
        answer = asking.chat.completions.create(model=model, messages=QUESTION, temperature=0, max_tokens=40)
        return answer.choices[0].message.content or ""


def programs() -> configparser.RawConfigParser:
    found = configparser.RawConfigParser(inline_comment_prefixes=(" ;",))
    found.read(CONF)
    return found


def test_it_serves(server: Supervised) -> None:
    assert SUM in ask(server)
    told = server.control("status").split("\n")
    assert sorted(line.split()[0] for line in told if "RUNNING" in line) == [
        "penstock-api:penstock-api-0", "penstock-executor:penstock-executor-0", "penstock-scheduler",
        "penstock-tokenizer:penstock-tokenizer-0",
    ]  # fmt: skip


@pytest.mark.parametrize("role", ["tokenizer", "scheduler", "executor", "api"])
def test_a_killed_process_comes_back_and_serves(server: Supervised, role: str) -> None:
    before = server.pids()
    os.kill(before[role], signal.SIGKILL)
    after = server.serving(role, old=before)
    assert {other for other in ROLES if after[other] != before[other]} == {role}
    assert SUM in ask(server)


def test_a_group_is_restarted(server: Supervised) -> None:
    before = server.pids()
    server.control("restart", "penstock-api:*")
    after = server.serving("api", old=before)
    assert {other for other in ROLES if after[other] != before[other]} == {"api"}
    assert SUM in ask(server)


def test_a_reload_starts_everything_anew(server: Supervised) -> None:
    before = server.pids()
    server.control("reload")
    after = server.serving(*ROLES, old=before)
    assert not set(before.values()) & set(after.values())
    assert SUM in ask(server)


def test_a_stop_lets_running_requests_finish(server: Supervised) -> None:
    """The last test of this file: the server is gone after it."""
    with client(server) as asking:
        model = asking.models.list().data[0].id
        chunks = asking.chat.completions.create(
            model=model, messages=QUESTION, stream=True, max_tokens=400, extra_body={"ignore_eos": True}
        )
        next(iter(chunks))
        server.control("shutdown")
        assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"
    pids = list(server.pids().values())
    assert server.process.wait(LIMIT) == 0
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []
    assert list(server.run_dir.glob("*.entry")) == []
    assert not (server.run_dir / "supervisor.sock").exists()


def test_the_order_of_stopping_drains() -> None:
    """supervisord ends the highest priority first, and waits for it."""
    found = programs()
    order = {name: found.getint(name, "priority") for name in found.sections() if name.startswith("program:")}
    assert sorted(order, key=order.__getitem__) == [
        "program:penstock-executor", "program:penstock-scheduler", "program:penstock-tokenizer", "program:penstock-api"
    ]  # fmt: skip


@pytest.mark.parametrize("role", ROLES)
def test_each_program_is_as_the_units_are(role: str) -> None:
    program = programs()[f"program:penstock-{role}"]
    drain = tomllib.loads((CONF.parent / "penstock.toml").read_text())["run"]["drain_timeout"]
    assert int(program["stopwaitsecs"]) == drain + 10
    assert program["stopsignal"] == "TERM"
    assert {int(code) for code in program["exitcodes"].split(",")} == {0, *cli.EXIT_CODES.values()}
    words = program["command"].replace("%(process_num)d", "2").split()
    parsed = options.parse(cli.parser_of(words[1]), words[2:])
    assert parsed.index == ("2" if role in ("api", "tokenizer") else "0")
    assert ('CUDA_VISIBLE_DEVICES="%(process_num)d"' in program.get("environment", "")) == (role == "executor")
