"""Options of several models: what each may say for itself, and what an engine's configuration is made of."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from penstock.protocol.config import ApiConfig, Config, RunConfig
from penstock.protocol.engine_config import ExecutorConfig, ModelConfig, SchedulerConfig
from penstock.protocol.errors import ConfigError
from penstock.protocol.served_models import engine_of, engines, names, several, shares, with_options
from penstock.protocol.validation import check


def of(models: dict[str, dict[str, Any]], **sections: Any) -> Config:
    return Config(run=RunConfig(models=json.dumps(models), run_dir="/run/x"), **sections)


def refusal(config: Config) -> str:
    with pytest.raises(ConfigError) as raised:
        check(config)
    return str(raised.value)


def test_a_model_has_what_it_says_and_else_what_all_have() -> None:
    config = of(
        {"a": {"path": "/a", "max-model-len": 512, "idle_timeout": 60}, "b": {"gpu_memory_utilization": 0.3}},
        model=ModelConfig(max_num_seqs=8), executor=ExecutorConfig(gpu_memory_utilization=0.5),
        scheduler=SchedulerConfig(idle_timeout=5.0),
    )  # fmt: skip
    check(config)
    assert names(config) == ("a", "b")
    one, other = engines(config)
    assert (one.model.model, one.model.max_model_len, one.model.max_num_seqs) == ("/a", 512, 8)
    assert (one.scheduler.idle_timeout, other.scheduler.idle_timeout) == (60.0, 5.0)
    assert (one.executor.gpu_memory_utilization, other.executor.gpu_memory_utilization) == (0.5, 0.3)
    assert (one.run.run_dir, other.run.run_dir) == ("/run/x/model-0", "/run/x/model-1")
    assert several(one), "its executors wait to be told"


def test_a_model_is_called_by_its_name_first() -> None:
    one, other = engines(of({"a": {"served_model_name": ["x", "a", "y"]}, "b": {}}))
    assert (one.model.served_model_name, other.model.served_model_name) == ("a,x,y", "b")


def test_one_model_is_what_it_always_was() -> None:
    config = Config()
    assert (engines(config), names(config), several(config)) == ((config,), ("",), False)
    assert engine_of(config) is config


def test_shares_are_of_each_gpu_that_a_model_has() -> None:
    config = of({"a": {"tensor_parallel_size": 2, "gpu_memory_utilization": 0.4}, "b": {"base_gpu_id": 1}})
    assert shares(config) == ({0: 0.4, 1: 0.4}, {1: 0.9})


def test_a_process_is_of_the_model_that_it_names() -> None:
    config = of({"a": {}, "b": {"max_model_len": 7}})
    named = msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, for_model="b"))
    assert engine_of(named).model.max_model_len == 7
    for wrong, message in (("", "it must say which one: a, b"), ("c", "the models are a, b")):
        config = msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, for_model=wrong))
        with pytest.raises(ConfigError, match=message):
            engine_of(config)
    with pytest.raises(ConfigError, match="there are no models"):
        engine_of(Config(run=RunConfig(for_model="a")))


def test_options_of_models_are_replaced_and_others_stay() -> None:
    config = with_options(of({"a": {"max_model_len": 9}, "b": {}}), {"a": {"model": "/found"}})
    assert [(each.model.model, each.model.max_model_len) for each in engines(config)] == [("/found", 9), ("", 0)]


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ({"a": {"port": 1}, "b": {}}, "models.a: 'port' is not allowed"),
        ({"a": {"max_model_len": -1}, "b": {}}, "models.a: --max-model-len: -1 is not allowed; it must be between 0"),
        ({"a": {"dtype": "int8"}, "b": {}}, "models.a: --dtype: 'int8'"),
        ({"a": {"max_num_seqs": 64, "max_num_batched_tokens": 16}, "b": {}}, "it must be at least --max-num-seqs (64)"),
        ({"a": {"lora_dir": "/x"}, "b": {}}, "models.a: --lora-dir: '/x' is not allowed; it needs --enable-lora"),
        ({"a": {"served_model_name": "x"}, "b": {"served_model_name": "x"}}, "the model a has that name too"),
        ({"a b": {}, "c": {}}, "a model's name has letters"),
    ],
)
def test_a_mistake_names_the_model_and_the_option(models: dict[str, dict[str, Any]], message: str) -> None:
    assert message in refusal(of(models))


def test_what_several_models_cannot_have_yet_is_refused() -> None:
    config = of({"a": {}, "b": {}})
    for option, changed in (
        ("--parts", {"run": msgspec.structs.replace(config.run, parts="api,tokenizer")}),
        ("--served-model-name", {"model": ModelConfig(served_model_name="x")}),
        ("--first-executor", {"executor": ExecutorConfig(first_executor=1)}),
    ):
        assert refusal(msgspec.structs.replace(config, **changed)).startswith(option)


def test_text_that_is_no_json_is_refused_with_an_example() -> None:
    assert "it must be like" in refusal(Config(run=RunConfig(models="a=b")))
    assert "it must be like" in refusal(Config(run=RunConfig(models='{"a": 3}')))
    assert ApiConfig().model_turn == 30.0
