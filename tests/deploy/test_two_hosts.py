"""A server over two hosts, run for real as `deploy/` has it: supervisord's programs of both, and the units' commands,
each host with its own options and run directory, meeting at an address with keys. Here both are this machine."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest

from penstock.services.links.curve import new_keys, write_keys
from tests.deploy.supervised import CONF, LIMIT, ROLES, Supervised, supervised
from tests.deploy.test_commands import Units
from tests.deploy.test_fronts import HOST

pytestmark = pytest.mark.long
SECOND = CONF.parent / "hosts" / "supervisord.conf"
QUESTION = [{"role": "user", "content": "What is 128 + 457?"}]
SUM = "585"


def toml(keys: Path, first_executor: int) -> str:
    """What a host is told: two stages, one on each."""
    return f"""
[model]
pipeline_parallel_size = 2
[links]
scheduler_address = "tcp://{HOST}:7000"
link_keys = "{keys}"
[api]
port = 0
api_processes = 1
[tokenizer]
tokenizer_processes = 1
[executor]
device = "cpu"
cpu_threads = 1
rendezvous = "tcp://{HOST}:29500"
first_executor = {first_executor}
"""


def made(folder: Path) -> Path:
    write_keys(folder / "link.keys", new_keys())
    return folder / "link.keys"


def answered(url: str) -> str:
    with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=LIMIT) as client:
        model = client.models.list().data[0].id
        answer = client.chat.completions.create(model=model, messages=QUESTION, temperature=0, max_tokens=40)
    return answer.choices[0].message.content or ""


@contextmanager
def both(folder: Path) -> Iterator[tuple[Supervised, Supervised]]:
    """supervisord of each host, serving; the second one first."""
    keys, conf = made(folder), folder / "second.conf"
    conf.write_text(SECOND.read_text().replace("numprocs=4", "numprocs=1"))
    with (
        supervised(folder / "b", conf=conf, toml=toml(keys, 1), roles=("executor",)) as second,
        supervised(folder / "a", toml=toml(keys, 0)) as first,
    ):
        first.serving()
        second.serving()
        yield first, second


def test_supervisords_of_two_hosts_are_one_server(tmp_path: Path) -> None:
    """One's executor is killed: the other's begins a new life with it. Stopped, the first one drains."""
    with both(tmp_path) as (first, second):
        assert SUM in answered(first.url)
        ours, theirs = first.pids(), second.pids()
        os.kill(theirs["executor"], signal.SIGKILL)
        second.serving("executor", old=theirs)
        after = first.serving("executor", old=ours)
        assert {role for role in ROLES if after[role] != ours[role]} == {"executor"}
        assert SUM in answered(first.url)
        for host in (first, second):
            host.control("shutdown")
            assert host.process.wait(LIMIT) == 0


def test_the_units_commands_of_two_hosts_are_one_server(tmp_path: Path) -> None:
    """Under the units' filters: who binds an address, and collectives, ask for this host's interfaces."""
    keys = made(tmp_path)
    hosts = [Units(tmp_path / name, toml(keys, first)) for first, name in enumerate("ab")]
    first, second = hosts
    try:
        second.start("penstock-executor@.service")
        for role in ("api@", "tokenizer@", "scheduler", "executor@"):
            first.start(f"penstock-{role}.service")
        for host in hosts:
            for name in host.processes:
                host.until(name, "READY")
        (url,) = set(first.fields("penstock-api@.service", "X_PENSTOCK_URL"))
        assert SUM in answered(url)
        for host in hosts:
            for role in ("api@", "tokenizer@", "scheduler", "executor@"):
                if process := host.processes.get(f"penstock-{role}.service"):
                    process.send_signal(signal.SIGTERM)
                    assert process.wait(LIMIT) == 0
    finally:
        for host in hosts:
            host.close()
