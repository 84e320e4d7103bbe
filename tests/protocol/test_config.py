from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.protocol.config import Config, LinksConfig, TokenizerConfig, fields
from penstock.protocol.engine_config import ExecutorConfig, ModelConfig, SchedulerConfig
from penstock.protocol.errors import ConfigError
from penstock.protocol.option import Field, number
from penstock.protocol.validation import check, check_value

BOUNDED = [field for field in fields() if field.option.low is not None]
CHOSEN = [field for field in fields() if field.option.choices]
KEPT = (
    "--model --served-model-name --host --port --dtype --max-model-len --max-num-seqs --max-num-batched-tokens "
    "--gpu-memory-utilization --tensor-parallel-size --enable-prefix-caching --block-size --seed --enforce-eager "
    "--api-key"
)


def named(field: Field) -> str:
    return field.name


def with_value(field: Field, value: object) -> Config:
    section = msgspec.structs.replace(getattr(Config(), field.section), **{field.name: value})
    return msgspec.structs.replace(Config(), **{field.section: section})


def test_the_defaults_are_allowed():
    assert check(Config()) == Config()


def test_the_names_that_people_type_are_there():
    assert set(KEPT.split()) <= {field.flag for field in fields()}


def test_an_option_has_one_name_and_one_place():
    names = [field.name for field in fields()]
    assert len(set(names)) == len(names)
    assert {field.section for field in fields()} == {field.name for field in msgspec.structs.fields(Config)}


@pytest.mark.parametrize("field", fields(), ids=named)
def test_every_option_says_what_it_is(field):
    assert len(field.option.help) > 10
    assert field.type in (str, int, float, bool)
    assert type(field.default) is field.type
    assert field.flag == "--" + field.name.replace("_", "-")
    if field.type in (int, float):
        assert field.option.low is not None, "every number has bounds"
        assert field.option.high is not None
        assert type(field.option.low) is type(field.option.high) or field.type is float


def refused(field: Field, value: object) -> str:
    with pytest.raises(ConfigError) as caught:
        check(with_value(field, value))
    error = caught.value
    assert error.option == field.flag
    assert error.value is value or error.value == value
    assert field.flag in str(error)
    assert repr(value) in str(error)
    return error.allowed


@pytest.mark.parametrize("field", BOUNDED, ids=named)
def test_beyond_its_bounds_an_option_is_refused(field):
    low, high = field.option.low, field.option.high
    step = 1 if field.type is int else 0.001
    for value in (low - step, high + step, -(10**30) if field.type is int else -math.inf):
        allowed = refused(field, field.type(value))
        assert number(low) in allowed
        assert number(high) in allowed
    for value in (low, high):
        check_value(field, field.type(value))


@pytest.mark.parametrize("field", [field for field in BOUNDED if field.type is float], ids=named)
@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_numbers_are_finite(field, value):
    refused(field, value)


def test_not_a_number_is_refused():
    field = next(field for field in fields() if field.name == "gpu_memory_utilization")
    with pytest.raises(ConfigError):
        check(with_value(field, math.nan))


@pytest.mark.parametrize("field", CHOSEN, ids=named)
def test_a_choice_is_one_of_those_named(field):
    allowed = refused(field, "nonsense")
    for choice in field.option.choices:
        assert choice in allowed
        check_value(field, choice)


@pytest.mark.parametrize("field", fields(), ids=named)
@settings(max_examples=25)
@given(value=st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary()))
def test_a_value_of_another_type_is_refused(field, value):
    if type(value) is field.type or (field.type is float and type(value) is int):
        return
    with pytest.raises(ConfigError, match=r"it must be (text|a whole number|a number|true or false)"):
        check_value(field, value)


@given(tokens=st.integers(0, 4096), sequences=st.integers(1, 4096))
def test_a_step_has_room_for_every_sequence(tokens, sequences):
    model = msgspec.structs.replace(Config().model, max_num_batched_tokens=tokens, max_num_seqs=sequences)
    config = msgspec.structs.replace(Config(), model=model)
    if tokens >= sequences or tokens == 0:  # 0: the executor chooses
        assert check(config) is config
    else:
        with pytest.raises(ConfigError, match=r"--max-num-batched-tokens.*--max-num-seqs \(\d+\)"):
            check(config)


def test_unknown_fields_are_no_options():
    with pytest.raises(TypeError):
        Config(speed=9)  # type: ignore[call-arg]
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(b'{"api": {"prot": 1}}', type=Config)


def test_secrets_have_a_variable():
    secret = {field.variable for field in fields() if field.option.secret}
    assert secret == {"PENSTOCK_API_KEY", "PENSTOCK_SSL_KEYFILE_PASSWORD"}


ADDRESSES = ("--scheduler-address", "--tokenizer-address", "--rendezvous")


def with_address(flag: str, where: str, keys: str = "link.key", **others: msgspec.Struct) -> Config:
    """A server of which one kind of process has an address."""
    name = flag[2:].replace("-", "_")
    if name == "rendezvous":
        parts = {"executor": ExecutorConfig(rendezvous=where), "links": LinksConfig(link_keys=keys)}
    else:
        parts = {"links": LinksConfig(**{name: where, "link_keys": keys})}
    return msgspec.structs.replace(Config(), **parts, **others)


@pytest.mark.parametrize("flag", ADDRESSES)
@pytest.mark.parametrize("where", ["tcp://10.0.0.1:29500", "tcp://node-1.example:1", "tcp://[fd00::1]:65000"])
def test_addresses_of_hosts_with_keys_are_allowed(flag, where):
    config = with_address(flag, where)
    assert check(config) is config


@pytest.mark.parametrize("flag", ADDRESSES)
@pytest.mark.parametrize(
    "where", ["10.0.0.1:29500", "tcp://10.0.0.1:0", "tcp://h:65536", "tcp://fd00::1:80", "tcp://*:1"]
)
def test_what_is_no_address_is_refused(flag, where):
    with pytest.raises(ConfigError, match=f"{flag}: .* it must be like tcp://"):
        check(with_address(flag, where))


@pytest.mark.parametrize("flag", ADDRESSES)
@pytest.mark.parametrize("where", ["tcp://127.0.0.1:29500", "tcp://node-1:29500"])
def test_hosts_do_not_meet_without_keys(flag, where):
    """Not on loopback either: other users are there."""
    with pytest.raises(ConfigError, match="it needs --link-keys, a file that `penstock keys FILE` makes"):
        check(with_address(flag, where, keys=""))


def test_keys_alone_are_allowed():
    check(msgspec.structs.replace(Config(), links=LinksConfig(link_keys="link.key")))


@pytest.mark.parametrize(
    ("flag", "last", "others"),
    [
        ("--scheduler-address", 65535 - 1, {}),
        ("--scheduler-address", 65535 - 7, {"model": ModelConfig(data_parallel_size=4)}),
        ("--tokenizer-address", 65535 - 2, {"tokenizer": TokenizerConfig(tokenizer_processes=3)}),
        ("--rendezvous", 65535 - 3, {"model": ModelConfig(data_parallel_size=4)}),
    ],
)
def test_every_process_has_its_ports(flag, last, others):
    """Two per scheduler, one per tokenizer, one per replica's executors."""
    check(with_address(flag, f"tcp://h:{last}", **others))
    with pytest.raises(ConfigError, match="65535 is the last"):
        check(with_address(flag, f"tcp://h:{last + 1}", **others))


def test_no_port_is_for_two():
    links = LinksConfig(scheduler_address="tcp://h:5000", tokenizer_address="tcp://h:5002", link_keys="k")
    check(msgspec.structs.replace(Config(), links=links))
    with pytest.raises(ConfigError, match=r"--tokenizer-address: .* --scheduler-address has 5002"):
        check(msgspec.structs.replace(Config(), links=links, model=ModelConfig(data_parallel_size=2)))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"kv_disk_size": 1}, "--kv-disk-size: 1 is not allowed; it needs --kv-disk"),
        ({"kv_disk": "/kv"}, "--kv-disk: '/kv' is not allowed; it needs --kv-disk-size"),
        ({"kv_disk": "/kv", "kv_disk_size": 1}, "it needs --kv-host-memory: blocks go to disk from there"),
        ({"kv_store": "mooncake://kv:1"}, "it needs --kv-host-memory: blocks go to the store from there"),
        (
            {"kv_store": "kv:1", "kv_host_memory": 1},
            "--kv-store: 'kv:1' is not allowed; it must be mooncake://HOST:PORT",
        ),
        (
            {"kv_store": "mooncake://kv:1", "kv_host_memory": 1, "kv_disk": "/kv", "kv_disk_size": 1},
            "blocks go there or to --kv-disk: leave one of them out",
        ),
    ],
)
def test_blocks_elsewhere_need_a_size_and_the_hosts_memory(options, why):
    with pytest.raises(ConfigError, match=why):
        check(Config(executor=ExecutorConfig(**options)))
    whole = ExecutorConfig(kv_disk="/kv", kv_disk_size=1, kv_host_memory=1)
    check(Config(executor=whole))
    check(Config(executor=ExecutorConfig(kv_store="mooncake://kv:1", kv_host_memory=1)))
    with pytest.raises(ConfigError, match="--kv-host-memory: 1 is not allowed; it needs --enable-prefix-caching"):
        check(Config(executor=ExecutorConfig(kv_host_memory=1), scheduler=SchedulerConfig(enable_prefix_caching=False)))
