"""Parts of a server on a host: how they are named, which there are, and what they need to find the others."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol import groups
from penstock.protocol.config import Config, LinksConfig, RunConfig
from penstock.protocol.engine_config import ExecutorConfig, ModelConfig
from penstock.protocol.errors import ConfigError
from penstock.protocol.links import Role
from penstock.protocol.parts import ORDER, Part, check_parts, count, missing, parts_of, read_parts, spelled
from penstock.protocol.validation import check

SCHEDULERS, TOKENIZERS, MEETING = "tcp://10.0.0.1:7000", "tcp://10.0.0.1:7100", "tcp://10.0.0.1:29500"


def configured(parts: str, *, ranks: int = 1, stages: int = 1, replicas: int = 1, apis: int = 0, tokenizers: int = 0,
               schedulers: str = "", tokenizer: str = "", rendezvous: str = "") -> Config:  # fmt: skip
    config = Config(
        model=ModelConfig(tensor_parallel_size=ranks, pipeline_parallel_size=stages, data_parallel_size=replicas),
        executor=ExecutorConfig(rendezvous=rendezvous),
        links=LinksConfig(scheduler_address=schedulers, tokenizer_address=tokenizer, link_keys="file"),
        run=RunConfig(parts=parts),
    )
    return msgspec.structs.replace(
        config,
        api=msgspec.structs.replace(config.api, api_processes=apis),
        tokenizer=msgspec.structs.replace(config.tokenizer, tokenizer_processes=tokenizers),
    )


def test_words_are_roles_and_numbers() -> None:
    assert read_parts("") == ()
    assert read_parts("api") == (Part(Role.API, None),)
    assert read_parts(" scheduler, executor:4-7 ,executor:9") == (
        Part(Role.SCHEDULER, None),
        Part(Role.EXECUTOR, range(4, 8)),
        Part(Role.EXECUTOR, range(9, 10)),
    )


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("executors", "it must be like api,tokenizer,scheduler,executor:0-3"),
        ("Executor:0", "it must be like"),
        ("executor:", "it must be like"),
        ("executor:-1", "it must be like"),
        ("executor:1-", "it must be like"),
        ("executor:1-2-3", "it must be like"),
        ("executor:0x1", "it must be like"),
        ("executor:٣", "it must be like"),
        ("executor:12345", "it must be like"),
        ("launcher", "it must be like"),
        ("api tokenizer", "it must be like"),
        (",", "it must be like"),
        ("executor:7-4", "4 comes before 7"),
    ],
)
def test_anything_else_is_refused_by_name(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as refused:
        read_parts(text)
    assert refused.value.option == "--parts"


@given(st.text(max_size=40))
def test_no_text_is_taken_for_what_it_is_not(text: str) -> None:
    try:
        found = read_parts(text)
    except ConfigError:
        return
    words = [word.strip().partition(":") for word in text.split(",") if word.strip()]
    assert list(map(str, found)) == [role + numbered(numbers) for role, _, numbers in words]


def numbered(text: str) -> str:
    """A word's numbers as a part says them: without zeros before them, and one where first and last are the same."""
    if not text:
        return ""
    first, _, last = text.partition("-")
    return f":{int(first)}" + (f"-{int(last)}" if last and int(last) != int(first) else "")


@given(st.sets(st.integers(0, 31), min_size=1), st.sets(st.integers(0, 3), min_size=1))
def test_what_is_spelled_is_read_as_the_same(executors: set[int], schedulers: set[int]) -> None:
    parts = {Role.SCHEDULER: tuple(sorted(schedulers)), Role.EXECUTOR: tuple(sorted(executors))}
    config = configured(spelled(parts), ranks=8, replicas=4)
    assert parts_of(config) == parts


def test_nothing_named_is_everything() -> None:
    config = configured("", ranks=2, stages=2, replicas=2, apis=3, tokenizers=2)
    assert {role: len(numbers) for role, numbers in parts_of(config).items()} == {
        Role.API: 3, Role.TOKENIZER: 2, Role.SCHEDULER: 2, Role.EXECUTOR: 8,
    }  # fmt: skip
    assert [count(role, config) for role in ORDER] == [3, 2, 2, 8]
    assert spelled(parts_of(config)) == "api:0-2,tokenizer:0-1,scheduler:0-1,executor:0-7"
    check_parts(config)


def test_numbers_need_not_stand_side_by_side() -> None:
    """Stage 0 of each of two replicas."""
    config = configured("executor:2,executor:0", stages=2, replicas=2, schedulers=SCHEDULERS, rendezvous=MEETING)
    check_parts(config)
    assert parts_of(config) == {Role.EXECUTOR: (0, 2)}
    assert spelled(parts_of(config)) == "executor:0,executor:2"


TWO = {"ranks": 2, "schedulers": SCHEDULERS, "rendezvous": MEETING}
FINE = [
    ("api,tokenizer,scheduler,executor:0", TWO),
    ("executor:1", TWO),
    ("executor", {"ranks": 2, "schedulers": SCHEDULERS}),
    ("api,tokenizer,scheduler", {"ranks": 2, "schedulers": SCHEDULERS}),
    ("api", {"tokenizers": 2, "tokenizer": TOKENIZERS}),
    ("tokenizer,scheduler,executor", {"tokenizers": 2, "tokenizer": TOKENIZERS}),
    ("tokenizer:1", {"tokenizers": 2, "tokenizer": TOKENIZERS, "schedulers": SCHEDULERS}),
    ("api:0,tokenizer", {"apis": 2, "tokenizers": 1, "tokenizer": TOKENIZERS, "schedulers": SCHEDULERS}),
    ("scheduler:1,executor:2-3", {"ranks": 2, "replicas": 2, "schedulers": SCHEDULERS}),
    ("api,tokenizer,scheduler,executor:0-1", {"ranks": 2, "replicas": 2, "schedulers": SCHEDULERS}),
    ("api,tokenizer,scheduler,executor", {"ranks": 2}),
]  # fmt: skip


@pytest.mark.parametrize(("parts", "given"), FINE)
def test_parts_that_find_the_others_are_taken(parts: str, given: dict) -> None:
    check(configured(parts, **given))


WRONG = [
    ("executor:1", {"ranks": 2, "rendezvous": MEETING}, "--scheduler-address", "scheduler 0 and its executors"),
    ("executor:1", {"ranks": 2, "schedulers": SCHEDULERS}, "--rendezvous", "executors 0 to 1, a group, are on several"),
    ("executor:0,scheduler,tokenizer,api", {"ranks": 2, "rendezvous": MEETING}, "--scheduler-address", "scheduler 0"),
    ("scheduler,tokenizer,api", {}, "--scheduler-address", "scheduler 0 and its executors are not all on this host"),
    ("scheduler,executor", {}, "--scheduler-address", "tokenizer and scheduler processes are not all on this host"),
    ("tokenizer", {"tokenizers": 1, "tokenizer": TOKENIZERS}, "--scheduler-address", "tokenizer and scheduler"),
    ("api", {"tokenizers": 1}, "--tokenizer-address", "api and tokenizer processes are not all on this host"),
    ("tokenizer,scheduler,executor", {"tokenizers": 1}, "--tokenizer-address", "api and tokenizer processes"),
    ("api:0,tokenizer,scheduler,executor", {"apis": 2}, "--tokenizer-address", "api and tokenizer processes"),
    ("api", {"tokenizer": TOKENIZERS}, "--tokenizer-processes", "it must be given, the same everywhere"),
    ("tokenizer,scheduler,executor", {"tokenizer": TOKENIZERS}, "--tokenizer-processes", "it must be given"),
    ("executor:1", {}, "--parts", "make 1 of them, the last is number 0"),
    ("executor:2-4", TWO, "--parts", "make 2 of them, the last is number 1"),
    ("scheduler:1", {}, "--parts", "--data-parallel-size make 1 of them"),
    ("api:0", {}, "--parts", "numbers need --api-processes, the same on every host"),
    ("tokenizer:0", {}, "--parts", "numbers need --tokenizer-processes"),
    ("executor:0,executor:0", {}, "--parts", "executor 0 is named twice"),
    ("executor:0-1,executor:1", {"ranks": 2}, "--parts", "executor 1 is named twice"),
    ("executor,executor:0", {}, "--parts", "executor without numbers is all of them already"),
    ("executor:0,executor", {}, "--parts", "executor without numbers is all of them already"),
    ("api,api", {}, "--parts", "api without numbers is all of them already"),
]  # fmt: skip


@pytest.mark.parametrize(("parts", "given", "option", "why"), WRONG)
def test_parts_that_would_wait_for_ever_are_refused(parts: str, given: dict, option: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as refused:
        check(configured(parts, **given))
    assert refused.value.option == option


def test_an_address_that_misses_says_how_one_looks() -> None:
    assert "tcp://HOST:PORT" in str(missing("--rendezvous", "they are apart"))


@given(ranks=st.integers(1, 4), stages=st.integers(1, 3), replicas=st.integers(1, 3), data=st.data())
def test_hosts_that_share_all_executors_have_each_of_them_once(ranks, stages, replicas, data) -> None:
    """However they are dealt out: everybody who needs an address is told, and with both all are taken."""
    total = groups.executors(ModelConfig(tensor_parallel_size=ranks, pipeline_parallel_size=stages,
                                         data_parallel_size=replicas))  # fmt: skip
    hosts = data.draw(st.lists(st.integers(0, 2), min_size=total, max_size=total))
    seen: list[int] = []
    for host in set(hosts):
        mine = tuple(index for index, at in enumerate(hosts) if at == host)
        given = {"ranks": ranks, "stages": stages, "replicas": replicas}
        text = spelled({Role.EXECUTOR: mine})
        with pytest.raises(ConfigError):
            check(configured(text, **given))
        config = configured(text, **given, schedulers=SCHEDULERS, rendezvous=MEETING)
        check(config)
        seen += parts_of(config)[Role.EXECUTOR]
    assert sorted(seen) == list(range(total))
