"""supervisord with the programs of `deploy/supervisord.conf`: start, kill, restart, reload, stop with drain."""

from __future__ import annotations

import configparser
import os
import signal
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest

from penstock.services import cli
from penstock.services.supervisor import options
from tests.deploy.supervised import CONF, LIMIT, ROLES, Supervised, supervised
from tests.deploy.test_systemd import number
from tests.e2e.chaos.streams import Answer, answers, bodies

pytest.importorskip("supervisor")
QUESTION = [{"role": "user", "content": "What is 128 + 457?"}]
SUM = "585"
STREAMS, TOKENS = 12, 24
SILENT = "silent for 10 s"  # how a peer says why it gave another up


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


@pytest.fixture(scope="module")
def undisturbed(server: Supervised) -> list[Answer]:
    return answers(server.url, bodies(STREAMS, TOKENS))


def disturbed(server: Supervised, disturb: Callable[[], None]) -> list[Answer]:
    """What clients get when this happens while they all have a part of their answers."""
    return answers(server.url, bodies(STREAMS, TOKENS), [STREAMS * TOKENS // 3], lambda _: disturb())


@pytest.mark.parametrize("role", ["tokenizer", "scheduler", "executor", "api"])
def test_a_killed_process_comes_back_and_costs_streams_nothing_but_time(
    server: Supervised, undisturbed: list[Answer], role: str
) -> None:
    """The api's streams break with it, as connections do."""
    before = server.pids()
    found = disturbed(server, lambda: os.kill(before[role], signal.SIGKILL))
    assert role == "api" or [answer.said for answer in found] == [answer.said for answer in undisturbed]
    after = server.serving(role, old=before)
    assert {other for other in ROLES if after[other] != before[other]} == {role}
    assert SUM in ask(server)
    rested(server)


@pytest.mark.long
@pytest.mark.parametrize("role", ["tokenizer", "scheduler", "executor"])
def test_a_stopped_process_that_is_continued_is_taken_back(
    server: Supervised, undisturbed: list[Answer], role: str
) -> None:
    """Nobody ends it, as a launcher would. Its peers give it up by its silence and begin anew; an executor has one that
    waits as long as a step may take."""
    before = server.pids()
    silent = server.log.read_text().count(SILENT)

    def stop() -> None:
        os.kill(before[role], signal.SIGSTOP)
        if role == "executor":
            server.until(lambda health: (health["last_step_age"] or 0) > 1)
        else:
            server.logged(SILENT, silent + 1)
        os.kill(before[role], signal.SIGCONT)

    found = disturbed(server, stop)
    assert [answer.said for answer in found] == [answer.said for answer in undisturbed]
    assert server.serving() == before
    rested(server)


def rested(server: Supervised) -> None:
    """Wait until nobody is left in the engine and no block is held."""
    server.until(lambda health: health["engine"] and health["engine"]["running"] == health["engine"]["waiting"] == 0)
    server.until(lambda health: health["capacity"]["tokens"] == health["capacity"]["tokens_free"])


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
    assert {path.name for path in server.run_dir.iterdir()} <= {"crashes"}


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
    assert number(parsed) == ("0" if role == "scheduler" else "2")
    assert ('CUDA_VISIBLE_DEVICES="%(process_num)d"' in program.get("environment", "")) == (role == "executor")
