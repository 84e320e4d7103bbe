from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol import links
from penstock.protocol.config import Config, LinksConfig, fields
from penstock.protocol.control import EngineStatus
from penstock.protocol.engine_config import ModelConfig
from penstock.protocol.errors import ConfigError
from penstock.protocol.links import (
    LINKS,
    MOST_BYTES,
    STEPS,
    TEXT,
    TOKENS,
    Role,
    address,
    identity,
    new_incarnation,
    ports_of,
    shared_hash,
)
from penstock.protocol.messages import Abort, Rejected


def test_the_table_joins_every_role():
    ends = {(link.binder, link.connector) for link in LINKS}
    assert ends == {
        (Role.TOKENIZER, Role.API),
        (Role.SCHEDULER, Role.TOKENIZER),
        (Role.SCHEDULER, Role.EXECUTOR),
    }
    assert len({link.name for link in LINKS}) == len(LINKS)


def largest_body() -> int:
    """Bytes that the options let a body have."""
    (found,) = [field.option.high for field in fields() if field.name == "max_body_bytes"]
    assert isinstance(found, int)
    return found


def test_the_largest_body_is_a_message() -> None:
    assert 2 * largest_body() < MOST_BYTES  # of token ids, two bytes each there and four here


@pytest.mark.parametrize("link", LINKS, ids=lambda link: link.name)
def test_the_window_is_reached_before_the_socket_is_full(link):
    assert 0 < link.window < link.high_water
    assert link.high_water >= 2 * link.window  # data of one peer, and handshakes and credits beside it
    assert link.silence >= 0
    assert link.up
    assert link.down


def test_what_ends_a_request_travels_all_the_way():
    assert Abort in TEXT.up
    assert Abort in TOKENS.up
    for kind in (Rejected, EngineStatus):
        assert kind in TOKENS.down
        assert kind in TEXT.down


def test_addresses_are_socket_files_of_their_own():
    run_dir = Path("/run/penstock")
    found = {address(link, run_dir, index) for link in LINKS for index in range(3)}
    assert len(found) == 9
    assert address(STEPS, run_dir, 0) == "ipc:///run/penstock/steps-0.sock"


def test_the_ports_of_an_address_are_dealt_in_the_tables_order():
    links = LinksConfig(scheduler_address="tcp://10.0.0.1:7000", tokenizer_address="tcp://[fd00::1]:8000")
    assert (ports_of(Role.SCHEDULER), ports_of(Role.TOKENIZER), ports_of(Role.API)) == (2, 1, 0)
    run_dir = Path("/run/penstock")
    assert [address(TOKENS, run_dir, index, links) for index in range(2)] == [
        "tcp://10.0.0.1:7000",
        "tcp://10.0.0.1:7002",
    ]
    assert [address(STEPS, run_dir, index, links) for index in range(2)] == [
        "tcp://10.0.0.1:7001",
        "tcp://10.0.0.1:7003",
    ]
    assert [address(TEXT, run_dir, index, links) for index in range(2)] == [
        "tcp://[fd00::1]:8000",
        "tcp://[fd00::1]:8001",
    ]


def test_a_link_without_an_address_stays_on_its_machine():
    links = LinksConfig(scheduler_address="tcp://h:7000")
    assert address(TEXT, Path("/run/penstock"), 0, links) == "ipc:///run/penstock/text-0.sock"
    assert address(STEPS, Path("/run/penstock"), 0, LinksConfig()) == "ipc:///run/penstock/steps-0.sock"


def test_an_address_that_is_none_is_told_by_its_option():
    with pytest.raises(ConfigError, match="--tokenizer-address"):
        address(TEXT, Path("/run/penstock"), 0, LinksConfig(tokenizer_address="h:1"))


@given(
    one=st.tuples(st.sampled_from(Role), st.integers(0, 63), st.integers(0, 2**31 - 1)),
    two=st.tuples(st.sampled_from(Role), st.integers(0, 63), st.integers(0, 2**31 - 1)),
)
def test_identities_tell_lives_apart(one, two):
    assert (identity(*one) == identity(*two)) == (one == two)
    assert len(identity(*one)) < 64  # ZMQ takes 255 bytes
    assert identity(*one)[0] != 0  # a leading zero is ZMQ's own


@given(sessions=st.tuples(st.integers(0, 2**40), st.integers(0, 2**40)))
def test_identities_tell_connections_apart(sessions):
    names = [identity(Role.API, 1, 7, session) for session in sessions]
    assert (names[0] == names[1]) == (sessions[0] == sessions[1])
    assert len(names[0]) < 64


def test_incarnations_differ():
    found = {new_incarnation() for _ in range(1000)}
    assert len(found) > 990
    assert all(0 <= number < 2**31 for number in found)


def test_the_hash_is_the_same_in_another_process():
    config = ModelConfig(model="/some/where", dtype="float32", max_model_len=4096)
    code = (
        "from penstock.protocol.config import ModelConfig; from penstock.protocol.links import shared_hash; "
        "print(shared_hash(ModelConfig(max_model_len=4096, dtype='float32', model='/some/where')))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert int(found.stdout) == shared_hash(config)
    assert 0 <= shared_hash(config) < 2**32


@pytest.mark.parametrize("field", msgspec.structs.fields(ModelConfig), ids=lambda field: field.name)
def test_every_shared_option_changes_the_hash(field):
    other = {str: "other", int: 7, bool: not field.default}[type(field.default)]
    assert shared_hash(ModelConfig()) != shared_hash(msgspec.structs.replace(ModelConfig(), **{field.name: other}))


def test_what_is_not_shared_does_not_change_the_hash():
    one, two = Config(), msgspec.structs.replace(Config(), api=msgspec.structs.replace(Config().api, port=1))
    assert shared_hash(one.model) == shared_hash(two.model)


def test_the_version_is_a_number_that_handshakes_carry():
    assert links.PROTOCOL_VERSION >= 1
    names = [field.name for field in msgspec.structs.fields(links.Hello)]
    assert names[:5] == ["version", "role", "index", "incarnation", "pid"]  # a later version must read an earlier hello
